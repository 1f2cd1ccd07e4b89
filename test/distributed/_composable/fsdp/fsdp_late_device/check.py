"""
A device that is late, on the CPU: as asynchronous, and as unkind, as the rules of
CUDA allow. Whole training steps run on it with the streams, events and buffers that
``fully_shard`` has on an accelerator, in as many orders as one likes.

    def train(rank):  # in a group of its own
        model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))
        model(torch.ones(2, 8)).sum().backward()
        return model  # what is returned must end up with the same bits, too

    print(check(train, ranks=4, orders=200))

docs/architecture.md says what that proves and what not. On the command line::

    python fsdp_late_device FILE.py:FUNCTION --ranks 4 --orders 200
    python fsdp_late_device FILE.py:FUNCTION --order late:default
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_late_device.memory import Device
from fsdp_late_device.orders import by_name, conflicts, Finding, Graph, names, run
from fsdp_late_device.queues import Recording
from fsdp_late_device.record import Rank, record


@dataclass
class Report:
    """What running in other orders has shown."""

    entries: int
    orders: int
    # Orders that gave other bits
    findings: list[Finding] = field(default_factory=list)
    # Pairs of entries that use the same memory with nothing to order them
    unordered: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.findings and not self.unordered

    def __str__(self) -> str:
        lines = [
            f"{self.entries} entries: {len(self.findings)} of {self.orders} orders "
            f"give other bits"
        ]
        if self.unordered:
            count = len(self.unordered)
            lines += [f"{count} pairs of entries share memory in no order, e.g."]
            lines += self.unordered[:3]
        lines += [str(finding) for finding in self.findings[:1]]
        return "\n".join(lines)


def unordered(recording: Recording) -> list[str]:
    """Returns the pairs of entries that share memory with nothing to order them."""
    return [f"  {first}\n  {second}" for first, second in conflicts(recording)]


def examine(recording: Recording, orders: Sequence[str] | int) -> Report:
    """
    Runs what was recorded in these orders, or in so many, and looks for pairs of
    entries that nothing orders.
    """
    graph, device = Graph(recording), Device(recording)
    wanted = names(graph, orders) if isinstance(orders, int) else orders
    found = [run(device, graph, by_name(graph, name)) for name in wanted]
    findings = [finding for finding in found if finding is not None]
    entries = len(recording.entries)
    return Report(entries, len(wanted), findings, unordered(recording))


def check(
    program: Callable[[Rank], Any],
    *,
    ranks: int = 4,
    orders: Sequence[str] | int = 200,
) -> Report:
    """
    Runs ``program`` as one of ``ranks`` ranks, and then again what it issued, in other
    orders.

    The program may use its argument's ``number``, ``handle`` (streams and events, as
    ``torch.cuda`` has them) and ``put_on_host``. Tensors are on the CPU. Collectives
    take what this rank gives for what all of them do, and have no order but that of
    their streams.

    Raises:
        AssertionError: if in order, too, it reads memory that nobody wrote.
    """
    return examine(record(program, ranks), orders)


# The command line #


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fsdp_late_device", description="Runs a program on a late device."
    )
    parser.add_argument("program", help="FILE.py:FUNCTION, given its rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--orders", type=int, default=200)
    parser.add_argument("--order", help="the name of one order, to run it again")
    args = parser.parse_args(arguments)
    orders = args.orders if args.order is None else [args.order]
    file, _, function = args.program.rpartition(":")
    sys.path.insert(0, str(Path(file).parent))
    program = runpy.run_path(file)[function]
    report = check(program, ranks=args.ranks, orders=orders)
    print(report)
    return not report.is_clean
