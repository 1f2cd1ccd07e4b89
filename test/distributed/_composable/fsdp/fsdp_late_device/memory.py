"""
The memory of a device that is late, and what runs in it: each entry of a recording,
bound to addresses that a caching allocator would give.

Memory that is freed is handed out again in the stream that it was allocated in, at
once and whatever its size. At that place of that stream's queue it is overwritten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from fsdp_late_device.queues import Entry, Kernel, Memory, Piece, POISON, Recording

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


_ALIGNMENT = 64
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def place(recording: Recording) -> tuple[dict[Memory, int], int]:
    """Returns the address of each memory, and how many bytes there are in all."""
    largest = max((c.memory.nbytes for c in recording.changes), default=0)
    # All blocks have one size, so that each fits every allocation
    block_nbytes = -(-largest // _ALIGNMENT) * _ALIGNMENT
    addresses: dict[Memory, int] = {}
    free: dict[Any, list[int]] = defaultdict(list)  # by owner
    end = 0
    for memory, is_free in recording.changes:
        if is_free:
            if memory.is_reusable:
                free[memory.owner].append(addresses[memory])
        elif memory.nbytes == 0:
            addresses[memory] = 0
        elif memory.initial is None and free[memory.owner]:
            addresses[memory] = free[memory.owner].pop()
        else:
            addresses[memory] = end
            end += block_nbytes
    return addresses, end


class Device:
    """All entries of a recording, to run one by one in any order."""

    @torch.no_grad()
    def __init__(self, recording: Recording):
        self.recording = recording
        self._addresses, nbytes = place(recording)
        # A few bytes more, for views of no elements at its end
        self._arena = torch.full((nbytes + _ALIGNMENT,), POISON, dtype=torch.uint8)
        for memory in self._addresses:
            if memory.initial is not None:
                self._bytes_of(memory).copy_(memory.initial)
        self._image = self._arena.clone()
        self._runs = [self._bind(entry.kernel) for entry in recording.entries]
        self._results = [
            [self._integers(piece) for piece in entry.writes]
            for entry in recording.entries
        ]
        self._expected = [self._run_in_order(entry) for entry in recording.entries]
        self._last = self._arena.clone()
        for memory, final in recording.final:
            if not torch.equal(self._bytes_of(memory), final):
                raise AssertionError(
                    f"in order, {memory.nbytes} bytes of {memory.label} end up as "
                    f"others than when they were issued"
                )

    def reset(self) -> None:
        """Makes the memory what it was in the beginning."""
        self._arena.copy_(self._image)

    @torch.no_grad()
    def run(self, entry: Entry) -> bool:
        """Runs an entry. Returns whether it gave the same bits as in order."""
        try:
            host_value = self._runs[entry.index]()
        except (RuntimeError, IndexError):
            return False  # as kernels do that index by what they are given
        pairs = zip(self._results[entry.index], self._expected[entry.index])
        is_same = all(torch.equal(*pair) for pair in pairs)
        return is_same and host_value == entry.kernel.host_value

    def is_as_in_order(self) -> bool:
        """Whether all entries have left in memory what they leave in order."""
        return torch.equal(self._arena, self._last)

    def _run_in_order(self, entry: Entry) -> list[torch.Tensor]:
        """Returns the bits that an entry gives."""
        if self._runs[entry.index]() != entry.kernel.host_value:
            raise AssertionError(f"the host reads another value: {entry}")
        return [result.clone() for result in self._results[entry.index]]

    # Binding #
    def _bytes_of(self, memory: Memory) -> torch.Tensor:
        address = self._addresses[memory]
        return self._arena[address : address + memory.nbytes]

    def _tensor(self, piece: Piece) -> torch.Tensor:
        address = self._addresses[piece.memory] // piece.dtype.itemsize
        storage = self._arena.untyped_storage()
        tensor = torch.empty(0, dtype=piece.dtype)
        return tensor.set_(storage, address + piece.offset, piece.size, piece.stride)

    def _integers(self, piece: Piece) -> torch.Tensor:
        return self._tensor(piece).view(_AS_INTEGERS[piece.dtype.itemsize])

    def _bind(self, kernel: Kernel) -> Callable[[], str]:
        """Returns what runs it in the arena, and returns what the host reads."""
        given = kernel.args, kernel.kwargs, kernel.outputs
        args, kwargs, targets = tree_map_only(Piece, self._tensor, given)

        def run() -> str:
            if kernel.rng_state is not None:
                torch.set_rng_state(kernel.rng_state)
            result = kernel.run(*args, **kwargs)
            if kernel.host_value:
                return repr(result)
            for target, value in zip(targets, tree_leaves(result)):
                if target is not None:
                    target.copy_(value)
            return ""

        return run
