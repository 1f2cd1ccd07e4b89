"""
Does with sharded models what plugins and trainers outside of torch do, with whatever
torch is imported, and saves what came of it: names that they read, write, call and
replace, and what their replacements then see.

The tests run it on the base release and on this branch and compare. A scenario that
raises is saved as its error, so that each of them is told apart. With ``--mixed``
scenarios whose units have several dtypes are run too, which the base refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_run_ranks import run_ranks
from parity_layers import (
    batch_of,
    BF16,
    digest,
    FP32,
    gradients,
    groups_of,
    Layer,
    local_of,
    loss_of,
    LR,
    parameters,
    Record,
    shard_stack,
    Stack,
    stack,
)

import torch
import torch._dynamo  # the first hook would, in each rank anew
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode


RANKS = 4
FAKE = "fake"  # which `fake_pg` registers
FP16 = torch.float16
POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bf16_reduce_fp32": MixedPrecisionPolicy(BF16, FP32),
    "bf16": MixedPrecisionPolicy(BF16),
    "reduce_bf16": MixedPrecisionPolicy(None, BF16),
}
OPERATORS = (
    "fsdp::all_gather_copy_in",
    "fsdp::split_with_sizes_copy",
    "fsdp::chunk_cat",
)


@dataclass(frozen=True)
class Place:
    rank: int
    mesh: DeviceMesh  # of all ranks
    pairs: DeviceMesh  # of all ranks, in two dims

    def sharded(self, policy: str = "none", model: Any = None, **kwargs: Any) -> Stack:
        kwargs = {"mesh": self.mesh, "mp_policy": POLICIES[policy]} | kwargs
        return shard_stack(stack() if model is None else model, **kwargs)

    def mixed(self, policy: str = "none", **kwargs: Any) -> Stack:
        return self.sharded(policy, stack((FP32, BF16)), **kwargs)


Scenario = Callable[[Place], Record]
Step = Callable[[Stack, Place, int], torch.Tensor]

SCENARIOS: dict[str, Scenario] = {}
# Of units with several dtypes
MIXED: dict[str, Scenario] = {}


def scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__] = run
    return run


def mixed(run: Scenario) -> Scenario:
    MIXED[run.__name__] = run
    return run


def one_backward(model: Stack, place: Place, step: int) -> torch.Tensor:
    loss = loss_of(model(batch_of(step, place.rank)))
    loss.backward()
    return loss


def train(
    model: Stack, place: Place, *, steps: range = range(2), run: Step = one_backward
) -> Record:
    """Returns each step's loss, sharded gradients and parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    record: Record = {}
    for step in steps:
        record[f"{step} loss"] = digest(run(model, place, step))
        record |= {f"{step} {name}": bits for name, bits in gradients(model)}
        optimizer.step()
        optimizer.zero_grad()
        record |= {f"{step} {name}": bits for name, bits in parameters(model)}
    return record


@contextlib.contextmanager
def replaced(owner: Any, **new: Any) -> Iterator[None]:
    """Replaces attributes that must be there, and puts them back."""
    with contextlib.ExitStack() as patches:
        for name, value in new.items():
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


# Dtypes #


def init_like_a_plugin(group: FSDPParamGroup) -> None:
    """Takes the first parameter's dtypes for the group's, and checks nothing."""
    for fsdp_param in group.fsdp_params:
        fsdp_param.init_dtype_attrs(group.mp_policy)
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    group._orig_dtype = trained[0].orig_dtype if trained else None
    group._reduce_dtype = trained[0].reduce_dtype if trained else None


def train_with_replaced_init(place: Place, model: Stack) -> Record:
    # Saved and put back by hand, as they do at import
    original, calls = FSDPParamGroup._init_mp_dtypes, []

    def replacement(group: FSDPParamGroup) -> None:
        calls.append(group._module_fqn)
        init_like_a_plugin(group)

    FSDPParamGroup._init_mp_dtypes = replacement
    try:
        record = train(model, place)
        seen = [*calls]
        model.unshard()  # may set up again
        record["calls after unshard"] = len(calls)
        model.reshard()
    finally:
        FSDPParamGroup._init_mp_dtypes = original
    return record | {"calls": seen}


@scenario
def replaced_init_mp_dtypes(place: Place) -> Record:
    return {
        policy: train_with_replaced_init(place, place.sharded(policy))
        for policy in POLICIES
    }


@scenario
def init_mp_dtypes_that_calls_the_original(place: Place) -> Record:
    original, calls = FSDPParamGroup._init_mp_dtypes, []

    def replacement(group: FSDPParamGroup) -> None:
        original(group)
        calls.append((group._module_fqn, str(group._orig_dtype)))

    with replaced(FSDPParamGroup, _init_mp_dtypes=replacement):
        record = train(place.sharded("bf16_reduce_fp32"), place)
    return record | {"calls": calls}


