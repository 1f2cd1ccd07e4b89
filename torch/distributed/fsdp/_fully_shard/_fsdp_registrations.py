"""
A unit's parameters as its modules have them: when the unit is made, when a state dict
is loaded, and at the first forward, until when users may replace or cast them.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast, TYPE_CHECKING, TypeAlias

import torch
import torch.nn as nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp._common_utils import _named_parameters_with_duplicates

from ._fsdp_api import CPUOffloadPolicy, MixedPrecisionPolicy
from ._fsdp_common import ShardPlacementFnResult
from ._fsdp_comms import can_exchange
from ._fsdp_doors import doors, Sharding, Taking
from ._fsdp_grads import find_widened, forget_if_changed
from ._fsdp_kept_names import KeptNames
from ._fsdp_param import FSDPParam, ParamModuleInfo
from ._fsdp_release import FOLLOWS_GRAD_DTYPE
from ._fsdp_settings import UnitSettings
from ._fsdp_unit import dtypes_of, UnitParams


if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


_ModuleToHandleDict: TypeAlias = "dict[nn.Module, RemovableHandle]"


class UnitRegistrations(UnitSettings, KeptNames):
    """The parameters of a group, and what its modules call them."""

    def _shard_params(
        self,
        params: list[nn.Parameter],
        shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        """Makes the unit's parameters of those that its modules have."""
        doors.errors.check_setting("mp_policy", mp_policy, self._unit_name)
        self.mp_policy = mp_policy
        infos = _get_param_module_infos(params, self.modules)
        # Within the unit: what they are called in the model shows at lazy init
        self._param_names = _get_param_names(infos, self.modules)
        named = [*zip(params, self._param_names, infos)]
        # All of them first, while the parameters are as users know them
        policies, is_final = doors.policies_of(
            mp_policy, params, self._param_names, self.device
        )
        # None: again, when the unit has a name
        self._resolved_policy = mp_policy if is_final else None
        make_fsdp_param = functools.partial(
            FSDPParam,
            mesh_info=self.mesh_info,
            post_forward_mesh_info=self.post_forward_mesh_info,
            device=self.device,
            shard_placement_fn=shard_placement_fn,
            offload_policy=self.offload_policy,
        )
        self._unit_params = UnitParams(
            _shard(
                param, name, functools.partial(make_fsdp_param, mp_policy=policy), info
            )
            for (param, name, info), policy in zip(named, policies)
        )
        # Before 2.15: the local tensors whose parameters had a `grad_dtype` of users'
        self._grad_dtypes: dict[FSDPParam, tuple[torch.Tensor, torch.dtype | None]] = {}
        for fsdp_param, param in zip(self._unit_params, params):
            self._watch_loads(fsdp_param)
            if not FOLLOWS_GRAD_DTYPE and param.grad_dtype != param.dtype:
                fsdp_param.sharded_param.grad_dtype = param.grad_dtype
                self._keep_grad_dtype(fsdp_param)
        self._module_to_pre_save_state_dict_hook_handle: _ModuleToHandleDict = {}
        self._module_to_pre_load_state_dict_hook_handle: _ModuleToHandleDict = {}
        # Until the first forward
        self._places_at_first: Any = _places_of_unit(self.modules)

    def _set_params(self, params: Sequence[FSDPParam]) -> None:
        self._unit_params = UnitParams(params)
        infos = [fsdp_param._module_info for fsdp_param in params]
        self._param_names = _get_param_names(infos, self.modules)

    # Of which plugins may set others at any time. Reading it runs no Python.
    fsdp_params: UnitParams = cast(
        UnitParams, property(attrgetter("_unit_params"), _set_params)
    )

    def _fqn(self, i: int) -> str:
        """Returns a parameter's name, which is within the unit before lazy init."""
        if (fqn := self.fsdp_params[i]._param_fqn) is not None:
            return fqn
        unit_fqn, name = self._module_fqn, self._param_names[i]
        if unit_fqn is None or len(self.modules) > 1:
            return name
        within, _, _ = name.partition(" of ")
        return f"{unit_fqn}.{within}" if unit_fqn else within

    def _check_exchanges(self, kind: type) -> None:
        if can_exchange(kind):
            return
        for i, fsdp_param in enumerate(self.fsdp_params):
            if (dtype := dtypes_of(fsdp_param).comm) is not None:
                raise ValueError(
                    f"{kind.__name__} of unit '{self._unit_name}' cannot reduce "
                    f"{self._fqn(i)}, which is sent in {dtype} (grad_comm_dtype) and "
                    "added by who gets it: give the class a method "
                    "exchange(output_tensor, input_tensor, group) that does as "
                    "torch.distributed.all_to_all_single, or leave grad_comm_dtype out"
                )

    # Taking what users have put there #
    def _take_registered(self) -> None:
        for i, fsdp_param in enumerate(self.fsdp_params):
            self._reset_sharded_param(fsdp_param)
            doors.errors.check_param(fsdp_param, self._fqn(i))
            fsdp_param._init_extensions()  # may have been added since
        self.fsdp_params.refresh()

    def _watch_loads(self, fsdp_param: FSDPParam) -> None:
        """Puts the method below in place of the parameter's own hook."""
        fsdp_param._post_load_hook_handle.remove()
        register_hook = (
            fsdp_param._module_info.module.register_load_state_dict_post_hook
        )
        fsdp_param._post_load_hook_handle = register_hook(
            functools.partial(self._reset_sharded_param, fsdp_param)
        )

    def _reset_sharded_param(self, fsdp_param: FSDPParam, *unused: Any) -> None:
        """Takes what the module has now: loaded, replaced, cast or materialized."""
        previous = fsdp_param.sharded_param
        has_grad_dtype = fsdp_param in self._grad_dtypes or (
            previous.is_leaf and previous.grad_dtype != previous.dtype
        )
        if has_grad_dtype:  # the previous one, as users left it
            self._keep_grad_dtype(fsdp_param)
        try:
            fsdp_param.reset_sharded_param()
        except Exception as error:
            at = Taking(fsdp_param, self._name_of(fsdp_param))
            raise doors.errors.explain(error, at)  # noqa: B904  (has its cause)
        if has_grad_dtype:
            self._keep_grad_dtype(fsdp_param)
        param: Any = fsdp_param.sharded_param
        if param is not previous:
            # Planned with the dtypes of the previous one
            self.fsdp_params.buckets.clear()
            if param._local_tensor.size() != fsdp_param.sharded_size:
                doors.errors.check_param(fsdp_param, self._name_of(fsdp_param))

    def _keep_grad_dtype(self, fsdp_param: FSDPParam) -> None:
        """
        Sets the ``grad_dtype`` that users set on what was loaded or cast without one.
        Unset on the same local tensor, it is what users took back.
        """
        param: Any = fsdp_param.sharded_param
        if FOLLOWS_GRAD_DTYPE or not param.is_leaf:
            return  # since 2.15 the release does so; other tensors are refused
        local_tensor = param._local_tensor
        kept = self._grad_dtypes.pop(fsdp_param, None)
        if param.grad_dtype == param.dtype and kept and kept[0] is not local_tensor:
            param.grad_dtype = kept[1]
        if param.grad_dtype != param.dtype:
            self._grad_dtypes[fsdp_param] = (local_tensor, param.grad_dtype)

    def _name_of(self, fsdp_param: FSDPParam) -> str:
        if fsdp_param in self.fsdp_params:
            return self._fqn(self.fsdp_params.index(fsdp_param))
        return fsdp_param._module_info.param_name  # a plugin has replaced it

    def _register_state_dict_hooks(self) -> None:
        """Makes sure that a state dict is taken from, and loaded to, the shards."""
        save_handles = self._module_to_pre_save_state_dict_hook_handle
        load_handles = self._module_to_pre_load_state_dict_hook_handle
        if save_handles:
            return

        def to_sharded_hook(*args: Any, **kwargs: Any) -> None:
            self._to_sharded()

        modules = [fsdp_param._module_info.module for fsdp_param in self.fsdp_params]
        for module in dict.fromkeys(modules):
            save_handles[module] = module.register_state_dict_pre_hook(to_sharded_hook)
            load_handles[module] = module._register_load_state_dict_pre_hook(
                to_sharded_hook
            )

    def _take_dtypes(self) -> None:
        """Takes the policy and the parameters' dtypes as they are now."""
        fsdp_params = self.fsdp_params
        if self.mp_policy is not self._resolved_policy:
            doors.errors.check_setting("mp_policy", self.mp_policy, self._unit_name)
            fqns = [*map(self._fqn, range(len(fsdp_params)))]
            self._resolve_policies(fqns, self._module_fqn is not None)
            self._resolved_policy = self.mp_policy
            self._check_exchanges(type(self._scatter_comm))
        self._init_mp_dtypes()
        for fsdp_param in fsdp_params:
            if fsdp_param.mp_policy is not self.mp_policy:
                # A replacement of the above may know of one policy only
                fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)
        for fsdp_param in fsdp_params:
            if not fsdp_param.orig_dtype.is_floating_point:
                # Autograd would cut complex gradients to it (2.15), see `reduce_dtype_of`
                fsdp_param.reduce_dtype = None
        self._keep_grad_dtypes()
        find_widened(fsdp_params)
        forget_if_changed(fsdp_params)

    def _resolve_policies(self, fqns: Sequence[str], is_named: bool) -> None:
        params = [fsdp_param.sharded_param for fsdp_param in self.fsdp_params]
        policies, _ = doors.policies_of(
            self.mp_policy, params, fqns, self.device, is_named
        )
        for fsdp_param, policy in zip(self.fsdp_params, policies, strict=True):
            fsdp_param.mp_policy = policy

    def resolve_by_name(self, module_names: Mapping[nn.Module, str]) -> None:
        """Gives parameters what a policy says of their names, before the root does."""
        if self._resolved_policy is not None:
            return
        infos = [fsdp_param._module_info for fsdp_param in self.fsdp_params]
        if all(info.module in module_names for info in infos):
            fqns = [f"{module_names[i.module]}.{i.param_name}" for i in infos]
            self._resolve_policies([fqn.lstrip(".") for fqn in fqns], is_named=True)

    def _keep_grad_dtypes(self) -> None:
        for fsdp_param in self.fsdp_params:
            self._keep_grad_dtype(fsdp_param)

    def _warn_of_late_params(self) -> None:
        known, self._places_at_first = self._places_at_first, None
        if known is None:
            return  # has been asked before
        # Under whatever name, and in whatever module, if wrappers have come since
        sharded = {id(fsdp_param.sharded_param) for fsdp_param in self.fsdp_params}
        late = [
            ".".join(filter(None, (self._module_fqn, name)))
            for name, module, attr, param in _params_of_unit(self.modules)
            if param.requires_grad
            and id(param) not in sharded
            and attr not in known.get(module, ())
        ]
        if late:
            warnings.warn(
                f"Parameters {late} were registered after fully_shard, which neither "
                "shards them nor reduces their gradients: register them before it, "
                "call fully_shard on their modules, or reduce them yourself",
                stacklevel=2,
            )

    def _check_materialized(self) -> None:
        """Raises if parameters have no data yet, or not where it is offloaded to."""
        devices = [fsdp_param.sharded_param.device for fsdp_param in self.fsdp_params]
        on_meta = [self._fqn(i) for i, d in enumerate(devices) if d.type == "meta"]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before "
                "training, but the following were still on meta device: "
                f"{on_meta}\nCall module.to_empty(device=...) and then initialize "
                "them, e.g. with each module's reset_parameters(), or load them"
            )
        if not isinstance(self.offload_policy, CPUOffloadPolicy):
            return
        elsewhere = [
            (self._fqn(i), d) for i, d in enumerate(devices) if d.type != "cpu"
        ]
        if elsewhere:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU "
                f"offloading, but these are on other devices: {elsewhere}\nLoad a "
                'CPU state dict or call module.to_empty(device="cpu")'
            )


