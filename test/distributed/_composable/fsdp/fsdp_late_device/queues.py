"""
What a recording of a device that is late holds. ``record.py`` makes one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp_late_device.collectives import Call
from fsdp_streams.devices import Stream

import torch


# Of memory that nobody has written: not a number in every floating-point dtype
POISON = 0xFF


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


class Piece(NamedTuple):
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
    args: list[Any]
    kwargs: dict[str, Any]
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
        where = ", ".join(f"{s.issuer.number}:{s.name}" for s in self.streams)
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
    # How many events each rank still held at the end of each step
    events_left: list[int] = field(default_factory=list)
    visited: set[tuple[str, int]] = field(default_factory=set)
