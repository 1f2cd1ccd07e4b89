"""
What modules have registered as a param group's parameters: when the group is made, when
a state dict is loaded, and at the first forward, until when users may change them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp._common_utils import _named_parameters_with_duplicates

from ._fsdp_api import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ._fsdp_errors import check_param, explain_registered, explain_sharding
from ._fsdp_host import FOLLOWS_GRAD_DTYPE
from ._fsdp_param import FSDPParam, ParamModuleInfo
from ._fsdp_param_cache import ParamGroupCache


class ParamRegistrations:
    """The parameters of a group as its modules have registered them."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        cache: ParamGroupCache,
        get_module_fqn: Callable[[], str | None],
    ):
        self._modules, self._get_module_fqn = modules, get_module_fqn
        self.set_cache(cache)
        # Before 2.15: the `grad_dtype` that users have set, and on which local tensor
        self._grad_dtypes: dict[FSDPParam, tuple[torch.Tensor, torch.dtype | None]] = {}
        self.keep_grad_dtypes()
        for fsdp_param in cache:
            fsdp_param._post_load_hook_handle.remove()
            module = fsdp_param._module_info.module
            hook = self.make_reset(fsdp_param)
            handle = module.register_load_state_dict_post_hook(hook)
            fsdp_param._post_load_hook_handle = handle
        own_params = _get_own_params(modules)
        self._first_places = {(id(module), name) for module, name, _ in own_params}

    def set_cache(self, cache: ParamGroupCache) -> None:
        self._cache = cache
        infos = [fsdp_param._module_info for fsdp_param in cache]
        # Within the group's modules: the root gives names in the model at lazy init
        self.names = dict(zip(cache, get_param_names(infos, self._modules)))

    def fqn(self, fsdp_param: FSDPParam) -> str:
        """Returns a parameter's name, within the group's modules before lazy init."""
        if fsdp_param._param_fqn is not None:
            return fsdp_param._param_fqn
        if (name := self.names.get(fsdp_param)) is None:
            return fsdp_param._module_info.param_name  # a plugin has replaced it
        return self._add_module_fqn(name)

    def fqns(self) -> list[str]:
        return [*map(self.fqn, self._cache)]

    def _add_module_fqn(self, name: str) -> str:
        module_fqn = self._get_module_fqn()
        if module_fqn is None or len(self._modules) > 1:
            return name
        within, _, _ = name.partition(" of ")
        return f"{module_fqn}.{within}" if module_fqn else within

    # Resetting #
    def reset_sharded_params(self) -> None:
        for fsdp_param in self._cache:
            self.make_reset(fsdp_param)()
            check_param(fsdp_param, self.fqn(fsdp_param))
            fsdp_param._init_extensions()  # may have been added since
        self._cache.invalidate()

    def make_reset(self, fsdp_param: FSDPParam) -> Callable[..., None]:
        """
        Returns a function that makes what users have loaded, replaced, cast or
        materialized the sharded parameter. As a hook of a user's module it runs after
        each load. Copying that module does not copy what a function refers to, as it
        would for a method or a partial. The module alone does not keep the unit alive.
        """
        registrations = weakref.ref(self)

        def reset(*unused: Any) -> None:
            if (own := registrations()) is None:
                fsdp_param.reset_sharded_param()
                return
            previous = fsdp_param.sharded_param
            has_grad_dtype = fsdp_param in own._grad_dtypes or (
                previous.is_leaf and previous.grad_dtype != previous.dtype
            )
            if has_grad_dtype:
                own._keep_grad_dtype(fsdp_param)
            try:
                fsdp_param.reset_sharded_param()
            except Exception as error:
                raise explain_registered(  # noqa: B904  (has its cause)
                    error, fsdp_param, own.fqn(fsdp_param)
                )
            if has_grad_dtype:
                own._keep_grad_dtype(fsdp_param)  # on the new parameter
            param: Any = fsdp_param.sharded_param
            if param is not previous:
                # Planned with the dtypes of the previous one
                own._cache.buckets.clear()
                if param._local_tensor.size() != fsdp_param.sharded_size:
                    check_param(fsdp_param, own.fqn(fsdp_param))

        return reset

    def keep_grad_dtypes(self) -> None:
        for fsdp_param in self._cache:
            self._keep_grad_dtype(fsdp_param)

    def _keep_grad_dtype(self, fsdp_param: FSDPParam) -> None:
        """
        Sets a user's ``grad_dtype`` again on what was loaded or cast without it. Missing
        on the same local tensor, it was unset by the user.
        """
        param: Any = fsdp_param.sharded_param
        if FOLLOWS_GRAD_DTYPE or not param.is_leaf:
            return  # since 2.15 the release does so; other tensors are refused
        local_tensor = param._local_tensor
        last = self._grad_dtypes.pop(fsdp_param, None)
        if param.grad_dtype == param.dtype and last and last[0] is not local_tensor:
            param.grad_dtype = last[1]
        if param.grad_dtype != param.dtype:
            self._grad_dtypes[fsdp_param] = (local_tensor, param.grad_dtype)

    # Checks #
    def check_materialized(self, offload_policy: OffloadPolicy) -> None:
        """Raises if parameters have no data yet, or not where they are offloaded to."""
        params = [(p, p.sharded_param.device) for p in self._cache]
        on_meta = [self.fqn(p) for p, device in params if device.type == "meta"]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before "
                "training, but the following were still on meta device: "
                f"{on_meta}\nCall module.to_empty(device=...) and then initialize "
                "them, e.g. with each module's reset_parameters(), or load them"
            )
        if not isinstance(offload_policy, CPUOffloadPolicy):
            return
        elsewhere = [(self.fqn(p), d) for p, d in params if d.type != "cpu"]
        if elsewhere:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU "
                f"offloading, but these are on other devices: {elsewhere}\nLoad a "
                'CPU state dict or call module.to_empty(device="cpu")'
            )

    def warn_of_late_params(self) -> None:
        """Warns of parameters that were registered after ``fully_shard``."""
        # Wrappers may have moved sharded ones since
        sharded = {id(p.sharded_param) for p in self._cache}
        late = [
            ParamModuleInfo(module, name)
            for module, name, param in _get_own_params(self._modules)
            if param.requires_grad
            and id(param) not in sharded
            and (id(module), name) not in self._first_places
        ]
        if late:
            names = map(self._add_module_fqn, get_param_names(late, self._modules))
            warnings.warn(
                f"Parameters {[*names]} were registered after fully_shard, which neither "
                "shards them nor reduces their gradients: register them before it, call "
                "fully_shard on their modules, or reduce them yourself",
                stacklevel=2,
            )


