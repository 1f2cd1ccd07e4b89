"""
What plugins do with a unit: its dtypes, its list of parameters, its states, what it keeps
between backward and the all-reduce, hooks of state dicts, and changes that come late.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

from fsdp_common.parity_layers import (
    batch_of,
    BF16,
    digest,
    FP32,
    gradients,
    groups_of,
    Layer,
    local_of,
    loss_of,
    parameters,
    Record,
    Stack,
    stack,
    units_of,
)
from fsdp_common.release_rules import FOLLOWS_GRAD_DTYPE
from fsdp_common.scenarios import (
    describe,
    one_backward,
    Place,
    POLICIES,
    Step,
    train,
)
from fsdp_plugins import mixed, of_both_kinds, scenario

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor


# Dtypes #


def init_like_a_plugin(group: FSDPParamGroup) -> None:
    """Takes the first parameter's dtypes for the group's, and checks nothing."""
    for fsdp_param in group.fsdp_params:
        fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    group._orig_dtype = trained[0].orig_dtype if trained else None
    group._reduce_dtype = trained[0].reduce_dtype if trained else None


def train_with_replaced_init(
    place: Place, policy: str, init: Callable[[FSDPParamGroup], None], calls: list[Any]
) -> Record:
    # Saved and put back by hand, as they do at import
    original, model = FSDPParamGroup._init_mp_dtypes, place.of_kind(policy)

    def replacement(group: FSDPParamGroup) -> None:
        init(group)
        calls.append((group._module_fqn, str(group._reduce_dtype)))

    FSDPParamGroup._init_mp_dtypes = replacement
    try:
        record = train(model, place)
        model.unshard()  # may set up again
        model.reshard()
    finally:
        FSDPParamGroup._init_mp_dtypes = original
    return record


@of_both_kinds
def replaced_init_mp_dtypes(place: Place) -> Record:
    """By one that knows of one dtype for all, and by one that calls the original."""
    calls: list[Any] = []
    record: Record = {"calls": calls}
    record["plain"] = {name: train(place.of_kind(name), place) for name in POLICIES}
    for init in (init_like_a_plugin, FSDPParamGroup._init_mp_dtypes):
        record[init.__name__] = {
            name: train_with_replaced_init(place, name, init, calls)
            for name in POLICIES
        }
    return record


def dtypes_of_groups(model: nn.Module) -> list[tuple[str, ...]]:
    names = (
        ["_reduce_dtype"] if FOLLOWS_GRAD_DTYPE else ["_orig_dtype", "_reduce_dtype"]
    )
    return [
        tuple([str(getattr(group, name)) for name in names])
        for group in groups_of(model)
    ]


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
    model, policy = place.sharded(), POLICIES["bf16"]
    for unit in (model, *model.blocks):
        unit._get_fsdp_state()._mp_policy = policy
    for group in groups_of(model):
        group.mp_policy = policy
        for fsdp_param in group.fsdp_params if FOLLOWS_GRAD_DTYPE else ():
            fsdp_param.mp_policy = policy  # the only ones that 2.15 has
    record = train(model, place)
    model.blocks[0].unshard()
    dtypes = [str(param.dtype) for param in model.blocks[0].parameters()]
    return record | {"gathered in": dtypes}


def group_that_is_built_directly(place: Place) -> Record:
    """As upstream's test of training states does, without any policy."""
    mesh_info = groups_of(place.sharded("none"))[0].mesh_info
    module = nn.Linear(4, 4)
    rest = (mesh_info, None, torch.device("cpu"), None, None, None)
    group = FSDPParamGroup([*module.parameters()], (module,), *rest)
    with group.use_training_state(TrainingState.FORWARD):
        inside = str(group._training_state)
    sizes = [tuple(p.sharded_size) for p in group.fsdp_params]
    return {"found": (inside, str(group._training_state), sizes)}


if not FOLLOWS_GRAD_DTYPE:  # since then the release needs one
    scenario(group_that_is_built_directly)


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


def update_weights(model: Stack) -> None:
    """As a quantizer that writes its weights back, one unit at a time."""
    for block in model.blocks:
        group = block._get_fsdp_state()._fsdp_param_group
        if group.is_sharded:
            block.unshard()
        group.fsdp_params = [
            replace_weight(group, i, 0.5)
            if fsdp_param._module_info.param_name == "weight"
            else fsdp_param
            for i, fsdp_param in enumerate(group.fsdp_params)
        ]
        block.reshard()