@mixed
def mixed_with_replaced_init_mp_dtypes(place: Place) -> Record:
    pairs = {}
    for policy in POLICIES:
        plain = train(place.mixed(policy), place)
        pairs[policy] = plain, train_with_replaced_init(place, place.mixed(policy))
    return pairs


def dtypes_of_groups(model: nn.Module) -> list[tuple[str, str]]:
    return [(str(g._orig_dtype), str(g._reduce_dtype)) for g in groups_of(model)]


@scenario
def dtypes_of_a_group(place: Place) -> Record:
    record: Record = {}
    for policy in POLICIES:
        for dtype in (FP32, BF16):
            model = place.sharded(policy, stack((dtype, dtype)))
            model.blocks[0].requires_grad_(False)
            one_backward(model, place, 0)
            record[f"{policy} {dtype}"] = dtypes_of_groups(model)
    return record


@mixed
def dtypes_of_a_mixed_group(place: Place) -> Record:
    model = place.mixed()
    one_backward(model, place, 0)
    return {"dtypes": dtypes_of_groups(model)}


@scenario
def policy_set_before_the_first_forward(place: Place) -> Record:
    record: Record = {}
    for name, policy in POLICIES.items():
        model = place.sharded()
        for unit in (model, *model.blocks):
            unit._get_fsdp_state()._mp_policy = policy
        for group in groups_of(model):
            group.mp_policy = policy
        record[name] = train(model, place)
        record[f"{name} dtypes"] = dtypes_of_weights(model)
        record[f"{name} like that from the start"] = record[name] == train(
            place.sharded(name), place
        )
    return record


def dtypes_of_weights(model: Stack) -> list[str]:
    """Returns what the weights are gathered in."""
    model.blocks[0].unshard()
    dtypes = [str(param.dtype) for param in model.blocks[0].parameters()]
    model.blocks[0].reshard()
    return dtypes


# The list of parameters #


def replace_weight(group: FSDPParamGroup, i: int, scale: float) -> FSDPParam:
    """Updates a weight of an unsharded unit, and shards what came of it."""
    old = group.fsdp_params[i]
    info = old._module_info
    weight = getattr(info.module, info.param_name).detach() * scale
    new_weight = nn.Parameter(weight.clone())
    setattr(info.module, info.param_name, new_weight)
    policy = MixedPrecisionPolicy(param_dtype=new_weight.dtype)
    new = FSDPParam(
        new_weight,
        info,
        old.mesh_info,
        old.post_forward_mesh_info,
        old.device,
        None,
        policy,
        None,
    )
    new.init_dtype_attrs(policy)
    old._post_load_hook_handle.remove()
    return new


def update_weights(model: Stack, *, scale: float) -> list[str]:
    """As a quantizer that writes its weights back, one unit at a time."""
    kinds = []
    for block in model.blocks:
        group = block._get_fsdp_state()._fsdp_param_group
        if group.is_sharded:
            block.unshard()
        by_place = {}
        for i, fsdp_param in enumerate(group.fsdp_params):
            is_weight = fsdp_param._module_info.param_name == "weight"
            by_place[i] = replace_weight(group, i, scale) if is_weight else fsdp_param
        group.fsdp_params = list(by_place.values())
        block.reshard()
        kinds += [type(param).__name__ for param in block.parameters()]
    return kinds


def train_with_updated_weights(place: Place, model: Stack) -> Record:
    record = train(model, place)
    record["kinds"] = update_weights(model, scale=0.5)
    record |= {f"updated {name}": bits for name, bits in parameters(model)}
    record |= train(model, place, steps=range(2, 4))
    record["places"] = [len(group.fsdp_params) for group in groups_of(model)]
    return record


@scenario
def parameter_replaced_while_unsharded(place: Place) -> Record:
    return {
        str(reshard): train_with_updated_weights(
            place, place.sharded(reshard_after_forward=reshard)
        )
        for reshard in (True, False)
    }


@mixed
def mixed_parameter_replaced_while_unsharded(place: Place) -> Record:
    return train_with_updated_weights(place, place.mixed())


@scenario
def parameter_replaced_before_the_first_forward(place: Place) -> Record:
    model = place.sharded()
    kinds = update_weights(model, scale=0.5)
    return train(model, place) | {"kinds": kinds}


@scenario
def same_parameters_in_a_plain_list(place: Place) -> Record:
    model = place.sharded("bf16_reduce_fp32")
    for group in groups_of(model):
        group.fsdp_params = [*group.fsdp_params]
    record = train(model, place)
    for group in groups_of(model):
        group.fsdp_params = list(reversed(group.fsdp_params))
    return record | train(model, place, steps=range(2, 4))


@scenario
def list_changed_in_place(place: Place) -> Record:
    """Leaves a frozen parameter to somebody else."""
    model = stack()
    model.blocks[0].layers[0].shift.requires_grad_(False)
    model = place.sharded(model=model)
    group = model.blocks[0]._get_fsdp_state()._fsdp_param_group
    record = train(model, place)
    model.blocks[0].unshard()
    shard = group.fsdp_params[2].sharded_param
    whole = model.blocks[0].layers[0].shift.detach().clone()
    model.blocks[0].reshard()
    del group.fsdp_params[2]
    model.blocks[0].layers[0].shift = nn.Parameter(whole, requires_grad=False)
    record |= train(model, place, steps=range(2, 4))
    return record | {"left": len(group.fsdp_params), "shard": digest(shard)}


