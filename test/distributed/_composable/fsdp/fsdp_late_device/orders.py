"""
In which order a device that is late runs what its queues hold: any in which each entry
comes after those that it must come after. And which entries use the same memory with
nothing to order them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from graphlib import TopologicalSorter
from typing import NamedTuple

from fsdp_late_device.memory import Device, place
from fsdp_late_device.queues import Entry, Recording


def names(recording: Recording, count: int) -> list[str]:
    """
    Returns the names of ``count`` orders: each stream as late as possible, and for the
    rest, but at least for half, random ones.
    """
    streams = dict.fromkeys(entry.stream.name for entry in recording.entries)
    late = [f"late:{name}" for name in streams][: count // 2]
    return late + [f"uniform:{n}" for n in range(count - len(late))]


def in_order(recording: Recording, name: str) -> Iterator[Entry]:
    """Yields all entries, in the same order for the same name."""
    kind, _, late_stream = name.partition(":")
    rng = random.Random(name)
    sorter = TopologicalSorter({e: e.before for e in recording.entries})
    sorter.prepare()
    ready: list[Entry] = []
    while sorter.is_active():
        ready += sorter.get_ready()
        if kind == "late":
            entry = min(ready, key=lambda e: (e.stream.name == late_stream, e.index))
        else:
            entry = rng.choice(ready)
        ready.remove(entry)
        yield entry
        sorter.done(entry)


class Finding(NamedTuple):
    """An order that gives other bits, and the first entry that does."""

    order: str
    entry: Entry | None  # None if only what is left in memory differs

    def __str__(self) -> str:
        what = self.entry or "what is left in memory"
        return f"order '{self.order}' gives other bits than in order: {what}"


def run(device: Device, order: str) -> Finding | None:
    """
    Runs all entries in the order of that name, up to the first that gives other bits,
    and compares what they leave in memory.
    """
    device.reset()
    for entry in in_order(device.recording, order):
        if not device.run(entry):
            return Finding(order, entry)
    # Two writes that nothing orders give their own bits, each of them
    return None if device.is_as_in_order() else Finding(order, None)


def conflicts(recording: Recording) -> list[tuple[Entry, Entry]]:
    """
    Returns the pairs of entries that use the same bytes, one of them to write, and
    that nothing orders. No other pair can make orders differ.
    """
    addresses, _ = place(recording)
    entries = recording.entries
    reach = [0] * len(entries)
    uses: list[tuple[int, int, int, bool]] = []
    for entry in entries:
        for other in entry.before:
            reach[entry.index] |= reach[other.index] | 1 << other.index
        for pieces, is_write in ((entry.reads, False), (entry.writes, True)):
            for piece in pieces:
                address, (start, end) = addresses[piece.memory], piece.span
                if end:
                    span = address + start, address + end
                    uses.append((*span, entry.index, is_write))
    uses.sort()
    found: set[tuple[int, int]] = set()
    for at, (_, end, index, writes) in enumerate(uses):
        for later in range(at + 1, len(uses)):
            start, _, other, other_writes = uses[later]
            if start >= end:
                break
            if writes or other_writes:
                first, second = (index, other) if index < other else (other, index)
                if first != second and not reach[second] >> first & 1:
                    found.add((first, second))
    return [(entries[a], entries[b]) for a, b in sorted(found)]
