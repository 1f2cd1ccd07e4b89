"""
A device that is late, on the CPU: as asynchronous, and as unkind, as CUDA's rules
allow. docs/architecture.md has an example, and says what that proves and what not.
"""

from collections.abc import Callable
from typing import Any

from fsdp_helpers.late_device.devices import Recording
from fsdp_helpers.late_device.record import Rank, record


def check(program: Callable[[Rank], Any], *, ranks: int = 4) -> list[str]:
    """
    Runs ``program`` as one of ``ranks`` ranks, and returns the pairs of entries that
    share memory with nothing to order them.

    The program may use its argument's ``handle`` (streams and events, as ``torch.cuda``
    has them) and ``put_on_host``. Tensors are on the CPU. Collectives take what this
    rank gives for what all of them do, and have no order but that of their streams.
    """
    return unordered(record(program, ranks))


def unordered(recording: Recording) -> list[str]:
    """Returns the pairs that use the same bytes, one to write, in no order."""
    entries = recording.entries
    reach = [0] * len(entries)
    uses: list[tuple[int, int, int, int, bool]] = []
    for entry in entries:
        for other in entry.before:
            reach[entry.index] |= reach[other.index] | 1 << other.index
        for pieces, is_write in ((entry.reads, False), (entry.writes, True)):
            for memory, (start, end) in pieces:
                if end:
                    uses.append((id(memory), start, end, entry.index, is_write))
    uses.sort()
    found: set[tuple[int, int]] = set()
    for at, (memory, _, end, index, writes) in enumerate(uses):
        for later in range(at + 1, len(uses)):
            other_memory, start, _, other, other_writes = uses[later]
            if other_memory != memory or start >= end:
                break
            if writes or other_writes:
                first, second = (index, other) if index < other else (other, index)
                if first != second and not reach[second] >> first & 1:
                    found.add((first, second))
    return [f"  {entries[a]}\n  {entries[b]}" for a, b in sorted(found)]