# States #


def states_of(group: FSDPParamGroup) -> tuple[Any, ...]:
    """Returns the state of a group, its parameters, and what is registered."""
    params = [
        getattr(p._module_info.module, p._module_info.param_name)
        for p in group.fsdp_params
    ]
    return (
        group._sharded_state.name,
        [p.sharded_state.name for p in group.fsdp_params],
        [isinstance(param, DTensor) for param in params],
        [tuple(local_of(param).shape) for param in params],
    )


def gather_by_hand(group: FSDPParamGroup, *, by_keyword: bool = False) -> None:
    """Unshards with the functions alone, as a test or a backend of one's own does."""
    stream = torch.cpu.current_stream()
    process_group = group.mesh_info.shard_process_group
    comm = _fsdp_collectives.DefaultAllGather()
    if by_keyword:
        result = _fsdp_collectives.foreach_all_gather(
            fsdp_params=[*group.fsdp_params],
            group=process_group,
            async_op=True,
            all_gather_copy_in_stream=stream,
            all_gather_stream=stream,
            device=group.device,
            all_gather_comm=comm,
        )
        _fsdp_collectives.foreach_all_gather_copy_out(
            all_gather_result=result,
            fsdp_params=[*group.fsdp_params],
            group=process_group,
        )
    else:
        params = [*group.fsdp_params]
        result = _fsdp_collectives.foreach_all_gather(
            params, process_group, False, stream, stream, group.device, comm
        )
        _fsdp_collectives.foreach_all_gather_copy_out(result, params, process_group)
    for fsdp_param in group.fsdp_params:
        fsdp_param.init_unsharded_param()


@scenario
def states_changed_by_hand(place: Place) -> Record:
    record: Record = {}
    for reshard, policy in itertools.product((True, 2), ("none", "bf16_reduce_fp32")):
        model = place.sharded(policy, reshard_after_forward=reshard)
        one_backward(model, place, 0)
        group = groups_of(model)[1]
        gather_by_hand(group)
        group._to_unsharded()
        seen = [states_of(group)]
        seen += [digest(param) for param in model.blocks[0].parameters()]
        group._to_unsharded()  # changes nothing
        if reshard == 2:
            group._to_sharded_post_forward()
            seen.append(states_of(group))
            group.unshard()
            group.wait_for_unshard()
            seen.append(states_of(group))
        group._to_sharded()
        seen.append(states_of(group))
        model.zero_grad()
        record[f"{reshard} {policy}"] = train(model, place) | {"seen": seen}
    return record


def wait_by_hand(group: FSDPParamGroup) -> None:
    result = group._all_gather_result
    if result is None:
        return
    process_group = group._all_gather_process_group
    _fsdp_param_group.foreach_all_gather_copy_out(
        result, group.fsdp_params, process_group
    )
    for fsdp_param in group.fsdp_params:
        fsdp_param.init_unsharded_param()
    group._to_unsharded()
    group._all_gather_result = None


def post_forward_by_hand(
    group: FSDPParamGroup, module: nn.Module, input: Any, output: Any
) -> Any:
    if group._use_post_forward_mesh:
        group._to_sharded_post_forward()
    elif group._reshard_after_forward:
        group._to_sharded()
    group._record_post_forward()
    group._training_state = TrainingState.IDLE
    return output


@scenario
def replaced_wait_for_unshard_and_post_forward(place: Place) -> Record:
    record: Record = {}
    calls: Counter[str] = Counter()

    def wait(group: FSDPParamGroup) -> None:
        calls["wait"] += 1
        wait_by_hand(group)

    def post_forward(group: FSDPParamGroup, *args: Any) -> Any:
        output = post_forward_by_hand(group, *args)
        orders.append([g._module_fqn for g in group.comm_ctx.post_forward_order])
        orders.append([*group._post_forward_indices])
        return output

    for reshard in (True, False, 2):
        orders: list[Any] = []
        with replaced(FSDPParamGroup, wait_for_unshard=wait, post_forward=post_forward):
            model = place.sharded("bf16", reshard_after_forward=reshard)
            record[str(reshard)] = train(model, place) | {"orders": orders}
    return record | {"calls": dict(calls)}


@scenario
def record_post_forward(place: Place) -> Record:
    """Replaces only what is recorded, and how often."""
    original, calls = FSDPParamGroup._record_post_forward, []

    def recording(group: FSDPParamGroup) -> None:
        calls.append(group._module_fqn)
        original(group)

    with replaced(FSDPParamGroup, _record_post_forward=recording):
        record = train(place.sharded(), place)
    return record | {"calls": calls}


# What HSDP keeps #


