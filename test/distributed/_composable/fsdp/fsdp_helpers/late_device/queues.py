"""
What a recording holds: what the streams of a rank have to do, and in which memory.
``record.py`` makes one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_helpers.late_device.devices import Stream


@dataclass(eq=False)
class Memory:
    """Storage from its allocation until it is freed."""

    owner: Stream  # the host for host memory
    nbytes: int
    label: str
    was_there: bool = False  # before the recording
    is_reusable: bool = True


class Piece(NamedTuple):
    """The bytes from the first to the last element of a tensor in some memory."""

    memory: Memory
    span: tuple[int, int]


@dataclass(eq=False, repr=False)  # each would show all that it comes after
class Entry:
    """What a stream has to do."""

    index: int  # in the order of issue
    stream: Stream
    label: str
    line: tuple[str, int, str]
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
    # How many events were still held at the end of each step
    events_left: list[int] = field(default_factory=list)
    # Files and lines of the calls that order streams
    visited: set[tuple[str, int]] = field(default_factory=set)
