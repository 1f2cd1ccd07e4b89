"""
A device that is late, on the CPU: as asynchronous, and as unkind, as the rules of
CUDA allow. Whole training steps run on it with the streams, events and buffers that
``fully_shard`` has on an accelerator, in as many orders as one likes.

    def train(rank):  # on each rank, in a group of its own
        model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))
        model(torch.ones(2, 8) * rank.number).sum().backward()
        return model  # what is returned must end up with the same bits, too

    print(check(train, ranks=4, orders=200))

How that is done is in the modules beside it, in this order:

- ``record.py`` runs a program once and takes down what each rank put into
  which stream, what orders it, and when memory was allocated and freed.
- ``memory.py`` gives all of that memory of its own, where what is freed is
  overwritten and handed out again.
- ``orders.py`` runs it in orders that the streams allow, and compares.

docs/architecture.md says what that proves and what not. On the command line::

    python fsdp_late_device FILE.py:FUNCTION --ranks 4 --orders 200
    python fsdp_late_device FILE.py:FUNCTION --order late:/default --memory last-ff
    python fsdp_late_device --schedules [--kinds mixed] [--only hsdp]
    python fsdp_late_device --races     # published ones, put back in
    python fsdp_late_device --waits     # each of them left out, one at a time
    python fsdp_late_device --steps     # small ones, in every order
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_late_device.memory import Device, PATTERNS, REUSES
from fsdp_late_device.orders import (
    by_name,
    conflicts,
    Finding,
    Graph,
    names,
    reversing,
    run,
)
from fsdp_late_device.queues import Recording
from fsdp_late_device.ranks import Rank
from fsdp_late_device.record import Recorder


SAME_BITS = "the same bits as in order"


@dataclass
class Report:
    """What running in other orders has shown."""

    entries: int
    ranks: int
    orders: int = 0
    # Orders that gave other bits
    findings: list[Finding] = field(default_factory=list)
    # Pairs of entries that use the same memory with nothing to order them
    unordered: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.findings and not self.unordered

    def __str__(self) -> str:
        lines = [
            f"{self.entries} entries of {self.ranks} ranks: {len(self.findings)} of "
            f"{self.orders} orders give other bits"
        ]
        if self.unordered:
            count = len(self.unordered)
            lines += [f"{count} pairs of entries share memory in no order, e.g."]
            lines += self.unordered[:3]
        lines += [str(finding) for finding in self.findings[:1]]
        return "\n".join(lines)


def devices(
    recording: Recording, orders: Sequence[str], reuses: Sequence[str] = REUSES
) -> Iterator[tuple[Device, Sequence[str]]]:
    """
    Yields devices that hand out memory differently, and which orders each is to run,
    so that each gets some of all kinds.
    """
    for n, reuse in enumerate(reuses):
        if mine := orders[n :: len(reuses)]:
            pattern = PATTERNS[n % len(PATTERNS)]
            yield Device(recording, reuse=reuse, pattern=pattern, seed=n), mine


def unordered(recording: Recording) -> list[str]:
    """Returns the pairs of entries that share memory with nothing to order them."""
    pairs = conflicts(recording, Graph(recording))
    return [f"  {first}\n  {second}" for first, second in pairs]


def examine(
    recording: Recording, orders: int, ranks: int = 0, reuses: Sequence[str] = REUSES
) -> Report:
    """
    Runs what was recorded in ``orders`` orders, which are spread over ways to hand
    out memory, and looks for pairs of entries that nothing orders.
    """
    graph = Graph(recording)
    report = Report(len(recording.entries), ranks)
    wanted = names(graph, orders)
    report.unordered += unordered(recording)
    for device, mine in devices(recording, wanted, reuses):
        for name in mine:
            finding = run(device, graph, by_name(graph, name))
            report.findings += [] if finding is None else [finding]
        report.orders += len(mine)
    return report


def check(
    program: Callable[[Rank], Any],
    *,
    ranks: int = 4,
    orders: int = 200,
    seed: int = 0,
    comms_in_order: bool = True,
) -> Report:
    """
    Runs ``program`` on ``ranks`` ranks, and then again what it issued, in other orders.

    The program is called with its rank, in a process group of its own. It may use
    ``rank.number``, ``rank.handle`` (streams and events, as ``torch.cuda`` has them),
    ``rank.put_on_host`` and ``rank.mark``. Tensors are on the CPU.

    Without ``comms_in_order``, collectives of one group in several streams may overtake
    each other, on all ranks alike: what is safe then needs no communicator's order.

    Raises:
        record.Stuck: if the ranks do not come to the same collectives.
        AssertionError: if in order, too, it reads memory that nobody wrote.
    """
    recorder = Recorder(ranks, comms_in_order=comms_in_order)
    recording = recorder.record(program, seed)
    return examine(recording, orders, ranks)


def replay(recording: Recording, order: str, memory: str) -> Finding | None:
    """Runs an order of a report once more, by its name and that of its memory."""
    reuse, _, pattern = memory.partition("-")
    seed = REUSES.index(reuse)
    device = Device(recording, reuse=reuse, pattern=int(pattern, 16), seed=seed)
    graph = Graph(recording)
    return run(device, graph, by_name(graph, order))


def show_one(recording: Recording, limit: int = 40) -> Finding | None:
    """
    Returns a finding, if any: of orders that hold up a stream or turn around two
    entries, for up to ``limit`` of the pairs that share memory in no order.
    """
    graph, device = Graph(recording), Device(recording)
    pairs = conflicts(recording, graph)
    streams = {s.name: None for pair in pairs for e in pair for s in e.streams}
    orders = [by_name(graph, f"late:/{name}") for name in streams]
    some = pairs[:: max(len(pairs) // limit, 1)]
    orders += [reversing(graph, *pair) for pair in some]
    findings = (run(device, graph, order) for order in orders)
    return next((finding for finding in findings if finding is not None), None)


# The command line #


def _load(place: str) -> Callable[[Rank], Any]:
    file, _, function = place.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file!r} is no Python file: name it as FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(file).parent))
    spec.loader.exec_module(module)
    if not hasattr(module, function):
        raise SystemExit(f"{file} has no function {function!r}")
    return getattr(module, function)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fsdp_late_device", description="Runs a program on a late device."
    )
    parser.add_argument("program", nargs="?", help="FILE.py:FUNCTION, given its rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--orders", type=int, default=200)
    parser.add_argument("--order", help="the name of one order, to run it again")
    parser.add_argument("--memory", default="last-ff", help="that it was found in")
    for mode in ("schedules", "races", "waits", "steps"):
        parser.add_argument(f"--{mode}", action="store_true")
    parser.add_argument(
        "--loose", action="store_true", help="a group's collectives have no order"
    )
    parser.add_argument("--kinds", nargs="+", help="of the schedules' units")
    parser.add_argument("--only", nargs="+", help="of the schedules or races")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.program is None:
        from fsdp_late_device.runs import run_mode

        return run_mode(args)
    program = _load(args.program)
    if args.order is not None:
        recording = Recorder(args.ranks, comms_in_order=not args.loose).record(program)
        finding = replay(recording, args.order, args.memory)
        print(finding or SAME_BITS)
        return finding is not None
    counts = {"ranks": args.ranks, "orders": args.orders}
    report = check(program, **counts, comms_in_order=not args.loose)
    print(report)
    return not report.is_clean
