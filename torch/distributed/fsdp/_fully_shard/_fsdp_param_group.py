"""
When a unit's data moves: the states of a parameter group, its hooks, its prefetching
and its waits.

What moves is in :mod:`_fsdp_collectives`, where it lies in :mod:`_fsdp_layout`, which
gradients there are in :mod:`_fsdp_grads`, and what all groups share in
:mod:`_fsdp_context`.

[Note: Who waits for whom]
Data passes from stream to stream, and each handover is one of these waits:

- optimizer -> copy-in: the root's pre-forward makes both gather streams wait.
- copy-in -> all-gather: ``foreach_all_gather``, stream to stream.
- all-gather -> copy-out: ``foreach_all_gather_copy_out`` waits for the event.
- copy-out -> next copy-in: the buffer of a gather is given back to the
  allocator only after both gather streams wait for the copy-out's event. In
  forward this is put off to the next group, see
  [Note: Freeing the gather buffer late].
- gradients -> reduce-scatter: ``reduce_buckets``, stream to stream. With
  ``grad_comm_dtype`` that stream has an all-to-all and the sum of what came in, which
  is allocated there. The sum overwrites the reduce-scatter's input.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, NoReturn
from typing_extensions import TypeVarTuple, Unpack

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._common_utils import (
    collect_grad_tensors,
    replace_grad_tensors,
)
from torch.distributed.fsdp.api import BackwardPrefetch

from ._fsdp_api import MixedPrecisionPolicy, OffloadPolicy
from ._fsdp_collectives import (
    _default_all_gather_output_fn,
    _default_reduce_scatter_input_fn,
    AllGatherOutputFn,
    AllGatherResult,
    BucketGrads,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
    prepare_inputs,
    reduce_buckets,
    ReduceResult,
    ReduceScatterInputFn,
    Reduction,
    unshard_single_rank,
)
from ._fsdp_common import (
    _disable_functorch_if_active,
    DataParallelMeshInfo,
    FSDPMeshInfo,
    is_bw,
    ShardPlacementFnResult,
    TrainingState,
)
from ._fsdp_comms import allocates_anew, holds_one_input
from ._fsdp_context import (  # noqa: F401  (all importable from here, as in the release)
    _GradientReductionState,
    AllGatherState,
    AllReduceState,
    FSDPCommContext,
    NamedTuple,
    ReduceScatterState,
)
from ._fsdp_doors import DescribedUnit, doors, Step
from ._fsdp_fast_paths import _dynamo_disable, are_leaves
from ._fsdp_grads import (
    accumulate_grads,
    begin_backward,
    drop_grads,
    end_backward,
    get_buckets,
    keep_grads,
    PartialReduce,
    PartialReduces,
    take_grads,
)
from ._fsdp_layout import ReduceBucket
from ._fsdp_observers import look_for_traces, NO_RANGE, range_of
from ._fsdp_param import ShardedState
from ._fsdp_registrations import (  # noqa: F401  (as above)
    _get_param_module_infos,
    _named_parameters_with_duplicates,
    CPUOffloadPolicy,
    FSDPParam,
    functools,
    ParamModuleInfo,
    TYPE_CHECKING,
    UnitRegistrations,
)
from ._fsdp_release import (
    FOLLOWS_GRAD_DTYPE,
    not_type_checked,
    register_autograd_function,
    restore_spmd_types,
)
from ._fsdp_settings import (  # noqa: F401  (as above)
    AllGather,
    as_mesh,
    DDPMeshInfo,
    DefaultAllGather,
    DefaultReduceScatter,
    HSDPMeshInfo,
    Literal,
    logger,
    logging,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    record_function,
    ReduceScatter,
    SymmMemAllGather,
    SymmMemReduceScatter,
)
from ._fsdp_unit import UnitBucket


_GradInputs = TypeVarTuple("_GradInputs")

# That a group is in while it is gathered ahead of its forward or backward
_STATE_OF_PASS = {
    "forward": TrainingState.FORWARD,
    "backward": TrainingState.PRE_BACKWARD,
}

# What others put in their places is called with the release's arguments
_OWN_GATHER, _OWN_REDUCE = foreach_all_gather, foreach_reduce


def _collect_from_flat(inputs: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in inputs if getattr(value, "requires_grad", False)]


def _replace_in_flat(inputs: Sequence[Any], tensors: Iterator[torch.Tensor]) -> list:
    return [
        next(tensors) if getattr(value, "requires_grad", False) else value
        for value in inputs
    ]


def _is_in_function_forward() -> bool:
    """
    Whether this is the forward of an autograd function: gradients are off, but reentrant
    checkpointing may run it again with gradients. Forward-mode gradients are off as well,
    which ``no_grad`` leaves on.
    """
    is_inference = torch.is_inference_mode_enabled()
    return not torch._C._is_fwd_grad_enabled() and not is_inference


class FSDPParamGroup(UnitRegistrations):
    """The parameters of a unit that are gathered and reduced together."""

    # Looking for replaced sharded parameters is costly, so only lazy init
    # does it, and only once
    _reset_sharded_params: bool = False

    # State of the iteration:
    _training_state: TrainingState = TrainingState.IDLE
    # The same as every parameter's own
    _sharded_state: ShardedState = ShardedState.SHARDED
    _all_gather_result: AllGatherResult | None = None
    # After resharding to a smaller mesh, which the next gather reads from
    _reshard_after_forward_event: torch.Event | None = None
    # After this group's last reduction, including what follows it
    _post_reduce_event: torch.Event | None = None
    # What others may put in place of the copies' own steps (2.15)
    _all_gather_output_fn: AllGatherOutputFn = staticmethod(
        _default_all_gather_output_fn
    )
    _prepare_reduce_scatter_inputs: ReduceScatterInputFn = staticmethod(
        _default_reduce_scatter_input_fn
    )
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
        super().__init__(
            modules, mesh_info, post_forward_mesh_info, device, offload_policy
        )
        self._shard_params(params, shard_placement_fn, mp_policy)
        self.comm_ctx = FSDPCommContext()
        # The places of this group's forwards in the shared order
        self._post_forward_indices: list[int] = []
        # Groups to gather when this one's backward is over (`BACKWARD_POST`)
        self._to_prefetch_late: list[FSDPParamGroup] = []
        self._all_reduce_states: list[AllReduceState] = []
        # Of microbatches whose all-reduce was put off
        self._partial_reduces = PartialReduces()
        self._agreement = doors.agreement(self._describe)

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
            self._take_registered()
            self._reset_sharded_params = True
            if self._param_group_index == 0:
                self._warn_of_late_params()
        self._check_materialized()
        self._validate_reduce_scatter_max_input_buffers()
        self._take_dtypes()
        self._register_state_dict_hooks()
        if is_first:
            doors.show_layout(self._describe)

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
        if (group := self._gather_group) is None:
            # Nothing moves until `wait_for_unshard`
            nothing = torch.empty(0, device=self.device)
            self._all_gather_result = AllGatherResult(nothing, None, None, [], [], [])
            return
        streams = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        if not self._agreement.on_gathers and foreach_all_gather is _OWN_GATHER:
            self._agreement.check_gather(group, self._gather_comm)
        try:
            with self._range("FSDP::all_gather"):
                self._all_gather_result = foreach_all_gather(
                    self.fsdp_params,
                    group,
                    async_op,
                    *streams,
                    self.device,
                    self._gather_comm,
                )
        except BaseException as error:
            try:
                self._wait_for_what_was_started(*streams)
            finally:
                self._raise_explained(error)

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
        if in_forward:
            self.comm_ctx.release_all_gather_state_for_comm_reuse()
        group = self._gather_group
        # The unsharded parameters are made once and outlive an inference mode
        # that is on now: made as inference tensors they could never train
        is_inference = torch.is_inference_mode_enabled()
        try:
            with torch.inference_mode(False) if is_inference else NO_RANGE:
                self._fill_unsharded_params(result, group)
        except BaseException as error:
            self._raise_explained(error)
        self._to_state(ShardedState.UNSHARDED)
        copy_out_event = self.device_handle.Event()
        copy_out_event.record()
        if in_forward and group is not None and result.all_gather_work is None:
            # See [Note: Freeing the gather buffer late]
            self.comm_ctx.all_gather_state = AllGatherState(result, copy_out_event)
        else:
            # In backward the copy-out runs beside a reduce-scatter anyway
            self.comm_ctx.wait_all_gather_streams_on_event(copy_out_event)
        self._all_gather_result = None

    def _fill_unsharded_params(
        self, result: AllGatherResult, group: dist.ProcessGroup | None
    ) -> None:
        if group is not None:
            options: dict[str, Any] = {}  # which older replacements do not take
            if self._all_gather_output_fn is not _default_all_gather_output_fn:
                options["all_gather_output_fn"] = self._all_gather_output_fn
            with self._range("FSDP::all_gather_copy_out"):
                foreach_all_gather_copy_out(result, self.fsdp_params, group, **options)
        else:
            unshard_single_rank(self.fsdp_params, self.device)
        self.fsdp_params.init_unsharded_params()

    def _order_gathers_after_reshard(self) -> None:
        # The shards to gather were written in the current stream
        self.comm_ctx.wait_all_gather_streams_on_event(
            self._reshard_after_forward_event
        )
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
            self._keep_grad_dtypes()
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
        # A unit of several modules comes here for each of them, and one
        # post-backward is enough
        is_first_module = self._training_state != TrainingState.FORWARD
        if is_first_module:
            self._look_for_traces_once_per_forward()
        with self._hook_range("FSDP::pre_forward"):
            self._training_state = TrainingState.FORWARD
            self._unshard_now()
            restore_spmd_types(self.fsdp_params)
            if is_first_module:
                args, kwargs = self._register_post_backward_hook(args, kwargs)
            return args, kwargs

    def _look_for_traces_once_per_forward(self) -> None:
        # A group that comes again is in another forward than when it came before. In
        # the first forward, lazy init has looked.
        if self._num_forwards == self.comm_ctx.num_forwards:
            self.comm_ctx.num_forwards += 1
            look_for_traces()
        self._num_forwards = self.comm_ctx.num_forwards

    @not_type_checked
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
            self._unshard_now()
            begin_backward(self.fsdp_params, self.reduce_grads)
            if default_prefetch:
                self._backward_prefetch()

    @_dynamo_disable
    @not_type_checked
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
        if not FOLLOWS_GRAD_DTYPE:
            with self._range("FSDP::post_backward_accumulate"):
                accumulate_grads(self.fsdp_params)
        with self._range("FSDP::post_backward_reshard"):
            # Taken first: with the parameters goes the way to their gradients
            grads = None
            if self.reduce_grads:
                grads = take_grads(self.fsdp_params, self.reduce_scatter_unused_params)
            if self.reshard_after_backward:
                self.reshard()
            end_backward(self.fsdp_params)
            self._post_backward_pending = grads is None
            if grads is None:
                if not FOLLOWS_GRAD_DTYPE:
                    keep_grads(self.fsdp_params)
                return
        self.comm_ctx.recycle_reduce_scatter_inputs(self)
        buckets = self._get_buckets(grads)
        if not buckets:
            return
        self._check_reductions(buckets)
        with self._range("FSDP::post_backward_reduce"):
            self._wait_for_post_backward()
            self._reduce_buckets(buckets, grads)
        if is_partial_forward:
            # Autograd goes on with the unit's other modules. Their kernels
            # must not be handed memory that this reduction still reads or
            # writes, so the current stream waits for all of it.
            self._wait_current_stream(self._post_reduce_event)

    def _get_buckets(self, grads: Sequence[torch.Tensor | None]) -> list[UnitBucket]:
        """Returns the reductions to run, in the order that all ranks run them in."""
        if not self._partial_reduces:
            return get_buckets(self.fsdp_params, grads)
        with self.device_handle.stream(self.comm_ctx.reduce_scatter_stream):
            return self._partial_reduces.get_buckets(
                self.fsdp_params, grads, self._scatter_divisor, self.all_reduce_grads
            )

    def _check_reductions(self, buckets: list[UnitBucket]) -> None:
        """Raises if the ranks that are about to reduce ``buckets`` disagree."""
        if foreach_reduce is not _OWN_REDUCE:
            return  # another's may need no other ranks, as a comm of a class of its own
        if (group := self._reduce_scatter_group) is not None:
            self._agreement.check_reduction(group, buckets, self._scatter_comm)
        if self.all_reduce_grads and (group := self._all_reduce_group) is not None:
            if self._partial_reduces:
                kept = [p.bucket for p in self._partial_reduces.values()]
                buckets = buckets + [UnitBucket([], bucket, None) for bucket in kept]
            self._agreement.check_reduction(group, buckets)

    def _reduce_buckets(
        self, buckets: list[UnitBucket], grads: list[torch.Tensor | None]
    ) -> None:
        """Runs each bucket's reduction and keeps what it needs until its events."""
        reduction, comm = self._reduction(), self._scatter_comm
        one_by_one = holds_one_input(comm)
        batches = [buckets]
        if one_by_one or foreach_reduce is not _OWN_REDUCE:
            batches = [[unit_bucket] for unit_bucket in buckets]
            reuses = not allocates_anew(comm) and len(buckets) > 1
            reduction = reduction._replace(reuses_output=reuses)
        held: list[tuple[torch.Tensor, torch.Event | None]] = []
        for batch in batches:
            if held and one_by_one:
                self._wait_current_stream(held.pop()[1])
            held += self._reduce_batch(reduction, buckets, batch, grads)
        if held:
            inputs, events = zip(*held)
            stream = self.device_handle.current_stream()
            state = ReduceScatterState(inputs, events[-1], stream, self)
            self.comm_ctx.reduce_scatter_states.append(state)

    def _reduce_batch(
        self,
        reduction: Reduction,
        buckets: list[UnitBucket],
        batch: list[UnitBucket],
        grads: list[torch.Tensor | None],
    ) -> list[tuple[torch.Tensor, torch.Event | None]]:
        """Reduces some of the buckets, and returns the inputs with their events."""
        parts: list[BucketGrads] = []
        results: list[ReduceResult] = []
        try:
            parts.extend(self._take_part(reduction, b, grads) for b in batch)
            if foreach_reduce is _OWN_REDUCE:
                reduce_buckets(reduction, parts, results)
            else:
                results.append(self._call_replacement(reduction, *parts))
        except BaseException as error:
            failed, own_grads = len(parts), []
            if failed == len(batch):
                # Those that have not been copied in have their gradients still
                not_in = [i for i, part in enumerate(parts) if part.unsharded_grads]
                failed = not_in[0] if not_in else min(len(results), failed - 1)
                own_grads = parts[failed].unsharded_grads
            streams = reduction.reduce_scatter_stream, reduction.all_reduce_stream
            try:
                self._wait_for_what_was_started(*streams)
            finally:
                self._raise_explained(error, buckets, batch[failed], own_grads)
        for part, result in zip(parts, results):
            self._keep_result(part.bucket, result)
        return [
            (result.reduce_scatter_input, result.reduce_scatter_event)
            for result in results
            if result.reduce_scatter_input is not None
        ]

    def _take_part(
        self,
        reduction: Reduction,
        unit_bucket: UnitBucket,
        grads: list[torch.Tensor | None],
    ) -> BucketGrads:
        """Returns a bucket together with what earlier microbatches left for it."""
        own_grads: list[torch.Tensor] = []
        for slot in unit_bucket.bucket.slots:
            own_grads.append(cast(torch.Tensor, grads[slot.param]))
            grads[slot.param] = None  # the bucket owns it from here on
        if foreach_reduce is _OWN_REDUCE and not reduction.prepares_by_default:
            # Before what is left for it is added, which lies as it was prepared
            params, bucket, _ = unit_bucket
            bucket = prepare_inputs(reduction, bucket, params, own_grads)
            unit_bucket = unit_bucket._replace(bucket=bucket)
        partial = None
        if self._partial_reduces:
            with self.device_handle.stream(self.comm_ctx.reduce_scatter_stream):
                unit_bucket, partial = self._partial_reduces.take(
                    self.fsdp_params, unit_bucket
                )
        return BucketGrads(unit_bucket.params, unit_bucket.bucket, own_grads, partial)

    def _keep_result(self, bucket: ReduceBucket, result: ReduceResult) -> None:
        """Keeps what is needed until its events, but for the reduce-scatter's input."""
        self._post_reduce_event = result.post_reduce_event
        events = self.comm_ctx._last_post_reduce_events
        events[result.post_reduce_stream] = result.post_reduce_event
        if result.all_reduce_input is not None:
            state = AllReduceState(result.all_reduce_input, result.all_reduce_event)
            self._all_reduce_states.append(state)
        if (kept := result.partial_reduce_output) is not None:
            self._partial_reduces[bucket.key] = PartialReduce(bucket, kept)

    def _call_replacement(
        self, reduction: Reduction, part: BucketGrads
    ) -> ReduceResult:
        """Reduces a bucket by what others put in place of :func:`foreach_reduce`."""
        params, bucket, grads, partial = part
        grad_dtype = UnitBucket.of(self.fsdp_params, bucket).grad_dtype
        arguments = reduction.arguments(
            params, grads, grad_dtype, bucket.dtype, partial
        )
        return ReduceResult._make(foreach_reduce(*arguments, **reduction.options()))

    def _reduction(self) -> Reduction:
        all_reduce_group = self._all_reduce_group
        all_reduce_stream = self._all_reduce_hook_stream
        if all_reduce_stream is None or all_reduce_group is not None:
            all_reduce_stream = self.comm_ctx.all_reduce_stream
        elif self._reduce_hook is None:
            raise AssertionError(
                "all reduce hook stream is specified but hook itself is missing: "
                f"call set_all_reduce_hook with a hook on module '{self._module_fqn}'"
            )
        return Reduction(
            self.device,
            self._scatter_comm,
            self._reduce_scatter_group,
            self.comm_ctx.reduce_scatter_stream,
            all_reduce_group,
            all_reduce_stream,
            self._reduce_hook,
            self.all_reduce_grads,
            self._divide_factor,
            self.force_sum_reduction_for_comms,
            self._prepare_reduce_scatter_inputs,
        )

    def finalize_backward(self):
        """Orders the current stream behind all that backward has started."""
        self.comm_ctx.wait_current_stream_on_reductions()
        self._post_reduce_event = None
        self._all_reduce_states.clear()
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
        """
        Gives up the iteration, after an exception in it: waits for what is in
        flight, drops it and what was accumulated, and reshards.
        """
        self._drop_all_gather()
        self._wait_for_post_backward()
        self._order_gathers_after_reshard()
        self._partial_reduces.clear()
        self._post_backward_pending = False
        drop_grads(self.fsdp_params)
        self._post_forward_indices.clear()
        self._to_prefetch_late.clear()
        self._training_state = TrainingState.IDLE
        self._to_state(ShardedState.SHARDED)
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

    def _wait_for_what_was_started(
        self, stream: torch.Stream, last_stream: torch.Stream
    ) -> None:
        """
        Orders what comes after an error behind what was started before it, whose
        memory, allocated in ``stream`` or the current one, nothing holds any more.
        """
        stream.wait_stream(last_stream)
        self.device_handle.current_stream().wait_stream(stream)

    def _wait_current_stream(self, event: torch.Event | None) -> None:
        if event is not None:
            self.device_handle.current_stream().wait_event(event)

    # Runtime: prefetch #
    def _backward_prefetch(self) -> None:
        """Starts the gathers that are next in backward, beside this group's."""
        if self._training_state != TrainingState.PRE_BACKWARD:
            return
        if not self._post_forward_indices:
            return  # an earlier backward of the same forward took them
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
        previous, target._training_state = target._training_state, state
        try:
            with range_of(f"FSDP::{pass_type}_prefetch for {target._module_fqn}"):
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

    # Hooks and process groups #
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
        inputs = [*args, *kwargs.values()]
        is_flat = are_leaves(inputs)
        collect = _collect_from_flat if is_flat else collect_grad_tensors
        if not (tensors := collect(inputs)):
            return args, kwargs  # the root's final callback comes to this group
        passed = iter(RegisterPostBackwardFunction.apply(self, *tensors))
        replace = _replace_in_flat if is_flat else replace_grad_tensors
        inputs = replace(inputs, passed)
        return tuple(inputs[: len(args)]), dict(zip(kwargs, inputs[len(args) :]))

    @property
    def _all_gather_process_group(self) -> dist.ProcessGroup:
        mesh_info: DataParallelMeshInfo | None = self.mesh_info
        if self._sharded_state is ShardedState.SHARDED_POST_FORWARD:
            mesh_info = self.post_forward_mesh_info
        return as_mesh(mesh_info, FSDPMeshInfo).shard_process_group

    @property
    def _gather_group(self) -> dist.ProcessGroup | None:
        """The ranks to gather over, None where each has all that there is."""
        if not isinstance(self.mesh_info, FSDPMeshInfo):
            return None  # replicated only
        group = self._all_gather_process_group
        return group if group.size() > 1 else None

    # Errors #
    def _describe(self) -> DescribedUnit:
        gather_group = self._gather_group
        return DescribedUnit(
            fqn=self._module_fqn,
            params=self.fsdp_params,
            names=tuple(self._param_names),
            fqns=tuple(map(self._fqn, range(len(self.fsdp_params)))),
            device=self.device,
            gather_world_size=1 if gather_group is None else gather_group.size(),
            world_size=self.mesh_info.mesh.size(),
            divide_factor=self._divide_factor,
            divide_factors=self._divide_factors,
            comms=(self._gather_comm, self._scatter_comm),
            has_partial_reduces=bool(self._partial_reduces),
        )

    def _raise_explained(
        self,
        error: BaseException,
        buckets: list[UnitBucket] | None = None,
        failed: UnitBucket | None = None,
        grads: Sequence[torch.Tensor] = (),
    ) -> NoReturn:
        """Raises an error in a gather, or in a bucket's reduction, with what it means."""
        explained = error
        # What goes wrong here must not take the place of what went wrong there
        with contextlib.suppress(Exception):
            if isinstance(error, Exception):
                step = Step(self._describe(), failed, grads)
                explained = doors.errors.explain(error, step)
                self._agreement.tell(explained, buckets)
        raise explained


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
        param_group = ctx.param_group
        param_group.post_backward()
        # Not from the root's final callback: backward is over then
        if param_group._to_prefetch_late:
            param_group._backward_prefetch_late()
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


register_autograd_function(RegisterPostBackwardFunction)
