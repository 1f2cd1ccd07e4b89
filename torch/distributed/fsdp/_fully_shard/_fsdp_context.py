"""
State that the groups of one root share, see :class:`FSDPCommContext`.

[Note: Holding reduced buffers]
An all-reduce over replicas may take longer than backward of several units. So its buffer
is kept until its group reduces again, or to the end of backward. That costs no memory
where sharded gradients are views of it. Where they are cast, up to ``_MAX_HELD_NBYTES``
are kept: beyond that, the allocating streams wait for the oldest buffers, never for the
newest, which compute would wait for as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, cast, NamedTuple, TYPE_CHECKING

import torch
from torch.distributed.device_mesh import _get_device_handle

from . import _fsdp_layout as layouts
from ._fsdp_collectives import AllGatherResult
from ._fsdp_common import TrainingState
from ._fsdp_direct import DirectMemory
from ._fsdp_grads import JoinedReduction, PartialReduces
from ._fsdp_observers import range_of
from ._fsdp_reduce import BucketGrads, reduce_buckets, Reduction


if TYPE_CHECKING:
    from ._fsdp_param_group import FSDPParamGroup

Parts = Sequence[BucketGrads]

# See [Note: Holding reduced buffers]
_MAX_HELD_NBYTES = 512 * 2**20


class AllGatherState(NamedTuple):
    """A gather whose buffer stays allocated until ``event``, after its copy-out."""

    all_gather_result: AllGatherResult
    event: torch.Event | None


class Handoff(NamedTuple):
    """
    Buffers that one post-backward's reductions use in other streams than allocated them.
    The context refers to them meanwhile. None may be dropped before :meth:`release`, but at
    the end of backward, which waits anyway.
    """

    buffers: tuple[torch.Tensor, ...]
    event: torch.Event | None  # after their last use
    allocation_streams: tuple[torch.Stream, ...]  # which may reuse their memory
    param_group: FSDPParamGroup  # that reduces
    nbytes: int = 0  # unless sharded gradients are views of the buffers

    @property
    def allocation_stream(self) -> torch.Stream:
        return self.allocation_streams[0]

    def release(self, *streams: torch.Stream) -> None:
        """Makes these streams, and those that allocated, wait for the last use."""
        for stream in dict.fromkeys(self.allocation_streams + streams):
            if self.event is not None:
                stream.wait_event(self.event)


ReduceScatterState = Handoff  # the release's name for one with inputs


class _GradientReductionState(NamedTuple):
    """A reduction that a user's handle waits for, by the root's state context."""

    owner: object


class FSDPCommContext:
    """The streams and in-flight buffers that the groups of one root share."""

    def __init__(self) -> None:
        # See [Note: Freeing the gather buffer late]
        self.all_gather_state: AllGatherState | None = None
        # Each reducing stream's last event. The end of backward waits for them
        self._last_post_reduce_events: dict[torch.Stream, torch.Event] = {}
        # Inputs and, where replicas all-reduce, reduced buffers. The oldest are first
        self.reduce_scatter_states: list[Handoff] = []
        self.all_reduce_states: list[Handoff] = []
        self.reduce_scatter_max_input_buffers: int = 1  # the largest of all groups
        self.resharded: list[DirectMemory] = []  # of units, to be freed
        # Small buckets that wait to be reduced together, see `Reduction.scaling`
        self.joined_reductions: dict[tuple, JoinedReduction] = {}
        self.joined_reductions_task: int = -1  # the backward whose end reduces them
        self.post_forward_order: list[Any] = []  # the last backward clears it
        self.num_forwards: int = 0  # each but the first looks for traces
        self.autocasts: bool = False  # whether any but the first began under autocast
        # While a user's handle has not been waited for (2.15)
        self.active_gradient_reduction: _GradientReductionState | None = None

    def lazy_init(self, device: torch.device):
        if hasattr(self, "all_gather_stream"):
            return  # from another root, see `share_comm_ctx`
        handle = self.device_handle = _get_device_handle(device.type)
        high = -1  # compute waits for the copies around a collective
        # The next group's copy-in in forward, beside this group's all-gather
        self.all_gather_copy_in_stream = handle.Stream(priority=high)
        # The next group's all-gather, beside this group's compute
        self.all_gather_stream = handle.Stream(priority=high)
        # Scaling and reduce-scatter, beside the next group's backward
        self.reduce_scatter_stream = handle.Stream(priority=high)
        # The all-reduce, usually over another network, beside the other collectives
        self.all_reduce_stream = handle.Stream()

    def get_all_gather_streams(
        self, async_op: bool, training_state: TrainingState
    ) -> tuple[torch.Stream, torch.Stream]:
        """Returns the streams of copy-in and all-gather: the shared ones for prefetch."""
        prefetches = (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
        if async_op or training_state not in prefetches:
            stream = self.device_handle.current_stream()
            return stream, stream
        return self.all_gather_copy_in_stream, self.all_gather_stream

    def wait_all_gather_streams_on_event(self, event: torch.Event | None) -> None:
        # Users may unshard before the first forward
        if event is not None and hasattr(self, "all_gather_stream"):
            self.all_gather_copy_in_stream.wait_event(event)
            self.all_gather_stream.wait_event(event)

    def hold_resharded(self, memory: DirectMemory) -> None:
        """Keeps memory that the current stream still reads, see [Note: Direct gathers]."""
        if memory.end_use(self.device_handle.current_stream()):
            self.resharded.append(memory)

    def free_resharded(self) -> None:
        """Frees the memory of resharded units for the next gather."""
        while self.resharded:
            self.resharded.pop(0).free()

    def groups_to_prefetch(self, group: FSDPParamGroup, index: int) -> Iterator[Any]:
        """
        Yields the groups of the module before that of ``group``, whose forward was at
        ``index``. Of a group for each mesh only that of index 1, the last but one in
        backward, prefetches: any earlier, parameters would be unsharded for longer; any
        later, no reduce-scatter would overlap.
        """
        order = self.post_forward_order
        if group._num_param_groups == 1:
            yield from order[max(index - 1, 0) : index]
        elif group._param_group_index == 1:
            earlier = reversed(order[:index])
            candidates = (g for g in earlier if g.modules is not group.modules)
            if (first := next(candidates, None)) is not None:
                yield first
                yield from takewhile(lambda g: g.modules is first.modules, candidates)

    def release_all_gather_state_for_comm_reuse(self) -> None:
        """Frees the last gather's buffer for the next gather, after its copy-out."""
        if (state := self.all_gather_state) is not None:
            self.wait_all_gather_streams_on_event(state.event)
            self.all_gather_state = None

    def release_all_gather_state_on_current_stream(self) -> None:
        """Frees the last gather's buffer once the current stream has waited for it."""
        if (state := self.all_gather_state) is not None:
            self.wait_current_stream(state.event)
            self.all_gather_state = None

    def wait_current_stream(self, event: torch.Event | None) -> None:
        if event is not None:
            self.device_handle.current_stream().wait_event(event)

    def reduce(
        self,
        group: FSDPParamGroup,
        reduction: Reduction,
        parts: Parts,
        partial_reduces: PartialReduces,
        reduce: Callable[..., None] = reduce_buckets,
    ) -> Parts:
        """
        Reduces buckets, with ``partial_reduces``, at once, or by collective if the comm or a
        plugin needs that. Keeps buffers in use. Returns buckets in the order of reductions.
        """
        batches = [parts]
        if reduction.holds_one_input or reduce is not reduce_buckets:
            batches = layouts.by_collective(parts)
        previous: Parts = ()
        try:
            for batch in batches:
                if previous and reduction.holds_one_input:
                    self.wait_current_stream(previous[-1].reduce_scatter_event)
                    for part in previous:  # the comm may now give this memory again
                        part.inputs = []
                if reduction.plugins is not None or partial_reduces:
                    for part in batch:
                        partial_reduces.prepare(reduction, part)
                reduce(reduction, batch)
                previous = batch
        except BaseException:
            scatter_stream = reduction.reduce_scatter_stream
            self.wait_after_error(scatter_stream, reduction.all_reduce_stream)
            raise
        parts = [part for batch in batches for part in batch]
        self._hold_reduce_buffers(group, parts)
        return parts

    def _hold_reduce_buffers(self, group: FSDPParamGroup, parts: Parts) -> None:
        """Keeps inputs and reduced buffers, and the last event of each stream."""
        compute, event = self.device_handle.current_stream(), None
        # Buckets may share an input or a buffer, which the last of them uses last
        inputs: dict[torch.Tensor, None] = {}
        streams: dict[torch.Tensor, torch.Stream] = {}  # that allocated, by buffer
        for part in parts:
            stream = part.post_reduce_stream
            self._last_post_reduce_events[stream] = part.post_reduce_event
            if part.inputs:
                event = part.reduce_scatter_event
                inputs |= dict.fromkeys(part.inputs)
            if (buffer := part.all_reduce_input) is not None:
                is_input = buffer in inputs  # over a single rank
                streams[buffer] = compute if is_input else self.reduce_scatter_stream
        if inputs:
            handoff = Handoff((*inputs,), event, (compute,), group)
            self.reduce_scatter_states.append(handoff)
        if streams:
            is_viewed = all(part.is_viewed for part in parts)
            nbytes = 0 if is_viewed else sum(buffer.nbytes for buffer in streams)
            args = (*streams,), parts[-1].all_reduce_event, (*streams.values(),)
            self.all_reduce_states.append(Handoff(*args, group, nbytes))

    def wait_after_error(self, earlier: torch.Stream, later: torch.Stream) -> None:
        """Makes the current stream wait for what was started in both streams."""
        earlier.wait_stream(later)
        self.device_handle.current_stream().wait_stream(earlier)

    def join_small(
        self, group: FSDPParamGroup, reduction: Reduction, parts: Parts
    ) -> Parts:
        """
        Lets small buckets wait for a reduction with those of other units, at the cap or at
        the end of this backward, be it inside of another. Returns those that do not wait.
        """
        small_nbytes, cap = cast(Any, group.reduce_bucket_cap)
        key, remaining = reduction.scaling, []
        is_plain = reduction.is_default and reduction.all_reduce_hook is None
        # After a deferral replicas may have different buckets
        has_deferred = group._has_deferred or reduction.defers_all_reduce
        if has_deferred or group._partial_reduces or not is_plain:
            return parts
        for batch in layouts.by_collective(parts):
            sizes = [p.bucket.shard_numel * p.bucket.wire_dtype.itemsize for p in batch]
            nbytes = reduction.shard_world_size * sum(sizes)
            if nbytes > small_nbytes:
                remaining += batch
                continue
            joined = self.joined_reductions.setdefault(key, JoinedReduction(reduction))
            joined.nbytes += nbytes
            joined.parts += batch
            joined.streams[self.device_handle.current_stream()] = None
            if joined.nbytes >= cap:
                self.reduce_joined(group, key)
        task = torch._C._current_graph_task_id()
        if task not in (-1, self.joined_reductions_task):  # -1: not in backward
            self.joined_reductions_task = task
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.reduce_joined(group))
        return remaining

    def reduce_joined(self, group: FSDPParamGroup, *keys: tuple) -> None:
        """Reduces the small buckets that wait under ``keys``, by default all."""
        for key in keys or [*self.joined_reductions]:
            self.recycle_reduce_buffers(group)
            joined = self.joined_reductions.pop(key)
            current_stream = self.device_handle.current_stream()
            joined.streams.pop(current_stream, None)
            for stream in joined.streams:
                current_stream.wait_stream(stream)
            try:
                self.reduce(group, joined.reduction, joined.join(), PartialReduces())
            finally:  # these streams may reuse the memory of the gradients
                for stream in joined.streams:
                    stream.wait_stream(current_stream)

    def recycle_reduce_buffers(self, group: FSDPParamGroup) -> None:
        """
        Waits for the oldest buffers and drops them, to make room for those of ``group``.
        Only the module's first group in a backward waits, or their reduce-scatters would
        run one after another.
        """
        states, reduced = self.reduce_scatter_states, self.all_reduce_states
        last_groups = (state.param_group for state in reversed(states))
        siblings = [*takewhile(lambda g: g.modules is group.modules, last_groups)]
        # If the group is one of them, this is a new backward of the module
        if siblings and group not in siblings:
            return
        while len(reduced) > 1 and sum(h.nbytes for h in reduced) > _MAX_HELD_NBYTES:
            reduced.pop(0).release()
        if (excess := len(states) + 1 - self.reduce_scatter_max_input_buffers) > 0:
            current_stream = self.device_handle.current_stream()
            with range_of(f"FSDP::post_backward_rs_wait ({group._module_fqn})"):
                for state in states[:excess]:
                    state.release(current_stream)
                del states[:excess]

    def drop_all_reduces(self, group: FSDPParamGroup) -> None:
        """Drops a group's reduced buffers, after their last use."""
        for state in (states := self.all_reduce_states):
            if state.param_group is group:
                state.release()
        states[:] = [state for state in states if state.param_group is not group]

    def wait_for_reductions(self) -> None:
        for event in self._last_post_reduce_events.values():
            self.wait_current_stream(event)
        self._last_post_reduce_events.clear()
        self.all_reduce_states.clear()
