"""
What the groups of one root share, see :class:`FSDPCommContext`.

[Note: Holding reduced buffers]
An all-reduce over replicas may take longer than backward of several units, and its
buffer was allocated in another stream, which may reuse the memory once it is freed. Yet
neither compute nor a reduce-scatter, which compute waits for, waits for an all-reduce
while backward goes on. Where sharded gradients view the buffer, to hold it takes no
memory: it is held until its group reduces again, or to the end of backward. Buffers
whose gradients are cast are held up to ``_MAX_HELD_NBYTES``. Beyond that, the streams
that allocated them wait for the oldest, but never for the newest.
"""

# Tests: streams, hsdp, prefetch
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import _get_device_handle

from ._fsdp_collectives import AllGatherResult, ReduceResult, Reduction
from ._fsdp_common import TrainingState
from ._fsdp_observers import range_of
from ._fsdp_reduce import SmallReductions


class AllGatherState(NamedTuple):
    """A gather whose buffer is held until ``event``, its copy-out."""

    all_gather_result: AllGatherResult
    event: torch.Event | None


class ReduceScatterState(NamedTuple):
    """The inputs of one post-backward, held until ``event``, after the last of them."""

    reduce_scatter_inputs: tuple[torch.Tensor, ...]  # one for each collective
    event: torch.Event | None
    allocation_stream: torch.Stream  # which may reuse their memory once freed
    param_group: Any  # the group that reduced


@dataclass
class _GradientReductionState:
    """A reduction that a user's handle waits for, by the root's state context."""

    owner: object


class AllReduceState(NamedTuple):
    """A bucket's reduced buffer, which its all-reduce uses until ``event``."""

    all_reduce_input: torch.Tensor
    event: torch.Event | None


@dataclass(eq=False)
class HeldAllReduces:
    """The reduced buffers of one post-backward, held until all of their events."""

    states: tuple[AllReduceState, ...]
    # Which may reuse their memory once freed
    allocation_streams: tuple[torch.Stream, ...]
    param_group: Any  # the group that reduced
    nbytes: int  # 0 if the sharded gradients view the buffers, and so hold them too


# Reduced buffers that no sharded gradient views are held up to this many bytes
_MAX_HELD_NBYTES = 512 * 2**20


