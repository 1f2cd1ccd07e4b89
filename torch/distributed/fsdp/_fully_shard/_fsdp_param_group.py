"""
When a unit's data moves: the states of a param group, its hooks, prefetching and waits.

[Note: Who waits for whom]
Streams wait for one another (also in joined reductions, direct memory and offloading):

- copy-in -> all-gather (``foreach_all_gather``), gradients -> reduce-scatter
  (``reduce_buckets``) -> all-reduce (``_reduce_batch``): stream for stream.
- all-gather -> copy-out: ``foreach_all_gather_copy_out`` waits for the event.
- optimizer (the root's pre-forward), post-forward shards, last copy-out -> copy-in: both
  gather streams wait.
- reduce-scatter -> next gradients' copy-in: ``FSDPCommContext.reduce_scatter_states``
  holds the inputs until the current stream has waited for them.
- all-reduce -> later reduce-scatter: none, see [Note: Holding reduced buffers].
- sharded gradients -> optimizer: backward ends with waits for all streams that reduced.

[Note: Freeing the gather buffer late]
With implicit prefetching in forward, the next group's copy-in runs beside this group's
all-gather. So the context holds this buffer until the next group's copy-out is about to
start, and the root drops the last one. Other gathers are freed after their copy-out.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, cast

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

from . import _fsdp_collectives as collectives
from . import _fsdp_comms as comms
from . import _fsdp_compat as compat
from . import _fsdp_grads as gradients
from . import _fsdp_observers as observers
from . import _fsdp_registrations as registrations
from . import _fsdp_releases as releases
from . import _fsdp_settings as settings
from ._fsdp_agreement import UnitAgreement
from ._fsdp_api import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy  # noqa: F401
from ._fsdp_collectives import (
    _default_all_gather_output_fn,
    AllGatherResult,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
)
from ._fsdp_common import (  # noqa: F401  (as in the release)
    _disable_functorch_if_active,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    is_bw,
    ShardPlacementFnResult,
    TrainingState,
)
from ._fsdp_comms import *  # noqa: F403  (as in the release)
from ._fsdp_compat import AllReduceState, get_copy_out_options, PluginNames  # noqa: F401
from ._fsdp_context import (  # noqa: F401  (as in the release)
    _GradientReductionState,
    AllGatherState,
    FSDPCommContext,
    ReduceScatterState,
)
from ._fsdp_direct import DirectMemory
from ._fsdp_grads import accumulation, PartialReduces
from ._fsdp_param import FSDPParam, ParamModuleInfo, ShardedState  # noqa: F401
from ._fsdp_param_cache import ParamGroupCache
from ._fsdp_policies import resolve_all, tables_of
from ._fsdp_reduce import _default_reduce_scatter_input_fn, reduce_buckets, Reduction
from ._fsdp_registrations import _get_param_module_infos, fqns_of  # noqa: F401
from ._fsdp_summary import log_layout


logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

# A plugin that replaces one of these expects the release's arguments
_GATHER, _REDUCE = foreach_all_gather, foreach_reduce
_COPY_OUT = foreach_all_gather_copy_out, _default_all_gather_output_fn


class FSDPParamGroup(settings.GroupSettings, PluginNames):
    """
    The parameters of a unit that are gathered and reduced together.

    FORWARD and PRE_BACKWARD begin with the hook that unshards; a prefetch also sets them.
    POST_BACKWARD lasts until the end of the root's backward.
    """

    # From the root's lazy init. Modules have a group for each mesh
    _module_fqn: str | None = None
    _param_group_index: int = 0
    _num_param_groups: int = 1

    # Parameters that lose hooks, and whether of `register_hook`
    _hooked: dict[FSDPParam, bool]
    # As of `fully_shard`: what its modules have that is not sharded
    _plain_places: set[tuple[nn.Module, str]]

    # State of the iteration #
    _training_state: TrainingState = TrainingState.IDLE
    _sharded_state: ShardedState = ShardedState.SHARDED
    # None: not yet. False: before the root's lazy init, since when users may replace them
    _reset_sharded_params: bool | None = None
    _all_gather_result: AllGatherResult | None = None
    # The group of that gather: the sharded state may change before copy-out
    _all_gather_group: dist.ProcessGroup | None = None
    _post_reduce_event: torch.Event | None = None
    _reshard_after_forward_event: torch.Event | None = None  # to the smaller mesh
    # Whether post-backward left gradients for `FSDPState.finalize_backward` (2.15)
    _post_backward_pending: bool = False
    _num_forwards: int = -1  # `comm_ctx.num_forwards` as of the group's last forward

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
        self.modules = modules  # a cycle, through each module's state, to here
        if _get_module_state(modules[0]) is not None:
            # Plugins that make a group without `fully_shard` may pass None
            settings.check_policies(self, mp_policy, offload_policy)
        self.mesh_info, self.post_forward_mesh_info = mesh_info, post_forward_mesh_info
        self.device, self.device_handle = device, _get_device_handle(device.type)
        self.mp_policy, self.offload_policy = mp_policy, offload_policy
        self.gradient_divide_factor, self.all_reduce_grads = None, True
        self._all_gather_comm = comms.DefaultAllGather()
        self._reduce_scatter_comm = comms.DefaultReduceScatter()
        # Plugins may replace these two (2.15)
        self._all_gather_output_fn: Any = _default_all_gather_output_fn
        self._prepare_reduce_scatter_inputs: Any = _default_reduce_scatter_input_fn
        self.fsdp_params = registrations.shard_params(self, params, shard_placement_fn)
        self._direct_memory = DirectMemory()
        self._cache = ParamGroupCache(self.fsdp_params, self._direct_memory)
        # The `mp_policy` that parameters got theirs from, and whether by final names
        self._resolved_policy = mp_policy, not tables_of(mp_policy)
        # Before 2.15: the `grad_dtype` that users have set, and on which local tensor
        self._grad_dtypes: dict[FSDPParam, tuple[Tensor, torch.dtype | None]] = {}
        registrations.keep_grad_dtypes(self)
        registrations.watch_loads(self)
        self._module_to_pre_save_state_dict_hook_handle: dict[nn.Module, Any] = {}
        self._module_to_pre_load_state_dict_hook_handle: dict[nn.Module, Any] = {}
        self.comm_ctx = FSDPCommContext()
        self._post_forward_indices: list[int] = []  # in `comm_ctx.post_forward_order`
        # Groups to gather when this one's backward is over (`BACKWARD_POST`)
        self._to_prefetch_after: list[FSDPParamGroup] = []
        self._partial_reduces = PartialReduces()
        self._agreement = UnitAgreement(self)

    def _get_cache(self) -> ParamGroupCache:
        """Returns the cache, a new one if plugins have replaced parameters."""
        if self._cache.fsdp_params != self.fsdp_params:
            self._cache = ParamGroupCache(self.fsdp_params, self._direct_memory)
        return self._cache

    # Lazy init #
    def lazy_init(self):
        """Reads the parameters as users have left them. May be called again."""
        observers.look_for_traces()
        self.comm_ctx.device_handle = self.device_handle  # before the root's lazy init
        by_root = self._module_fqn is not None
        if self.is_sharded and self._reset_sharded_params is not by_root:
            registrations.reset_sharded_params(self)
            self._cache = ParamGroupCache(self.fsdp_params, self._direct_memory)
            self._reset_sharded_params = by_root
        if self._cache.watched and self.is_unsharded:  # users unshard it
            registrations.warn_if_stale(self)
        self._validate_reduce_scatter_max_input_buffers()
        self._init_dtypes()
        self._register_state_dict_hooks()

    def _init_dtypes(self) -> None:
        """Reads dtypes, and the policy, which may be new or have got final names."""
        cache, init_dtypes = self._get_cache(), PluginNames._init_mp_dtypes
        is_replaced = getattr(self._init_mp_dtypes, "__func__", None) is not init_dtypes
        policy, are_named = self._resolved_policy
        is_resolved = self.mp_policy is policy and are_named
        has_changed = cache.noted_facts != cache.get_facts()
        if is_resolved and not (has_changed or is_replaced):
            return
        cache.noted_facts = None  # if any of this fails, or a plugin may set any dtypes
        registrations.check_materialized(self)
        if not is_resolved:
            settings.check_policies(self, self.mp_policy)
            params = [fsdp_param.sharded_param for fsdp_param in self.fsdp_params]
            is_same = self.mp_policy is policy
            earlier = [p.mp_policy for p in self.fsdp_params] if is_same else []
            named = fqns_of(self, with_class=False), self._module_fqn is not None
            policies = resolve_all(self.mp_policy, params, *named, earlier)
            for fsdp_param, policy in zip(self.fsdp_params, policies, strict=True):
                fsdp_param.mp_policy = policy
            settings.check_can_exchange(self, type(self._reduce_scatter_comm))
            self._resolved_policy = self.mp_policy, True
        self._init_mp_dtypes()
        for fsdp_param in self.fsdp_params:
            # A plugin may have applied the unit's policy to all parameters
            if is_replaced and fsdp_param.mp_policy is not self.mp_policy:
                fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)
            if not fsdp_param.orig_dtype.is_floating_point:
                # Since 2.15 autograd would accumulate complex gradients in a real dtype
                fsdp_param.reduce_dtype = None
        registrations.keep_grad_dtypes(self)
        cache.upcast_by_autograd = accumulation.find_upcast(self.fsdp_params)
        cache.buckets.clear()
        if not is_replaced:
            cache.noted_facts = cache.get_facts()

    # Meshes #
    @property
    def _reshard_after_forward(self) -> bool:
        return self.post_forward_mesh_info is not None

    @property
    def _use_post_forward_mesh(self) -> bool:
        return self.post_forward_mesh_info not in (None, self.mesh_info)

    @property
    def _is_hsdp(self) -> bool:
        return isinstance(self.mesh_info, HSDPMeshInfo)

    def _get_gather_group(self) -> dist.ProcessGroup | None:
        """Returns the group to gather over, None without sharding."""
        is_post_forward = self._sharded_state is ShardedState.SHARDED_POST_FORWARD
        mesh_info = self.post_forward_mesh_info if is_post_forward else self.mesh_info
        return getattr(mesh_info, "shard_process_group", None)

    @property
    def _reduce_scatter_process_group(self) -> dist.ProcessGroup:
        settings.as_mesh(self.mesh_info, FSDPMeshInfo)
        return self._reduce_groups()[0]

    def _reduce_groups(self) -> tuple[Any, Any]:
        """Returns the groups of reduce-scatter and all-reduce, None without one."""
        mesh_info = self.mesh_info
        scatter_group = getattr(mesh_info, "reduce_scatter_process_group", None)
        scatter_group = scatter_group or getattr(mesh_info, "shard_process_group", None)
        return scatter_group, getattr(mesh_info, "replicate_process_group", None)

    _register_state_dict_hooks = registrations.register_state_dict_hooks

    # Runtime: unshard and reshard #
    @_disable_functorch_if_active
    def unshard(self, async_op: bool = False):
        """Starts the all-gather, unless it is under way or not needed."""
        if self._all_gather_result is not None or self.is_unsharded:
            return
        in_backward = self._training_state == TrainingState.PRE_BACKWARD
        if in_backward and not self.unshard_in_backward:
            return
        if (event := self._reshard_after_forward_event) is not None:
            self.comm_ctx.wait_all_gather_streams_on_event(event)
            self._reshard_after_forward_event = None
        group = self._all_gather_group = self._get_gather_group()
        if group is None or group.size() == 1:
            # Nothing moves until `wait_for_unshard`
            empty = torch.empty(0, device=self.device)
            self._all_gather_result = AllGatherResult(empty, None, None, [], [], [])
            return
        comm, is_replaced = self._all_gather_comm, foreach_all_gather is not _GATHER
        streams = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        if not is_replaced and not self._agreement.has_compared_gathers:
            self._agreement.check_gather(group, comm)
        args = self.fsdp_params, group, async_op, *streams, self.device, comm
        options = {} if is_replaced else {"cache": self._get_cache()}
        if (memory := self._direct_memory).min_nbytes is not None:
            can_gather = self._can_gather_directly()
            memory.gather_min_nbytes = memory.min_nbytes if can_gather else None
        try:
            with self._range("FSDP::all_gather"):
                self._all_gather_result = foreach_all_gather(*args, **options)
        except BaseException as error:
            self.comm_ctx.wait_after_error(*streams)
            self._agreement.add_note(error)
            raise

    @_disable_functorch_if_active
    def wait_for_unshard(self):
        """Completes a started unshard: copies out and registers the parameters."""
        if (result := self._all_gather_result) is None:
            return
        if in_forward := self._training_state == TrainingState.FORWARD:
            self.comm_ctx.release_all_gather_state_for_comm_reuse()
        # A plugin may have started the gather
        group: Any = self._all_gather_group or self._get_gather_group()
        is_single = group is None or group.size() == 1
        if (memory := self._direct_memory).allocated:
            memory.begin_use(self.device_handle.current_stream())
        cache = self._get_cache()
        args, options = (result, self.fsdp_params, group), cast(Any, {"cache": cache})
        copy_out = foreach_all_gather_copy_out, self._all_gather_output_fn
        if copy_out != _COPY_OUT:
            options = get_copy_out_options(_default_all_gather_output_fn, copy_out[1])
        # Parameters are made once, and as inference tensors they could never train
        is_inference = torch.is_inference_mode_enabled()
        try:
            with torch.inference_mode(False) if is_inference else observers.NO_CONTEXT:
                if is_single:
                    collectives.unshard_single_rank(cache, self.device)
                else:
                    with self._range("FSDP::all_gather_copy_out"):
                        foreach_all_gather_copy_out(*args, **options)
                if not cache.has_unsharded_params:
                    cache.init_unsharded_params()
                    accumulation.end_backward(cache)  # in the first microbatch as well
        except BaseException as error:
            self._agreement.add_note(error)
            raise
        self._to_state(ShardedState.UNSHARDED)
        event = self.device_handle.current_stream().record_event()
        if in_forward and not is_single and result.all_gather_work is None:
            # See [Note: Freeing the gather buffer late]
            self.comm_ctx.all_gather_state = AllGatherState(result, event)
        else:
            self.comm_ctx.wait_all_gather_streams_on_event(event)
        self.comm_ctx.free_resharded()
        self._all_gather_result = self._all_gather_group = None

    def _can_gather_directly(self) -> bool:
        """Whether the next gather may be direct, see [Note: Direct gathers]."""
        copy_out = foreach_all_gather_copy_out, self._all_gather_output_fn
        parts = type(self._all_gather_comm), copy_out
        if parts != (comms.DefaultAllGather, _COPY_OUT) or self._use_post_forward_mesh:
            return False
        params: Any = self.fsdp_params if releases.RELEASE.may_keep_storage else ()
        return not any(p.keep_unsharded_storage for p in params)

    @releases.not_type_checked
    def _unshard_now(self) -> None:
        self.unshard(self.unshard_async_op)  # does nothing if prefetched
        self.wait_for_unshard()

    @_disable_functorch_if_active
    def reshard(self):
        """Frees the unsharded parameters, or shards them to the smaller mesh."""
        after_forward = self._training_state == TrainingState.FORWARD
        if after_forward and self._use_post_forward_mesh:
            self._to_state(ShardedState.SHARDED_POST_FORWARD)
            event = self._reshard_after_forward_event = self.device_handle.Event()
            event.record()
            # From a direct gather before users set the smaller mesh
            self.comm_ctx.free_resharded()
        elif self._reshard_after_forward or not after_forward:
            self._to_state(ShardedState.SHARDED)
        if self._training_state is TrainingState.IDLE:
            # By users, or before `nn.Module._apply` replaces the parameters
            registrations.keep_grad_dtypes(self)
            self.comm_ctx.free_resharded()

    # Runtime: forward #
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Runs for each module of a unit, which has one post-backward
        is_first_module = self._training_state != TrainingState.FORWARD
        if is_first_module:
            if self._num_forwards < 0:
                log_layout(self)
            # A group that runs again begins a forward. In the first, lazy init looks
            if self._num_forwards == self.comm_ctx.num_forwards:
                self.comm_ctx.num_forwards += 1
                self.comm_ctx.autocasts |= torch._C._is_any_autocast_enabled()
                observers.look_for_traces()
            self._num_forwards = self.comm_ctx.num_forwards
            if self._cache.watched and self.is_unsharded:
                registrations.warn_if_stale(self)
            if self._grad_dtypes:  # `nn.Module._apply` may have lost them
                registrations.keep_grad_dtypes(self)
        self._log("FSDP::pre_forward")
        with self._range("FSDP::pre_forward"):
            self._training_state = TrainingState.FORWARD
            self._unshard_now()
            releases.restore_spmd_types(self.fsdp_params)
            if is_first_module:
                args, kwargs = self._register_post_backward_hook(args, kwargs)
            return args, kwargs

    @releases.not_type_checked
    def post_forward(self, module: nn.Module, input: Any, output: Any):
        self._log("FSDP::post_forward")
        with self._range("FSDP::post_forward"):
            # Checkpointing repeats a forward in backward, which keeps the parameters
            if not is_bw():
                self._record_post_forward()
                self.reshard()
            self._training_state = TrainingState.IDLE
        return output

    def _record_post_forward(self) -> None:
        # Without gradients only reentrant checkpointing's forward has a backward: its
        # autograd function turns forward AD off outside inference mode
        by_users = torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()
        if torch.is_grad_enabled() or not by_users:
            order = self.comm_ctx.post_forward_order
            self._post_forward_indices.append(len(order))
            order.append(self)
        elif not self._reshard_after_forward:
            self._cache.watch()

    # Runtime: backward #
    @releases.not_type_checked
    def pre_backward(self, default_prefetch: bool, *unused: Any):
        if self._training_state == TrainingState.PRE_BACKWARD:
            return
        self._log("FSDP::pre_backward")
        with self._range("FSDP::pre_backward"):
            self._training_state = TrainingState.PRE_BACKWARD
            # Not empty if the root's final callback ran the last post-backward
            self._to_prefetch_after.clear()
            self._unshard_now()
            accumulation.begin_backward(self._cache, reduces=self.reduce_grads)
            if default_prefetch:
                self._backward_prefetch()

    @torch._disable_dynamo
    @releases.not_type_checked
    def post_backward(self, *unused: Any):
        """Reshards, and reduces gradients, also those of earlier microbatches."""
        self._log("FSDP::post_backward")
        # Still the unit's forward if some of its modules did not run
        in_forward = self._training_state == TrainingState.FORWARD
        self._training_state = TrainingState.POST_BACKWARD
        cache = self._get_cache()
        accumulation.add_up(self)
        with self._range("FSDP::post_backward_reshard"):
            grads = accumulation.pop_grads(self) if self.reduce_grads else None
            if self.reshard_after_backward:
                self.reshard()
            else:
                cache.keep_requires_grad()
            accumulation.end_backward(cache)
            self._post_backward_pending = not self.reduce_grads
            if grads is None:
                accumulation.keep_unreduced(self.fsdp_params)
                return
        self._reduce(grads)
        if in_forward and len(self.modules) > 1:
            # As in the release: else the unit's next module gets corrupt gradients
            self.comm_ctx.wait_current_stream(self._post_reduce_event)

    # Runtime: reduce #
    def _reduce(self, grads: list[Tensor | None]) -> None:
        """Reduces gradients, None where a parameter has none, bucket by bucket."""
        cache, context = self._cache, self.comm_ctx
        if cache.has_empty_params:
            gradients.accumulate_empty_grads(self, grads)
        context.recycle_reduce_buffers(self)
        partial_reduces, defers = self._partial_reduces, not self.all_reduce_grads
        buckets: Any = partial_reduces.plan(cache, grads, defers=defers)
        if not buckets:
            return
        groups, comm = self._reduce_groups(), self._reduce_scatter_comm
        reduction = self._make_reduction(len(buckets), groups)
        is_default, reduce = foreach_reduce is _REDUCE, reduce_buckets
        if not is_default:  # it might not communicate, and prepares gradients itself
            args: Any = foreach_reduce, self._prepare_reduce_scatter_inputs
            reduce = functools.partial(compat.reduce_monkeypatched, *args)
            reduction.plugins = None
        elif self._agreement.agreed != (buckets, *groups, comm, not defers):
            self._agreement.check_reductions(buckets, *groups, comm, not defers)
        with self._range("FSDP::post_backward_reduce"):
            self._wait_for_post_backward()
            parts: Any = gradients.make_parts(buckets, self.fsdp_params, grads)
            if is_default and self.reduce_bucket_cap is not None:
                parts = context.join_small(self, reduction, parts)
                if not parts:
                    return
            try:
                args = self, reduction, parts, partial_reduces, reduce
                parts = context.reduce(*args)
            except BaseException as error:
                self._agreement.add_note(error, [part.bucket for part in parts])
                raise
            partial_reduces.clear()  # they are in these sums
            for part in parts:
                self._post_reduce_event = part.post_reduce_event
                if (output := part.partial_reduce_output) is not None:
                    partial_reduces[part.bucket.key] = part.bucket, output

    def _make_reduction(self, num_buckets: int, groups: tuple[Any, Any]) -> Reduction:
        """Returns the settings that the unit's buckets are reduced with now."""
        context, comm = self.comm_ctx, self._reduce_scatter_comm
        scatter_group, replicate_group = groups
        all_reduce_stream, hook = self._all_reduce_hook_stream, self._all_reduce_hook
        if all_reduce_stream is None or replicate_group is not None:
            all_reduce_stream = context.all_reduce_stream
        elif hook is None:
            fix = f"call set_all_reduce_hook on module '{self._module_fqn}'"
            fault = "all reduce hook stream is specified but hook itself is missing"
            raise AssertionError(f"{fault}: {fix}")
        scatter = scatter_group, context.reduce_scatter_stream, comm
        all_reduce = replicate_group, all_reduce_stream, self.all_reduce_grads, hook
        scaling = self.gradient_divide_factor, self.force_sum_reduction_for_comms
        copy_in = collectives.foreach_reduce_scatter_copy_in
        plugins = compat.CopyInPlugins(copy_in, self._prepare_reduce_scatter_inputs)
        # Whether the output still is when the next bucket, or microbatch, allocates
        in_use = num_buckets > 1 or not self.all_reduce_grads
        return Reduction(
            *(*scatter, *all_reduce, *scaling, self.device),
            plugins=None if plugins == compat.DEFAULT_COPY_IN else plugins,
            clones_output=in_use and not self._has_fresh_buffers,
            holds_one_input=self._holds_one_input,
        )

    def _wait_for_post_backward(self) -> None:
        """Lets the current stream wait for the group's last reduction, once."""
        if (event := self._post_reduce_event) is not None:
            self.comm_ctx.wait_current_stream(event)
            self._post_reduce_event = None
        if self.comm_ctx.all_reduce_states:
            self.comm_ctx.drop_all_reduces(self)

    def finalize_backward(self):
        """Makes the current stream wait for all that backward has started."""
        context = self.comm_ctx
        if context.autocasts:
            gradients.reduce_late_grads(self)
        context.reduce_joined(self)
        context.wait_for_reductions()
        self._post_reduce_event = None
        self._drop_iteration_state()
        # If forward skipped modules of a unit, the last gather's buffer is still there
        context.release_all_gather_state_on_current_stream()
        context.free_resharded()

    def _reset_iter_state(self) -> None:
        """Waits for all that is in flight, drops it and all gradients, and reshards."""
        self._drop_iteration_state()
        self._wait_for_post_backward()
        self._partial_reduces.clear()
        self.comm_ctx.joined_reductions.clear()
        accumulation.drop_grads(self._get_cache())
        event = self._reshard_after_forward_event
        self.comm_ctx.wait_all_gather_streams_on_event(event)
        self._reshard_after_forward_event = None
        self._post_backward_pending = False
        self._training_state = TrainingState.IDLE
        # A failed step may have left outputs or registrations even if it is sharded
        self._sharded_state = ShardedState.UNSHARDED
        self._to_state(ShardedState.SHARDED)
        self.comm_ctx.free_resharded()

    def _drop_iteration_state(self) -> None:
        """Waits for offloaded gradients and an unused prefetch, and forgets forwards."""
        if (result := self._all_gather_result) is not None:
            self.comm_ctx.wait_current_stream(result.all_gather_event)
            if isinstance(result.all_gather_work, dist.distributed_c10d.Work):
                result.all_gather_work.wait()
            self._all_gather_result = self._all_gather_group = None
            if not self.is_unsharded:
                self.comm_ctx.hold_resharded(self._direct_memory)
        for fsdp_param in self.fsdp_params:
            if (event := fsdp_param.grad_offload_event) is not None:
                event.synchronize()  # the optimizer reads it on the CPU
                fsdp_param.grad_offload_event = None
        self._post_forward_indices.clear()
        self._to_prefetch_after.clear()

    # Runtime: prefetch #
    def _backward_prefetch(self) -> None:
        """Starts the gathers that are next in backward, or leaves them for later."""
        if not (indices := self._post_forward_indices):
            return  # an earlier backward of the same forward popped them
        targets = self.comm_ctx.groups_to_prefetch(self, indices.pop())
        if self.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            for target in targets:
                self._prefetch_unshard(target, "backward")
        elif self.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._to_prefetch_after = [*targets]

    @torch._disable_dynamo
    def _prefetch_after_backward(self) -> None:
        """Starts the gathers that `BACKWARD_POST` has left for the end of backward."""
        targets, self._to_prefetch_after = self._to_prefetch_after, []
        for target in targets:
            if target._post_forward_indices:  # else its backward is over: a child's
                self._prefetch_unshard(target, "backward")

    @staticmethod
    def _prefetch_unshard(target_fsdp_param_group: Any, pass_type: str) -> None:
        """Starts a group's gather as its forward or backward does."""
        target, in_forward = target_fsdp_param_group, pass_type == "forward"
        if not in_forward and pass_type != "backward":
            raise ValueError(f"Unknown pass type: {pass_type}")
        state = TrainingState.FORWARD if in_forward else TrainingState.PRE_BACKWARD
        label = f"FSDP::{pass_type}_prefetch for {target._module_fqn}"
        with observers.range_of(label), target.use_training_state(state):
            target.unshard(target.unshard_async_op)

    # Sharded state #
    def _to_state(self, state: ShardedState) -> None:
        """Brings all parameters, and with them the group, to ``state``."""
        if self._sharded_state is not state:
            self._get_cache().to_state(state)
            self._sharded_state = state
            if self._direct_memory.allocated and state is not ShardedState.UNSHARDED:
                self.comm_ctx.hold_resharded(self._direct_memory)

    @property
    def is_sharded(self) -> bool:
        return self._sharded_state is ShardedState.SHARDED

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
        """Passes inputs that need gradients through `RegisterPostBackwardFunction`."""
        inputs = [*args, *kwargs.values()]
        if not torch.is_grad_enabled() or not (tensors := collect_grad_tensors(inputs)):
            return args, kwargs  # the root's final callback runs post-backward
        passed = iter(RegisterPostBackwardFunction.apply(self, *tensors))
        inputs = replace_grad_tensors(inputs, passed)
        return tuple(inputs[: len(args)]), dict(zip(kwargs, inputs[len(args) :]))

    # Labels #
    @property
    def _unit_name(self) -> str:
        # The fqn of the root is ""
        return self._module_fqn or " and ".join(type(m).__name__ for m in self.modules)

    def _log(self, name: str) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", self._with_fqn(name))

    def _range(self, name: str) -> contextlib.AbstractContextManager:
        """Returns a profiler range named after the step and the unit."""
        if observers.is_observed():
            return record_function(self._with_fqn(name))
        return observers.NO_CONTEXT

    def _with_fqn(self, label: str) -> str:
        if self._module_fqn:
            label += f" ({self._module_fqn})"
        if self._num_param_groups > 1 and isinstance(self.mesh_info, FSDPMeshInfo):
            label += f" [pg={self.mesh_info.shard_mesh_size}]"
        return label

    def __repr__(self):
        return f"FSDPParamGroup(fqn={self._module_fqn})"