def put_off(change: Callable[[FSDPParamGroup], Any] | None, seen: list[Any]) -> Step:
    """Returns a step of two microbatches, of which the second is all-reduced."""

    def run(model: Stack, place: Place, step: int) -> torch.Tensor:
        for i in range(2):
            model.set_requires_all_reduce(i == 1)
            loss = loss_of(model(batch_of(step, i, place.rank)))
            loss.backward()
            for group in groups_of(model):
                seen.append(digest(group._partial_reduce_output))
                if i == 0 and change is not None:
                    change(group)
        return loss

    return run


def set_partial(value: Callable[[torch.Tensor], Any]) -> Callable[..., None]:
    def change(group: FSDPParamGroup) -> None:
        group._partial_reduce_output = value(group._partial_reduce_output)

    return change


PARTIALS = {
    "read": None,
    "dropped": set_partial(lambda kept: None),
    "replaced": set_partial(lambda kept: 2 * kept),
    "of_ones": set_partial(torch.ones_like),
    "scaled_in_place": lambda group: group._partial_reduce_output.mul_(0.5),
    "read_and_set_back": set_partial(lambda kept: kept),
}


def train_put_off(place: Place, policy: str, name: str) -> Record:
    model = place.sharded(policy, mesh=place.pairs)
    seen: list[Any] = [group._partial_reduce_output for group in groups_of(model)]
    record = train(model, place, run=put_off(PARTIALS[name], seen))
    return record | {"seen": seen}


@scenario
def partial_reduce_output(place: Place) -> Record:
    return {
        f"{name} {policy}": train_put_off(place, policy, name)
        for name in PARTIALS
        for policy in ("none", "bf16_reduce_fp32", "reduce_bf16")
    }


@scenario
def partial_reduce_output_set_where_none_is_kept(place: Place) -> Record:
    """As a plugin does that all-reduces every few steps, with sums of its own."""
    model = place.sharded(mesh=place.pairs)
    saved: list[torch.Tensor] = []

    def run(model: Stack, place: Place, step: int) -> torch.Tensor:
        for group, kept in zip(groups_of(model), saved):
            group._partial_reduce_output = kept
        saved.clear()
        model.set_requires_all_reduce(step % 2 == 1)
        loss = one_backward(model, place, step)
        if step % 2 == 0:
            for group in groups_of(model):
                saved.append(group._partial_reduce_output.clone())
                group._partial_reduce_output = None
        return loss

    return train(model, place, steps=range(4), run=run)


def describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value).__name__, str(value.dtype), tuple(value.shape)
    if isinstance(value, tuple):
        return type(value).__name__, [describe(each) for each in value]
    return type(value).__name__


@scenario
def all_reduce_state(place: Place) -> Record:
    seen: list[Any] = []
    original = FSDPParamGroup.post_backward

    def post_backward(group: FSDPParamGroup, *args: Any) -> None:
        original(group, *args)
        state = group._all_reduce_state
        seen.append(describe(state))
        if state is not None:
            seen.append((digest(state.all_reduce_input), state.event is None))

    with replaced(FSDPParamGroup, post_backward=post_backward):
        model = place.sharded("bf16_reduce_fp32", mesh=place.pairs)
        record = train(model, place)
    seen += [describe(group._all_reduce_state) for group in groups_of(model)]
    return record | {"seen": seen}


@scenario
def all_gather_output(place: Place) -> Record:
    model = place.sharded()
    before = [describe(group._all_gather_output) for group in groups_of(model)]
    record = train(model, place)
    after = [describe(group._all_gather_output) for group in groups_of(model)]
    return record | {"before": before, "after": after}


# Hooks of state dicts #

HANDLES = (
    "_module_to_pre_save_state_dict_hook_handle",
    "_module_to_pre_load_state_dict_hook_handle",
)


def handles_of(model: nn.Module) -> dict[str, list[Any]]:
    """Returns the modules and the kinds of handles that each group has."""
    names = {module: name for name, module in model.named_modules()}
    found = {}
    for attribute in HANDLES:
        by_group = [getattr(group, attribute) for group in groups_of(model)]
        found[attribute] = [
            sorted((names[m], type(handle).__name__) for m, handle in handles.items())
            for handles in by_group
        ]
    return found


def kinds_while_unsharded(model: Stack) -> dict[str, str]:
    """Returns what a state dict has of units that are unsharded now."""
    for unit in (model, *model.blocks):
        unit.unshard()
    kinds = {name: type(value).__name__ for name, value in model.state_dict().items()}
    for unit in (model, *model.blocks):
        unit.reshard()
    return kinds


@scenario
def handles_of_state_dict_hooks(place: Place) -> Record:
    model = place.sharded()
    record: Record = {"before": handles_of(model)}
    record |= train(model, place)
    return record | {"after": handles_of(model), "kinds": kinds_while_unsharded(model)}


