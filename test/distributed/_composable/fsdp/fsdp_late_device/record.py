"""
Records what a program issues to a device that is late: which operator, copy and
collective it put into which stream, after what, and in which memory.

One rank runs, in a group of several: what the others do is what it does. It runs what it
issues at once, on tensors of its own: that gives the shapes, what the host reads, and
the bits to expect. What was issued runs again, in other orders: ``orders.py``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from fsdp_late_device.devices import DeviceHandle, Event, Pending, Stream
from fsdp_late_device.operators import (
    ALLOCATING,
    argument_names,
    COLLECTIVES,
    draws_random_numbers,
    flat,
    functional_call,
    HOST_READING,
    is_on_device,
    is_view,
    OperatorMode,
    written_names,
)
from fsdp_late_device.queues import (
    Call,
    Change,
    Entry,
    HostRead,
    Kernel,
    Meeting,
    Memory,
    Piece,
    POISON,
    Poisoning,
    Recording,
    Work,
)
from fsdp_late_device.sites import caller_line, CHECKERS, Site, Watch

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard as fsdp_package
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore


CHECKERS.add(__file__)

# What the schema of an operator does not say that it writes
_WRITTEN_BESIDES = {"fsdp::all_gather_copy_in": frozenset(("all_gather_output",))}


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Rank:
    """What a program is given, and what takes note of all that it issues."""

    is_paused = False  # takes no note of operators

    def __init__(self, number: int, watch: Watch):
        self.number, self._watch = number, watch
        self.recording = Recording(visited=watch.visited)
        self.handle = DeviceHandle(self)
        self.host = Stream(self, "host")
        self.default_stream = self.stream = Stream(self, "default")
        self._streams = [self.default_stream]
        self._comm_streams: dict[Any, Stream] = {}
        self._memory: dict[int, tuple[StorageWeakRef, Memory]] = {}
        # Functional collectives by their results' storage
        self._pending: dict[int, Any] = {}
        self._recorded: set[Memory] = set()  # in streams, so freed after them
        # By owner: memory that its next allocation may get
        self._freed: dict[Stream, list[Memory]] = {}
        self._events: weakref.WeakSet[Event] = weakref.WeakSet()

    # What a program may use #
    def new_stream(self, name: str | None = None) -> Stream:
        name = name or f"stream {len(self._streams)}"
        same = sum(s.name.partition("#")[0] == name for s in self._streams)
        stream = Stream(self, f"{name}#{same}" if same else name)
        self._streams.append(stream)
        return stream

    def synchronize(self) -> None:
        """Makes the host wait for all streams."""
        self.collect()
        for stream in self._streams:
            self.host.clock |= stream.clock

    def put_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declares the memory of these tensors to be the host's, from now on."""
        self.synchronize()
        for tensor in tensors:
            self._piece(tensor).memory.owner = self.host

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return self._piece(tensor).memory.owner is self.host

    def end_step(self) -> None:
        """Takes note of how many events somebody holds."""
        self.recording.events_left.append(len(self._events))

    # What the stand-ins use #
    def new_event(self) -> Event:
        event = Event(self)
        self._events.add(event)
        return event

    def comes_to_call(self) -> bool:
        self.collect()
        return self._watch.comes_to_call()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused

    # Entries #
    def _add(
        self,
        work: Work,
        label: Any,
        reads: list[Piece],
        writes: list[Piece],
        stream: Stream,
    ) -> None:
        entries, before = self.recording.entries, stream.clock | self.host.clock
        line = caller_line()
        entry = Entry(
            len(entries), stream, str(label), line, work, before, reads, writes
        )
        entries.append(entry)
        stream.clock = frozenset((entry,))

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
            self._add(HostRead(kernel, result), operator, reads, [], stream)
            self.host.clock |= stream.clock
        elif writes or not any(map(is_on_device, results)):
            # else it returned an argument
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
        if not is_on_device(value) or value.untyped_storage()._cdata in self._memory:
            return None
        return self._piece(value, str(operator), stream)

    # Memory #
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
            whole = Piece(memory, torch.uint8, (memory.nbytes,), (1,), 0)
            freed = f"free {memory.nbytes} bytes of {memory.label}"
            self._add(Poisoning(memory), freed, [], [whole], memory.owner)
        memory = Memory(owner, storage.nbytes(), label)
        # The weak reference keeps another storage from getting the same key
        self._memory[storage._cdata] = StorageWeakRef(storage), memory
        self.recording.changes.append(Change(memory, is_free=False))
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
        self.recording.changes.append(Change(memory, is_free=True))
        if memory in self._recorded:
            memory.is_reusable = False  # until long after its readers
        else:
            self._freed.setdefault(memory.owner, []).append(memory)

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
        self._add(kernel, "copy across", [source], [target], self.stream)
        if not non_blocking:
            self.host.clock |= self.stream.clock
        return copy

    def finish(self) -> None:
        """Takes note of what is left in memory."""
        for ref, memory in self._memory.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if memory.nbytes and storage is not None:
                self.recording.final.append((memory, _as_bytes(storage).clone()))

    # Collectives #
    def meet(
        self,
        name: str,
        operation: str | None,
        group: Any,
        source: torch.Tensor,
        target: torch.Tensor,
        is_async: bool,
    ) -> Pending | None:
        self.collect()
        stream = self.stream
        if is_async:  # one for each group, after ours
            if group not in self._comm_streams:
                comm = f"comm {len(self._comm_streams)}"
                self._comm_streams[group] = self.new_stream(comm)
            stream = self._comm_streams[group]
            stream.clock |= self.stream.clock
        call = Call(name, operation, dist.get_rank(group), dist.get_world_size(group))
        reads, writes = [self._piece(source)], [self._piece(target)]
        with self.paused(), torch.no_grad():
            call.run(source, target)
        self._add(Meeting(call, *reads, *writes), name, reads, writes, stream)
        if not is_async:
            return None
        done = self.new_event()
        done.clock = stream.clock
        return Pending(done, (source, target))

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
        operation, size = functional_call(name, given)
        target = source.new_empty(size)
        self._piece(target, label="empty")
        group = dist.distributed_c10d._resolve_process_group(given["group_name"])
        pending = self.meet(name, operation, group, source, target, is_async=True)
        self._pending[target.untyped_storage()._cdata] = pending
        return target


