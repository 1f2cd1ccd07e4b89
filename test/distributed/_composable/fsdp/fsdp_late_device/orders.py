"""
In which order a device that is late runs what its queues hold: any that the edges
between them allow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_late_device.memory import Device, place
from fsdp_late_device.queues import Entry, Recording
from fsdp_streams.devices import Stream

import torch


# Orders #

# From what could run next to what runs next
Pick = Callable[[Sequence[int]], int]


class Order(NamedTuple):
    """One order, by a name that gives the same one again."""

    name: str
    pick: Pick


class Graph:
    """Which entry must come after which."""

    def __init__(self, recording: Recording):
        self.entries = recording.entries
        self.before = [sorted({b.index for b in e.before}) for e in self.entries]
        self.after: list[list[int]] = [[] for _ in self.entries]
        for index, earlier in enumerate(self.before):
            for other in earlier:
                self.after[other].append(index)

    def linear(self, pick: Pick) -> Iterator[int]:
        """Yields all entries, each after those that it must come after."""
        missing = [len(earlier) for earlier in self.before]
        ready = [index for index, count in enumerate(missing) if count == 0]
        while ready:
            index = pick(ready)
            ready.remove(index)
            yield index
            for other in self.after[index]:
                missing[other] -= 1
                if missing[other] == 0:
                    ready.append(other)

    def streams(self) -> list[Stream]:
        found = {stream: None for entry in self.entries for stream in entry.streams}
        return [*found]


def in_order(graph: Graph) -> Order:
    return Order("in order", min)


def _latest(graph: Graph, name: str, late: Callable[[Stream], bool]) -> Order:
    are_late = [any(map(late, entry.streams)) for entry in graph.entries]
    return Order(name, lambda ready: min(ready, key=lambda i: (are_late[i], i)))


def _uniform(seed: int) -> Order:
    rng = random.Random(seed)
    return Order(f"uniform:{seed}", lambda ready: ready[rng.randrange(len(ready))])


def _by_priorities(graph: Graph, seed: int) -> Order:
    """
    Streams have random priorities, and a few times on the way the stream that was
    just served falls behind all others. One stream runs far ahead of another so.
    """
    rng = random.Random(seed)
    streams = graph.streams()
    priority = {stream: rng.random() for stream in streams}
    count = len(graph.entries)
    falls = {rng.randrange(count): -n for n in range(1, rng.randrange(1, 6))}
    step = 0

    def pick(ready: Sequence[int]) -> int:
        nonlocal step
        index = max(
            ready, key=lambda i: (min(priority[s] for s in graph.entries[i].streams), i)
        )
        if (fall := falls.get(step)) is not None:
            priority.update(dict.fromkeys(graph.entries[index].streams, fall))
        step += 1
        return index

    return Order(f"priorities:{seed}", pick)


def by_name(graph: Graph, name: str) -> Order:
    """Returns the order of that name, for a replay."""
    kind, _, what = name.partition(":")
    if kind == "uniform":
        return _uniform(int(what))
    if kind == "priorities":
        return _by_priorities(graph, int(what))
    if kind == "late":
        rank, _, stream = what.rpartition("/")
        return _latest(
            graph,
            name,
            lambda s: s.name == stream and rank in ("", str(s.issuer.number)),
        )
    if name != "in order":
        raise ValueError(f"there is no order {name!r}")
    return in_order(graph)


def names(graph: Graph, count: int) -> list[str]:
    """
    Returns the names of ``count`` orders: each stream as late as possible, on all
    ranks and then on one, and for the rest random ones.
    """
    streams = graph.streams()
    late = [f"late:/{name}" for name in dict.fromkeys(s.name for s in streams)]
    late += [f"late:{s.issuer.number}/{s.name}" for s in streams]
    late = late[: count // 2]
    kinds = "priorities", "uniform"
    return late + [f"{kinds[n % 2]}:{n}" for n in range(count - len(late))]


# Running them #


@dataclass(repr=False)
class Finding:
    """An order that gives other bits."""

    order: str
    device: str
    ran: list[Entry]  # up to the first that gave other bits
    touching: list[tuple[int, Entry]]  # with their places in the order

    def __repr__(self) -> str:
        entry = self.ran[-1]
        lines = [
            f"order '{self.order}' in memory '{self.device}': the entry at place "
            f"{len(self.ran) - 1} gives, or leaves, other bits than in order",
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
        for index in graph.linear(order.pick):
            ran.append(index)
            if not device.run(index):
                return _describe(device, graph, order, ran)
        if len(ran) < len(graph.entries):
            raise AssertionError("some entries wait for each other")
        changed = device.changed_at_end()
    if changed is None:
        return None
    # As two writes do that nothing orders, and that nobody reads
    writers = [
        index
        for index in ran
        if any(
            _overlaps(device.span(p), [changed]) for p in graph.entries[index].writes
        )
    ]
    return _describe(device, graph, order, ran[: ran.index(writers[-1]) + 1])


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
    return Finding(order.name, device.name, entries, touching[-limit:])


def _overlaps(span: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in others)


# All orders #


class Explored(NamedTuple):
    """What :func:`explore` has seen."""

    orders: int  # all of them
    states: int  # sets of entries that have run
    runs: int  # of single entries
    finding: Finding | None


class TooMany(RuntimeError):
    """There are more states than were asked for."""


def explore(
    device: Device, graph: Graph, *, start: int = 0, max_states: int = 100_000
) -> Explored:
    """
    Runs every order of the entries from ``start`` on, after those before it.

    Two orders that have run the same entries go on together, if the memory is the
    same byte for byte. So each state, a set of entries that have run, is entered
    from all states before it, and left once to each state after it.
    """
    device.reset()
    with device.running():
        for index in range(start):
            device.run(index)
        return _explore(device, graph, start, max_states)


def _explore(device: Device, graph: Graph, start: int, max_states: int) -> Explored:
    count = len(graph.entries)
    done = (1 << start) - 1
    needed = [sum(1 << b for b in before) for before in graph.before]
    # By what has run: the memory, in how many orders, and one of them
    level = {done: (device.arena.clone(), 1, ())}
    states = runs = 0
    for _ in range(start, count):
        following: dict[int, tuple[torch.Tensor, int, tuple[int, ...]]] = {}
        for mask, (memory, orders, path) in level.items():
            states += 1
            if states > max_states:
                raise TooMany(f"more than {max_states} states")
            for index in _ready(graph, needed, mask, start):
                device.arena.copy_(memory)
                runs += 1
                is_same = device.run(index)
                known = following.get(mask | 1 << index)
                if known is not None:
                    is_same &= torch.equal(known[0], device.arena)
                if not is_same:
                    order = Order("explored", min)
                    ran = [*range(start), *path, index]
                    finding = _describe(device, graph, order, ran)
                    return Explored(orders, states, runs, finding)
                before = 0 if known is None else known[1]
                kept = device.arena.clone() if known is None else known[0]
                entry = kept, before + orders, (*path, index)
                following[mask | 1 << index] = entry
        level = following
    ((_, orders, _),) = level.values()
    return Explored(orders, states, runs, None)


def _ready(graph: Graph, needed: list[int], mask: int, start: int) -> Iterator[int]:
    for index in range(start, len(graph.entries)):
        if not mask >> index & 1 and needed[index] & ~mask == 0:
            yield index


# Which orders matter #


def conflicts(recording: Recording, graph: Graph) -> list[tuple[Entry, Entry]]:
    """
    Returns the pairs of entries that use the same bytes, one of them to write, and
    that nothing orders. No other pair can make orders differ.
    """
    addresses, _ = place(recording, "last")
    reach = [0] * len(graph.entries)
    for index, before in enumerate(graph.before):
        for other in before:
            reach[index] |= reach[other] | 1 << other
    uses: list[tuple[int, int, int, bool]] = []
    for entry in graph.entries:
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
    return [(graph.entries[a], graph.entries[b]) for a, b in sorted(found)]


def reversing(graph: Graph, first: Entry, second: Entry) -> Order:
    """Returns an order in which ``second`` comes before ``first``, as early as it can."""
    wanted, rest = set(), [second.index]
    while rest:
        index = rest.pop()
        if index not in wanted:
            wanted.add(index)
            rest.extend(graph.before[index])

    def pick(ready: Sequence[int]) -> int:
        return min(ready, key=lambda i: (i not in wanted, i))

    return Order(f"reversing:{first.index},{second.index}", pick)
