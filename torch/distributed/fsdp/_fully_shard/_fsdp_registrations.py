"""Keeps a param group's parameters in step with those registered in its modules."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from itertools import chain, groupby, repeat
from typing import Any, cast, TYPE_CHECKING

import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp._common_utils import _named_parameters_with_duplicates
from torch.distributed.tensor import DTensor

from ._fsdp_api import CPUOffloadPolicy, MixedPrecisionPolicy
from ._fsdp_errors import add_note, check_param, listed, note_sharding
from ._fsdp_param import FSDPParam, ParamModuleInfo
from ._fsdp_policies import resolve_all
from ._fsdp_releases import RELEASE


if TYPE_CHECKING:
    from ._fsdp_param_group import FSDPParamGroup


def _get_param_module_infos(
    params: list[nn.Parameter], modules: tuple[nn.Module, ...]
) -> list[ParamModuleInfo]:
    """Finds the modules that have each parameter, several if it is shared."""
    infos: dict[nn.Parameter, ParamModuleInfo] = {}
    trees = [module.named_modules(remove_duplicate=False) for module in modules]
    for _, submodule in chain(*trees):
        for name, param in _named_parameters_with_duplicates(submodule, recurse=False):
            if (info := infos.get(param)) is None:
                infos[param] = ParamModuleInfo(submodule, name)
            else:
                info.shared_modules.append(submodule)
                info.shared_param_names.append(name)
    if not infos.keys() >= {*params}:
        raise AssertionError(f"Some parameters are not in the module tree of {modules}")
    return [infos[param] for param in params]


def shard_params(
    group: FSDPParamGroup, params: list[nn.Parameter], placement_fn: Callable | None
) -> list[FSDPParam]:
    infos = _get_param_module_infos(params, group.modules)
    names = get_param_names(infos, group.modules)
    # Users' overrides see parameters of which none is sharded yet
    policies = resolve_all(group.mp_policy or MixedPrecisionPolicy(), params, names)
    fsdp_params: list[FSDPParam] = []
    group._hooked = {}
    places = group.mesh_info, group.post_forward_mesh_info, group.device, placement_fn
    for param, info, name, policy in zip(params, infos, names, policies, strict=True):
        try:
            fsdp_param = FSDPParam(param, info, *places, policy, group.offload_policy)
        except Exception as error:
            note_sharding(error, param, f"{name} of unit '{group._unit_name}'")
            raise
        if not RELEASE.keeps_grad_dtypes and param.grad_dtype != param.dtype:
            fsdp_param.sharded_param.grad_dtype = param.grad_dtype
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            group._hooked[fsdp_param] = bool(param._backward_hooks)
        fsdp_params.append(fsdp_param)
    group._plain_places = {*_find_plain_params(group)}
    return fsdp_params


def get_param_names(
    infos: Sequence[ParamModuleInfo], modules: tuple[nn.Module, ...]
) -> list[str]:
    """Returns each parameter's name in the first of ``modules`` that has it."""
    trees = [module.named_modules() for module in reversed(modules)]
    prefixes = {submodule: prefix for prefix, submodule in chain(*trees)}
    names = [f"{prefixes.get(info.module, '')}.{info.param_name}" for info in infos]
    return [name.lstrip(".") for name in names]


def fqns_of(
    group: FSDPParamGroup, *fsdp_params: FSDPParam, with_class: bool = True
) -> list[str]:
    """Returns the names of some of a group's parameters, by default of all."""
    fsdp_params = fsdp_params or tuple(group.fsdp_params)
    fqns: list[Any] = [fsdp_param._param_fqn for fsdp_param in fsdp_params]
    if None not in fqns:
        return fqns
    # Before the root's lazy init, and where it did not find what users have replaced
    infos = [fsdp_param._module_info for fsdp_param in fsdp_params]
    names, fqn = get_param_names(infos, group.modules), group._module_fqn
    if fqn is not None and len(group.modules) == 1:
        return [f"{fqn}.{name}".lstrip(".") for name in names]
    unit = f" of unit '{group._unit_name}'" if with_class else ""
    return [name + unit for name in names]


def places_of(fsdp_params: Sequence[FSDPParam]) -> list[tuple[nn.Module, list]]:
    """Returns modules with names and indices of parameters, in order, each if shared."""
    places: list[tuple[nn.Module, tuple[str, int]]] = []
    for i, info in enumerate(fsdp_param._module_info for fsdp_param in fsdp_params):
        modules = [info.module, *info.shared_modules]
        names = zip([info.param_name, *info.shared_param_names], repeat(i))
        places += zip(modules, names)
    runs = [[*run] for _, run in groupby(places, key=lambda place: id(place[0]))]
    return [(run[0][0], [place for _, place in run]) for run in runs]


