"""
Queues of a device that is late: streams and events, and what a recording of them
holds. ``record.py`` makes one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TYPE_CHECKING

from fsdp_late_device.collectives import Call
from fsdp_streams.happens_before import CHECKERS

import torch
from torch.utils._pytree import TreeSpec


if TYPE_CHECKING:
    from fsdp_late_device.ranks import Rank

# Of memory that nobody has written: not a number in every floating-point dtype
POISON = 0xFF

CHECKERS.add(__file__)


# What is recorded #


@dataclass(eq=False)
class Memory:
    """Storage from its allocation until it is freed."""

    rank: int
    owner: Stream  # the host for host memory
    nbytes: int
    label: str
    # Of what was there before it was first used
    initial: torch.Tensor | None = None
    is_reusable: bool = True


@dataclass(frozen=True)
class Piece:
    """A tensor: where it lies in which memory."""

    memory: Memory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements

    @property
    def span(self) -> tuple[int, int]:
        """The bytes from the first to the last element."""
        if 0 in self.size:
            return 0, 0
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride))
        start = self.offset * self.dtype.itemsize
        return start, start + (last + 1) * self.dtype.itemsize


class Kernel(NamedTuple):
    """An operator, with pieces in place of tensors."""

    operator: Any
    arguments: list[Any]  # flat
    spec: TreeSpec
    outputs: list[Piece | None]  # None where it is an argument, or no tensor
    rng_state: torch.Tensor | None  # of what draws random numbers


class HostRead(NamedTuple):
    """An operator whose result the host goes on with."""

    kernel: Kernel
    value: Any


class Poisoning(NamedTuple):
    """Memory is freed."""

    memory: Memory


class Meeting(NamedTuple):
    """A collective, and for each of its ranks the input and the output."""

    call: Call
    inputs: list[Piece]
    outputs: list[Piece]


Work = Kernel | HostRead | Poisoning | Meeting


@dataclass(eq=False, repr=False)  # each would show all that it comes after
class Entry:
    """What one stream has to do, or one of each rank for a collective."""

    index: int  # in the order of issue
    streams: tuple[Stream, ...]
    label: str
    line: tuple[str, int, str]
    work: Work
    before: frozenset[Entry]  # what must have run
    reads: list[Piece]
    writes: list[Piece]

    def __repr__(self) -> str:
        file, number, function = self.line
        at = f"{file.rpartition('/')[2]}:{number} {function}"
        where = ", ".join(f"{s.rank.number}:{s.name}" for s in self.streams)
        return f"[{where}] {self.label} ({at})"


class Change(NamedTuple):
    """Memory was allocated, or else freed."""

    memory: Memory
    is_free: bool


@dataclass
class Recording:
    """What all ranks issued."""

    entries: list[Entry] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    # What was still there at the end, and its bytes then
    final: list[tuple[Memory, torch.Tensor]] = field(default_factory=list)
    # The number of entries at each `Rank.mark`
    marks: list[int] = field(default_factory=list)
    visited: set[tuple[str, int]] = field(default_factory=set)


# Streams and events #


class Stream:
    """A queue of one rank. The host is one as well."""

    def __init__(self, rank: Rank, name: str):
        self.rank, self.name = rank, name
        # What the next entry must come after
        self.last: frozenset[Entry] = frozenset()

    def wait_stream(self, other: Stream) -> None:
        if self.rank.comes_to_call():
            self.last |= other.last

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.rank)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.rank.host.wait_stream(self)

    def query(self) -> bool:
        self.synchronize()
        return True

    def __repr__(self) -> str:
        return self.name


class Event:
    """Without a record, nothing waits for it."""

    def __init__(self, rank: Rank):
        self.rank = rank
        self.after: frozenset[Entry] = frozenset()

    def record(self, stream: Stream | None = None) -> None:
        is_made = self.rank.comes_to_call()
        self.after = (stream or self.rank.stream).last if is_made else frozenset()

    def wait(self, stream: Stream | None = None) -> None:
        if self.rank.comes_to_call():
            stream = stream or self.rank.stream
            stream.last |= self.after

    def synchronize(self) -> None:
        self.wait(self.rank.host)

    def query(self) -> bool:
        self.synchronize()
        return True
