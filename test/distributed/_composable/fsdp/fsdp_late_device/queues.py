"""
What a recording holds: what the streams of a rank have to do, and in which memory.
``record.py`` makes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp_late_device.devices import Stream

import torch


# Of memory that nobody has written: not a number in every floating-point dtype
POISON = 0xFF


@dataclass(eq=False)
class Memory:
    """Storage from its allocation until it is freed."""

    owner: Stream  # the host for host memory
    nbytes: int
    label: str
    # Of what was there before it was first used
    initial: torch.Tensor | None = None
    is_reusable: bool = True


@dataclass(eq=False)
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


@dataclass
class Kernel:
    """An operator or a function, with pieces in place of tensors."""

    run: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    # None where a result is an argument, or no tensor
    outputs: list[Piece | None] = field(default_factory=list)
    rng_state: torch.Tensor | None = None  # of what draws random numbers
    host_value: str = ""  # what the host reads, and goes on with


@dataclass(eq=False, repr=False)  # each would show all that it comes after
class Entry:
    """What a stream has to do."""

    index: int  # in the order of issue
    stream: Stream
    label: str
    line: tuple[str, int, str]
    kernel: Kernel
    before: frozenset[Entry]  # what must have run
    reads: list[Piece]
    writes: list[Piece]

    def __repr__(self) -> str:
        file, number, function = self.line
        at = f"{file.rpartition('/')[2]}:{number} {function}"
        return f"[{self.stream}] {self.label} ({at})"


class Change(NamedTuple):
    """Memory was allocated, or else freed."""

    memory: Memory
    is_free: bool


@dataclass
class Recording:
    """What a rank issued."""

    entries: list[Entry] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    # What was still there at the end, and its bytes then
    final: list[tuple[Memory, torch.Tensor]] = field(default_factory=list)
    # How many events were still held at the end of each step
    events_left: list[int] = field(default_factory=list)
    # Files and lines of the calls that order streams
    visited: set[tuple[str, int]] = field(default_factory=set)