def register(places: Sequence[tuple], params: Sequence[nn.Parameter]) -> None:
    """Registers ``params`` at their places in modules."""
    plain = nn.Module.__setattr__
    for module, named in places:
        # The plain method's checks would cost more than all else, and pass: the name is
        # that of a parameter. A class may define another method at any time
        if type(module).__setattr__ is plain:
            registered = module._parameters
            for name, i in named:
                registered[name] = params[i]
        else:
            for name, i in named:
                setattr(module, name, params[i])


def watch_loads(group: FSDPParamGroup) -> None:
    """Resets each parameter after its module has loaded a state dict, or `_apply` ran."""
    for fsdp_param in cast(Any, group.fsdp_params):
        fsdp_param._post_load_hook_handle.remove()
        reset = fsdp_param.reset_sharded_param = _make_reset(group, fsdp_param)
        add_hook = fsdp_param._module_info.module.register_load_state_dict_post_hook
        fsdp_param._post_load_hook_handle = add_hook(reset)


def register_state_dict_hooks(group: FSDPParamGroup) -> None:
    """Reshards before state dicts are saved and loaded, which hold shards."""
    save_handles = group._module_to_pre_save_state_dict_hook_handle
    load_handles = group._module_to_pre_load_state_dict_hook_handle

    def reshard(*unused: Any) -> None:
        group._to_sharded()
        if (context := group.comm_ctx).resharded:
            context.free_resharded()

    for fsdp_param in group.fsdp_params:
        if (module := fsdp_param._module_info.module) not in save_handles:
            save_handles[module] = module.register_state_dict_pre_hook(reshard)
            load_handles[module] = module._register_load_state_dict_pre_hook(reshard)


def reset_sharded_params(group: FSDPParamGroup) -> None:
    for fsdp_param, fqn in zip(group.fsdp_params, fqns_of(group)):
        _make_reset(group, fsdp_param)()
        check_param(fsdp_param, fqn)
        if not hasattr(fsdp_param, "_unsharded_param"):
            fsdp_param._init_extensions()  # may have been added since
    if group._module_fqn is not None:
        _warn_of_losses(group)


def _make_reset(group: FSDPParamGroup, fsdp_param: FSDPParam) -> Callable[..., None]:
    """
    Returns a hook that makes what users have loaded, replaced, cast or materialized the
    sharded parameter: a closure, as deepcopy of their module does not follow those.
    """
    reference = weakref.ref(group)  # the module alone does not keep the group alive

    def reset(*unused: Any) -> None:
        if (group := reference()) is None:
            return type(fsdp_param).reset_sharded_param(fsdp_param)
        group._cache.held_inputs = None  # which have the previous shard
        previous = fsdp_param.sharded_param
        # Loading comes here for each parameter, few of which have one
        has_grad_dtype = previous.is_leaf and previous.grad_dtype != previous.dtype
        has_grad_dtype |= fsdp_param in group._grad_dtypes
        if has_grad_dtype:
            keep_grad_dtypes(group, fsdp_param)
        try:
            type(fsdp_param).reset_sharded_param(fsdp_param)
        except Exception as error:
            (name,) = fqns_of(group, fsdp_param)
            check_param(fsdp_param, name)  # raises if it knows why
            add_note(error, f"{name} cannot be sharded as it is registered.")
            raise
        if has_grad_dtype:
            keep_grad_dtypes(group, fsdp_param)  # on the new parameter
        param: Any = fsdp_param.sharded_param
        if param is not previous:
            group._cache.buckets.clear()  # which have the previous one's dtypes
            # Only then look up the name: that loops over all modules of the group
            if param._local_tensor.size() != fsdp_param.sharded_size:
                check_param(fsdp_param, *fqns_of(group, fsdp_param))

    return reset


def keep_grad_dtypes(group: FSDPParamGroup, *fsdp_params: FSDPParam) -> None:
    """
    Restores a user's ``grad_dtype`` on a parameter that was loaded or cast since. If it
    is missing on the same local tensor, the user has unset it.
    """
    if RELEASE.keeps_grad_dtypes:
        return
    for fsdp_param in fsdp_params or group.fsdp_params:
        param: Any = fsdp_param.sharded_param
        if not (param.is_leaf and isinstance(param, DTensor)):
            continue  # `reset_sharded_param` or `check_param` refuses it
        shard, previous = param._local_tensor, group._grad_dtypes.pop(fsdp_param, None)
        if param.grad_dtype == param.dtype and previous and previous[0] is not shard:
            param.grad_dtype = previous[1]
        if param.grad_dtype != param.dtype:
            group._grad_dtypes[fsdp_param] = (shard, param.grad_dtype)


