"""
The memory of a device that is late, and what runs in it: each entry of a recording,
bound to addresses that a caching allocator would give.

Memory that is freed is handed out again in the stream that it was allocated in, at
once and whatever its size. At that place of that stream's queue it is overwritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fsdp_late_device.operators import flat
from fsdp_late_device.queues import (
    Entry,
    HostRead,
    Kernel,
    Meeting,
    Memory,
    Piece,
    POISON,
    Poisoning,
    Recording,
)

import torch
from torch.utils._python_dispatch import _disable_current_modes


_ALIGNMENT = 64
# Up to here all blocks have one size, so that each fits every allocation
_ONE_SIZE_NBYTES = 1 << 16

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _block_nbytes(nbytes: int, largest: int) -> int:
    if largest <= _ONE_SIZE_NBYTES:
        return largest
    return 1 << max(nbytes - 1, _ALIGNMENT - 1).bit_length()


def place(recording: Recording) -> tuple[dict[Memory, int], int]:
    """Returns the address of each memory, and how many bytes there are in all."""
    end = 0
    addresses: dict[Memory, int] = {}
    free: dict[Any, list[int]] = {}
    largest = max((c.memory.nbytes for c in recording.changes), default=0)
    largest = -(-largest // _ALIGNMENT) * _ALIGNMENT
    for memory, is_free in recording.changes:
        if memory.nbytes == 0:
            addresses[memory] = 0
            continue
        nbytes = _block_nbytes(memory.nbytes, largest)
        blocks = free.setdefault((memory.owner, nbytes), [])
        is_host = memory.owner is memory.owner.rank.host
        if is_free:
            if memory.is_reusable:
                blocks.append(addresses[memory])
        elif blocks and memory.initial is None and not is_host:
            addresses[memory] = blocks.pop()
        else:
            addresses[memory] = end
            end += nbytes
    return addresses, end


class Device:
    """All entries of a recording, to run one by one in any order."""

    def __init__(self, recording: Recording):
        self.recording = recording
        self._addresses, nbytes = place(recording)
        # A few bytes more, for views of no elements at its end
        self.arena = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
        self._image = torch.full_like(self.arena, POISON)
        for memory in self._addresses:
            if memory.initial is not None:
                self._bytes_of(memory, self._image).copy_(memory.initial)
        self.reset()
        self._runs = [self._bind(entry.work) for entry in recording.entries]
        self._results = [self._bind_results(entry) for entry in recording.entries]
        self._host_value: Any = None
        self._expected: list[Any] = [None] * len(self._runs)
        self._run_in_order()

    def reset(self) -> None:
        """Makes the memory what it was in the beginning."""
        self.arena.copy_(self._image)

    @staticmethod
    @contextlib.contextmanager
    def running() -> Iterator[None]:
        """Operators that run are not recorded, nor differentiated."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with torch.no_grad(), _disable_current_modes():
            yield
        torch.set_num_threads(threads)

    def run(self, index: int) -> bool:
        """Runs an entry. Returns whether it gave the same bits as in order."""
        try:
            self._runs[index]()
        except (RuntimeError, IndexError):
            return False  # as kernels do that index by what they are given
        expected = self._expected[index]
        if isinstance(self.recording.entries[index].work, HostRead):
            return _is_same(self._host_value, expected)
        results = self._results[index]
        return all(torch.equal(*pair) for pair in zip(results, expected))

    def span(self, piece: Piece) -> tuple[int, int]:
        """Returns from where to where a piece lies in the arena, in bytes."""
        start, end = piece.span
        address = self._addresses[piece.memory]
        return address + start, address + end

    def _run_in_order(self) -> None:
        """
        Raises:
            AssertionError: if that gives other bits than when they were issued:
                what is issued reads memory that nobody wrote.
        """
        with self.running():
            for index, run in enumerate(self._runs):
                run()
                entry = self.recording.entries[index]
                if isinstance(entry.work, HostRead):
                    self._expected[index] = self._host_value
                    if not _is_same(self._host_value, entry.work.value):
                        raise AssertionError(f"the host reads another value: {entry}")
                else:
                    results = self._results[index]
                    self._expected[index] = [result.clone() for result in results]
        for memory, final in self.recording.final:
            if not torch.equal(self._bytes_of(memory, self.arena), final):
                raise AssertionError(
                    f"in order, {memory.nbytes} bytes of {memory.label} end up as "
                    f"others than when they were issued"
                )
        self._last = self.arena.clone()

    def changed_at_end(self) -> tuple[int, int] | None:
        """
        Returns the first byte that is another one after all entries than after running
        them in order, and the one behind it. None if there is none.
        """
        if torch.equal(self.arena, self._last):
            return None
        first = int((self.arena != self._last).nonzero()[0])
        return first, first + 1

    # Binding #
    def _bytes_of(self, memory: Memory, arena: torch.Tensor) -> torch.Tensor:
        address = self._addresses[memory]
        return arena[address : address + memory.nbytes]

    def _tensor(self, piece: Piece) -> torch.Tensor:
        address = self._addresses[piece.memory] // piece.dtype.itemsize
        storage = self.arena.untyped_storage()
        tensor = torch.empty(0, dtype=piece.dtype)
        return tensor.set_(storage, address + piece.offset, piece.size, piece.stride)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Piece):
            return self._tensor(value)
        if isinstance(value, list):
            return [self._argument(item) for item in value]
        return value

    def _bind_results(self, entry: Entry) -> list[torch.Tensor]:
        if isinstance(entry.work, Poisoning):
            return []
        results = []
        for piece in entry.writes:
            whole = self._tensor(piece)
            if piece.dtype.itemsize > 8:  # complex
                whole = torch.view_as_real(whole)
            results.append(whole.view(_AS_INTEGERS[whole.dtype.itemsize]))
        return results

    def _bind(self, work: Any) -> Callable[[], Any]:
        if isinstance(work, Poisoning):
            mine = self._bytes_of(work.memory, self.arena)
            return lambda: mine.fill_(POISON)
        if isinstance(work, Meeting):
            source, target = self._tensor(work.source), self._tensor(work.target)
            return lambda: work.call.run(source, target)
        if isinstance(work, HostRead):
            read = self._bind_operator(work.kernel)
            return lambda: setattr(self, "_host_value", read())
        return self._bind_kernel(work)

    def _bind_operator(self, kernel: Kernel) -> Callable[[], Any]:
        args = [self._argument(value) for value in kernel.args]
        kwargs = {name: self._argument(v) for name, v in kernel.kwargs.items()}
        operator = kernel.operator
        if kernel.rng_state is None:
            return lambda: operator(*args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        state = kernel.rng_state

        def draw() -> Any:
            generator.set_state(state)
            return operator(*args, **kwargs)

        return draw

    def _bind_kernel(self, kernel: Kernel) -> Callable[[], Any]:
        operator = self._bind_operator(kernel)
        targets = [p if p is None else self._tensor(p) for p in kernel.outputs]

        def run() -> None:
            for target, value in zip(targets, flat(operator())):
                if target is not None:
                    target.copy_(value)

        return run


def _is_same(value: Any, expected: Any) -> bool:
    return value == expected or (value != value and expected != expected)