@scenario
def state_dict_hooks_that_are_removed(place: Place) -> Record:
    """Detaches the first block's hooks, so that it is saved as it is."""
    model = place.sharded()
    record = train(model, place)
    group = groups_of(model)[1]
    counts = []
    for attribute in HANDLES:
        handles = getattr(group, attribute)
        counts.append(len(handles))
        for handle in handles.values():
            handle.remove()
    record["kinds"] = kinds_while_unsharded(model)
    record["left"] = [
        (len(module._state_dict_pre_hooks), len(module._load_state_dict_pre_hooks))
        for module in model.modules()
        if isinstance(module, Layer)
    ]
    record |= {f"again {name}": bits for name, bits in train(model, place).items()}
    return record | {"counts": counts}


# What is gathered #


@scenario
def inputs_and_metadatas_called(place: Place) -> Record:
    get_inputs = _fsdp_collectives._get_param_all_gather_inputs
    get_metadatas = _fsdp_collectives._get_all_gather_input_metadatas
    record: Record = {}
    for policy, dtype in itertools.product(POLICIES, (FP32, BF16)):
        model = place.sharded(policy, stack((dtype, dtype)))
        one_backward(model, place, 0)
        for i, group in enumerate(groups_of(model)):
            inputs = get_inputs(group.fsdp_params)
            record[f"{policy} {dtype} {i}"] = (
                [[digest(tensor) for tensor in of_param] for of_param in inputs],
                str(get_metadatas(inputs)),
            )
    mix = [[torch.ones(3)], [torch.ones(2, dtype=BF16), torch.ones(5)]]
    record["of several dtypes"] = str(get_metadatas(mix))
    return record


def train_with_inputs(
    place: Place, model: Stack, change: Callable[[torch.Tensor], torch.Tensor]
) -> Record:
    """Lets ``change`` make what is gathered of each tensor."""
    original, calls = _fsdp_collectives._get_param_all_gather_inputs, []

    def get_inputs(fsdp_params: list[FSDPParam]) -> list[list[torch.Tensor]]:
        inputs = original(fsdp_params)
        calls.append([[t.numel() for t in tensors] for tensors in inputs])
        return [[change(t) for t in tensors] for tensors in inputs]

    with replaced(_fsdp_collectives, _get_param_all_gather_inputs=get_inputs):
        record = train(model, place)
    return record | {"calls": calls}


@scenario
def replaced_inputs(place: Place) -> Record:
    return {
        f"{policy} {reshard}": train_with_inputs(
            place, place.sharded(policy, reshard_after_forward=reshard), lambda t: 2 * t
        )
        for policy in POLICIES
        for reshard in (True, False, 2)
    }


@scenario
def replaced_inputs_that_change_nothing(place: Place) -> Record:
    record = train_with_inputs(place, place.sharded("bf16"), lambda tensor: tensor)
    del record["calls"]
    return {"same": record == train(place.sharded("bf16"), place)}


@scenario
def replaced_inputs_of_another_dtype(place: Place) -> Record:
    return train_with_inputs(place, place.sharded(), lambda t: t.to(BF16))


@scenario
def inputs_replaced_between_steps(place: Place) -> Record:
    """What was found out before must not be what is gathered afterwards."""
    model = place.sharded()
    record = train(model, place)
    record |= {"doubled": train_with_inputs(place, model, lambda t: 2 * t)}
    return record | {"afterwards": train(model, place)}


@mixed
def mixed_replaced_inputs_that_change_nothing(place: Place) -> Record:
    model = place.mixed()
    record = train_with_inputs(place, model, lambda tensor: tensor)
    calls = record.pop("calls")
    return {"same": record == train(place.mixed(), place), "calls": len(calls)}


@scenario
def replaced_metadatas(place: Place) -> Record:
    original, calls = _fsdp_collectives._get_all_gather_input_metadatas, []

    def get_metadatas(inputs: list[list[torch.Tensor]]) -> Any:
        metadatas = original(inputs)
        calls.append(str(metadatas))
        return metadatas

    with replaced(_fsdp_collectives, _get_all_gather_input_metadatas=get_metadatas):
        record = train(place.sharded("bf16_reduce_fp32"), place)
    return record | {"calls": calls}


@scenario
def replaced_inputs_and_metadatas(place: Place) -> Record:
    """As a backend does that has its own of all of it."""
    calls: Counter[str] = Counter()

    def get_inputs(fsdp_params: list[FSDPParam]) -> list[list[torch.Tensor]]:
        calls["inputs"] += 1
        return [param.all_gather_inputs for param in fsdp_params]

    def get_metadatas(inputs: list[list[torch.Tensor]]) -> Any:
        calls["metadatas"] += 1
        dtypes = [[tensor.dtype for tensor in tensors] for tensors in inputs]
        numels = [[tensor.numel() for tensor in tensors] for tensors in inputs]
        return dtypes, numels, dtypes[0][0]

    with replaced(
        _fsdp_collectives,
        _get_param_all_gather_inputs=get_inputs,
        _get_all_gather_input_metadatas=get_metadatas,
    ):
        record = train(place.sharded("bf16_reduce_fp32"), place)
    return record | {"calls": dict(calls)}


