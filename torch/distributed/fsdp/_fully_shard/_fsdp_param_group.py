"""
When a unit's data moves: the states of a parameter group, its hooks and its
prefetching, and the streams and buffers that all groups share.

What moves is in :mod:`_fsdp_collectives`, where it lies in :mod:`_fsdp_layout`.

[Note: Who waits for whom]
Data passes from stream to stream, and each handover is one of these waits:

- optimizer -> copy-in: the root's pre-forward makes both gather streams wait.
- copy-in -> all-gather: ``foreach_all_gather``, stream to stream.
- all-gather -> copy-out: ``foreach_all_gather_copy_out`` waits for the event.
- copy-out -> next copy-in: the buffer of a gather is given back to the
  allocator only after both gather streams wait for the copy-out's event. In
  forward this is put off to the next group, see
  [Note: Freeing the gather buffer late].
- gradients -> reduce-scatter: ``foreach_reduce``, stream to stream.
- reduce-scatter -> next copy-in: ``FSDPCommContext.reduce_scatter_states``
  holds the inputs of the last groups, one record for each post-backward; the
  current stream waits for its event before the record is dropped.
- all-reduce -> next reduce-scatter: ``_all_reduce_states`` holds the buffers
  of all buckets until their own events.
- sharded gradients -> optimizer: the end of backward waits for the last event
  of every stream that reduced.

[Note: Freeing the gather buffer late]
With implicit prefetching in forward, the copy-in of the next group runs in a
stream of its own, beside this group's all-gather. This rank's shards are
copied into a part of the gather's output, so that the next copy-in must get
other memory than this gather's buffer. Hence the shared context keeps the
last gather alive until the next group has ordered its streams behind this
group's copy-out; the root drops the last of them at the end of its forward.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, cast, Literal, NamedTuple, TYPE_CHECKING, TypeAlias
from typing_extensions import TypeVarTuple, Unpack

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._common_utils import (
    _named_parameters_with_duplicates,
    collect_grad_tensors,
    replace_grad_tensors,
)
from torch.profiler import record_function

from ._fsdp_agreement import UnitAgreement
from ._fsdp_api import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ._fsdp_collectives import (
    _get_gradient_divide_factors,
    AllGather,
    AllGatherResult,
    DefaultAllGather,
    DefaultAllocMixin,
    DefaultReduceScatter,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
    PartialReduce,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocMixin,
    ProcessGroupAllocReduceScatter,
    ReduceScatter,
    scatter_divisor,
    SymmMemAllGather,
    SymmMemAllocMixin,
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
from ._fsdp_errors import (
    check_all_gather,
    check_all_reduce_hook,
    check_divide_factor,
    check_grad_dtype,
    check_policies,
    check_reduce_scatter,
    check_reshards,
    how_to_shard,
    raise_with,
    what_is_registered,
)
from ._fsdp_kept_names import KeptNames
from ._fsdp_layout import (
    dtype_rank,
    extend_bucket,
    plan_buckets,
    reduce_dtype_of,
    ReduceBucket,
    ReduceSlot,
)
from ._fsdp_observers import is_observed, look_for_traces, NO_RANGE, range_of
from ._fsdp_param import FSDPParam, ParamModuleInfo, ShardedState
from ._fsdp_summary import summarize_unit
from ._fsdp_unit import BucketParams, dtypes_of, grad_dtype_of, UnitParams


if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
# Of tables, which can be turned off apart from the steps
layout_logger = logger.getChild("layout")

_GradInputs = TypeVarTuple("_GradInputs")
_ModuleToHandleDict: TypeAlias = "dict[nn.Module, RemovableHandle]"

# Gradient patterns (which parameters have one, reduced in which dtype) whose
# buckets a group remembers. Most groups see one; conditional ones see more.
_MAX_CACHED_PATTERNS = 32


def _untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    """
    Keeps dynamo out of a hook, like :func:`_dynamo_disable`, with a wrapper that
    is made once and not at each call: at the first, as it imports the compiler.
    """
    untraced: Callable[..., Any] | None = None

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal untraced
        if untraced is None:
            reason = "FSDP hooks run eagerly"
            untraced = torch._dynamo.disable(method, recursive=True, reason=reason)
        return untraced(*args, **kwargs)

    return call


class FSDPCommContext:
    """The streams and in-flight buffers that the groups of one root share."""

    def lazy_init(self, device: torch.device):
        handle = _get_device_handle(device.type)
        self.device_handle = handle
        # The copies around a collective are short and compute waits for them,
        # so their streams come before the compute stream in priority
        first = -1
        # In forward, the next group's copy-in beside this group's all-gather
        self.all_gather_copy_in_stream = handle.Stream(priority=first)
        # The next group's all-gather beside this group's compute
        self.all_gather_stream = handle.Stream(priority=first)
        # Scaling and reduce-scatter beside the next group's backward
        self.reduce_scatter_stream = handle.Stream(priority=first)
        # HSDP reduces over the replicas, usually over another network than the
        # shard group's, beside all-gathers and reduce-scatters
        self.all_reduce_stream = handle.Stream()
        # The last event of each stream that reduces. A stream's later event
        # implies its earlier ones, so these are all that backward's end needs.
        self._last_post_reduce_events: dict[torch.Stream, torch.Event] = {}
        # See [Note: Freeing the gather buffer late]
        self.all_gather_state: AllGatherState | None = None
        # Oldest first. How many may be there is one number for all groups: the
        # root's lazy init resolves it from theirs.
        self.reduce_scatter_states: list[ReduceScatterState] = []
        self.reduce_scatter_max_input_buffers: int = 1
        # The groups of one module that have reduced one after the other so far
        self.reducing_groups: list[FSDPParamGroup] = []
        # Of the unit last reduced over each process group: reductions come in the
        # same order on all of its ranks
        self.last_reduced: dict[dist.ProcessGroup, UnitAgreement] = {}
        # Groups in the order of their forwards, for prefetching in backward.
        # A reference cycle, which ends with every backward.
        self.post_forward_order: list[FSDPParamGroup] = []

    def get_all_gather_streams(
        self, async_op: bool, training_state: TrainingState
    ) -> tuple[torch.Stream, torch.Stream]:
        """
        Returns the streams for copy-in and all-gather: streams of their own
        where the gather may be a prefetch, else the current one for both.
        """
        prefetches = (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
        if async_op or training_state not in prefetches:
            stream = self.device_handle.current_stream()
            return stream, stream
        return self.all_gather_copy_in_stream, self.all_gather_stream


class AllGatherState(NamedTuple):
    """A finished gather whose buffer is kept until ``event``, its copy-out."""

    all_gather_result: AllGatherResult
    event: torch.Event | None


class ReduceScatterState(NamedTuple):
    """
    The reduce-scatter inputs of one post-backward, one for each bucket, kept
    until ``event``, which follows the last of them.
    """

    reduce_scatter_inputs: tuple[torch.Tensor, ...]
    event: torch.Event | None


class AllReduceState(NamedTuple):
    """
    A bucket's reduced buffer, which was allocated in the reduce-scatter stream
    and is used in another, kept until ``event``. Dropped earlier, its memory
    could become the next group's reduce-scatter output while it is being read.
    """

    all_reduce_input: torch.Tensor
    event: torch.Event | None


def _checked(name: str, check: Callable[[Any, str], None]) -> property:
    """
    Returns an attribute that is stored under ``name`` and checked when it is set:
    `FSDPModule` sets it without a look. Reading it runs no Python.
    """

    def set_checked(self: FSDPParamGroup, value: Any) -> None:
        check(value, self._unit_name)
        setattr(self, name, value)

    return property(attrgetter(name), set_checked)


class FSDPParamGroup(KeptNames):
    """The parameters of a unit that are gathered and reduced together."""

    # Set by the root's lazy init: the modules' name, and the group's place
    # among the groups of the same modules, one for each mesh
    _module_fqn: str | None = None
    _param_group_index: int = 0
    _num_param_groups: int = 1
    # Looking for replaced sharded parameters is costly, so only lazy init
    # does it, and only once
    _reset_sharded_params: bool = False

    # Settings, set through `FSDPModule`:
    # Gradient sync: none at all, or no all-reduce (HSDP)
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    # Replaces the number of data-parallel ranks
    gradient_divide_factor = _checked("_divide_factor", check_divide_factor)
    _divide_factor: float | None = None
    # Scale apart from the collectives, which then only sum
    force_sum_reduction_for_comms: bool = False
    # Reduce zeros for parameters without a gradient, so that ranks that use
    # different parameters still issue the same collectives
    reduce_scatter_unused_params: bool = False
    # This group's wish; the shared context holds what is granted
    reduce_scatter_max_input_buffers: int = 1
    # Gather in the current stream and wait for the work, which spares memory
    # in the streams for prefetching but prefetches explicitly only
    unshard_async_op: bool = False
    # False if backward does not need the parameters, e.g. an embedding's
    unshard_in_backward: bool = True
    _all_reduce_hook = _checked("_reduce_hook", check_all_reduce_hook)
    _reduce_hook: Callable[[torch.Tensor], None] | None = None
    _all_gather_comm = _checked("_gather_comm", check_all_gather)
    _gather_comm: AllGather
    _reduce_scatter_comm = _checked("_scatter_comm", check_reduce_scatter)
    _scatter_comm: ReduceScatter
    # Only without native HSDP, which has a stream of its own for the hook.
    # Users may set it before lazy init, so it is not in the shared context.
    _all_reduce_hook_stream: torch.Stream | None = None

    # State of the iteration:
    _training_state: TrainingState = TrainingState.IDLE
    # The same as every parameter's own
    _sharded_state: ShardedState = ShardedState.SHARDED
    _all_gather_result: AllGatherResult | None = None
    # After resharding to a smaller mesh, which the next gather reads from
    _reshard_after_forward_event: torch.Event | None = None
    # After this group's last reduction, including what follows it
    _post_reduce_event: torch.Event | None = None

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
        self.mesh_info, self.post_forward_mesh_info = mesh_info, post_forward_mesh_info
        self.mp_policy, self.offload_policy = mp_policy, offload_policy
        self._resolved_policy = mp_policy  # into each parameter's own
        self.device, self.device_handle = device, _get_device_handle(device.type)
        check_policies(mp_policy, offload_policy, self._unit_name)
        make_fsdp_param = functools.partial(
            FSDPParam,
            mesh_info=mesh_info,
            post_forward_mesh_info=post_forward_mesh_info,
            device=device,
            shard_placement_fn=shard_placement_fn,
            offload_policy=offload_policy,
        )
        infos = _get_param_module_infos(params, modules)
        # Within the unit: what they are called in the model shows at lazy init
        self._param_names = _get_param_names(infos, modules)
        # All of them first, while the parameters are as users know them
        policies = [
            mp_policy.resolve(param, name, device)
            for param, name in zip(params, self._param_names)
        ]
        # By position, where users set another than the default
        self._grad_dtypes = {
            i: param.grad_dtype
            for i, param in enumerate(params)
            if param.grad_dtype != param.dtype
        }
        self._watch_loads(infos)  # before the parameters do
        self._unit_params = UnitParams(
            self._shard(param, name, make_fsdp_param, info, policy)
            for param, name, info, policy in zip(
                params, self._param_names, infos, policies
            )
        )
        self._keep_grad_dtypes()
        self._places_at_first: Any = _places_of_unit(self.modules)
        self.comm_ctx = FSDPCommContext()
        self._all_gather_comm = DefaultAllGather()
        self._reduce_scatter_comm = DefaultReduceScatter()
        self._module_to_pre_save_state_dict_hook_handle: _ModuleToHandleDict = {}
        self._module_to_pre_load_state_dict_hook_handle: _ModuleToHandleDict = {}
        # The places of this group's forwards in the shared order
        self._post_forward_indices: list[int] = []
        self._all_reduce_states: list[AllReduceState] = []
        # Of microbatches whose all-reduce was put off, by reduce dtype
        self._partial_reduces: dict[torch.dtype, PartialReduce] = {}
        self._agreement = UnitAgreement(self)

    # Initialization #
    def _set_params(self, params: Sequence[FSDPParam]) -> None:
        self._unit_params = UnitParams(params)
        infos = [fsdp_param._module_info for fsdp_param in params]
        self._param_names = _get_param_names(infos, self.modules)

    # Of which plugins may set others at any time. Reading it runs no Python.
    fsdp_params: UnitParams = cast(
        UnitParams, property(attrgetter("_unit_params"), _set_params)
    )

    def lazy_init(self):
        """
        Takes the parameters as they are now: until the first forward, users
        may have loaded, replaced or cast them. May be called again.
        """
        look_for_traces()
        if not hasattr(self.comm_ctx, "device_handle"):
            self.comm_ctx.device_handle = _get_device_handle(self.device.type)
        is_first = self.is_sharded and not self._reset_sharded_params
        if is_first:
            self._reset_sharded_params = True
            for i, fsdp_param in enumerate(self.fsdp_params):
                self._take_registered(i)
                fsdp_param._init_extensions()  # may have been added since
            self.fsdp_params.refresh()
            self._warn_of_late_params()
        self._validate_no_meta_params()
        self._validate_cpu_offload_params()
        self._validate_reduce_scatter_max_input_buffers()
        self._take_dtypes()
        self._register_state_dict_hooks()
        if is_first and layout_logger.isEnabledFor(logging.DEBUG):
            summary = summarize_unit(self, self._module_fqn or "(root)")
            layout_logger.debug("%s", summary)

    def _take_dtypes(self) -> None:
        """Takes the policy and the parameters' dtypes as they are now."""
        buckets = self.fsdp_params.buckets
        planned_for = buckets and [*map(_planned_for, self.fsdp_params)]
        if self.mp_policy is not self._resolved_policy:
            check_policies(self.mp_policy, self.offload_policy, self._unit_name)
            self._resolved_policy = self.mp_policy
            for i, fsdp_param in enumerate(self.fsdp_params):
                fsdp_param.mp_policy = self.mp_policy.resolve(
                    fsdp_param.sharded_param, self._name_of(i), self.device
                )
        self._init_mp_dtypes()
        for fsdp_param in self.fsdp_params:
            if fsdp_param.mp_policy is not self.mp_policy:
                # A replacement of the above may know of one policy only
                fsdp_param.init_dtype_attrs(fsdp_param.mp_policy)
        self._keep_grad_dtypes()
        if planned_for and [*map(_planned_for, self.fsdp_params)] != planned_for:
            buckets.clear()

    def _shard(
        self,
        param: nn.Parameter,
        name: str,
        make_fsdp_param: functools.partial[FSDPParam],
        info: ParamModuleInfo,
        policy: MixedPrecisionPolicy,
    ) -> FSDPParam:
        try:
            fsdp_param = make_fsdp_param(param, info, mp_policy=policy)
        except Exception as error:
            is_placed = make_fsdp_param.keywords["shard_placement_fn"] is not None
            what_to_do = how_to_shard(param, self.offload_policy, is_placed)
            raise_with(error, f"Parameter {name} cannot be sharded. {what_to_do}")
        if self._use_post_forward_mesh:
            smaller = _as_mesh(self.post_forward_mesh_info, FSDPMeshInfo)
            check_reshards(fsdp_param, smaller.shard_mesh_size, name)
        return fsdp_param

    def _take_registered(self, i: int) -> None:
        """Takes what the module now has under the parameter's name, if it can."""
        fsdp_param, name = self.fsdp_params[i], self._name_of(i)
        try:
            fsdp_param.reset_sharded_param()
        except Exception as error:
            wrong = what_is_registered(fsdp_param, name)
            raise_with(error, wrong or f"{name} cannot be taken as it is registered")
        if (wrong := what_is_registered(fsdp_param, name)) is not None:
            raise RuntimeError(wrong)

    def _watch_loads(self, infos: Sequence[ParamModuleInfo]) -> None:
        """Takes what is loaded before the parameters do so, which name nothing."""

        def loaded_hook(module: nn.Module, *args: Any) -> None:
            for i, fsdp_param in enumerate(self.fsdp_params):
                if fsdp_param._module_info.module is module:
                    self._take_registered(i)
            self._keep_grad_dtypes()
            # Planned with the dtypes of what was replaced
            self.fsdp_params.buckets.clear()

        for module in dict.fromkeys(info.module for info in infos):
            module.register_load_state_dict_post_hook(loaded_hook)

    def _warn_of_late_params(self) -> None:
        known, self._places_at_first = self._places_at_first, None
        if known is None or self._param_group_index > 0:
            return
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

    def _keep_grad_dtypes(self) -> None:
        """
        Sets each `grad_dtype` that users chose on the sharded parameter of now,
        which does not have it if it is another one than they set it on.
        """
        for i, fsdp_param in enumerate(self.fsdp_params):
            param = fsdp_param.sharded_param
            if param.grad_dtype != param.dtype:
                check_grad_dtype(param, self._name_of(i))
                self._grad_dtypes[i] = param.grad_dtype
            elif i in self._grad_dtypes:
                param.grad_dtype = self._grad_dtypes[i]
            # pyrefly: ignore [missing-attribute]
            fsdp_param.grad_dtype = param.grad_dtype

    def set_symm_mem(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """
        Takes the communication buffers from symmetric memory. Reduce-scatter
        takes part only with sums forced, the one reduction that NCCL's
        symmetric kernels know.
        """
        self._check_comms_are(
            "set_symm_mem",
            (DefaultAllGather, SymmMemAllGather),
            (DefaultReduceScatter, SymmMemReduceScatter),
        )
        group = self._all_gather_process_group
        self._all_gather_comm = SymmMemAllGather(group, backend)
        if self.force_sum_reduction_for_comms:
            group = self._reduce_scatter_process_group
            self._reduce_scatter_comm = SymmMemReduceScatter(group, backend)

    def set_allocate_memory_from_process_group(self, enable: bool) -> None:
        """
        Takes the communication buffers from the process groups' allocators
        where they have one, or from the default one again.
        """
        self._check_comms_are(
            "set_allocate_memory_from_process_group",
            (DefaultAllGather, ProcessGroupAllocAllGather),
            (DefaultReduceScatter, ProcessGroupAllocReduceScatter),
        )
        if not enable:
            self._all_gather_comm = DefaultAllGather()
            self._reduce_scatter_comm = DefaultReduceScatter()
            return
        gather_group = self._all_gather_process_group
        self._all_gather_comm = ProcessGroupAllocAllGather(gather_group)
        reduce_group = self._reduce_scatter_process_group
        self._reduce_scatter_comm = ProcessGroupAllocReduceScatter(reduce_group)

    def _check_comms_are(
        self,
        caller: str,
        all_gather_types: tuple[type, ...],
        reduce_scatter_types: tuple[type, ...],
    ) -> None:
        for name, comm, types in (
            ("all gather", self._all_gather_comm, all_gather_types),
            ("reduce scatter", self._reduce_scatter_comm, reduce_scatter_types),
        ):
            if not isinstance(comm, types):
                raise AssertionError(
                    f"cannot call {caller}() when {name} comm is custom: module "
                    f"'{self._module_fqn}' uses {type(comm).__name__}, which "
                    "allocates its own buffers"
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
        if self._gather_world_size == 1:
            # Nothing moves until `wait_for_unshard`
            nothing = torch.empty(0, device=self.device)
            self._all_gather_result = AllGatherResult(nothing, None, None, [], [], [])
            return
        streams = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        group = self._all_gather_process_group
        if not self._agreement.on_gathers:
            self._agreement.check_gather(group)
        try:
            with self._range("FSDP::all_gather"):
                self._all_gather_result = foreach_all_gather(
                    self.fsdp_params,
                    group,
                    async_op,
                    *streams,
                    self.device,
                    self._all_gather_comm,
                )
        except BaseException as error:
            self._agreement.tell(error)
            raise

    @_disable_functorch_if_active
    def wait_for_unshard(self):
        """
        Completes the unshard that was started, if any: copies out of the
        gather's buffer and registers the unsharded parameters.
        """
        result = self._all_gather_result
        if result is None:
            return
        in_forward = self._training_state == TrainingState.FORWARD
        if in_forward and (previous := self.comm_ctx.all_gather_state) is not None:
            self._wait_all_gather_streams_on_event(previous.event)
            self.comm_ctx.all_gather_state = None
        is_gathered = self._gather_world_size > 1
        # The unsharded parameters are made once and outlive an inference mode
        # that is on now: made as inference tensors they could never train
        with (
            torch.inference_mode(False)
            if torch.is_inference_mode_enabled()
            else contextlib.nullcontext()
        ):
            self._fill_unsharded_params(result, is_gathered)
        self._to_state(ShardedState.UNSHARDED)
        copy_out_event = self.device_handle.Event()
        copy_out_event.record()
        if in_forward and is_gathered and result.all_gather_work is None:
            # See [Note: Freeing the gather buffer late]
            self.comm_ctx.all_gather_state = AllGatherState(result, copy_out_event)
        else:
            # In backward the copy-out runs beside a reduce-scatter anyway
            self._wait_all_gather_streams_on_event(copy_out_event)
        self._all_gather_result = None

    def _fill_unsharded_params(self, result: AllGatherResult, is_gathered: bool):
        if is_gathered:
            group = self._all_gather_process_group
            try:
                with self._range("FSDP::all_gather_copy_out"):
                    foreach_all_gather_copy_out(result, self.fsdp_params, group)
            except BaseException as error:
                self._agreement.tell(error)
                raise
        else:
            unshard_single_rank(self.fsdp_params, self.device)
        self.fsdp_params.init_unsharded_params()

    def _wait_all_gather_streams_on_event(self, event: torch.Event | None):
        ctx = self.comm_ctx
        # No streams yet if users unshard before the first forward
        if event is not None and hasattr(ctx, "all_gather_stream"):
            ctx.all_gather_copy_in_stream.wait_event(event)
            ctx.all_gather_stream.wait_event(event)

    def _order_gathers_after_reshard(self) -> None:
        # The shards to gather were written in the current stream
        self._wait_all_gather_streams_on_event(self._reshard_after_forward_event)
        self._reshard_after_forward_event = None

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
        elif self._reshard_after_forward or not after_forward:
            self._to_state(ShardedState.SHARDED)

    # Runtime: forward #
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        look_for_traces()
        with self._hook_range("FSDP::pre_forward"):
            # A unit of several modules comes here for each of them, and one
            # post-backward is enough
            is_first_module = self._training_state != TrainingState.FORWARD
            self._training_state = TrainingState.FORWARD
            self._unshard_now()
            if is_first_module:
                args, kwargs = self._register_post_backward_hook(args, kwargs)
            return args, kwargs

    def post_forward(self, module: nn.Module, input: Any, output: Any):
        with self._hook_range("FSDP::post_forward"):
            # Activation checkpointing around the unit runs its forward again
            # in backward. That one keeps the parameters, which backward is
            # about to use, and is not a forward to prefetch for.
            if not is_bw():
                self._record_post_forward()
                self.reshard()
            self._training_state = TrainingState.IDLE
        return output

    def _record_post_forward(self) -> None:
        # Once for each forward: each has a pre-backward of its own
        order = self.comm_ctx.post_forward_order
        self._post_forward_indices.append(len(order))
        order.append(self)

    # Runtime: backward #
    def pre_backward(self, default_prefetch: bool, *unused: Any):
        if self._training_state == TrainingState.PRE_BACKWARD:
            return
        with self._hook_range("FSDP::pre_backward"):
            self._training_state = TrainingState.PRE_BACKWARD
            self._unshard_now()
            if default_prefetch:
                self._backward_prefetch()

    @_untraced
    def post_backward(self, *unused: Any):
        """
        Reshards the parameters and reduces their gradients, as well as what
        earlier microbatches left to reduce. Called again it finds nothing.
        """
        self._log_hook("FSDP::post_backward")
        # In a unit of several modules of which some did not run, forward never
        # ended for the unit and no pre-backward was registered
        is_partial_forward = (
            len(self.modules) > 1 and self._training_state == TrainingState.FORWARD
        )
        self._training_state = TrainingState.POST_BACKWARD
        self.fsdp_params.follow()
        with self._range("FSDP::post_backward_accumulate"):
            for fsdp_param in self.fsdp_params:
                if fsdp_param.unsharded_accumulated_grad is not None:
                    fsdp_param.accumulate_unsharded_grad_if_needed()
        with self._range("FSDP::post_backward_reshard"):
            # Taken first: with the parameters goes the way to their gradients
            grads = self._take_unsharded_grads() if self.reduce_grads else None
            if self.reshard_after_backward:
                self.reshard()
            if grads is None:
                self._keep_unsharded_grads()
                return
        self._recycle_reduce_scatter_inputs()
        buckets = self._get_buckets(grads)
        if not buckets:
            return
        self._check_reductions(buckets)
        try:
            with self._range("FSDP::post_backward_reduce"):
                self._wait_for_post_backward()
                self._reduce_buckets(buckets, grads)
        except BaseException as error:
            self._agreement.tell(error, buckets)
            raise
        if is_partial_forward:
            # Autograd goes on with the unit's other modules. Their kernels
            # must not be handed memory that this reduction still reads or
            # writes, so the current stream waits for all of it.
            self._wait_current_stream(self._post_reduce_event)

    def _keep_unsharded_grads(self) -> None:
        """Keeps the gradients on the unsharded parameters, in the reduce dtype."""
        for fsdp_param in self.fsdp_params:
            if not hasattr(fsdp_param, "_unsharded_param"):
                continue  # has not been unsharded yet
            grad = fsdp_param.unsharded_param.grad
            if grad is not None and grad.is_floating_point():  # see `reduce_dtype_of`
                fsdp_param.to_accumulated_grad_if_needed()

    def _take_unsharded_grads(self) -> list[torch.Tensor | None]:
        """
        Takes each parameter's gradient away from it, None where there is none
        to reduce: kept from earlier microbatches, or new, or zeros.
        """
        grads: list[torch.Tensor | None] = []
        for fsdp_param in self.fsdp_params:
            param: nn.Parameter | None = getattr(fsdp_param, "_unsharded_param", None)
            if param is None:  # has not been unsharded yet
                grads.append(None)
                continue
            grad = param.grad
            if (
                grad is None
                or fsdp_param.unsharded_accumulated_grad is not None
                or fsdp_param.is_dtensor
            ):
                grad = self._take_unusual_grad(fsdp_param, param)
            else:
                param.grad = None
            grads.append(grad)
        return grads

    def _take_unusual_grad(
        self, fsdp_param: FSDPParam, unsharded_param: nn.Parameter
    ) -> torch.Tensor | None:
        if (grad := fsdp_param.unsharded_accumulated_grad) is not None:
            fsdp_param.unsharded_accumulated_grad = None
            return fsdp_param._get_grad_inner_tensor(grad)
        if (grad := unsharded_param.grad) is not None:
            unsharded_param.grad = None
            return fsdp_param._get_grad_inner_tensor(grad)
        if self.reduce_scatter_unused_params and unsharded_param.requires_grad:
            return fsdp_param.unsharded_zero_grad_data
        return None

    def _recycle_reduce_scatter_inputs(self) -> None:
        """
        Drops the reduce-scatter inputs of earlier post-backwards until there
        is room for one more, the oldest first, each after its event.

        Once for all groups of a module, at the one that comes first, whichever that
        is: waiting for each of them would run their reduce-scatters one after the
        other. A group that comes again, or after one of another module, is the first
        of the next time.
        """
        groups = self.comm_ctx.reducing_groups
        if groups and groups[0].modules is self.modules and self not in groups:
            groups.append(self)
            return
        self.comm_ctx.reducing_groups = [self]
        states = self.comm_ctx.reduce_scatter_states
        excess = len(states) + 1 - self.comm_ctx.reduce_scatter_max_input_buffers
        if excess <= 0:
            return
        with range_of(f"FSDP::post_backward_rs_wait ({self._module_fqn})"):
            for state in states[:excess]:
                self._wait_current_stream(state.event)
            del states[:excess]

    def _get_buckets(self, grads: Sequence[torch.Tensor | None]) -> list[BucketParams]:
        """
        Returns one list of parameters for each reduction to run, in the order
        that all ranks run them in.
        """
        dtypes = tuple([None if grad is None else grad.dtype for grad in grads])
        if self._partial_reduces:
            reduce_dtypes = self._align_partial_reduces(self._reduce_dtypes(dtypes))
            buckets = self._plan_buckets(reduce_dtypes)
        elif (kept := self.fsdp_params.buckets.get(dtypes)) is not None:
            return kept
        else:
            buckets = self._plan_buckets(self._reduce_dtypes(dtypes))
            if len(self.fsdp_params.buckets) >= _MAX_CACHED_PATTERNS:
                self.fsdp_params.buckets.clear()
            self.fsdp_params.buckets[dtypes] = buckets
        if self._partial_reduces and self.all_reduce_grads:
            # Those without a gradient now may have parts of earlier microbatches
            fresh = [params.bucket.dtype for params in buckets]
            kept = [dtype for dtype in self._partial_reduces if dtype not in fresh]
            empty = [self._bucket_params(ReduceBucket(dtype, ())) for dtype in kept]
            buckets = sorted(buckets + empty, key=lambda p: dtype_rank(p.bucket.dtype))
        return buckets

    def _reduce_dtypes(
        self, grad_dtypes: Sequence[torch.dtype | None]
    ) -> tuple[torch.dtype | None, ...]:
        """Returns what each parameter's gradient is reduced in, if it has one."""
        return tuple(
            None
            if dtype is None
            else reduce_dtype_of(dtype, fsdp_param.mp_policy.reduce_dtype)
            for dtype, fsdp_param in zip(grad_dtypes, self.fsdp_params)
        )

    def _check_reductions(self, buckets: list[BucketParams]) -> None:
        """Raises if the ranks that are about to reduce ``buckets`` disagree."""
        if (group := self._reduce_scatter_group) is not None:
            self._agreement.check_reduction(group, buckets)
        if self.all_reduce_grads and (group := self._all_reduce_group) is not None:
            if self._partial_reduces:
                kept = [p.bucket for p in self._partial_reduces.values()]
                buckets = buckets + [BucketParams((), bucket) for bucket in kept]
            self._agreement.check_reduction(group, buckets)

    def _plan_buckets(
        self, reduce_dtypes: Sequence[torch.dtype | None]
    ) -> list[BucketParams]:
        slots, slot_dtypes = [], []
        for i, (fsdp_param, dtype) in enumerate(zip(self.fsdp_params, reduce_dtypes)):
            if dtype is not None:
                shard_numel = fsdp_param.padded_sharded_param_size.numel()
                grad_dtype = grad_dtype_of(fsdp_param)
                slots.append(ReduceSlot(i, grad_dtype, shard_numel))
                slot_dtypes.append(dtype)
        return [self._bucket_params(b) for b in plan_buckets(slots, slot_dtypes)]

    def _keep_partial_reduce(self, output: torch.Tensor) -> None:
        """Takes ``output`` (1D) for what all trainable parameters have summed to."""
        kept = self._partial_reduces.get(output.dtype)
        if kept is None or kept.bucket.shard_numel != output.numel():
            dtypes = [
                dtypes_of(p).reduce if p.sharded_param.requires_grad else None
                for p in self.fsdp_params
            ]
            buckets = [params.bucket for params in self._plan_buckets(dtypes)]
        else:
            buckets = [kept.bucket]
        for bucket in buckets:
            if (bucket.dtype, bucket.shard_numel) == (output.dtype, output.numel()):
                self._partial_reduces = {bucket.dtype: PartialReduce(bucket, output)}
                return
        wanted = [f"{bucket.shard_numel} of {bucket.dtype}" for bucket in buckets]
        raise ValueError(
            f"_partial_reduce_output of unit '{self._unit_name}' got {output.numel()} "
            f"elements of {output.dtype}, but the unit reduces {', '.join(wanted)}"
        )

    def _align_partial_reduces(
        self, reduce_dtypes: tuple[torch.dtype | None, ...]
    ) -> tuple[torch.dtype | None, ...]:
        """
        Lets a parameter whose reduce dtype has changed since a part of it was
        kept go on in the wider of both, and returns the dtypes to reduce in.
        """
        aligned = list(reduce_dtypes)
        slots, slot_dtypes, is_moved = [], [], False
        for kept_dtype, partial in self._partial_reduces.items():
            for slot in partial.bucket.slots:
                fresh_dtype = reduce_dtypes[slot.param] or kept_dtype
                dtype = torch.promote_types(kept_dtype, fresh_dtype)
                if reduce_dtypes[slot.param] is not None:
                    aligned[slot.param] = dtype
                slots.append(slot)
                slot_dtypes.append(dtype)
                is_moved |= dtype != kept_dtype
        if is_moved:
            kept = [*self._partial_reduces.values()]
            buckets = plan_buckets(slots, slot_dtypes)
            dtypes = [*self._partial_reduces, *slot_dtypes]
            divisors = {dtype: self._scatter_divisor(dtype) for dtype in dtypes}
            with self.device_handle.stream(self.comm_ctx.reduce_scatter_stream):
                merged = [PartialReduce.merge(b, kept, divisors) for b in buckets]
            self._partial_reduces = {m.bucket.dtype: m for m in merged}
        return tuple(aligned)

    def _scatter_divisor(self, dtype: torch.dtype) -> float:
        factors, custom = self._divide_factors(dtype), self.gradient_divide_factor
        return scatter_divisor(self._reduce_scatter_group, factors, custom)

    def _divide_factors(self, dtype: torch.dtype):
        return _get_gradient_divide_factors(
            self._reduce_scatter_group,
            self._all_reduce_group,
            dtype,
            self.device.type,
            self.gradient_divide_factor,
            self.force_sum_reduction_for_comms,
        )

    def _bucket_params(self, bucket: ReduceBucket) -> BucketParams:
        members = (self.fsdp_params[slot.param] for slot in bucket.slots)
        return BucketParams(members, bucket)

    def _reduce_buckets(
        self, buckets: list[BucketParams], grads: list[torch.Tensor | None]
    ) -> None:
        """Runs each bucket's reduction and keeps what it needs until its events."""
        inputs: list[torch.Tensor] = []
        scattered: torch.Event | None = None
        for params in buckets:
            if inputs and not _allocates_anew(self._reduce_scatter_comm):
                # It may give the next bucket the buffer that this one's
                # reduce-scatter still reads
                self._wait_current_stream(scattered)
            bucket_grads: list[torch.Tensor] = []
            for slot in params.bucket.slots:
                bucket_grads.append(cast(torch.Tensor, grads[slot.param]))
                grads[slot.param] = None  # the bucket owns it from here on
            params, partial = self._take_partial_reduce(params)
            result = self._reduce_bucket(params, bucket_grads, partial)
            (reduce_input, event, stream, done, shared, shared_event, kept) = result
            self._post_reduce_event = done
            self.comm_ctx._last_post_reduce_events[stream] = done
            if reduce_input is not None:
                inputs.append(reduce_input)
                scattered = event
            if shared is not None:
                self._all_reduce_states.append(AllReduceState(shared, shared_event))
            if kept is not None:
                dtype = params.bucket.dtype
                self._partial_reduces[dtype] = PartialReduce(params.bucket, kept)
        if inputs:
            state = ReduceScatterState(tuple(inputs), scattered)
            self.comm_ctx.reduce_scatter_states.append(state)

    def _reduce_bucket(
        self,
        params: BucketParams,
        grads: list[torch.Tensor],
        partial: torch.Tensor | None,
    ):
        return foreach_reduce(
            params,
            grads,
            self._reduce_scatter_group,
            self.comm_ctx.reduce_scatter_stream,
            self._reduce_scatter_comm,
            params.grad_dtype,
            params.bucket.dtype,
            self.device,
            self.gradient_divide_factor,
            self._all_reduce_group,
            self._get_all_reduce_stream(self._all_reduce_group is not None),
            self.all_reduce_grads,
            partial,
            self._all_reduce_hook,
            self.force_sum_reduction_for_comms,
        )

    def _get_all_reduce_stream(self, is_replicated: bool) -> torch.Stream:
        if is_replicated or self._all_reduce_hook_stream is None:
            return self.comm_ctx.all_reduce_stream
        if self._all_reduce_hook is None:
            raise AssertionError(
                "all reduce hook stream is specified but hook itself is missing: "
                f"call set_all_reduce_hook with a hook on module '{self._module_fqn}'"
            )
        return self._all_reduce_hook_stream

    def _take_partial_reduce(
        self, params: BucketParams
    ) -> tuple[BucketParams, torch.Tensor | None]:
        """
        Takes what earlier microbatches left for a bucket, together with the
        bucket's parameters, to which those that only have a part of it are
        appended.
        """
        bucket = params.bucket
        partial = self._partial_reduces.pop(bucket.dtype, None)
        if partial is None:
            return params, None
        extended = extend_bucket(bucket, partial.bucket)
        if extended.slots != partial.bucket.slots:
            with self.device_handle.stream(self.comm_ctx.reduce_scatter_stream):
                partial = PartialReduce.merge(extended, [partial])
        return self._bucket_params(extended), partial.output

    def finalize_backward(self):
        """Orders the current stream behind all that backward has started."""
        for event in self.comm_ctx._last_post_reduce_events.values():
            self._wait_current_stream(event)
        self.comm_ctx._last_post_reduce_events.clear()
        self._post_reduce_event = None
        self._all_reduce_states.clear()
        for fsdp_param in self.fsdp_params:
            if (event := fsdp_param.grad_offload_event) is not None:
                event.synchronize()  # the optimizer reads it on the CPU
                fsdp_param.grad_offload_event = None
        # A prefetch of a group that backward then did not use
        self._drop_all_gather()
        self._post_forward_indices.clear()
        self.comm_ctx.reducing_groups.clear()

    def _reset_iter_state(self) -> None:
        """
        Gives up the iteration, after an exception in it: waits for what is in
        flight, drops it and what was accumulated, and reshards.
        """
        self._drop_all_gather()
        self._wait_for_post_backward()
        self._order_gathers_after_reshard()
        self._partial_reduces.clear()
        for fsdp_param in self.fsdp_params:
            fsdp_param.unsharded_accumulated_grad = None
            if hasattr(fsdp_param, "_unsharded_param"):
                fsdp_param.unsharded_param.grad = None
        self._post_forward_indices.clear()
        self._training_state = TrainingState.IDLE
        self._to_state(ShardedState.SHARDED)
        self._agreement.forget()
        self.comm_ctx.last_reduced.clear()
        self.comm_ctx.reducing_groups.clear()

    def _drop_all_gather(self) -> None:
        if self._all_gather_result is None:
            return
        self._wait_current_stream(self._all_gather_result.all_gather_event)
        work = self._all_gather_result.all_gather_work
        if isinstance(work, dist.distributed_c10d.Work):
            work.wait()
        self._all_gather_result = None

    def _wait_for_post_backward(self):
        """
        Waits for this group's own last reduction, if backward comes to it a
        second time, and lets go of its buffers.
        """
        self._wait_current_stream(self._post_reduce_event)
        self._post_reduce_event = None
        for state in self._all_reduce_states:
            self._wait_current_stream(state.event)
        self._all_reduce_states.clear()

    def _wait_current_stream(self, event: torch.Event | None) -> None:
        if event is not None:
            self.device_handle.current_stream().wait_event(event)

    # Runtime: prefetch #
    def _backward_prefetch(self) -> None:
        """
        Starts the gather of the groups whose forward came before this one's.

        Where a module has several groups, one for each mesh, backward comes to
        the last first. The last but one then prefetches all groups of the
        module before: any earlier and they would be unsharded for longer, any
        later and no reduce-scatter would be left to run beside their gather.
        """
        if self._training_state != TrainingState.PRE_BACKWARD:
            return
        if not self._post_forward_indices:
            return  # an earlier backward of the same forward took them
        index = self._post_forward_indices.pop()
        earlier = reversed(self.comm_ctx.post_forward_order[:index])
        if self._num_param_groups == 1:
            if (target := next(earlier, None)) is not None:
                self._prefetch_unshard(target, "backward")
            return
        if self._param_group_index != 1:
            return
        target_modules: tuple[nn.Module, ...] | None = None
        for target in earlier:
            if target.modules is self.modules:
                continue
            if target_modules is None:
                target_modules = target.modules
            if target.modules is not target_modules:
                return
            self._prefetch_unshard(target, "backward")

    @staticmethod
    def _prefetch_unshard(
        target_fsdp_param_group: FSDPParamGroup, pass_type: str
    ) -> None:
        """Starts a group's gather as if in its own forward or backward."""
        states = {
            "forward": TrainingState.FORWARD,
            "backward": TrainingState.PRE_BACKWARD,
        }
        if pass_type not in states:
            raise ValueError(
                f"Unknown pass type: {pass_type}, expects one of {[*states]}"
            )
        target = target_fsdp_param_group
        label = f"FSDP::{pass_type}_prefetch for {target._module_fqn}"
        with range_of(label), target.use_training_state(states[pass_type]):
            try:
                target.unshard(target.unshard_async_op)
            except AttributeError as error:
                if hasattr(target.comm_ctx, "all_gather_stream"):
                    raise
                raise_with(
                    error,
                    f"Unit '{target._unit_name}' cannot be prefetched before a root "
                    "that has it ran its forward: prefetch units of the same root",
                )

    # Sharded state #
    def _to_state(self, state: ShardedState) -> None:
        """Brings all parameters, and with them the group, to ``state``."""
        if self._sharded_state is state:
            return
        self.fsdp_params.to_state(state)
        self._sharded_state = state

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

    # Hook registration #
    def _register_post_backward_hook(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """
        Passes the inputs that need gradients through one autograd node, whose
        backward runs when the gradients of all of them are there, and with
        them those of the unit's parameters.
        """
        if not torch.is_grad_enabled():
            return args, kwargs
        tensors = collect_grad_tensors((args, kwargs))
        if not tensors:
            return args, kwargs  # the root's final callback comes to this group
        passed = RegisterPostBackwardFunction.apply(self, *tensors)
        args, kwargs = replace_grad_tensors((args, kwargs), iter(passed))
        return args, kwargs

    def _register_state_dict_hooks(self) -> None:
        """Makes sure that a state dict is taken from, and loaded to, the shards."""
        save_handles = self._module_to_pre_save_state_dict_hook_handle
        load_handles = self._module_to_pre_load_state_dict_hook_handle
        if save_handles:
            return

        def to_sharded_hook(*args: Any, **kwargs: Any) -> None:
            self._to_state(ShardedState.SHARDED)

        modules = [fsdp_param._module_info.module for fsdp_param in self.fsdp_params]
        for module in dict.fromkeys(modules):
            save_handles[module] = module.register_state_dict_pre_hook(to_sharded_hook)
            load_handles[module] = module._register_load_state_dict_pre_hook(
                to_sharded_hook
            )

    # Meshes and process groups #
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
    def _gather_world_size(self) -> int:
        if isinstance(self.mesh_info, FSDPMeshInfo):
            return self._all_gather_process_group.size()
        return 1  # replicated only

    @property
    def _all_gather_process_group(self) -> dist.ProcessGroup:
        if self.is_sharded_post_forward:
            return _as_mesh(
                self.post_forward_mesh_info, FSDPMeshInfo
            ).shard_process_group
        return _as_mesh(self.mesh_info, FSDPMeshInfo).shard_process_group

    @property
    def _reduce_scatter_process_group(self) -> dist.ProcessGroup:
        mesh_info = _as_mesh(self.mesh_info, FSDPMeshInfo)
        return mesh_info.reduce_scatter_process_group or mesh_info.shard_process_group

    @property
    def _all_reduce_process_group(self) -> dist.ProcessGroup:
        return _as_mesh(self.mesh_info, DDPMeshInfo).replicate_process_group

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
        Gives reduce-scatter a process group of its own, so that it can overlap
        with all-gather on the wire, or the shared one again.

        Args:
            new_groups: By shard ranks, what one call over many groups has made
                so far: meshes over the same ranks share one communicator.
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

    # Labels and checks #
    def _range(self, name: str) -> contextlib.AbstractContextManager:
        """Returns a profiler range named after the step and the unit."""
        if not is_observed():
            return NO_RANGE  # without the label
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

    @property
    def _unit_name(self) -> str:
        # The root's is empty
        return self._module_fqn or type(self.modules[0]).__name__

    def _name_of(self, i: int) -> str:
        """Returns a parameter's name, which is within the unit before lazy init."""
        if (fqn := self.fsdp_params[i]._param_fqn) is not None:
            return fqn
        if self._module_fqn is None or len(self.modules) > 1:
            return self._param_names[i]
        within = self._name_within(i)
        return f"{self._module_fqn}.{within}" if self._module_fqn else within

    def _name_within(self, i: int) -> str:
        """Returns a parameter's name in the unit's module, without that one's class."""
        within, _, _ = self._param_names[i].partition(" of ")
        return within

    def _validate_no_meta_params(self):
        on_meta = [
            self._name_of(i)
            for i, fsdp_param in enumerate(self.fsdp_params)
            if fsdp_param.sharded_param.device.type == "meta"
        ]
        if on_meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before "
                "training, but the following were still on meta device: "
                f"{on_meta}\nCall module.to_empty(device=...) and then initialize "
                "them, e.g. with each module's reset_parameters(), or load them"
            )

    def _validate_cpu_offload_params(self):
        if not isinstance(self.offload_policy, CPUOffloadPolicy):
            return
        elsewhere = [
            (self._name_of(i), fsdp_param.sharded_param.device)
            for i, fsdp_param in enumerate(self.fsdp_params)
            if fsdp_param.sharded_param.device.type != "cpu"
        ]
        if elsewhere:
            raise RuntimeError(
                "FSDP parameters should be materialized on CPU when enabling CPU "
                f"offloading, but these are on other devices: {elsewhere}\nLoad a "
                'CPU state dict or call module.to_empty(device="cpu")'
            )

    def _validate_reduce_scatter_max_input_buffers(self):
        wanted = self.reduce_scatter_max_input_buffers
        comm = self._reduce_scatter_comm
        # Called before the shared context is set up, if users unshard first,
        # so the group's own wish is what there is to check
        if wanted > 1 and isinstance(comm, SymmMemReduceScatter):
            raise ValueError(
                "set_reduce_scatter_max_input_buffers(>1) is not supported with the "
                f"symmetric-memory reduce-scatter comm, but got {wanted} for module "
                f"'{self._module_fqn}' using {type(comm).__name__}: its pool reuses "
                "one buffer, and each one kept back would register more memory. "
                "Set 1, or use the default reduce-scatter comm"
            )


def _allocates_anew(comm: ReduceScatter) -> bool:
    """Whether no buffer from ``comm`` shares memory with one that is still held."""
    mixins = (DefaultAllocMixin, ProcessGroupAllocMixin, SymmMemAllocMixin)
    return any(type(comm).allocate is mixin.allocate for mixin in mixins)


def _as_mesh(mesh_info: DataParallelMeshInfo | None, kind: type) -> Any:
    if not isinstance(mesh_info, kind):
        raise AssertionError(
            f"Expected mesh_info to be {kind.__name__}, got {type(mesh_info).__name__}"
        )
    return mesh_info


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


def _planned_for(fsdp_param: FSDPParam) -> tuple[Any, ...]:
    """Returns what the place of a parameter's gradient in a bucket depends on."""
    return (
        fsdp_param.mp_policy.reduce_dtype,
        grad_dtype_of(fsdp_param),
        fsdp_param.padded_sharded_param_size,
    )


class _Place(NamedTuple):
    """Where a unit's module, or one below it, has a parameter."""

    fqn: str  # within the unit
    module: nn.Module
    attr: str
    param: nn.Parameter


def _params_of_unit(modules: tuple[nn.Module, ...]) -> Iterator[_Place]:
    """Yields the parameters of the modules but for those that are in other units."""

    def walk(module: nn.Module, prefix: str) -> Iterator[_Place]:
        for name, param in module._parameters.items():
            if param is not None:
                yield _Place(f"{prefix}{name}", module, name, param)
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


class RegisterPostBackwardFunction(torch.autograd.Function):
    """
    The identity on a unit's inputs, all of which require gradients. Its
    backward is the unit's post-backward.
    """

    generate_vmap_rule = True

    @classmethod
    def apply(cls, param_group: FSDPParamGroup, *inputs: torch.Tensor):
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
    def forward(param_group: FSDPParamGroup, *inputs: torch.Tensor):
        return inputs

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.param_group = inputs[0]

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        ctx.param_group.post_backward()
        return (None, *grads)

    @staticmethod
    # pyrefly: ignore [bad-override]
    def jvp(
        ctx: Any,
        param_group_tangent: object,
        *grad_inputs: Unpack[_GradInputs],
    ) -> tuple[Unpack[_GradInputs]]:
        # The group is no tensor and has no tangent. Post-backward comes from
        # the pre-backward hook on the outputs, after primals and tangents.
        return grad_inputs
