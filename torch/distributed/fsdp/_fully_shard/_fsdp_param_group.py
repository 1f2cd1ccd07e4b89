"""
When a unit's data moves: the states of a param group, its hooks, prefetching and waits.

What moves is in :mod:`_fsdp_collectives`, where it lies in :mod:`_fsdp_layout`, what
becomes of gradients, with partial reduces, in :mod:`_fsdp_reduce`, what groups share in
:mod:`_fsdp_context`, and who observes a step in :mod:`_fsdp_observers`.

[Note: Who waits for whom]
Each handover of data from stream to stream is one of these waits:

- optimizer -> copy-in: the root's pre-forward makes both gather streams wait.
- copy-in -> all-gather: ``foreach_all_gather``, stream to stream.
- all-gather -> copy-out: ``foreach_all_gather_copy_out`` waits for the event.
- copy-out -> next copy-in: both gather streams wait for the copy-out's event before the
  gather's buffer is freed: in forward with implicit prefetching at the next unit's
  copy-out, else at once.
- gradients -> reduce-scatter: ``reduce_buckets``, stream to stream. With
  ``grad_comm_dtype`` that stream has an all-to-all and the sum of what it received.
- reduce-scatter -> next copy-in: ``FSDPCommContext.reduce_scatter_states`` holds the
  last post-backwards' inputs until the current stream has waited for their events.
- all-reduce -> later reduce-scatter: none, while there is room, see
  [Note: Holding reduced buffers].
- sharded gradients -> optimizer: backward ends with waits for all streams that reduced.

[Note: Freeing the gather buffer late]
With implicit prefetching in forward, the next group's copy-in runs in a stream of its
own, beside this group's all-gather, and must get other memory than this one's buffer.
Hence the shared context keeps the last gather alive until the next group has ordered
its streams behind this group's copy-out. The root drops the last one after forward.
"""

# Tests: module_hooks, prefetch, streams
from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Literal
from typing_extensions import TypeVarTuple, Unpack

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed._composable_state import _get_module_state
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._common_utils import (
    _named_parameters_with_duplicates,  # noqa: F401  (as in the release)
    collect_grad_tensors,
    replace_grad_tensors,
)
from torch.distributed.fsdp.api import BackwardPrefetch
from torch.profiler import record_function

from . import _fsdp_observers as observers
from . import _fsdp_registrations as registrations
from . import _fsdp_releases as releases
from ._fsdp_agreement import UnitAgreement
from ._fsdp_api import (
    AllGather,
    CPUOffloadPolicy,  # noqa: F401  (as in the release)
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReduceScatter,
)
from ._fsdp_collectives import (
    _default_all_gather_output_fn,
    _default_reduce_scatter_input_fn,
    AllGatherOutputFn,
    AllGatherResult,
    DefaultAllGather,
    DefaultReduceScatter,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
    PrepareFn,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    SymmMemAllGather,
    SymmMemReduceScatter,
    unshard_single_rank,
)
from ._fsdp_common import (
    _disable_functorch_if_active,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    is_bw,
    ShardPlacementFnResult,
    TrainingState,
)
from ._fsdp_compat import PluginNames
from ._fsdp_context import (
    _GradientReductionState,  # noqa: F401  (as in the release)
    AllGatherState,
    AllReduceState,  # noqa: F401  (as in the release)
    FSDPCommContext,
    ReduceScatterState,  # noqa: F401  (as in the release)
)
from ._fsdp_errors import warn_user
from ._fsdp_layout import dtypes_of, ReduceBucketCap
from ._fsdp_observers import _dynamo_disable
from ._fsdp_param import (
    FSDPParam,
    ParamModuleInfo,  # noqa: F401  (as in the release)
    ShardedState,
)
from ._fsdp_param_cache import ParamGroupCache, ParamVersions
from ._fsdp_policies import resolve_all
from ._fsdp_reduce import GradReducer, is_upcast_by_autograd
from ._fsdp_registrations import _get_param_module_infos, fqns_of  # noqa: F401
from ._fsdp_releases import FOLLOWS_GRAD_DTYPE, not_type_checked
from ._fsdp_settings import check_setting
from ._fsdp_summary import log_layout


logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
_GradInputs = TypeVarTuple("_GradInputs")

_STATE_OF_PASS = {
    "forward": TrainingState.FORWARD,
    "backward": TrainingState.PRE_BACKWARD,
}

# To detect monkeypatching: replacements are called with the release's arguments
_OWN_GATHER = foreach_all_gather

# Of a sharded and of an unsharded parameter, while the unit stayed unsharded
_WRITTEN = (
    "has changed since the unit was gathered and left unsharded, so forward uses the "
    "old values. Call reshard() on the unit's module right after the forward without "
    "gradients, before clipping and optimizer.step()",
    "was changed in place while it was unsharded, which is lost when the unit "
    "reshards. Call reshard() on the unit's module before the change, or before the "
    "optimizer is made",
)