# Operators #


def count_of(names: list[str]) -> dict[str, int]:
    """Returns how often each operator and range is there."""
    ours = [name for name in names if name.startswith(("fsdp::", "FSDP::"))]
    return dict(sorted(Counter(ours).items()))


class Watching(TorchDispatchMode):
    """Sees each operator that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@scenario
def operators_that_a_dispatch_mode_sees(place: Place) -> Record:
    record: Record = {}
    for policy in POLICIES:
        model = place.sharded(policy)
        record[policy] = train(model, place)
        with Watching() as watching:
            record[f"{policy} watched"] = train(model, place, steps=range(2, 3))
        record[f"{policy} counts"] = count_of(watching.names)
    return record


@scenario
def operators_and_ranges_that_profilers_see(place: Place) -> Record:
    record: Record = {}
    cpu = [torch.profiler.ProfilerActivity.CPU]
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    for name, config in (("plain", None), ("all threads", all_threads)):
        model = place.sharded("bf16_reduce_fp32")
        train(model, place)
        with torch.profiler.profile(
            activities=cpu, experimental_config=config
        ) as profiler:
            one_backward(model, place, 2)
        record[name] = count_of([event.name for event in profiler.events()])
    return record


@scenario
def operators_and_ranges_of_an_execution_trace(place: Place) -> Record:
    model = place.sharded("bf16_reduce_fp32")
    train(model, place)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        observer = torch.profiler.ExecutionTraceObserver()
        observer.register_callback(str(path))
        observer.start()
        one_backward(model, place, 2)
        observer.stop()
        observer.unregister_callback()
        nodes = json.loads(path.read_text())["nodes"]
    return {"counts": count_of([node["name"] for node in nodes])}


def copy_in_of_a_vendor(
    calls: Counter[str],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def copy_in(inputs, output, split_sizes, numel, rank):
        calls["copy in"] += 1
        own = output.narrow(0, numel * rank, numel)
        for slot, tensor in zip(own.split(split_sizes), inputs, strict=True):
            slot.copy_(tensor)
        return own, output

    return copy_in


@contextlib.contextmanager
def kernels_of_a_vendor(key: str) -> Iterator[Counter[str]]:
    """Replaces the operators' kernels for a kind of device, and counts their calls."""
    calls: Counter[str] = Counter()

    def split(output, split_sizes, dim=0, *, out):
        calls["split"] += 1
        for piece, target in zip(output.split(split_sizes, dim), out, strict=True):
            target.copy_(piece)

    def chunk_cat(tensors, dim, num_chunks, out):
        calls["cat"] += 1
        torch._chunk_cat(tensors, dim, num_chunks, out=out)

    library = torch.library.Library("fsdp", "IMPL")
    kernels = (copy_in_of_a_vendor(calls), split, chunk_cat)
    try:
        for operator, kernel in zip(OPERATORS, kernels):
            library.impl(operator.removeprefix("fsdp::"), kernel, key)
        yield calls
    finally:
        library._destroy()


@scenario
def operators_of_another_device(place: Place) -> Record:
    """Of tensors that are on neither a CPU nor a GPU, while nobody listens."""
    with torch.device("meta"):
        model = stack()
    model = place.sharded("bf16", model)
    group = groups_of(model)[1]
    for fsdp_param in group.fsdp_params:
        fsdp_param.init_dtype_attrs(group.mp_policy)
        fsdp_param.device = torch.device("meta")
    device, stream = torch.device("meta"), torch.cpu.current_stream()
    process_group = group.mesh_info.shard_process_group
    with (
        kernels_of_a_vendor("Meta") as calls,
        replaced(_fsdp_collectives, _get_device_handle=lambda kind: torch.cpu),
        # There are no data to send
        replaced(dist, all_gather_single=lambda *args, **kwargs: None),
    ):
        comm = _fsdp_collectives.DefaultAllGather()
        params = [*group.fsdp_params]
        result = _fsdp_collectives.foreach_all_gather(
            params, process_group, False, stream, stream, device, comm
        )
        _fsdp_collectives.foreach_all_gather_copy_out(result, params, process_group)
        grads = [torch.empty(8, 3, device=device), torch.empty(4, device=device)]
        output = torch.empty(4 * 7, device=device)
        _fsdp_collectives.foreach_reduce_scatter_copy_in(grads, output, 4)
    return {"calls": dict(calls)}


# Divide factors #


def op_of(op: Any) -> tuple[str, Any]:
    """Returns an operation's name, and its factor where it has one."""
    name = getattr(op, "op", op).name
    if name != "PREMUL_SUM":
        return name, None
    return name, pickle.loads(pickle.dumps(op)).__getstate__()


def factor_cases() -> Iterator[tuple[Any, ...]]:
    return itertools.product(
        (None, 1, 2, 4),  # shards
        (None, 1, 2, 4),  # replicas
        (FP32, BF16, FP16),
        (None, 1.0, 2.0, 4.0, 3.0),
        (False, True),
    )


