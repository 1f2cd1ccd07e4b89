"""Stands in for a device: its streams, events and ``torch.cuda``; and recordings."""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp_helpers.late_device.sites import Line

import torch
import torch.distributed as dist


# What must have run: of each stream its last entry. Never changed in place.
Clock = frozenset["Entry"]


class Stream:
    """A device's stream, or the host: what comes next follows all of its clock."""

    def __init__(self, rank: Any, name: str):
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

    def __repr__(self) -> str:
        return self.name


class Event:
    """Stands in for a device's event. Without a record, nothing waits for it."""

    def __init__(self, rank: Any):
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

    def __init__(self, rank: Any):
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


# Recordings #


@dataclass(eq=False)
class Memory:
    """Storage from its allocation until it is freed."""

    owner: Stream  # the host for host memory
    nbytes: int
    label: str


class Piece(NamedTuple):
    """The bytes from the first to the last element of a tensor in some memory."""

    memory: Memory
    span: tuple[int, int]


@dataclass(eq=False, repr=False)  # each would show all that it comes after
class Entry:
    """An operator, copy or collective in a stream's queue."""

    index: int  # in the order of issue
    stream: Stream
    label: str
    line: Line
    before: frozenset[Entry]  # what must have run
    reads: list[Piece]
    writes: list[Piece]

    def __repr__(self) -> str:
        file, number, function = self.line
        at = f"{file.rpartition('/')[2]}:{number} {function}"
        return f"[{self.stream}] {self.label} ({at})"


@dataclass
class Recording:
    """All that a rank issued."""

    entries: list[Entry] = field(default_factory=list)
    # How many events were still held at the end of each step
    events_left: list[int] = field(default_factory=list)
    # The lines that order streams
    visited: set[Line] = field(default_factory=set)
