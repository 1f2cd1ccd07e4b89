"""
What one rank issues to a device that is late: its operators, memory and collectives.
``record.py`` runs all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TYPE_CHECKING

from fsdp_late_device.collectives import Call, functional_call
from fsdp_late_device.queues import (
    Change,
    Entry,
    HostRead,
    Kernel,
    Memory,
    Piece,
    POISON,
    Poisoning,
    Work,
)
from fsdp_streams.devices import Event, Issuer, Pending, Stream
from fsdp_streams.operators import (
    ALLOCATING,
    argument_names,
    draws_random_numbers,
    flat,
    HOST_READING,
    is_on_device,
    is_view,
    written_names,
)
from fsdp_streams.sites import CHECKERS

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef


if TYPE_CHECKING:
    from fsdp_late_device.record import Recorder

CHECKERS.add(__file__)

# What the schema of an operator does not say that it writes
_WRITTEN_BESIDES = {"fsdp::all_gather_copy_in": frozenset(("all_gather_output",))}


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Rank(Issuer):
    """
    One rank of a recording, in a thread of its own: a
    :class:`torch.distributed` group of that many ranks is there, and the devices'
    handles that ``fully_shard`` asks for are stand-ins.
    """

    START: frozenset[Entry] = frozenset()

    def __init__(self, device: Recorder, number: int):
        super().__init__(device.watch)
        self.device, self.number, self.handle = device, number, device.handle
        self._memory: dict[int, tuple[StorageWeakRef, Memory]] = {}
        self._groups: dict[Any, Any] = {}
        # Functional collectives by their results' storage
        self._pending: dict[int, Any] = {}
        self._recorded: set[Memory] = set()  # in streams, so freed after them
        # By owner: memory that its next allocation may get
        self._freed: dict[Stream, list[Memory]] = {}
        self._events: weakref.WeakSet[Event] = weakref.WeakSet()

    # What a program may use #
    def synchronize(self) -> None:
        self.collect()
        super().synchronize()

    def put_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declares the memory of these tensors to be the host's, from now on."""
        self.synchronize()
        for tensor in tensors:
            self._piece(tensor).memory.owner = self.host

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return self._piece(tensor).memory.owner is self.host

    def mark(self) -> None:
        """Marks a place in the recording. All hosts wait for all until here."""
        self.synchronize()
        self.device.mark(self)

    def end_step(self) -> None:
        """Takes note of how many events somebody holds."""
        self.device.recording.events_left.append(len(self._events))

    def new_event(self) -> Event:
        event = super().new_event()
        self._events.add(event)
        return event

    # Entries #
    def join(self, clock: frozenset[Entry], other: frozenset[Entry]) -> Any:
        return clock | other

    def comes_to_call(self) -> bool:
        self.collect()
        return super().comes_to_call()

    def _add(
        self,
        work: Work,
        label: Any,
        reads: list[Piece],
        writes: list[Piece],
        stream: Stream,
    ) -> Entry:
        before = stream.clock | self.host.clock
        entry = self.device.new_entry(
            (stream,), str(label), work, before, reads, writes
        )
        stream.clock = frozenset((entry,))
        return entry

    def issue(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an operator, and records it unless it moves no data."""
        self.collect()
        if operator.namespace == "_c10d_functional":
            return self._issue_collective(operator, args, kwargs)
        if is_view(operator):
            return operator(*args, **kwargs)
        given, reads, writes = self._given(operator, args, kwargs)
        names, written = argument_names(operator), written_names(operator)
        named = (*zip(names, args), *kwargs.items())
        changed = [v for n, v in named if n in written and is_on_device(v)]
        nbytes = [v.untyped_storage().nbytes() for v in changed]
        rng_state = None
        if draws_random_numbers(operator):
            generator = kwargs.get("generator") or torch.default_generator
            rng_state = generator.get_state()
        result = operator(*args, **kwargs)
        if nbytes != [v.untyped_storage().nbytes() for v in changed]:
            raise NotImplementedError(f"{operator} resizes its arguments' memory")
        results = flat(result)
        name = operator._schema.name
        if name in ALLOCATING:
            for tensor in filter(is_on_device, results):
                self._piece(tensor, label="empty")
            return result
        owners = [piece.memory.owner for piece in (*reads, *writes)]
        on_host = bool(owners) and all(owner is self.host for owner in owners)
        stream = self.host if on_host else self.stream
        outputs = [self._output(v, operator, stream) for v in results]
        writes = [piece for piece in outputs if piece is not None] + writes
        kernel = Kernel(operator, *given, outputs, rng_state)
        if name in HOST_READING:
            entry = self._add(HostRead(kernel, result), operator, reads, [], stream)
            self.host.comes_after({entry})
        elif writes or not any(
            map(is_on_device, results)
        ):  # else it returned an argument
            self._add(kernel, operator, reads, writes, stream)
        return result

    def _given(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[tuple[list[Any], dict[str, Any]], list[Piece], list[Piece]]:
        """Returns arguments with pieces for tensors, and those read and written."""
        written = written_names(operator)
        written |= _WRITTEN_BESIDES.get(operator._schema.name, frozenset())
        reads: list[Piece] = []
        writes: list[Piece] = []

        def pieces(name: str, value: Any) -> Any:
            if is_on_device(value):
                piece = self._piece(value)
                (writes if name in written else reads).append(piece)
                return piece
            if isinstance(value, (list, tuple)):
                return [pieces(name, item) for item in value]
            return value

        mine = [pieces(*pair) for pair in zip(argument_names(operator), args)]
        named = {name: pieces(name, value) for name, value in kwargs.items()}
        return (mine, named), reads, writes

    def _output(self, value: Any, operator: Any, stream: Stream) -> Piece | None:
        if not is_on_device(value) or self._is_known(value):
            return None
        return self._piece(value, str(operator), stream)

    # Memory #
    def _is_known(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._memory

    def _piece(
        self,
        tensor: torch.Tensor,
        label: str | None = None,
        owner: Stream | None = None,
    ) -> Piece:
        """
        Returns where a tensor lies. With a label, its memory was allocated right
        now. Otherwise memory that was never seen was there with its contents.
        """
        storage = tensor.untyped_storage()
        known = self._memory.get(storage._cdata)
        if known is None:
            memory = self._allocate(storage, label or "someone before", owner)
            if label is None:
                memory.initial = _as_bytes(storage).clone()
            elif label == "empty":
                _as_bytes(storage).fill_(POISON)
        else:
            memory = known[1]
        size, stride = tuple(tensor.size()), tensor.stride()
        return Piece(memory, tensor.dtype, size, stride, tensor.storage_offset())

    def _allocate(
        self, storage: torch.UntypedStorage, label: str, owner: Stream | None = None
    ) -> Memory:
        owner = owner or self.stream
        for memory in self._freed.pop(owner, ()):
            self._poison(memory)
        memory = Memory(self.number, owner, storage.nbytes(), label)
        # The weak reference keeps another storage from getting the same key
        self._memory[storage._cdata] = StorageWeakRef(storage), memory
        self.device.recording.changes.append(Change(memory, is_free=False))
        return memory

    def collect(self) -> None:
        """Finds out which memory was let go of since the last call."""
        # Of the class itself: this runs at each operator, for all memory
        is_expired = torch.UntypedStorage._expired
        expired = [k for k, (ref, _) in self._memory.items() if is_expired(ref.cdata)]
        for key in expired:
            self._free(self._memory.pop(key)[1])

    def _free(self, memory: Memory) -> None:
        if memory.nbytes == 0 or memory.owner is self.host:
            return  # pinned memory waits for its copies by itself
        self.device.recording.changes.append(Change(memory, is_free=True))
        if memory in self._recorded:
            memory.is_reusable = False  # until long after its readers
        else:
            self._freed.setdefault(memory.owner, []).append(memory)

    def _poison(self, memory: Memory) -> None:
        whole = Piece(memory, torch.uint8, (memory.nbytes,), (1,), 0)
        label = f"free {memory.nbytes} bytes of {memory.label}"
        self._add(Poisoning(memory), label, [], [whole], memory.owner)

    def resize(self, storage: torch.UntypedStorage, original: Any, nbytes: int) -> Any:
        self.collect()
        before = storage.nbytes()
        result = original(storage, nbytes)
        if self.is_paused or before == nbytes or storage.device.type != "cpu":
            return result
        known = self._memory.pop(storage._cdata, None)
        if known is not None and before > 0:
            self._free(known[1])
        self._allocate(storage, "resize_")
        if nbytes > 0:
            with self.paused():
                _as_bytes(storage).fill_(POISON)
        return result

    def record_stream(self, tensor: torch.Tensor) -> None:
        self._recorded.add(self._piece(tensor).memory)

    def copy_across(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Copies from host to device or back, in the current stream."""
        self.collect()
        source = self._piece(tensor)
        to_device = source.memory.owner is self.host
        with self.paused():
            copy = tensor.detach().clone()
        owner = self.stream if to_device else self.host
        target = self._piece(copy, "copy across", owner)
        kernel = Kernel(torch.ops.aten.clone.default, [source], {}, [target], None)
        entry = self._add(kernel, "copy across", [source], [target], self.stream)
        if not non_blocking:
            self.host.comes_after({entry})
        return copy

    def finish(self) -> None:
        for _, memory in self._memory.values():
            memory.label += ", kept"
        self.device.recording.final += [
            (memory, _as_bytes(storage).clone())
            for ref, memory in self._memory.values()
            if memory.nbytes and (storage := _storage_of(ref)) is not None
        ]

    # Collectives #
    def meet(
        self,
        call: Call,
        group: Any,
        source: torch.Tensor,
        target: torch.Tensor,
        is_async: bool,
    ) -> Pending | None:
        """Takes part in a collective."""
        self.collect()
        stream = self.comm_stream(group) if is_async else self.stream
        self.device.meet(self, call, self._key(group), stream, source, target)
        return self.pending(stream, source, target) if is_async else None

    def _issue_collective(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Takes part in a functional collective, as DTensor issues them."""
        given = dict(zip(argument_names(operator), args)) | kwargs
        source = args[0]
        name = operator._schema.name.partition("::")[2]
        if name == "wait_tensor":
            pending = self._pending.pop(source.untyped_storage()._cdata, None)
            if pending is not None:
                pending.wait()
            return source
        if name.startswith("_"):
            return operator(*args, **kwargs)  # makes a subclass of it
        call, size = functional_call(name, given)
        target = source.new_empty(size)
        self._piece(target, label="empty")
        group = dist.distributed_c10d._resolve_process_group(given["group_name"])
        pending = self.meet(call, group, source, target, is_async=True)
        self._pending[target.untyped_storage()._cdata] = pending
        return target

    def _key(self, group: Any) -> Any:
        """Names a group alike on all of its ranks."""
        group = group or dist.group.WORLD
        if group not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            before = [key for key in self._groups.values() if key[0] == ranks]
            self._groups[group] = ranks, len(before)
        return self._groups[group]

    def pieces(self, tensors: Sequence[torch.Tensor]) -> list[Piece]:
        return [self._piece(tensor) for tensor in tensors]


def _storage_of(ref: StorageWeakRef) -> torch.UntypedStorage | None:
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
