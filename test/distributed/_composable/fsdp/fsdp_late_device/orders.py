"""
In which order a device that is late runs what its queues hold: any that the edges
between them allow. And which entries use the same memory with no edge between.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_late_device.memory import Device, place
from fsdp_late_device.queues import Entry, Recording


# Orders #


class Order(NamedTuple):
    """One order, by a name that gives the same one again."""

    name: str
    # From what could run next to what runs next
    pick: Callable[[Sequence[int]], int]


class Graph:
    """Which entry must come after which."""

    def __init__(self, recording: Recording):
        self.entries = recording.entries
        self.before = [sorted({b.index for b in e.before}) for e in self.entries]
        self.after: list[list[int]] = [[] for _ in self.entries]
        for index, earlier in enumerate(self.before):
            for other in earlier:
                self.after[other].append(index)

    def linear(self, order: Order) -> Iterator[int]:
        """Yields all entries, each after those that it must come after."""
        missing = [len(earlier) for earlier in self.before]
        ready = [index for index, count in enumerate(missing) if count == 0]
        while ready:
            index = order.pick(ready)
            ready.remove(index)
            yield index
            for other in self.after[index]:
                missing[other] -= 1
                if missing[other] == 0:
                    ready.append(other)


def by_name(graph: Graph, name: str) -> Order:
    """Returns the order of that name."""
    kind, _, what = name.partition(":")
    if kind == "uniform":
        rng = random.Random(int(what))
        return Order(name, lambda ready: ready[rng.randrange(len(ready))])
    if kind == "late":
        is_late = [entry.stream.name == what for entry in graph.entries]
        return Order(name, lambda ready: min(ready, key=lambda i: (is_late[i], i)))
    if name != "in order":
        raise ValueError(f"there is no order {name!r}")
    return Order(name, min)


def names(graph: Graph, count: int) -> list[str]:
    """
    Returns the names of ``count`` orders: each stream as late as possible, and for the
    rest, but at least for half, random ones.
    """
    streams = dict.fromkeys(entry.stream.name for entry in graph.entries)
    late = [f"late:{name}" for name in streams][: count // 2]
    return late + [f"uniform:{n}" for n in range(count - len(late))]


# Running them #


@dataclass(repr=False)
class Finding:
    """An order that gives other bits."""

    order: str
    ran: list[Entry]  # up to the first that gave other bits
    touching: list[tuple[int, Entry]]  # with their places in the order

    def __repr__(self) -> str:
        entry = self.ran[-1]
        lines = [
            f"order '{self.order}': the entry at place {len(self.ran) - 1} gives, or "
            f"leaves, other bits than in order",
            f"  {entry}",
            "  who used its memory before, with the places in this order and in order:",
        ]
        lines += [f"  {at:5} {e.index:5} {e}" for at, e in self.touching]
        return "\n".join(lines)


def run(device: Device, graph: Graph, order: Order) -> Finding | None:
    """
    Runs all entries in an order, up to the first that gives other bits, and compares
    what they leave in memory.
    """
    device.reset()
    ran: list[int] = []
    with device.running():
        for index in graph.linear(order):
            ran.append(index)
            if not device.run(index):
                return _describe(device, graph, order, ran)
        changed = device.changed_at_end()
    if changed is None:
        return None
    # As two writes do that nothing orders, and that nobody reads
    writers = [
        at
        for at, index in enumerate(ran)
        if any(
            _overlaps(device.span(p), [changed]) for p in graph.entries[index].writes
        )
    ]
    return _describe(device, graph, order, ran[: writers[-1] + 1])


def _describe(
    device: Device, graph: Graph, order: Order, ran: Sequence[int], limit: int = 12
) -> Finding:
    entries = [graph.entries[index] for index in ran]
    last = entries[-1]
    mine = [device.span(piece) for piece in (*last.reads, *last.writes)]
    touching = [
        (at, entry)
        for at, entry in enumerate(entries[:-1])
        if any(_overlaps(device.span(p), mine) for p in entry.writes)
    ]
    return Finding(order.name, entries, touching[-limit:])


def _overlaps(span: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in others)


# Which orders matter #


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
