"""
Does with sharded models what plugins and trainers outside of torch do, with whatever
torch is imported: names that they read, write, call and replace, and what their
replacements then see. Also what later releases than 2.13 added, where they have it.
"""

import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_helpers.common import parity_layers as layers
from fsdp_helpers.common import scenarios as common
from fsdp_helpers.common.doubles import dispatched
from fsdp_helpers.common.parity_layers import digest, FP32, groups_of, Record, Stack
from fsdp_helpers.common.release_rules import IS_2_15
from fsdp_helpers.common.scenarios import describe, one_backward, POLICIES, Setup, train
from fsdp_helpers.parity.models import Extended
from fsdp_helpers.plugins import mixed, of_both_kinds, scenario, SCENARIOS
from fsdp_helpers.plugins.later_releases import where  # and adds its scenarios

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


# Gathers #


@of_both_kinds
def replaced_inputs(setup: Setup) -> Record:
    """
    Between two steps that gather what the unit does. In mixed units a plugin may replace
    inputs by what they would have been, as then all steps are those without it.
    """
    scale = 1 if setup.is_mixed else 2
    original = _fsdp_collectives._get_param_all_gather_inputs

    def get_inputs(fsdp_params: list[FSDPParam]) -> list[list[torch.Tensor]]:
        return [[scale * t for t in tensors] for tensors in original(fsdp_params)]

    new = {"_get_param_all_gather_inputs": get_inputs}
    record: Record = {"plain": train(setup.sharded(), setup, steps=range(3))}
    for reshard in (True, 2):
        model = setup.sharded(reshard_after_forward=reshard)
        found = train(model, setup, steps=range(1))
        with mock.patch.multiple(_fsdp_collectives, **new):
            found |= train(model, setup, steps=range(1, 2))
        record[str(reshard)] = found | train(model, setup, steps=range(2, 3))
    return record


@scenario
def replaced_metadatas(setup: Setup) -> Record:
    """Alone, and with the inputs: as a backend does that has its own of all of it."""
    calls: list[str] = []

    def get_inputs(fsdp_params: list[FSDPParam]) -> list[list[torch.Tensor]]:
        calls.append("inputs")
        return [param.all_gather_inputs for param in fsdp_params]

    def get_metadatas(inputs: list[list[torch.Tensor]]) -> Any:
        calls.append("metadatas")
        dtypes = [[tensor.dtype for tensor in tensors] for tensors in inputs]
        numels = [[tensor.numel() for tensor in tensors] for tensors in inputs]
        return dtypes, numels, dtypes[0][0]

    record: Record = {}
    new = {"_get_all_gather_input_metadatas": get_metadatas}
    for more in ({}, {"_get_param_all_gather_inputs": get_inputs}):
        with mock.patch.multiple(_fsdp_collectives, **new, **more):
            found = train(setup.sharded("bf16_reduce_fp32"), setup)
        record[" ".join(more)] = found
    return record | {"calls": calls}


# Operators #


def count_of(names: list[str]) -> dict[str, int]:
    """Returns how often each operator and range is there."""
    ours = Counter(name for name in names if name.startswith(("fsdp::", "FSDP::")))
    del ours["FSDP::look_for_traces"]  # by which a profiler without a flag is found
    return dict(sorted(ours.items()))


@contextlib.contextmanager
def profiled() -> Iterator[list[str]]:
    cpu, names = [torch.profiler.ProfilerActivity.CPU], []
    with torch.profiler.profile(activities=cpu) as profiler:
        yield names
    names += [event.name for event in profiler.events()]


@contextlib.contextmanager
def profiled_on_demand() -> Iterator[list[str]]:
    """Profiles as a daemon does, which torch's Python does not notice."""
    activities = {torch.profiler.ProfilerActivity.CPU}
    state, flags = torch.autograd.ProfilerState.KINETO, [False] * 5
    experimental = torch._C._profiler._ExperimentalConfig()
    # pyrefly: ignore [bad-argument-count]
    config = torch.autograd.ProfilerConfig(state, *flags, experimental)
    torch.autograd._prepare_profiler(config, activities)
    torch.autograd._enable_profiler(config, activities)
    names: list[str] = []
    yield names
    events = torch.autograd._disable_profiler().events()
    names += [event.name() for event in events]