class FSDPCommContext:
    """The streams and in-flight buffers that the groups of one root share."""

    def __init__(self) -> None:
        self.has_streams = False
        # See [Note: Freeing the gather buffer late]
        self.all_gather_state: AllGatherState | None = None
        # The end of backward waits for the last event of each stream that reduces
        self._last_post_reduce_events: dict[torch.Stream, torch.Event] = {}
        # Oldest first. The root's lazy init resolves their maximum from all groups.
        self.reduce_scatter_states: list[ReduceScatterState] = []
        self.reduce_scatter_max_input_buffers: int = 1
        # Oldest first, see [Note: Holding reduced buffers]
        self.all_reduce_states: list[HeldAllReduces] = []
        # The groups of one module that have reduced since another module's last did
        self.reducing_groups: list[Any] = []
        # Small buckets that wait to be reduced together
        self.small_reductions: dict[Reduction, SmallReductions] = {}
        # The backward whose end reduces them
        self.small_reductions_task: int = -1
        # In the order of forwards. Each backward clears it, and its reference cycle.
        self.post_forward_order: list[Any] = []
        # How many forwards have looked for traces
        self.num_forwards: int = 0
        # While a user's handle has not been waited for (2.15)
        self.active_gradient_reduction: _GradientReductionState | None = None

    def lazy_init(self, device: torch.device):
        if self.has_streams:
            return  # from another root, see `share_comm_ctx`
        self.has_streams = True
        handle = self.device_handle = _get_device_handle(device.type)
        high = -1  # before compute, which waits for the copies around a collective
        # In forward, the next group's copy-in beside this group's all-gather
        self.all_gather_copy_in_stream = handle.Stream(priority=high)
        # The next group's all-gather beside this group's compute
        self.all_gather_stream = handle.Stream(priority=high)
        # Scaling and reduce-scatter beside the next group's backward
        self.reduce_scatter_stream = handle.Stream(priority=high)
        # HSDP's, usually over another network, beside the shard group's collectives
        self.all_reduce_stream = handle.Stream()

    def get_all_gather_streams(
        self, async_op: bool, training_state: TrainingState
    ) -> tuple[torch.Stream, torch.Stream]:
        """Returns the streams of copy-in and all-gather: own ones for a prefetch."""
        prefetches = (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)
        if async_op or training_state not in prefetches:
            stream = self.device_handle.current_stream()
            return stream, stream
        return self.all_gather_copy_in_stream, self.all_gather_stream

    def wait_all_gather_streams_on_event(self, event: torch.Event | None) -> None:
        # Users may unshard before the first forward
        if event is not None and self.has_streams:
            self.all_gather_copy_in_stream.wait_event(event)
            self.all_gather_stream.wait_event(event)

    def get_groups_to_prefetch(self, group: Any, index: int) -> Iterator[Any]:
        """
        Yields the groups that backward prefetches from ``group``, whose forward was at
        ``index``: those of the module before.

        Backward runs a module's groups, one for each mesh, from last to first. The
        group of index 1 prefetches: before, parameters would be unsharded for longer;
        after, no reduce-scatter would be left to overlap with their gathers.
        """
        earlier = (self.post_forward_order[i] for i in range(index - 1, -1, -1))
        if group._num_param_groups == 1:
            yield from islice(earlier, 1)
        elif group._param_group_index == 1:
            others = (other for other in earlier if other.modules is not group.modules)
            for _, same in groupby(others, key=lambda other: id(other.modules)):
                yield from same
                return

    def release_all_gather_state_for_comm_reuse(self) -> None:
        """Frees the last gather's buffer for the next gather, after its copy-out."""
        if (state := self.all_gather_state) is not None:
            self.wait_all_gather_streams_on_event(state.event)
            self.all_gather_state = None

    def release_all_gather_state_on_current_stream(self) -> None:
        """Frees the last gather's buffer once the current stream has waited for it."""
        if (state := self.all_gather_state) is not None:
            if state.event is not None:
                self.device_handle.current_stream().wait_event(state.event)
            self.all_gather_state = None

    def hold_reduce_buffers(
        self, group: Any, results: Sequence[ReduceResult], *, are_viewed: bool
    ) -> None:
        """
        Holds what the reductions of one post-backward use until their events.
        ``are_viewed``: whether the sharded gradients are views of the reduced buffers.
        """
        current_stream = self.device_handle.current_stream()
        # Several buckets may share an input, which the last of them reads last
        inputs: dict[torch.Tensor, None] = {}
        scattered: torch.Event | None = None
        reduced: list[AllReduceState] = []
        streams: dict[torch.Stream, None] = {}
        for result in results:
            reduce_input, output = result.reduce_scatter_input, result.all_reduce_input
            if reduce_input is not None:
                inputs[reduce_input] = None
                scattered = result.reduce_scatter_event
            if output is not None:
                reduced.append(AllReduceState(output, result.all_reduce_event))
                # Over a single rank, the output is the input
                is_input = output is reduce_input
                stream = current_stream if is_input else self.reduce_scatter_stream
                streams[stream] = None
        if inputs:
            state = ReduceScatterState((*inputs,), scattered, current_stream, group)
            self.reduce_scatter_states.append(state)
        if reduced:
            nbytes = (
                0 if are_viewed else sum(r.all_reduce_input.nbytes for r in reduced)
            )
            held = HeldAllReduces((*reduced,), (*streams,), group, nbytes)
            self.all_reduce_states.append(held)

    def recycle_reduce_buffers(self, group: Any) -> None:
        """
        Drops the oldest buffers of reductions after their events, to make room for
        those of ``group``. Only at the first group of a module to reduce: waiting at
        each would serialize their reduce-scatters. A group that comes again is a first.
        """
        groups = self.reducing_groups
        if groups and groups[0].modules is group.modules and group not in groups:
            groups.append(group)
            return
        self.reducing_groups = [group]
        held = self.all_reduce_states
        nbytes, count = sum(h.nbytes for h in held), 0
        while nbytes > _MAX_HELD_NBYTES and count < len(held) - 1:
            nbytes, count = nbytes - held[count].nbytes, count + 1
        self.drop_all_reduces(held[:count])
        states = self.reduce_scatter_states
        excess = len(states) + 1 - self.reduce_scatter_max_input_buffers
        if excess <= 0:
            return
        current_stream = self.device_handle.current_stream()
        with range_of(f"FSDP::post_backward_rs_wait ({group._module_fqn})"):
            for state in states[:excess]:
                if state.event is not None:
                    state.allocation_stream.wait_event(state.event)
                    if state.allocation_stream != current_stream:
                        current_stream.wait_event(state.event)
            del states[:excess]

    def drop_all_reduces(self, dropped: Sequence[HeldAllReduces]) -> None:
        """Drops reduced buffers, which the streams that may reuse them wait for."""
        for held in dropped:
            if (event := held.states[-1].event) is not None:
                for stream in held.allocation_streams:
                    stream.wait_event(event)
            self.all_reduce_states.remove(held)

    def wait_current_stream_on_reductions(self) -> None:
        """Makes the current stream wait for all reductions."""
        for event in self._last_post_reduce_events.values():
            self.device_handle.current_stream().wait_event(event)
        self._last_post_reduce_events.clear()
        self.all_reduce_states.clear()