def _collect_from_flat(inputs: Sequence[Any]) -> list[Tensor]:
    return [v for v in inputs if getattr(v, "requires_grad", False)]


def _replace_in_flat(inputs: Sequence[Any], tensors: Iterator[Tensor]) -> list:
    return [next(tensors) if getattr(v, "requires_grad", False) else v for v in inputs]


def _is_in_function_forward() -> bool:
    """
    Whether this is the forward of an autograd function: gradients are off, but
    reentrant checkpointing may run it again with gradients. Forward-mode gradients are
    off as well, which ``no_grad`` leaves on.
    """
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def _warn_if_written(group: FSDPParamGroup, *kinds: int) -> None:
    """Warns if forward has values from before a step (0), or a step is lost (1)."""
    for kind in kinds:
        versions = group._param_versions
        if versions and (fsdp_param := versions.find_written(kind)) is not None:
            (fqn,) = fqns_of(group, fsdp_param)
            group._param_versions, group._has_warned_of_versions = None, True
            warn_user(f"Parameter {fqn} of unit '{group._unit_name}' {_WRITTEN[kind]}")


def _checked(name: str) -> Any:
    """Returns a property that checks what it is set to. Reading runs no Python."""
    attribute = f"_value_of_{name.lstrip('_')}"

    def set_value(group: FSDPParamGroup, value: Any) -> None:
        check_setting(name, value, group._unit_name)
        if name == "_reduce_scatter_comm":
            _check_can_exchange(group, type(value))
        setattr(group, attribute, value)

    return property(attrgetter(attribute), set_value)


def _check_can_exchange(group: FSDPParamGroup, kind: type) -> None:
    """Raises if a reduce-scatter cannot send what the parameters' policies ask for."""
    if getattr(kind, "exchange", None) is not None:
        return
    for fsdp_param in group.fsdp_params:
        if (dtype := dtypes_of(fsdp_param).comm) is not None:
            raise ValueError(
                f"{kind.__name__} of unit '{group._unit_name}' cannot reduce "
                f"{fqns_of(group, fsdp_param)[0]}, which is sent in {dtype} "
                "(grad_comm_dtype): give it a method exchange(output_tensor, "
                "input_tensor, group) that does as torch.distributed."
                "all_to_all_single, or leave grad_comm_dtype out"
            )


def _check_comms_are(group: FSDPParamGroup, setter: str, *kinds: type) -> None:
    """Raises if users have set a comm that is neither a default one nor of these."""
    comms = {
        "all gather": group._all_gather_comm,
        "reduce scatter": group._reduce_scatter_comm,
    }
    for name, comm in comms.items():
        if not isinstance(comm, (DefaultAllGather, DefaultReduceScatter, *kinds)):
            raise AssertionError(
                f"cannot call {setter}() when {name} comm is custom: module "
                f"'{group._module_fqn}' uses {type(comm).__name__}"
            )


def _as_mesh(mesh_info: DataParallelMeshInfo | None, kind: type) -> Any:
    if not isinstance(mesh_info, kind):
        raise AssertionError(
            f"Expected mesh_info to be {kind.__name__}, got {type(mesh_info).__name__}"
        )
    return mesh_info


class _Meshes:
    """The process groups of a param group, by what its parameters are sharded over."""

    mesh_info: DataParallelMeshInfo
    post_forward_mesh_info: FSDPMeshInfo | None
    # The same as every parameter's own
    _sharded_state: ShardedState = ShardedState.SHARDED

    @property
    def _reshard_after_forward(self) -> bool:
        return self.post_forward_mesh_info is not None

    @property
    def _use_post_forward_mesh(self) -> bool:
        smaller = self.post_forward_mesh_info
        return smaller is not None and smaller != self.mesh_info

    @property
    def _is_hsdp(self) -> bool:
        return isinstance(self.mesh_info, HSDPMeshInfo)

    @property
    def _all_gather_process_group(self) -> dist.ProcessGroup:
        mesh_info: DataParallelMeshInfo | None = self.mesh_info
        if self._sharded_state is ShardedState.SHARDED_POST_FORWARD:
            mesh_info = self.post_forward_mesh_info
        return _as_mesh(mesh_info, FSDPMeshInfo).shard_process_group

    @property
    def _reduce_scatter_process_group(self) -> dist.ProcessGroup:
        mesh_info = _as_mesh(self.mesh_info, FSDPMeshInfo)
        return mesh_info.reduce_scatter_process_group or mesh_info.shard_process_group

    @property
    def _all_reduce_process_group(self) -> dist.ProcessGroup:
        return _as_mesh(self.mesh_info, DDPMeshInfo).replicate_process_group

    # None where nothing is to do: each rank has all, replicates or shards only
    @property
    def _gather_group(self) -> dist.ProcessGroup | None:
        if not isinstance(self.mesh_info, FSDPMeshInfo):
            return None
        group = self._all_gather_process_group
        return group if group.size() > 1 else None

    @property
    def _reduce_scatter_group(self) -> dist.ProcessGroup | None:
        is_sharded = isinstance(self.mesh_info, FSDPMeshInfo)
        return self._reduce_scatter_process_group if is_sharded else None

    @property
    def _all_reduce_group(self) -> dist.ProcessGroup | None:
        is_replicated = isinstance(self.mesh_info, DDPMeshInfo)
        return self._all_reduce_process_group if is_replicated else None

    def _set_separate_reduce_scatter_group(
        self, enable: bool, new_groups: dict[tuple[int, ...], dist.ProcessGroup]
    ) -> None:
        """
        Gives reduce-scatter a process group of its own, so that it overlaps with
        all-gather on the wire, or the shared one again. ``new_groups`` has those that
        one call has made so far, by shard ranks: meshes over the same ranks share one.
        """
        mesh_info = _as_mesh(self.mesh_info, FSDPMeshInfo)
        if not enable:
            mesh_info.reduce_scatter_process_group = None
            return
        ranks = tuple(dist.get_process_group_ranks(mesh_info.shard_process_group))
        group = new_groups.get(ranks) or mesh_info.reduce_scatter_process_group
        if group is None:
            # Synchronized among its own ranks only: under HSDP the others make
            # groups of theirs and never come to this one
            group = dist.new_group(
                list(ranks),
                group_desc="fsdp_reduce_scatter",
                use_local_synchronization=True,
            )
        new_groups[ranks] = mesh_info.reduce_scatter_process_group = group