# Recording a program #


def record(
    program: Callable[[Rank], Any],
    ranks: int = 1,
    *,
    number: int = 0,
    without: Site | None = None,
) -> Recording:
    """
    Runs a program as one rank of a group of so many, without one of the calls that
    order streams, and returns what it issued.
    """
    torch.manual_seed(0)
    rank = Rank(number, Watch(without))
    with _patched(rank):
        store = FakeStore()
        dist.init_process_group("fake", store=store, rank=number, world_size=ranks)
        try:
            with OperatorMode(rank):
                kept = program(rank)
                rank.collect()
            rank.finish()
            del kept
        finally:
            dist.destroy_process_group()
    return rank.recording


@contextlib.contextmanager
def _patched(rank: Rank) -> Iterator[None]:
    with contextlib.ExitStack() as stack:

        def patch(*args: Any) -> None:
            stack.enter_context(mock.patch.object(*args))

        for name, module in [*sys.modules.items()]:
            is_fsdp = name.startswith(fsdp_package.__name__)
            if is_fsdp and hasattr(module, "_get_device_handle"):
                patch(module, "_get_device_handle", lambda *unused: rank.handle)
        for name, tensors in COLLECTIVES.items():
            patch(dist, name, _collective(rank, name, tensors))
        patch(dist, "barrier", lambda *args, **kwargs: rank.synchronize())
        for owner, name, call in _methods(rank):
            patch(owner, name, call)
        gc.disable()  # or memory would be freed at other places each time
        stack.callback(gc.enable)
        gc.freeze()  # what a schedule collects is its own
        stack.callback(gc.unfreeze)
        yield


def _collective(
    rank: Rank, name: str, tensors: tuple[str, str]
) -> Callable[..., Pending | None]:
    original = getattr(dist, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Pending | None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if any(given.get(f"{side}_split_sizes") for side in ("input", "output")):
            raise NotImplementedError(f"{name} with split sizes")
        operation = getattr(given.get("op"), "op", given.get("op"))
        return rank.meet(
            name,
            getattr(operation, "name", None),
            given["group"],
            *(given[argument] for argument in tensors),
            given["async_op"],
        )

    return call


def _methods(rank: Rank) -> Iterator[tuple[Any, str, Any]]:
    resize, to = torch.UntypedStorage.resize_, torch.Tensor.to
    tolist = torch.Tensor.tolist

    def is_copied(tensor: torch.Tensor) -> bool:
        return is_on_device(tensor) and not rank.is_paused

    @functools.wraps(resize)
    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        return rank.resize(storage, resize, nbytes)

    @functools.wraps(to)
    def to_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_copied(tensor) and "non_blocking" in kwargs:
            return rank.copy_across(tensor, kwargs["non_blocking"])
        return to(tensor, *args, **kwargs)

    @functools.wraps(tolist)
    def tolist_(tensor: torch.Tensor) -> Any:
        if is_copied(tensor) and not rank.is_on_host(tensor):
            tensor = rank.copy_across(tensor, non_blocking=False)
        return tolist(tensor)

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        rank.record_stream(tensor)

    yield torch.UntypedStorage, "resize_", resize_
    yield torch.Tensor, "to", to_
    yield torch.Tensor, "tolist", tolist_
    yield torch.Tensor, "record_stream", record_stream