def reverse(model: Stack) -> None:
    for group in groups_of(model):
        group.fsdp_params = list(reversed(group.fsdp_params))


def drop_in_place(model: Stack) -> None:
    """Leaves a parameter to somebody else, frozen."""
    group, layer = groups_of(model)[1], model.blocks[0].layers[0]
    model.blocks[0].unshard()
    whole = layer.shift.detach().clone()
    model.blocks[0].reshard()
    del group.fsdp_params[2]
    if FOLLOWS_GRAD_DTYPE:
        group.lazy_init()  # which numbers them
    layer.shift = nn.Parameter(whole, requires_grad=False)


@of_both_kinds
def list_of_parameters_changed(place: Place) -> Record:
    record: Record = {}
    changes = (update_weights, reverse, drop_in_place)
    for change, reshard in itertools.product(changes, (True, False)):
        model = place.of_kind(reshard_after_forward=reshard)
        found = train(model, place)
        change(model)
        found |= {f"changed {name}": bits for name, bits in parameters(model)}
        found |= train(model, place, steps=range(2, 4))
        found["places"] = [len(group.fsdp_params) for group in groups_of(model)]
        record[f"{change.__name__} {reshard}"] = found
    return record


# States #


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


@scenario
def states_changed_by_hand(place: Place) -> Record:
    model = place.sharded("bf16_reduce_fp32", reshard_after_forward=2)
    one_backward(model, place, 0)
    group = groups_of(model)[1]
    group.unshard()
    wait_by_hand(group)
    seen = [states_of(group)]
    seen += [digest(param) for param in model.blocks[0].parameters()]
    group._to_unsharded()  # changes nothing
    group._to_sharded_post_forward()
    seen.append(states_of(group))
    group.unshard()
    group.wait_for_unshard()
    seen.append(states_of(group))
    group._to_sharded()
    seen.append(states_of(group))
    model.zero_grad()
    return train(model, place) | {"seen": seen}


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
        new = {"wait_for_unshard": wait, "post_forward": post_forward}
        with mock.patch.multiple(FSDPParamGroup, **new):
            model = place.sharded("bf16", reshard_after_forward=reshard)
            record[str(reshard)] = train(model, place) | {"orders": orders}
    return record | {"calls": dict(calls)}


# What HSDP keeps #


def deferred(change: Callable[[FSDPParamGroup], Any], seen: list[Any]) -> Step:
    """Returns a step of two microbatches, of which the second is all-reduced."""

    def run(model: Stack, place: Place, step: int) -> torch.Tensor:
        for i in range(2):
            model.set_requires_all_reduce(i == 1)
            loss = loss_of(model(batch_of(step, i, place.rank)))
            loss.backward()
            for group in groups_of(model):
                seen.append(digest(group._partial_reduce_output))
                if i == 0:
                    change(group)
        return loss

    return run


KEPT = "_partial_reduce_output"
CHANGES: dict[str, Callable[[FSDPParamGroup], Any]] = {
    "read": lambda group: None,
    "dropped": lambda group: setattr(group, KEPT, None),
    "replaced": lambda group: setattr(group, KEPT, 2 * getattr(group, KEPT)),
    "scaled_in_place": lambda group: getattr(group, KEPT).mul_(0.5),
}


def train_deferred(place: Place, policy: str, name: str) -> Record:
    model = place.sharded(policy, mesh=place.pairs)
    seen: list[Any] = [group._partial_reduce_output for group in groups_of(model)]
    record = train(model, place, run=deferred(CHANGES[name], seen))
    return record | {"seen": seen}


@scenario
def partial_reduce_output(place: Place) -> Record:
    found = {name: train_deferred(place, "none", name) for name in CHANGES}
    policy = "bf16_reduce_fp32"
    return found | {policy: train_deferred(place, policy, "replaced")}


@mixed
def several_partial_reduce_outputs(place: Place) -> Record:
    model = place.mixed(mesh=place.pairs)
    model.set_requires_all_reduce(False)
    one_backward(model, place, 0)
    kept = [group._partial_reduce_output for group in groups_of(model)]
    for group in groups_of(model):
        group._partial_reduce_output = None
    left = [group._partial_reduce_output for group in groups_of(model)]
    return {"kept": [describe(each) for each in kept], "left": left}


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


