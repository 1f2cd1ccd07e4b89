"""
The streams and in-flight buffers that the groups of one root share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import _get_device_handle

from ._fsdp_collectives import AllGatherResult
from ._fsdp_common import TrainingState
from ._fsdp_observers import range_of


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
    # Where their memory goes back to, which may be reused there at once
    allocation_stream: torch.Stream
    param_group: Any  # the group that reduced


@dataclass
class _GradientReductionState:
    """The reduction that a user's handle waits for, by the root's state context."""

    owner: object


class AllReduceState(NamedTuple):
    """
    A bucket's reduced buffer, which was allocated in the reduce-scatter stream
    and is used in another, kept until ``event``. Dropped earlier, its memory
    could become the next group's reduce-scatter output while it is being read.
    """

    all_reduce_input: torch.Tensor
    event: torch.Event | None


class FSDPCommContext:
    """The streams and in-flight buffers that the groups of one root share."""

    # See [Note: Freeing the gather buffer late]
    all_gather_state: AllGatherState | None = None
    # While a user's handle has not been waited for (2.15)
    active_gradient_reduction: _GradientReductionState | None = None

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
        # Oldest first. How many may be there is one number for all groups: the
        # root's lazy init resolves it from theirs.
        self.reduce_scatter_states: list[ReduceScatterState] = []
        self.reduce_scatter_max_input_buffers: int = 1
        # The groups of one module that have reduced one after the other so far
        self.reducing_groups: list[Any] = []
        # Groups in the order of their forwards, for prefetching in backward.
        # A reference cycle, which ends with every backward.
        self.post_forward_order: list[Any] = []

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

    def wait_all_gather_streams_on_event(self, event: torch.Event | None) -> None:
        # No streams yet if users unshard before the first forward
        if event is not None and hasattr(self, "all_gather_stream"):
            self.all_gather_copy_in_stream.wait_event(event)
            self.all_gather_stream.wait_event(event)

    def get_groups_to_prefetch(self, group: Any, index: int) -> Iterator[Any]:
        """
        Yields the groups that backward gathers next to ``group``, whose forward was
        at ``index``: that of the forward before.

        Where a module has several groups, one for each mesh, backward comes to
        the last first. The last but one then prefetches all groups of the
        module before: any earlier and they would be unsharded for longer, any
        later and no reduce-scatter would be left to run beside their gather.
        """
        earlier = reversed(self.post_forward_order[:index])
        if group._num_param_groups == 1:
            yield from islice(earlier, 1)
            return
        if group._param_group_index != 1:
            return
        others = (other for other in earlier if other.modules is not group.modules)
        target_modules: tuple[Any, ...] | None = None
        for other in others:
            target_modules = target_modules or other.modules
            if other.modules is not target_modules:
                return
            yield other

    def release_all_gather_state_for_comm_reuse(self) -> None:
        """Frees the last gather's buffer for the next gather, after its copy-out."""
        if (state := self.all_gather_state) is not None:
            self.wait_all_gather_streams_on_event(state.event)
            self.all_gather_state = None

    def release_all_gather_state_on_current_stream(self) -> None:
        """
        Frees the last gather's buffer at the end of an iteration. The gather streams
        are ordered behind the current one before they gather again.
        """
        if (state := self.all_gather_state) is not None:
            if state.event is not None:
                self.device_handle.current_stream().wait_event(state.event)
            self.all_gather_state = None

    def recycle_reduce_scatter_inputs(self, group: Any) -> None:
        """
        Drops the reduce-scatter inputs of earlier post-backwards until there is room
        for those of ``group``, the oldest first, each after its event.

        Once for all groups of a module, at the one that comes first, whichever that
        is: waiting for each of them would run their reduce-scatters one after the
        other. A group that comes again, or after one of another module, is the first
        of the next time.
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
                if state.event is None:
                    continue
                state.allocation_stream.wait_event(state.event)
                if state.allocation_stream != current_stream:
                    current_stream.wait_event(state.event)
            del states[:excess]

    def wait_current_stream_on_reductions(self) -> None:
        """Orders the current stream behind all that reductions have started."""
        if not self._last_post_reduce_events:
            return
        current_stream = self.device_handle.current_stream()
        for event in self._last_post_reduce_events.values():
            current_stream.wait_event(event)
        self._last_post_reduce_events.clear()

    def release_reduce_scatter_inputs(self) -> None:
        """Drops all reduce-scatter inputs that are left, each after its event."""
        for state in self.reduce_scatter_states:
            if state.event is not None:
                state.allocation_stream.wait_event(state.event)
        self.reduce_scatter_states.clear()
