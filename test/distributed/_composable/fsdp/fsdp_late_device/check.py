"""
A device that is late, on the CPU: as asynchronous, and as unkind, as the rules of
CUDA allow. Whole training steps run on it with the streams, events and buffers that
``fully_shard`` has on an accelerator, in as many orders as one likes.

    def train(rank):  # in a group of its own
        model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))
        model(torch.ones(2, 8)).sum().backward()
        return model  # what is returned must end up with the same bits, too

    print(check(train, ranks=4, orders=200))

docs/architecture.md says what that proves and what not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fsdp_late_device.memory import Device
from fsdp_late_device.orders import conflicts, Finding, names, run
from fsdp_late_device.queues import Recording
from fsdp_late_device.record import Rank, record


class Report(NamedTuple):
    """What running in other orders has shown."""

    entries: int
    orders: int
    # Orders that gave other bits
    findings: list[Finding]
    # Pairs of entries that use the same memory with nothing to order them
    unordered: list[str]

    @property
    def is_clean(self) -> bool:
        return not self.findings and not self.unordered

    def __str__(self) -> str:
        lines = [
            f"{self.entries} entries: {len(self.findings)} of {self.orders} orders "
            f"give other bits",
            f"{len(self.unordered)} pairs of entries share memory in no order",
        ]
        return "\n".join([*lines, *self.unordered[:3], *map(str, self.findings[:1])])


def unordered(recording: Recording) -> list[str]:
    """Returns the pairs of entries that share memory with nothing to order them."""
    return [f"  {first}\n  {second}" for first, second in conflicts(recording)]


def examine(recording: Recording, orders: Sequence[str] | int) -> Report:
    """
    Runs what was recorded in these orders, or in so many, and looks for pairs of
    entries that nothing orders.
    """
    device = Device(recording)
    wanted = names(recording, orders) if isinstance(orders, int) else orders
    findings = [found for name in wanted if (found := run(device, name))]
    return Report(len(recording.entries), len(wanted), findings, unordered(recording))


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