def check_materialized(group: FSDPParamGroup) -> None:
    """Raises if parameters are on the meta device, or are offloaded but not on CPU."""
    named = [*zip(fqns_of(group), [p.sharded_param.device for p in group.fsdp_params])]
    if on_meta := [fqn for fqn, device in named if device.type == "meta"]:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, "
            f"but the following were still on meta device: {on_meta}\nCall module."
            "to_empty(device=...), and then initialize or load them"
        )
    misplaced = [(fqn, device) for fqn, device in named if device.type != "cpu"]
    if misplaced and isinstance(group.offload_policy, CPUOffloadPolicy):
        raise RuntimeError(
            "FSDP parameters should be materialized on CPU when enabling CPU "
            f'offloading, but got {misplaced}\nCall module.to_empty(device="cpu")'
        )


def _find_plain_params(group: FSDPParamGroup) -> dict[Any, nn.Parameter]:
    """Returns the parameters of a unit's modules that are not sharded, by their place."""
    from ._fsdp_init import _get_managed_modules as find  # a cycle

    ddp = nn.parallel.DistributedDataParallel
    return {
        (module, name): param
        for module in find(group.modules, is_composable_fn=lambda m: type(m) is not ddp)
        for name, param in module._parameters.items()
        if param is not None and not isinstance(param, DTensor)
    }


def _warn_of_losses(group: FSDPParamGroup) -> None:
    """Warns of hooks that FSDP does not call, and of parameters that it does not shard."""
    lost: list[FSDPParam] = []
    for fsdp_param in group.fsdp_params:
        param, hooked = fsdp_param.sharded_param, group._hooked.get(fsdp_param)
        # Torch's `MemTracker` sets hooks of both kinds
        if not (hooked or param._post_accumulate_grad_hooks):
            hooked = param._backward_hooks or hooked is False
        if hooked and param.requires_grad:
            lost.append(fsdp_param)
    if lost:
        warnings.warn(
            f"Hooks on {listed(fqns_of(group, *lost))} are lost. FSDP calls those that "
            "are set after fully_shard, by register_post_accumulate_grad_hook",
            stacklevel=2,
        )
    late = [
        ParamModuleInfo(*place)
        for place, param in _find_plain_params(group).items()
        # A hook may reduce the gradient
        if param.requires_grad and not param._post_accumulate_grad_hooks
        if place not in group._plain_places
    ]
    if late and group.mesh_info.mesh.size() > 1:
        warnings.warn(
            f"{listed(get_param_names(late, group.modules))} of unit '{group._unit_name}' "
            "came after fully_shard: neither sharded nor reduced. Register them before it",
            stacklevel=2,
        )


def get_marks(fsdp_param: FSDPParam) -> tuple:
    """Returns marks that writes to a shard change: fused optimizers' no version."""
    param: Any = fsdp_param.sharded_param
    tensors = param, param._local_tensor
    return param.grad is None, *(t._version for t in tensors if not t.is_inference())


def warn_if_stale(group: FSDPParamGroup) -> None:
    """Warns if a unit computes with other values than its shards have by now."""
    registered, fsdp_param, marks = group._cache.watched
    is_same = registered is group._cache._registered  # else gathered anew
    if is_same and get_marks(fsdp_param) == marks:
        return
    group._cache.watched = False if is_same else None  # once: it waits for the device
    shard, unsharded = fsdp_param._sharded_param_data, fsdp_param._unsharded_param
    # Forward may write to an unsharded parameter, as an embedding with `max_norm` does
    is_plain = type(shard) is Tensor and not unsharded._version
    is_exact = is_plain and group._can_gather_directly()  # else a gather may round
    if not (is_same and is_exact) or fsdp_param.fsdp_placement.dim != 0:
        return
    n, rank = shard.numel(), getattr(fsdp_param.mesh_info, "shard_mesh_rank", 0)
    part = fsdp_param.all_gather_outputs[0][rank * n : (rank + 1) * n]
    if not part.equal(shard.to(part.device, part.dtype)):
        warnings.warn(
            f"{fqns_of(group, fsdp_param)[0]} was written to while its unit stayed unsharded "
            "after a forward without gradients, so forward uses old values. Call reshard() "
            "on the unit's module after such a forward, before the write",
            stacklevel=2,
        )


def groups_of(module: nn.Module, function: str, recurse: bool = True) -> dict[Any, Any]:
    """Returns the param groups of a module's units, each with its modules' names."""
    named: list[Any] = [*module.named_modules()] if recurse else [("", module)]
    # By class, as wrappers may pass on a unit's attributes. To import FSDPModule: a cycle
    units = [item for item in named if hasattr(type(item[1]), "_get_fsdp_state")]
    if not units:
        name = type(module).__name__
        raise ValueError(f"{function} found no unit in {name}: call fully_shard first")
    groups: dict[Any, list[str]] = {}
    for name, unit in units:
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            groups.setdefault(group, []).append(name or "(root)")
    return groups