def _shard(
    param: nn.Parameter,
    name: str,
    make_fsdp_param: functools.partial[FSDPParam],
    info: ParamModuleInfo,
) -> FSDPParam:
    try:
        fsdp_param = make_fsdp_param(param, info)
    except Exception as error:
        at = Sharding(param, name, make_fsdp_param)
        raise doors.errors.explain(error, at)  # noqa: B904  (has its cause)
    doors.errors.check_param(fsdp_param, name)
    return fsdp_param


def _get_param_module_infos(
    params: list[nn.Parameter], modules: tuple[nn.Module, ...]
) -> list[ParamModuleInfo]:
    """
    Finds where each parameter is registered. A parameter may be registered
    under several names, and a module may itself be, so duplicates count in the
    walk over both.
    """
    infos: dict[nn.Parameter, ParamModuleInfo] = {}
    wanted = set(params)
    submodules = (
        submodule
        for module in modules
        for _, submodule in module.named_modules(remove_duplicate=False)
    )
    for submodule in submodules:
        for name, param in _named_parameters_with_duplicates(submodule, recurse=False):
            if param not in wanted:
                continue
            if (info := infos.get(param)) is None:
                infos[param] = ParamModuleInfo(submodule, name)
            else:
                info.shared_modules.append(submodule)
                info.shared_param_names.append(name)
    if len(infos) < len(params):
        raise AssertionError(f"Some parameters are not in the module tree of {modules}")
    return [infos[param] for param in params]