@contextlib.contextmanager
def traced() -> Iterator[list[str]]:
    observer, names = torch.profiler.ExecutionTraceObserver(), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        observer.register_callback(str(path))
        observer.start()
        yield names
        observer.stop()
        observer.unregister_callback()
        names += [node["name"] for node in json.loads(path.read_text())["nodes"]]


OBSERVERS = {
    "dispatch mode": dispatched,
    "profiler": profiled,
    "profiler on demand": profiled_on_demand,
    "execution trace": traced,
}


@scenario
def operators_and_ranges_that_observers_see(setup: Setup) -> Record:
    model = setup.sharded("bf16_reduce_fp32")
    record = train(model, setup)
    for name, observe in OBSERVERS.items():
        with observe() as names:
            observed = train(model, setup, steps=range(2, 3))
        afterwards = train(model, setup, steps=range(3, 4))
        record[name] = observed | afterwards | {"calls": count_of(names)}
    return record


# Reductions #


@of_both_kinds
def replaced_reduce_scatter_copy_in(setup: Setup) -> Record:
    """The replaced function gets gradients of one dtype at a time."""
    name, calls = "foreach_reduce_scatter_copy_in", []
    original = getattr(_fsdp_collectives, name)

    def copy_in(grads: list[torch.Tensor], output: torch.Tensor, world_size: int):
        calls.append((len(grads), len({grad.dtype for grad in grads}), output.numel()))
        original([2 * grad for grad in grads], output, world_size)

    with mock.patch.object(_fsdp_collectives, name, copy_in):
        return train(setup.sharded("reduce_bf16"), setup) | {"calls": calls}


# Globals #