class RegisterPostBackwardFunction(torch.autograd.Function):
    """The identity on a unit's inputs, whose backward is the unit's post-backward."""

    generate_vmap_rule = True

    @classmethod
    def apply(cls, param_group: FSDPParamGroup, *inputs: Tensor):
        if torch._C._are_functorch_transforms_active():
            return super().apply(param_group, *inputs)
        # `Function.apply` would look for default arguments: 2 % of a unit's host time
        inputs = torch._functorch.utils.unwrap_dead_wrappers(inputs)
        base: Any = super(torch.autograd.Function, cls)
        return base.apply(param_group, *inputs)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def forward(param_group: FSDPParamGroup, *inputs: Tensor):
        return inputs

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.param_group = inputs[0]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        group: FSDPParamGroup = ctx.param_group
        group.post_backward()
        if group._to_prefetch_after:
            group._prefetch_after_backward()
        if torch.is_grad_enabled():
            # With `create_graph`, a second backward through these gradients needs the unit
            # unsharded, and to be finalized: the root's pre-backward must run as well
            state: Any = _get_module_state(group.modules[0])
            for hooked_state in (state._state_ctx.all_states[0], state):
                for grad in grads:
                    if grad is not None and grad.requires_grad:
                        grad.register_hook(hooked_state._pre_backward)
        return (None, *grads)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def jvp(ctx: Any, param_group_tangent: object, *grad_inputs: Tensor):
        return grad_inputs  # the group has no tangent


releases.register_autograd_function(RegisterPostBackwardFunction)