def _params_of_unit(
    modules: tuple[nn.Module, ...],
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """
    Yields the parameters of the modules but for those that are in other units: name
    within the unit, module that has it, name there, parameter.
    """

    def walk(
        module: nn.Module, prefix: str
    ) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
        for name, param in module._parameters.items():
            if param is not None:
                yield f"{prefix}{name}", module, name, param
        for name, child in module.named_children():
            is_unit = {"fully_shard", "replicate"} & (_get_registry(child) or {}).keys()
            if child not in modules and not is_unit:
                yield from walk(child, f"{prefix}{name}.")

    for module in modules:
        yield from walk(module, "")


def _places_of_unit(
    modules: tuple[nn.Module, ...],
) -> weakref.WeakKeyDictionary[nn.Module, set[str]]:
    places: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
    for _, module, attr, _ in _params_of_unit(modules):
        places.setdefault(module, set()).add(attr)
    return places


def _get_param_names(
    infos: list[ParamModuleInfo], modules: tuple[nn.Module, ...]
) -> list[str]:
    """Returns what each parameter is called in which of the unit's own modules."""
    places: dict[nn.Module, tuple[str, str]] = {}
    for module in modules:
        for prefix, submodule in module.named_modules():
            prefix = f"{prefix}." if prefix else ""
            places.setdefault(submodule, (prefix, type(module).__name__))
    names = []
    for info in infos:
        prefix, of = places.get(info.module, ("", type(info.module).__name__))
        names.append(f"{prefix}{info.param_name} of {of}")
    return names