def groups_by_size(backend: str | None) -> dict[int | None, Any]:
    """Returns this rank's process groups, and that there is none."""
    made: dict[int | None, Any] = {None: None}
    for size in (1, 2, RANKS):
        starts = range(0, RANKS, size)
        groups = [
            dist.new_group([*range(start, start + size)], backend=backend)
            for start in starts
        ]
        made[size] = groups[dist.get_rank() // size]
    return made


def table_of_factors(groups: dict[int | None, Any]) -> Record:
    record: Record = {}
    for shards, replicas, dtype, factor, is_sum in factor_cases():
        pre, post, scatter, reduce = _fsdp_collectives._get_gradient_divide_factors(
            groups[shards], groups[replicas], dtype, "cpu", factor, is_sum
        )
        key = f"{shards} {replicas} {dtype} {factor} {is_sum}"
        record[key] = pre, post, op_of(scatter), op_of(reduce)
    one = _fsdp_collectives._get_gradient_divide_factors(groups[1], None, FP32)
    record["group of one"] = one[0], one[1], op_of(one[2]), op_of(one[3])
    return record


@scenario
def divide_factors(place: Place) -> Record:
    del place
    return table_of_factors(groups_by_size("gloo"))


@scenario
def divide_factors_where_sums_can_scale(place: Place) -> Record:
    """With process groups of a backend that takes any operation, and sends nothing."""
    del place
    return table_of_factors(groups_by_size(FAKE))


@scenario
def divide_factors_of_another_device(place: Place) -> Record:
    """Of a kind whose backend forces sums, and of none in particular."""
    del place
    record: Record = {}
    for device, factor in itertools.product(("", "mtia"), (None, 2.0)):
        pre, post, scatter, reduce = _fsdp_collectives._get_gradient_divide_factors(
            dist.group.WORLD, None, FP32, device, factor, device == ""
        )
        record[f"{device} {factor}"] = pre, post, op_of(scatter), op_of(reduce)
    return record


# Calling the functions #


@scenario
def gather_called_with_plain_lists(place: Place) -> Record:
    record: Record = {}
    for by_keyword, policy in itertools.product((False, True), POLICIES):
        model = place.sharded(policy)
        one_backward(model, place, 0)
        model.zero_grad()
        group = groups_of(model)[1]
        gather_by_hand(group, by_keyword=by_keyword)
        unsharded = [digest(p._unsharded_param) for p in group.fsdp_params]
        group._to_unsharded()
        group._to_sharded()
        record[f"{policy} {by_keyword}"] = unsharded, train(model, place)
    return record


def reduce_by_hand(place: Place, policy: str, *, is_hybrid: bool, keyword: bool) -> Any:
    mesh = place.pairs if is_hybrid else place.mesh
    model = place.sharded(policy, mesh=mesh)
    one_backward(model, place, 0)
    model.zero_grad()
    group = groups_of(model)[1]
    grads = [
        batch_of(i, place.rank, dim=p._orig_size.numel())[0].view(p._orig_size)
        for i, p in enumerate(group.fsdp_params)
    ]
    grads = [grad.to(POLICIES[policy].param_dtype or FP32) for grad in grads]
    stream = torch.cpu.current_stream()
    arguments = {
        "fsdp_params": [*group.fsdp_params],
        "unsharded_grads": grads,
        "reduce_scatter_group": group.mesh_info.shard_process_group,
        "reduce_scatter_stream": stream,
        "reduce_scatter_comm": _fsdp_collectives.DefaultReduceScatter(),
        "orig_dtype": FP32,
        "reduce_dtype": POLICIES[policy].reduce_dtype,
        "device": group.device,
        "gradient_divide_factor": None,
        "all_reduce_group": (
            group.mesh_info.replicate_process_group if is_hybrid else None
        ),
        "all_reduce_stream": stream,
        "all_reduce_grads": True,
        "partial_reduce_output": None,
        "all_reduce_hook": None,
    }
    foreach_reduce = _fsdp_collectives.foreach_reduce
    if keyword:
        results = foreach_reduce(**arguments, force_sum_reduction_for_comms=False)
    else:
        results = foreach_reduce(*arguments.values())
    (scattered, _, post, _, shared, _, partial) = results
    return (
        digest(scattered) if shared is None else describe(scattered),
        type(post).__name__,
        digest(shared),
        partial is None,
        len(grads),  # which it empties
        dict(gradients(model.blocks[0])),
    )


@scenario
def reduce_called_with_plain_lists(place: Place) -> Record:
    return {
        f"{policy} {is_hybrid} {keyword}": reduce_by_hand(
            place, policy, is_hybrid=is_hybrid, keyword=keyword
        )
        for policy in POLICIES
        for is_hybrid in (False, True)
        for keyword in (False, True)
    }


@scenario
def replaced_globals(place: Place) -> Record:
    """Of the module whose functions test utilities replace."""
    calls: Counter[str] = Counter()
    originals = {
        name: getattr(_fsdp_param_group, name)
        for name in (
            "foreach_all_gather",
            "foreach_all_gather_copy_out",
            "foreach_reduce",
        )
    }

    def gather(*args: Any, **kwargs: Any) -> Any:
        calls["gather"] += 1
        return originals["foreach_all_gather"](*args, **kwargs)

    def copy_out(result: Any, params: Any, group: Any) -> Any:
        calls["copy out"] += 1
        calls[type(result).__name__] += 1
        return originals["foreach_all_gather_copy_out"](result, params, group)

    def reduce(params: Any, grads: list[torch.Tensor], *args: Any, **kwargs: Any):
        calls["reduce"] += 1
        grads[:] = [2 * grad for grad in grads]
        return originals["foreach_reduce"](params, grads, *args, **kwargs)

    with replaced(
        _fsdp_param_group,
        foreach_all_gather=gather,
        foreach_all_gather_copy_out=copy_out,
        foreach_reduce=reduce,
    ):
        record = train(place.sharded("bf16_reduce_fp32"), place)
    return record | {"calls": dict(calls)}


# Late changes #


def watched_layers(model: Stack) -> type[Layer]:
    """Gives all layers of the blocks a class of their own."""

    class Watched(Layer):
        pass

    for block in model.blocks:
        for layer in block.layers:
            layer.__class__ = Watched
    return Watched


@scenario
def setattr_replaced_after_lazy_init(place: Place) -> Record:
    model = stack()
    kind = watched_layers(model)
    place.sharded(model=model)
    record = train(model, place)
    calls: Counter[str] = Counter()

    def set_and_count(module: nn.Module, name: str, value: Any) -> None:
        calls[f"{name} {type(value).__name__}"] += 1
        nn.Module.__setattr__(module, name, value)

    kind.__setattr__ = set_and_count
    record |= train(model, place, steps=range(2, 4))
    return record | {"calls": dict(calls)}


@scenario
def setattr_that_is_taken_away_after_lazy_init(place: Place) -> Record:
    model = stack()
    kind = watched_layers(model)
    calls: Counter[str] = Counter()

    def set_and_count(module: nn.Module, name: str, value: Any) -> None:
        calls[name] += 1
        nn.Module.__setattr__(module, name, value)

    kind.__setattr__ = set_and_count
    place.sharded(model=model)
    record = train(model, place)
    before = dict(calls)
    del kind.__setattr__
    record |= train(model, place, steps=range(2, 4))
    return record | {"before": before, "after": dict(calls)}


class Doubled(torch.Tensor):
    """Is gathered as twice its values."""

    @torch.no_grad()
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        plain = self.as_subclass(torch.Tensor).detach()
        return (2 * plain.contiguous(),), "doubled"

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None) -> Any:
        (gathered,) = outputs
        if out is None:
            return gathered, (gathered,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered.view_as(out))
        return None