class FSDPParamGroup(_Meshes, PluginNames):
    """
    The parameters of a unit that are gathered and reduced together.

    They are sharded, unsharded, or between forward and backward sharded over a smaller
    mesh: ``_sharded_state``. Where in a step they are is ``_training_state``:

    - IDLE: in none, or between forward and backward.
    - FORWARD: from pre-forward, which unshards, to post-forward, which reshards.
    - PRE_BACKWARD: from pre-backward, which unshards, until all gradients are there.
    - POST_BACKWARD: from post-backward, which reshards and reduces the gradients, to
      the end of the root's backward.

    A group that is prefetched is in the state of that pass meanwhile.
    """

    # Set by the root's lazy init: of the modules, and among their groups for each mesh
    _module_fqn: str | None = None
    _param_group_index: int = 0
    _num_param_groups: int = 1

    # Settings #
    # Replaces the number of data-parallel ranks
    gradient_divide_factor: float | None = _checked("gradient_divide_factor")
    _all_gather_comm: AllGather = _checked("_all_gather_comm")
    _reduce_scatter_comm: ReduceScatter = _checked("_reduce_scatter_comm")
    _all_reduce_hook: Callable[[Tensor], None] | None = _checked("_all_reduce_hook")
    # Of the hook without native HSDP. Users may set it before lazy init.
    _all_reduce_hook_stream: torch.Stream | None = None
    # Gradient sync: none at all, or no all-reduce (HSDP)
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    # Scale apart from the collectives, which then only sum
    force_sum_reduction_for_comms: bool = False
    # Reduce zeros for parameters without a gradient, so that all ranks reduce alike
    reduce_scatter_unused_params: bool = False
    # Requested; the effective value is in `comm_ctx`
    reduce_scatter_max_input_buffers: int = 1
    # Gather in the current stream, with a work: less memory, only explicit prefetching
    unshard_async_op: bool = False
    # Which buckets wait for those of other units. None: never joined
    reduce_bucket_cap: ReduceBucketCap | None = None
    # False if backward does not need the parameters, e.g. an embedding's
    unshard_in_backward: bool = True
    # When the gather that comes next in backward starts. None: no prefetch
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE

    # State of the iteration #
    _training_state: TrainingState = TrainingState.IDLE
    # Resetting sharded parameters is costly, so only the first lazy init does it, and
    # the root's, before which users may have unsharded and then replaced them
    _reset_sharded_params: bool = False
    _reset_by_root: bool = False
    # Whether lazy init has read the parameters' dtypes
    _has_read_dtypes: bool = False
    _all_gather_result: AllGatherResult | None = None
    # Of the gather in flight: the state may change before copy-out
    _all_gather_group: dist.ProcessGroup | None = None
    # While the unit stays unsharded, as an optimizer may step
    _param_versions: ParamVersions | None = None
    _has_warned_of_versions: bool = False
    # After resharding to a smaller mesh, which the next gather reads from
    _reshard_after_forward_event: torch.Event | None = None
    # Whether gradients wait for `FSDPModule.finalize_backward` (2.15)
    _post_backward_pending: bool = False
    # The shared number as of this group's last forward
    _num_forwards: int = -1

    def __init__(
        self,
        params: list[nn.Parameter],
        modules: tuple[nn.Module, ...],
        mesh_info: DataParallelMeshInfo,
        post_forward_mesh_info: FSDPMeshInfo | None,
        device: torch.device,
        shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ):
        self.modules = modules  # a reference cycle of one lifetime
        if _get_module_state(modules[0]) is not None:
            # By `fully_shard`, which users call. Others may pass None.
            check_setting("offload_policy", offload_policy, self._unit_name)
            check_setting("mp_policy", mp_policy, self._unit_name)
        self.mesh_info, self.post_forward_mesh_info = mesh_info, post_forward_mesh_info
        self.device, self.device_handle = device, _get_device_handle(device.type)
        self.mp_policy, self.offload_policy = mp_policy, offload_policy
        self.gradient_divide_factor = self._all_reduce_hook = None
        self._all_gather_comm = DefaultAllGather()
        self._reduce_scatter_comm = DefaultReduceScatter()
        # Plugins may replace these steps of the copies (2.15)
        self._all_gather_output_fn: AllGatherOutputFn = _default_all_gather_output_fn
        self._prepare_reduce_scatter_inputs: PrepareFn = (
            _default_reduce_scatter_input_fn
        )
        sharded, is_final = registrations.shard_params(self, params, shard_placement_fn)
        self._cache = ParamGroupCache(sharded)
        # None: to be resolved again when the root has named the parameters
        self._resolved_policy = mp_policy if is_final else None
        # Before 2.15: the `grad_dtype` that users have set, and on which local tensor
        self._grad_dtypes: dict[FSDPParam, tuple[Tensor, torch.dtype | None]] = {}
        registrations.keep_grad_dtypes(self)
        registrations.watch_loads(self)
        own_params = registrations.get_own_params(modules)
        self._first_places = {(id(module), name) for module, name, _ in own_params}
        # Handles of hooks, by module
        self._module_to_pre_save_state_dict_hook_handle: dict[nn.Module, Any] = {}
        self._module_to_pre_load_state_dict_hook_handle: dict[nn.Module, Any] = {}
        self.comm_ctx = FSDPCommContext()
        # The places of this group's forwards in the shared order
        self._post_forward_indices: list[int] = []
        # Groups to gather when this one's backward is over (`BACKWARD_POST`)
        self._to_prefetch_late: list[FSDPParamGroup] = []
        self._reducer = GradReducer(self)
        self._agreement = UnitAgreement(self)

    @property
    def fsdp_params(self) -> ParamGroupCache:
        return self._cache

    @fsdp_params.setter
    def fsdp_params(self, params: Sequence[FSDPParam]) -> None:  # by plugins
        self._cache = ParamGroupCache(params)
        self._param_versions = None

    # Lazy init #
    def lazy_init(self):
        """Reads the parameters as users have left them. May be called again."""
        observers.look_for_traces()
        self.comm_ctx.device_handle = self.device_handle  # before the root's lazy init
        by_root = self._module_fqn is not None
        has_reset = self._reset_by_root if by_root else self._reset_sharded_params
        if self.is_sharded and not has_reset:
            registrations.reset_sharded_params(self)
            self._reset_sharded_params, self._reset_by_root = True, by_root
        self._validate_reduce_scatter_max_input_buffers()
        self._init_dtypes()
        self._register_state_dict_hooks()

    def _init_dtypes(self) -> None:
        """Reads the policy and the parameters' dtypes where any of them has changed."""
        is_same_policy = self.mp_policy is self._resolved_policy
        has_changed = self._cache.invalidate_buckets_if_changed() or not is_same_policy
        if self._has_read_dtypes and not has_changed and not self._replaces_init_dtypes:
            return
        self._has_read_dtypes = False  # if any of this fails
        registrations.check_materialized(self)
        if not is_same_policy:
            check_setting("mp_policy", self.mp_policy, self._unit_name)
            params = [fsdp_param.sharded_param for fsdp_param in self.fsdp_params]
            named = params, fqns_of(self), self._module_fqn is not None
            policies, _ = resolve_all(self.mp_policy, *named)
            for fsdp_param, policy in zip(self.fsdp_params, policies, strict=True):
                fsdp_param.mp_policy = policy
            self._resolved_policy = self.mp_policy
            _check_can_exchange(self, type(self._reduce_scatter_comm))
        self._call_init_mp_dtypes()
        for fsdp_param in self.fsdp_params:
            if not fsdp_param.orig_dtype.is_floating_point:
                # Since 2.15 autograd would cut complex gradients to it
                fsdp_param.reduce_dtype = None
        registrations.keep_grad_dtypes(self)
        upcast = [*filter(is_upcast_by_autograd, self.fsdp_params)]
        self._cache.upcast_by_autograd = upcast
        self._cache.invalidate_buckets_if_changed()
        # What replaces it may set anything
        self._has_read_dtypes = not self._replaces_init_dtypes

    def _register_state_dict_hooks(self) -> None:
        """Reshards before state dicts are saved and loaded, which hold shards."""
        save_handles = self._module_to_pre_save_state_dict_hook_handle
        load_handles = self._module_to_pre_load_state_dict_hook_handle

        def to_sharded_hook(*args: Any, **kwargs: Any) -> None:
            self._to_sharded()

        for fsdp_param in self.fsdp_params:
            if (module := fsdp_param._module_info.module) in save_handles:
                continue
            save_handles[module] = module.register_state_dict_pre_hook(to_sharded_hook)
            register_load = module._register_load_state_dict_pre_hook
            load_handles[module] = register_load(to_sharded_hook)

    # Backends of collectives #
    def set_symm_mem(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """
        Allocates communication buffers from symmetric memory, those of reduce-scatter
        only with sums forced, the one reduction that NCCL's symmetric kernels know.
        """
        kinds = SymmMemAllGather, SymmMemReduceScatter
        _check_comms_are(self, "set_symm_mem", *kinds)
        if self.force_sum_reduction_for_comms:
            _check_can_exchange(self, SymmMemReduceScatter)  # before any is set
            group = self._reduce_scatter_process_group
            self._reduce_scatter_comm = SymmMemReduceScatter(group, backend)
        group = _as_mesh(self.mesh_info, FSDPMeshInfo).shard_process_group
        self._all_gather_comm = SymmMemAllGather(group, backend)

    def set_allocate_memory_from_process_group(self, enable: bool) -> None:
        """Allocates buffers of collectives from their groups, or by default again."""
        kinds = ProcessGroupAllocAllGather, ProcessGroupAllocReduceScatter
        _check_comms_are(self, "set_allocate_memory_from_process_group", *kinds)
        if not enable:
            self._all_gather_comm = DefaultAllGather()
            self._reduce_scatter_comm = DefaultReduceScatter()
            return
        group = _as_mesh(self.mesh_info, FSDPMeshInfo).shard_process_group
        self._all_gather_comm = ProcessGroupAllocAllGather(group)
        group = self._reduce_scatter_process_group
        self._reduce_scatter_comm = ProcessGroupAllocReduceScatter(group)

    def _validate_reduce_scatter_max_input_buffers(self):
        comm, wanted = self._reduce_scatter_comm, self.reduce_scatter_max_input_buffers
        # As requested: users may unshard before the context is set up
        if wanted > 1 and isinstance(comm, SymmMemReduceScatter):
            raise ValueError(
                "set_reduce_scatter_max_input_buffers(>1) is not supported with the "
                f"symmetric-memory reduce-scatter comm, but got {wanted} for module "
                f"'{self._module_fqn}' using {type(comm).__name__}, which registers "
                "each buffer that is held. Set 1, or use the default comm"
            )

    # Runtime: unshard and reshard #
    @_disable_functorch_if_active
    def unshard(self, async_op: bool = False):
        """Starts the all-gather, unless it is under way or nothing is to do."""
        if self._all_gather_result is not None or self.is_unsharded:
            return
        in_backward = self._training_state == TrainingState.PRE_BACKWARD
        if in_backward and not self.unshard_in_backward:
            return
        self._order_gathers_after_reshard()
        group = self._all_gather_group = self._gather_group
        if group is None:
            # Nothing moves until `wait_for_unshard`
            nothing = torch.empty(0, device=self.device)
            self._all_gather_result = AllGatherResult(nothing, None, None, [], [], [])
            return
        comm = self._all_gather_comm
        streams = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        if not self._agreement.on_gathers and foreach_all_gather is _OWN_GATHER:
            self._agreement.check_gather(group, comm)
        try:
            with self._range("FSDP::all_gather"):
                self._all_gather_result = foreach_all_gather(
                    self._cache, group, async_op, *streams, self.device, comm
                )
        except BaseException as error:
            self._clean_up(error, streams)
            raise

    @_disable_functorch_if_active
    def wait_for_unshard(self):
        """Completes a started unshard: copies out and registers the parameters."""
        result = self._all_gather_result
        if result is None:
            return
        in_forward = self._training_state == TrainingState.FORWARD
        if in_forward:
            self.comm_ctx.release_all_gather_state_for_comm_reuse()
        # A plugin may have started the gather
        group = self._all_gather_group or self._gather_group
        # Parameters are made once: as inference tensors they could never train
        is_inference = torch.is_inference_mode_enabled()
        options: dict[str, Any] = {}  # which older replacements do not accept
        if self._all_gather_output_fn is not _default_all_gather_output_fn:
            options["all_gather_output_fn"] = self._all_gather_output_fn
        try:
            with torch.inference_mode(False) if is_inference else observers.NO_RANGE:
                if group is None:
                    unshard_single_rank(self._cache, self.device)
                else:
                    with self._range("FSDP::all_gather_copy_out"):
                        foreach_all_gather_copy_out(
                            result, self._cache, group, **options
                        )
                self._cache.init_unsharded_params()
        except BaseException as error:
            self._clean_up(error)
            raise
        self._to_state(ShardedState.UNSHARDED)
        copy_out_event = self.device_handle.Event()
        copy_out_event.record()
        if in_forward and group is not None and result.all_gather_work is None:
            # See [Note: Freeing the gather buffer late]
            self.comm_ctx.all_gather_state = AllGatherState(result, copy_out_event)
        else:
            # In backward the copy-out runs beside a reduce-scatter anyway, and a gather
            # in the current stream (`async_op`) is behind it
            self.comm_ctx.wait_all_gather_streams_on_event(copy_out_event)
        self._all_gather_result = self._all_gather_group = None

    def _order_gathers_after_reshard(self) -> None:
        # The shards to gather were written in the current stream
        event = self._reshard_after_forward_event
        self.comm_ctx.wait_all_gather_streams_on_event(event)
        self._reshard_after_forward_event = None

    @not_type_checked
    def _unshard_now(self) -> None:
        self.unshard(self.unshard_async_op)  # does nothing if prefetched
        self.wait_for_unshard()

    @_disable_functorch_if_active
    def reshard(self):
        """Frees the unsharded parameters, or shards them to the smaller mesh."""
        if self._training_state is TrainingState.IDLE:
            # Users' call, or `nn.Module._apply`, after which it cannot be seen
            registrations.keep_grad_dtypes(self)
            _warn_if_written(self, 1)
        after_forward = self._training_state == TrainingState.FORWARD
        if after_forward and self._use_post_forward_mesh:
            self._to_state(ShardedState.SHARDED_POST_FORWARD)
            event = self._reshard_after_forward_event = self.device_handle.Event()
            event.record()
        elif self._reshard_after_forward or not after_forward:
            self._to_state(ShardedState.SHARDED)
        elif not torch.is_grad_enabled() and not _is_in_function_forward():
            self._stay_unsharded()

    def _stay_unsharded(self) -> None:
        """Notes the versions of parameters: an optimizer may step before a reshard."""
        self._cache.keep_requires_grad()
        if self.is_unsharded and not self._has_warned_of_versions:
            if self._param_versions is None:
                self._param_versions = ParamVersions(self._cache)
            else:
                self._param_versions.note_unsharded()

    # Runtime: forward #
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # A unit of several modules comes here for each: one post-backward is enough
        is_first_module = self._training_state != TrainingState.FORWARD
        if is_first_module:
            if self._num_forwards < 0:
                log_layout(self)
                if self._param_group_index == 0:
                    registrations.warn_of_late_params(self)
            # Seeing a group twice: a new forward began. In the first, lazy init looked
            if self._num_forwards == self.comm_ctx.num_forwards:
                self.comm_ctx.num_forwards += 1
                observers.look_for_traces()
            self._num_forwards = self.comm_ctx.num_forwards
        with self._hook_range("FSDP::pre_forward"):
            self._training_state = TrainingState.FORWARD
            if is_first_module:
                _warn_if_written(self, 0, 1)
            self._unshard_now()
            releases.restore_spmd_types(self._cache)
            if is_first_module:
                args, kwargs = self._register_post_backward_hook(args, kwargs)
            return args, kwargs

    @not_type_checked
    def post_forward(self, module: nn.Module, input: Any, output: Any):
        with self._hook_range("FSDP::post_forward"):
            # What checkpointing repeats keeps the parameters and is no prefetch target
            if not is_bw():
                self._record_post_forward()
                self.reshard()
            self._training_state = TrainingState.IDLE
        return output

    def _record_post_forward(self) -> None:
        if not torch.is_grad_enabled() and not _is_in_function_forward():
            return  # no backward will come
        # Once for each forward: each has a pre-backward of its own
        order = self.comm_ctx.post_forward_order
        self._post_forward_indices.append(len(order))
        order.append(self)

    # Runtime: backward #
    @not_type_checked
    def pre_backward(self, default_prefetch: bool, *unused: Any):
        if self._training_state == TrainingState.PRE_BACKWARD:
            return
        with self._hook_range("FSDP::pre_backward"):
            self._training_state = TrainingState.PRE_BACKWARD
            # Left if the final callback of the last backward came to post-backward
            self._to_prefetch_late.clear()
            self._unshard_now()
            self._reducer.suspend_upcasts()
            if default_prefetch:
                self._backward_prefetch()

    @_dynamo_disable
    @not_type_checked
    def post_backward(self, *unused: Any):
        """Reshards, and reduces gradients, also those of earlier microbatches."""
        self._log_hook("FSDP::post_backward")
        # In a unit of several modules of which some did not run, forward never
        # ended for the unit and no pre-backward was registered
        is_partial_forward = (
            len(self.modules) > 1 and self._training_state == TrainingState.FORWARD
        )
        self._training_state = TrainingState.POST_BACKWARD
        self._cache.invalidate_if_changed()
        if not FOLLOWS_GRAD_DTYPE:
            with self._range("FSDP::post_backward_accumulate"):
                for fsdp_param in self.fsdp_params:
                    if fsdp_param.unsharded_accumulated_grad is not None:
                        fsdp_param.accumulate_unsharded_grad_if_needed()
        with self._range("FSDP::post_backward_reshard"):
            # Read `.grad` before resharding
            grads = self._reducer.pop_grads() if self.reduce_grads else None
            if self.reshard_after_backward:
                self.reshard()
            else:
                self._stay_unsharded()
            self._reducer.resume_upcasts()
            self._post_backward_pending = grads is None
            if grads is None:
                self._reducer.upcast_unreduced_grads()
                return
        self._reducer.reduce(grads, foreach_reduce)
        if is_partial_forward:
            # Kernels of the unit's other modules must not get memory that it still uses
            self._wait_current_stream(self._reducer.event)

    def finalize_backward(self):
        """Orders the current stream behind all that backward has started."""
        self._reducer.finish()
        for fsdp_param in self.fsdp_params:
            if (event := fsdp_param.grad_offload_event) is not None:
                event.synchronize()  # the optimizer reads it on the CPU
                fsdp_param.grad_offload_event = None
        # A prefetch of a group that backward then did not use
        self._drop_all_gather()
        # That of a forward that did not run all modules of a unit
        self.comm_ctx.release_all_gather_state_on_current_stream()
        self._post_forward_indices.clear()
        self._to_prefetch_late.clear()
        self.comm_ctx.reducing_groups.clear()

    def _reset_iter_state(self) -> None:
        """Waits for what is in flight, drops it and all gradients, and reshards."""
        self._drop_all_gather()
        self._reducer.reset()
        self._order_gathers_after_reshard()
        self._post_backward_pending = False
        self._post_forward_indices.clear()
        self._to_prefetch_late.clear()
        self._training_state = TrainingState.IDLE
        # Also if it is sharded: what failed may have left outputs or registrations
        self._cache.to_state(ShardedState.SHARDED)
        self._sharded_state = ShardedState.SHARDED
        self._param_versions = None
        self.comm_ctx.reducing_groups.clear()

    def _drop_all_gather(self) -> None:
        if self._all_gather_result is None:
            return
        self._wait_current_stream(self._all_gather_result.all_gather_event)
        work = self._all_gather_result.all_gather_work
        if isinstance(work, dist.distributed_c10d.Work):
            work.wait()
        self._all_gather_result = self._all_gather_group = None

    def _wait_current_stream(self, event: torch.Event | None) -> None:
        if event is not None:
            self.device_handle.current_stream().wait_event(event)

    # Runtime: prefetch #
    def _backward_prefetch(self) -> None:
        """Starts the gathers that are next in backward, beside this group's."""
        if not self._post_forward_indices:
            return  # an earlier backward of the same forward popped them
        index = self._post_forward_indices.pop()
        targets = self.comm_ctx.get_groups_to_prefetch(self, index)
        if self.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            for target in targets:
                self._prefetch_unshard(target, "backward")
        elif self.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._to_prefetch_late = [*targets]

    @_dynamo_disable
    def _backward_prefetch_late(self) -> None:
        """Starts those that were to wait for the end of this group's backward."""
        targets, self._to_prefetch_late = self._to_prefetch_late, []
        for target in targets:
            self._prefetch_unshard(target, "backward")

    @staticmethod
    def _prefetch_unshard(
        target_fsdp_param_group: FSDPParamGroup, pass_type: str
    ) -> None:
        """Starts a group's gather as if in its own forward or backward."""
        if (state := _STATE_OF_PASS.get(pass_type)) is None:
            raise ValueError(
                f"Unknown pass type: {pass_type}, expects one of {[*_STATE_OF_PASS]}"
            )
        target = target_fsdp_param_group
        label = f"FSDP::{pass_type}_prefetch for {target._module_fqn}"
        previous, target._training_state = target._training_state, state
        try:
            with observers.range_of(label):
                target.unshard(target.unshard_async_op)
        except AttributeError as error:
            # Streams come with the root
            if error.obj is not target.comm_ctx:
                raise
            raise AttributeError(
                f"Unit '{target._unit_name}' cannot be prefetched before a root "
                "that has it ran its forward: prefetch units of the same root"
            ) from error
        finally:
            target._training_state = previous

    # Sharded state #
    def _to_state(self, state: ShardedState) -> None:
        """Brings all parameters, and with them the group, to ``state``."""
        if self._sharded_state is state:
            return
        self._cache.to_state(state)
        self._sharded_state = state
        self._param_versions = None

    @property
    def is_sharded(self) -> bool:
        return self._sharded_state is ShardedState.SHARDED

    @property
    def is_sharded_post_forward(self) -> bool:
        return self._sharded_state is ShardedState.SHARDED_POST_FORWARD

    @property
    def is_unsharded(self) -> bool:
        return self._sharded_state is ShardedState.UNSHARDED

    @contextlib.contextmanager
    def use_training_state(self, training_state: TrainingState):
        previous, self._training_state = self._training_state, training_state
        try:
            yield
        finally:
            self._training_state = previous

    def _register_post_backward_hook(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """
        Passes the inputs that need gradients through one autograd node, whose backward
        runs when their gradients are there, and with them those of the parameters.
        """
        if not torch.is_grad_enabled():
            return args, kwargs
        inputs = [*args, *kwargs.values()]
        is_flat = observers.LEAVES.issuperset(map(type, inputs))
        collect = _collect_from_flat if is_flat else collect_grad_tensors
        if not (tensors := collect(inputs)):
            return args, kwargs  # the root's final callback comes to this group
        passed = iter(RegisterPostBackwardFunction.apply(self, *tensors))
        replace_in = _replace_in_flat if is_flat else replace_grad_tensors
        inputs = replace_in(inputs, passed)
        return tuple(inputs[: len(args)]), dict(zip(kwargs, inputs[len(args) :]))

    def _register_second_pre_backward(self, grads: Sequence[Tensor | None]) -> None:
        """
        Makes a backward through gradients of the unit's inputs, of which this one makes
        a graph, unshard what it has saved, and end as any other.
        """
        state: Any = _get_module_state(self.modules[0])
        # It may come to the root's parameters by this unit only
        for unsharded in (state._state_ctx.all_states[0], state):
            for grad in grads:
                if grad is not None and grad.requires_grad:
                    grad.register_hook(unsharded._pre_backward)

    # Labels #
    @property
    def _unit_name(self) -> str:
        # The root's is empty
        return self._module_fqn or type(self.modules[0]).__name__

    def _range(self, name: str) -> contextlib.AbstractContextManager:
        """Returns a profiler range named after the step and the unit."""
        if not observers.is_observed():
            return observers.NO_RANGE
        return record_function(self._with_fqn(name))

    def _log_hook(self, name: str) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", self._with_fqn(name))

    def _hook_range(self, name: str) -> contextlib.AbstractContextManager:
        """Returns the range of a hook, which is logged as well."""
        self._log_hook(name)
        return self._range(name)

    def _with_fqn(self, label: str) -> str:
        if self._module_fqn:
            label += f" ({self._module_fqn})"
        if self._num_param_groups > 1 and isinstance(self.mesh_info, FSDPMeshInfo):
            label += f" [pg={self.mesh_info.shard_mesh_size}]"
        return label

    def __repr__(self):
        return f"FSDPParamGroup(fqn={self._module_fqn})"

    # Errors #
    def _clean_up(
        self,
        error: BaseException,
        streams: tuple[torch.Stream, torch.Stream] | None = None,
        *reduced: Any,
    ) -> None:
        """After an error: waits for what was started, and notes what this rank did."""
        if streams is not None:
            first, last = streams
            try:
                first.wait_stream(last)
                self.device_handle.current_stream().wait_stream(first)
            except Exception:  # which must not take the place of the error
                logger.exception(
                    "Unit '%s' could not wait for what it had started before an error: "
                    "memory that is still in use may be reused",
                    self._unit_name,
                )
        if isinstance(error, Exception):
            self._agreement.add_note(error, *reduced)


class RegisterPostBackwardFunction(torch.autograd.Function):
    """The identity on inputs that require gradients; its backward is post-backward."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, param_group: FSDPParamGroup, *inputs: Tensor):
        if torch._C._are_functorch_transforms_active():
            return super().apply(param_group, *inputs)
        # Past what `Function.apply` does for default arguments, which there are
        # none of: it inspects the signature, at five times the cost of the rest
        inputs = torch._functorch.utils.unwrap_dead_wrappers(inputs)
        directly = super(torch.autograd.Function, cls)
        # pyrefly: ignore [missing-attribute]
        return directly.apply(param_group, *inputs)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(param_group: FSDPParamGroup, *inputs: Tensor):
        return inputs

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.param_group = inputs[0]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        param_group = ctx.param_group
        param_group.post_backward()
        # Not from the root's final callback: backward is over then
        if param_group._to_prefetch_late:
            param_group._backward_prefetch_late()
        if torch.is_grad_enabled():
            param_group._register_second_pre_backward(grads)
        return (None, *grads)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def jvp(
        ctx: Any, param_group_tangent: object, *grad_inputs: Unpack[_GradInputs]
    ) -> tuple[Unpack[_GradInputs]]:
        # The group is no tensor and has no tangent. Post-backward comes from
        # the pre-backward hook on the outputs, after primals and tangents.
        return grad_inputs


releases.register_autograd_function(RegisterPostBackwardFunction)