@scenario
def buffers_that_few_read(place: Place) -> Record:
    seen: list[Any] = []
    original = FSDPParamGroup.post_backward

    def post_backward(group: FSDPParamGroup, *args: Any) -> None:
        original(group, *args)
        state = group._all_reduce_state
        seen.append(describe(state))
        if state is not None:
            seen.append((digest(state.all_reduce_input), state.event is None))

    model = place.sharded("bf16_reduce_fp32", mesh=place.pairs)
    seen += [describe(group._all_gather_output) for group in groups_of(model)]
    with mock.patch.object(FSDPParamGroup, "post_backward", post_backward):
        record = train(model, place)
    seen += [describe(group._all_reduce_state) for group in groups_of(model)]
    return record | {"seen": seen}


# Hooks of state dicts #

HANDLES = (
    "_module_to_pre_save_state_dict_hook_handle",
    "_module_to_pre_load_state_dict_hook_handle",
)


def handles_of(model: nn.Module) -> dict[str, list[Any]]:
    """Returns the modules and the kinds of handles that each group has."""
    names = {module: name for name, module in model.named_modules()}
    return {
        attribute: [
            sorted(
                (names[module], type(handle).__name__)
                for module, handle in getattr(group, attribute).items()
            )
            for group in groups_of(model)
        ]
        for attribute in HANDLES
    }


def kinds_while_unsharded(model: Stack) -> dict[str, str]:
    """Returns what a state dict has of units that are unsharded now."""
    for unit in units_of(model):
        unit.unshard()
    kinds = {name: type(value).__name__ for name, value in model.state_dict().items()}
    for unit in units_of(model):
        unit.reshard()
    return kinds


@scenario
def state_dict_hooks(place: Place) -> Record:
    """Detaches the first block's, so that it is saved as it is."""
    model = place.sharded()
    record: Record = {"before": handles_of(model)}
    record |= train(model, place)
    record |= {"after": handles_of(model), "kinds": kinds_while_unsharded(model)}
    for attribute in HANDLES:
        for handle in getattr(groups_of(model)[1], attribute).values():
            handle.remove()
    record["kinds without"] = kinds_while_unsharded(model)
    record["left"] = [
        (len(module._state_dict_pre_hooks), len(module._load_state_dict_pre_hooks))
        for module in model.modules()
        if isinstance(module, Layer)
    ]
    return record | {"again": train(model, place)}


# Late changes #


@scenario
def setattr_of_a_class(place: Place) -> Record:
    """Comes after lazy init, and goes again."""
    model, calls = place.sharded(), Counter()
    record = train(model, place)

    def set_and_count(module: nn.Module, name: str, value: Any) -> None:
        calls[f"{name} {type(value).__name__}"] += 1
        nn.Module.__setattr__(module, name, value)

    with mock.patch.object(Layer, "__setattr__", set_and_count):
        record |= train(model, place, steps=range(2, 4)) | {"calls": dict(calls)}
    return record | train(model, place, steps=range(4, 6)) | {"left": dict(calls)}


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


@scenario
def extension_after_lazy_init(place: Place) -> Record:
    """Comes in the place of a plain parameter's local tensor."""
    record: Record = {}
    for is_initialized in (False, True):
        model = place.sharded(model=stack(dim=8))
        step = lambda i: loss_of(model(batch_of(i, place.rank, dim=8)))  # noqa: B023, E731
        step(1).backward()
        model.zero_grad()
        group = groups_of(model)[1]
        names = [p._module_info.param_name for p in group.fsdp_params]
        fsdp_param = group.fsdp_params[names.index("weight")]
        sharded = fsdp_param.sharded_param
        sharded._local_tensor = sharded._local_tensor.detach().as_subclass(Doubled)
        if is_initialized:
            fsdp_param._init_extensions()
        try:
            for i in (2, 3):
                step(i).backward()
            record[f"{is_initialized}"] = dict(gradients(model))
        except Exception as error:  # of each release another
            record[f"{is_initialized}"] = {"raised": isinstance(error, Exception)}
    return record
