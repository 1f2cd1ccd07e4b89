"""
What stands in for a device: streams, events and ``torch.cuda``. They order what a rank
issues.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TYPE_CHECKING

import torch
import torch.distributed as dist


if TYPE_CHECKING:
    from fsdp_helpers.late_device.queues import Entry
    from fsdp_helpers.late_device.record import Rank

# What must have run: of each stream its last entry. Never changed in place.
Clock = frozenset["Entry"]


class Stream:
    """
    Stands in for a device's stream, or for the host. What it does next comes after
    all that is in its clock.
    """

    def __init__(self, rank: Rank, name: str):
        self.rank, self.name = rank, name
        self.clock: Clock = frozenset()

    def wait_stream(self, other: Stream) -> None:
        if self.rank.comes_to_call():
            self.clock |= other.clock

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.rank.new_event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.rank.host.wait_stream(self)

    def __repr__(self) -> str:
        return self.name


class Event:
    """Stands in for a device's event. Without a record, nothing waits for it."""

    def __init__(self, rank: Rank):
        self.rank = rank
        self.clock: Clock = frozenset()

    def record(self, stream: Stream | None = None) -> None:
        is_made = self.rank.comes_to_call()
        stream = stream or self.rank.stream
        self.clock = stream.clock if is_made else frozenset()

    def wait(self, stream: Stream | None = None) -> None:
        if self.rank.comes_to_call():
            stream = stream or self.rank.stream
            stream.clock |= self.clock

    def synchronize(self) -> None:
        self.wait(self.rank.host)


class Pending(dist.distributed_c10d.Work):
    """An asynchronous collective, which keeps its tensors until waited for."""

    def __init__(self, done: Event, tensors: Sequence[torch.Tensor]):
        super().__init__()
        self.done, self.tensors = done, tensors

    def wait(self, timeout: Any = None) -> bool:
        self.done.wait()
        self.tensors = ()
        return True


class DeviceHandle:
    """Stands in for ``torch.cuda`` and its like."""

    def __init__(self, rank: Rank):
        self._rank = rank

    def Stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Makes a stream, named after what the line that asks for it sets."""
        frame = sys._getframe(1)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        assigned = re.search(r"(\w+) = ", line)
        return self._rank.new_stream(assigned[1] if assigned else None)

    def Event(self, *args: Any, **kwargs: Any) -> Event:
        return self._rank.new_event()

    def current_stream(self, device: Any = None) -> Any:
        return self._rank.stream

    def synchronize(self, device: Any = None) -> None:
        self._rank.synchronize()

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        rank = self._rank
        previous = rank.stream
        # A call of ours, the context manager's and then the site's
        if rank.comes_to_call():
            rank.stream = stream
        try:
            yield
        finally:
            rank.stream = previous