@scenario
def replaced_copy_out(setup: Setup) -> Record:
    """A global of the module that calls it, as test utilities replace it."""
    calls: list[str] = []
    original = _fsdp_param_group.foreach_all_gather_copy_out

    def copy_out(result: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(type(result).__name__)
        original(result, *args, **kwargs)

    with mock.patch.object(_fsdp_param_group, "foreach_all_gather_copy_out", copy_out):
        record = train(setup.sharded("bf16_reduce_fp32"), setup)
    return record | {"calls": calls}


# Dtypes #


def init_like_a_plugin(group: FSDPParamGroup) -> None:
    """Takes the unit's policy and the first parameter's dtypes for those of all."""
    for fsdp_param in group.fsdp_params:
        # Which the release has no more since 2.15
        fsdp_param.init_dtype_attrs(getattr(group, "mp_policy", fsdp_param.mp_policy))
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    group._orig_dtype = trained[0].orig_dtype if trained else None
    group._reduce_dtype = trained[0].reduce_dtype if trained else None


@of_both_kinds
def replaced_init_mp_dtypes(setup: Setup) -> Record:
    """By one that knows of one dtype for all, and by one that calls the original."""
    # Parameters of mixed units keep policies of their own
    own = {"param_dtype_override_fn": lambda param: FP32 if param.ndim == 1 else None}
    policy = MixedPrecisionPolicy(layers.BF16, FP32, **own if setup.is_mixed else {})
    record: Record = {"plain": train(setup.sharded(mp_policy=policy), setup)}
    units: list[str] = []
    for init in (init_like_a_plugin, FSDPParamGroup._init_mp_dtypes):

        def replacement(group: FSDPParamGroup, init: Any = init) -> None:
            init(group)
            units.append(group._module_fqn)

        model = setup.sharded(mp_policy=policy)
        with mock.patch.object(FSDPParamGroup, "_init_mp_dtypes", replacement):
            record[init.__name__] = train(model, setup)
            model.unshard()  # may set up again
            model.reshard()
    return record | {"calls": units}


@of_both_kinds
def dtypes_of_a_group(setup: Setup) -> Record:
    """Records them for trained, frozen and mixed parameters."""
    names = ["_reduce_dtype"] if IS_2_15 else ["_orig_dtype", "_reduce_dtype"]
    record: Record = {}
    for policy in POLICIES:
        model = setup.sharded(policy)
        model.blocks[0].requires_grad_(False)
        one_backward(model, setup, 0)
        record[policy] = [
            [str(getattr(group, name)) for name in names] for group in groups_of(model)
        ]
    return record


@scenario
def policy_set_before_the_first_forward(setup: Setup) -> Record:
    model, policy = setup.sharded(), POLICIES["bf16"]
    for unit in (model, *model.blocks):
        unit._get_fsdp_state()._mp_policy = policy
    for group in groups_of(model):
        group.mp_policy = policy
        for fsdp_param in group.fsdp_params if IS_2_15 else ():
            fsdp_param.mp_policy = policy  # the only ones that 2.15 has
    record = train(model, setup)
    model.blocks[0].unshard()
    dtypes = [str(param.dtype) for param in model.blocks[0].parameters()]
    return record | {"gathered in": dtypes}


@where(not IS_2_15, scenario)  # since then the release needs a policy
def group_that_is_built_by_hand(setup: Setup) -> Record:
    """As upstream's test of training states does, without any policy."""
    mesh_info = groups_of(setup.sharded("none"))[0].mesh_info
    module = nn.Linear(4, 4)
    rest = (mesh_info, None, torch.device("cpu"), None, None, None)
    group = FSDPParamGroup([*module.parameters()], (module,), *rest)
    return {"sizes": [tuple(p.sharded_size) for p in group.fsdp_params]}


# The list of parameters #


def halve_weight(old: FSDPParam) -> FSDPParam:
    """Updates a weight of an unsharded unit, and shards what came of it."""
    info = old._module_info
    weight = nn.Parameter(info.module.weight.detach() * 0.5)
    info.module.weight = weight
    policy = MixedPrecisionPolicy(param_dtype=weight.dtype)
    meshes = old.mesh_info, old.post_forward_mesh_info
    new = FSDPParam(weight, info, *meshes, old.device, None, policy, None)
    new.init_dtype_attrs(policy)
    old._post_load_hook_handle.remove()
    return new


def update_weights(model: Stack) -> None:
    """As a quantizer that writes its weights back, one unit at a time."""
    for block in model.blocks:
        group = block._get_fsdp_state()._fsdp_param_group
        block.unshard()
        group.fsdp_params = [
            halve_weight(param) if param._module_info.param_name == "weight" else param
            for param in group.fsdp_params
        ]
        block.reshard()


def reverse(model: Stack) -> None:
    for group in groups_of(model):
        group.fsdp_params = list(reversed(group.fsdp_params))


def drop_in_place(model: Stack) -> None:
    """Removes a parameter from its group, and registers its values as a frozen one."""
    group, layer = groups_of(model)[1], model.blocks[0].layers[0]
    model.blocks[0].unshard()
    whole = layer.shift.detach().clone()
    model.blocks[0].reshard()
    del group.fsdp_params[2]
    if IS_2_15:
        group.lazy_init()  # which numbers them
    layer.shift = nn.Parameter(whole, requires_grad=False)


@of_both_kinds
def list_of_parameters_changed(setup: Setup) -> Record:
    record: Record = {}
    for change in (update_weights, reverse, drop_in_place):
        model = setup.sharded()
        found = train(model, setup)
        change(model)
        found |= {f"changed {name}": bits for name, bits in layers.parameters(model)}
        record[change.__name__] = found | train(model, setup, steps=range(2, 4))
    return record


# States #


def wait_by_hand(group: FSDPParamGroup) -> None:
    result = group._all_gather_result
    if result is None:
        return
    _fsdp_param_group.foreach_all_gather_copy_out(
        result, group.fsdp_params, group._all_gather_process_group
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
def replaced_wait_for_unshard_and_post_forward(setup: Setup) -> Record:
    """They change a group's state, and record the order in which backward prefetches."""
    record: Record = {}
    seen: list[Any] = []

    def post_forward(group: FSDPParamGroup, *args: Any) -> Any:
        output = post_forward_by_hand(group, *args)
        order = [each._module_fqn for each in group.comm_ctx.post_forward_order]
        seen.append((group._sharded_state.name, order))
        return output

    new = {"wait_for_unshard": wait_by_hand, "post_forward": post_forward}
    for reshard in (True, False, 2):
        with mock.patch.multiple(FSDPParamGroup, **new):
            model = setup.sharded("bf16", reshard_after_forward=reshard)
            record[str(reshard)] = train(model, setup)
    return record | {"calls": seen}


# Partial reduces of HSDP #


def deferred(change: Callable[[FSDPParamGroup], Any], seen: list[Any]) -> common.Step:
    """Returns a step of two microbatches, of which the second is all-reduced."""

    def run(model: Stack, setup: Setup, step: int) -> torch.Tensor:
        for i in range(2):
            model.set_requires_all_reduce(i == 1)
            loss = layers.loss_of(model(layers.batch_of(step, i, setup.rank)))
            loss.backward()
            for group in groups_of(model):
                seen.append(digest(group._partial_reduce_output))
                if i == 0:
                    change(group)
        return loss

    return run


KEPT = "_partial_reduce_output"


def set_anew(group: FSDPParamGroup) -> None:
    """As a plugin does that all-reduces every few steps, with sums of its own."""
    kept = group._partial_reduce_output.clone()
    group._partial_reduce_output = None
    group._partial_reduce_output = kept


CHANGES: dict[str, Callable[[FSDPParamGroup], Any]] = {
    "read": lambda group: None,
    "dropped": lambda group: setattr(group, KEPT, None),
    "replaced": lambda group: setattr(group, KEPT, 2 * getattr(group, KEPT)),
    "scaled_in_place": lambda group: getattr(group, KEPT).mul_(0.5),
    "set_anew": set_anew,
}


@scenario
def partial_reduce_output(setup: Setup) -> Record:
    record: Record = {}
    for name, change in CHANGES.items():
        model, seen = setup.sharded("bf16_reduce_fp32", mesh=setup.pairs), []
        record[name] = train(model, setup, run=deferred(change, seen)) | {"seen": seen}
    return record


@mixed
def several_partial_reduce_outputs(setup: Setup) -> Record:
    model = setup.sharded(mesh=setup.pairs)
    model.set_requires_all_reduce(False)
    one_backward(model, setup, 0)
    kept = [group._partial_reduce_output for group in groups_of(model)]
    for group in groups_of(model):
        group._partial_reduce_output = None
    left = [group._partial_reduce_output for group in groups_of(model)]
    return {"kept": [describe(each) for each in kept], "left": left}


@scenario
def all_reduce_state(setup: Setup) -> Record:
    seen: list[Any] = []
    original = FSDPParamGroup.post_backward

    def post_backward(group: FSDPParamGroup, *args: Any) -> None:
        original(group, *args)
        if (state := group._all_reduce_state) is not None:
            seen.append((digest(state.all_reduce_input), state.event is None))

    model = setup.sharded("bf16_reduce_fp32", mesh=setup.pairs)
    with mock.patch.object(FSDPParamGroup, "post_backward", post_backward):
        record = train(model, setup)
    left = [describe(group._all_reduce_state) for group in groups_of(model)]
    return record | {"calls": seen, "left": left}


# Hooks of state dicts #


@scenario
def state_dict_hooks(setup: Setup) -> Record:
    """A plugin detaches the first block's, so that it is saved as it is."""
    model = setup.sharded()
    record: Record = train(model, setup)
    group = groups_of(model)[1]
    for when in ("attached", "detached"):
        for unit in layers.units_of(model):
            unit.unshard()
        state_dict = model.state_dict()
        record[when] = {name: type(v).__name__ for name, v in state_dict.items()}
        for kind in ("save", "load"):
            handles = getattr(group, f"_module_to_pre_{kind}_state_dict_hook_handle")
            for handle in handles.values():
                handle.remove()
    layer = model.blocks[0].layers[0]
    hooks = layer._state_dict_pre_hooks, layer._load_state_dict_pre_hooks
    return record | {"left": [*map(len, hooks)]}


# Late changes #


class Doubled(Extended):
    """Is gathered as twice its values."""

    @torch.no_grad()
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (2 * self.whole_shard(),), type(self).__name__

    def unpack(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return inputs[0]


@scenario
def extension_after_lazy_init(setup: Setup) -> Record:
    """Replaces a plain parameter's local tensor, and is set up by hand."""
    model = setup.sharded()
    one_backward(model, setup, 1)
    model.zero_grad()
    fsdp_param, *_ = groups_of(model)[1].fsdp_params
    sharded = fsdp_param.sharded_param
    sharded._local_tensor = Doubled(sharded._local_tensor.detach())
    fsdp_param._init_extensions()
    one_backward(model, setup, 2)
    return dict(layers.gradients(model))


if __name__ == "__main__":
    sys.exit(SCENARIOS.main(__doc__))