def give_extension(model: Stack, *, is_initialized: bool) -> None:
    """Puts an extension tensor in the place of a plain parameter's local tensor."""
    group = groups_of(model)[1]
    fsdp_param = next(
        p for p in group.fsdp_params if p._module_info.param_name == "weight"
    )
    sharded = fsdp_param.sharded_param
    sharded._local_tensor = sharded._local_tensor.detach().as_subclass(Doubled)
    if is_initialized:
        fsdp_param._init_extensions()


def train_with_late_extension(place: Place, *, is_initialized: bool) -> Record:
    model = place.sharded(model=stack(dim=8))
    step = lambda i: loss_of(model(batch_of(i, place.rank, dim=8)))  # noqa: E731
    record = {"before": digest(step(0))}
    step(1).backward()
    model.zero_grad()
    give_extension(model, is_initialized=is_initialized)
    for i in (2, 3):
        try:
            loss = step(i)
            loss.backward()
        except Exception as error:  # which of them is told apart by the test
            return record | {"raised": f"{type(error).__name__}: {error}"}
        record[f"{i} loss"] = digest(loss)
        record |= {f"{i} {name}": bits for name, bits in gradients(model)}
    return record


@scenario
def extension_after_lazy_init(place: Place) -> Record:
    return train_with_late_extension(place, is_initialized=False)


@scenario
def extension_after_lazy_init_that_is_initialized(place: Place) -> Record:
    return train_with_late_extension(place, is_initialized=True)


# Running #


def run_all(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (RANKS,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    place = Place(rank, mesh, pairs)
    results: dict[str, Any] = {}
    for name, run in {**SCENARIOS, **(MIXED if args.mixed else {})}.items():
        if args.only and name not in args.only:
            continue
        try:
            results[name] = run(place)
        except Exception as error:
            # All ranks do the same, so that they also fail alike
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for a file of each rank")
    parser.add_argument("--mixed", action="store_true", help="run mixed units too")
    parser.add_argument("--only", nargs="+", help="scenarios to run, default all")
    run_ranks(run_all, parser.parse_args(), RANKS)


if __name__ == "__main__":
    sys.exit(main())