def shard_params(
    params: Sequence[nn.Parameter],
    infos: Sequence[ParamModuleInfo],
    names: Sequence[str],
    policies: Sequence[MixedPrecisionPolicy],
    **arguments: Any,
) -> list[FSDPParam]:
    """Shards each parameter, with the other ``arguments`` of ``FSDPParam``."""
    fsdp_params = []
    for param, info, name, policy in zip(params, infos, names, policies, strict=True):
        try:
            fsdp_param = FSDPParam(param, info, mp_policy=policy, **arguments)
        except Exception as error:
            raise explain_sharding(  # noqa: B904  (has its cause)
                error, param, name, arguments
            )
        check_param(fsdp_param, name)
        if not FOLLOWS_GRAD_DTYPE and param.grad_dtype != param.dtype:
            fsdp_param.sharded_param.grad_dtype = param.grad_dtype
        fsdp_params.append(fsdp_param)
    return fsdp_params


def _get_param_module_infos(
    params: list[nn.Parameter], modules: tuple[nn.Module, ...]
) -> list[ParamModuleInfo]:
    """
    Finds where each parameter is registered: in several places if it is shared, or if a
    module that has it is.
    """
    infos: dict[nn.Parameter, ParamModuleInfo] = {}
    trees = [module.named_modules(remove_duplicate=False) for module in modules]
    for _, submodule in chain.from_iterable(trees):
        for name, param in _named_parameters_with_duplicates(submodule, recurse=False):
            if (info := infos.get(param)) is None:
                infos[param] = ParamModuleInfo(submodule, name)
            else:
                info.shared_modules.append(submodule)
                info.shared_param_names.append(name)
    if not infos.keys() >= {*params}:
        raise AssertionError(f"Some parameters are not in the module tree of {modules}")
    return [infos[param] for param in params]


def get_param_names(
    infos: Sequence[ParamModuleInfo], modules: tuple[nn.Module, ...]
) -> list[str]:
    """Returns what each parameter is called in which of ``modules``."""
    places: dict[nn.Module, tuple[str, str]] = {}
    for module in modules:
        for prefix, submodule in module.named_modules():
            places.setdefault(submodule, (prefix, type(module).__name__))
    names = []
    for info in infos:
        prefix, of = places.get(info.module, ("", type(info.module).__name__))
        names.append(f"{prefix}.{info.param_name} of {of}".lstrip("."))
    return names


def _get_own_params(
    modules: tuple[nn.Module, ...],
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yields module, name in it, and parameter, but for those of nested units."""
    pending, seen = [*modules], {*modules}
    for module in pending:  # which grows
        for name, param in module._parameters.items():
            if param is not None:
                yield module, name, param
        for child in module.children():
            is_unit = {"fully_shard", "replicate"} & (_get_registry(child) or {}).keys()
            if child not in seen and not is_unit:
                seen.add(child)
                pending.append(child)
