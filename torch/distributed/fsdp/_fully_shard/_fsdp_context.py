"""What the groups of one root share, see :class:`FSDPCommContext`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import _get_device_handle

from ._fsdp_collectives import AllGatherResult, BucketGrads, join_parts, Reduction
from ._fsdp_common import TrainingState
from ._fsdp_layout import bucket_rank, BucketKey
from ._fsdp_observers import range_of


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
    """
    A bucket's reduced buffer, held until ``event``: else the stream that allocated it,
    of the reduce-scatter, could reuse its memory while the all-reduce reads it.
    """

    all_reduce_input: torch.Tensor
    event: torch.Event | None


class SmallReductions(dict[Reduction, list[tuple[BucketGrads, torch.Stream]]]):
    """
    Small buckets that wait to be reduced together, with the streams that computed their
    gradients. All ranks add the same in the same order.
    """

    # Of the backward whose end reduces them
    graph_task_id: int = -1

    def nbytes(self, reduction: Reduction) -> int:
        """Returns the size of the collective's input so far."""
        return sum(reduction.input_nbytes(part.bucket) for part, _ in self[reduction])

    def pop_joined(
        self, reduction: Reduction
    ) -> tuple[list[BucketGrads], dict[torch.Stream, None]]:
        """Pops what waits as one bucket for each key, and the gradients' streams."""
        by_key: dict[BucketKey, list[BucketGrads]] = {}
        streams: dict[torch.Stream, None] = {}
        for part, stream in self.pop(reduction):
            by_key.setdefault(part.bucket.key, []).append(part)
            streams[stream] = None
        keys = sorted(by_key, key=bucket_rank)
        return [join_parts(by_key[key]) for key in keys], streams


class FSDPCommContext:
    """The streams and in-flight buffers that the groups of one root share."""

    # See [Note: Freeing the gather buffer late]
    all_gather_state: AllGatherState | None = None
    # While a user's handle has not been waited for (2.15)
    active_gradient_reduction: _GradientReductionState | None = None
    # How many forwards have looked for traces
    num_forwards: int = 0

    def lazy_init(self, device: torch.device):
        if hasattr(self, "all_gather_stream"):
            return  # by another root, see `share_comm_ctx`
        handle = _get_device_handle(device.type)
        self.device_handle = handle
        # Before compute, which waits for the short copies around a collective
        high = -1
        # In forward, the next group's copy-in beside this group's all-gather
        self.all_gather_copy_in_stream = handle.Stream(priority=high)
        # The next group's all-gather beside this group's compute
        self.all_gather_stream = handle.Stream(priority=high)
        # Scaling and reduce-scatter beside the next group's backward
        self.reduce_scatter_stream = handle.Stream(priority=high)
        # HSDP's, usually over another network, beside the shard group's collectives
        self.all_reduce_stream = handle.Stream()
        # The end of backward waits for the last event of each stream that reduces
        self._last_post_reduce_events: dict[torch.Stream, torch.Event] = {}
        # Oldest first. The root's lazy init resolves their maximum from all groups.
        self.reduce_scatter_states: list[ReduceScatterState] = []
        self.reduce_scatter_max_input_buffers: int = 1
        # The groups of one module that have reduced since another module's last did
        self.reducing_groups: list[Any] = []
        self.small_reductions = SmallReductions()
        # In the order of forwards. Each backward clears it, and its reference cycle.
        self.post_forward_order: list[Any] = []

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
        # No streams yet if users unshard before the first forward
        if event is not None and hasattr(self, "all_gather_stream"):
            self.all_gather_copy_in_stream.wait_event(event)
            self.all_gather_stream.wait_event(event)

    def get_groups_to_prefetch(self, group: Any, index: int) -> Iterator[Any]:
        """
        Yields the groups that backward prefetches from ``group``, whose forward was at
        ``index``: those of the module before.

        Backward runs a module's groups, one for each mesh, from last to first. The last
        but one prefetches: earlier, parameters would be unsharded for longer; later, no
        reduce-scatter would be left to overlap with their gathers.
        """
        earlier = reversed(self.post_forward_order[:index])
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

    def recycle_reduce_scatter_inputs(self, group: Any) -> None:
        """
        Drops the oldest reduce-scatter inputs after their events, to make room for
        those of ``group``. Only at the first group of a module to reduce: waiting at
        each would serialize their reduce-scatters. A group that comes again is a first.
        """
        groups = self.reducing_groups
        if groups and groups[0].modules is group.modules and group not in groups:
            groups.append(group)
            return
        self.reducing_groups = [group]
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

    def wait_current_stream_on_reductions(self) -> None:
        """Makes the current stream wait for all reductions."""
        for event in self._last_post_reduce_events.values():
            self.device_handle.current_stream().wait_event(event)
        self._last_post_reduce_events.clear()
