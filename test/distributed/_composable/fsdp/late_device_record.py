"""
What a program issues to a device that is late: which rank put what into which
stream, after what, and in which memory. :mod:`fsdp_late_device` tells what for.

Ranks are threads that take turns, so that a recording is the same each time. They
run what they issue at once, on tensors of their own: that gives the shapes, what the
host reads, and the bits to expect. What they issued runs again, in other orders and
in other memory: :mod:`late_device_memory`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from fsdp_happens_before import (
    _caller_line,
    _is_view,
    _written_names,
    CHECKERS,
    Site,
)
from late_device_collectives import Call, COLLECTIVES, functional_call

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard as fsdp_package
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, TreeSpec


# Of memory that nobody has written: not a number in every floating-point dtype
POISON = 0xFF

CHECKERS.add(__file__)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ALLOCATING = frozenset(
    "aten::" + name
    for name in ("empty", "empty_like", "empty_strided", "new_empty")
    + ("new_empty_strided", "empty_permuted")
)
_HOST_READING = frozenset(("aten::_local_scalar_dense", "aten::equal"))
# What the schema of an operator does not say that it writes
_WRITTEN_BESIDES = {"fsdp::all_gather_copy_in": frozenset(("all_gather_output",))}


# What is recorded #


@dataclass(eq=False)
class Memory:
    """Storage from its allocation until it is freed."""

    rank: int
    owner: Stream  # the host for host memory
    nbytes: int
    label: str
    # Of what was there before it was first used
    initial: torch.Tensor | None = None
    is_reusable: bool = True


@dataclass(frozen=True)
class Piece:
    """A tensor: where it lies in which memory."""

    memory: Memory
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements

    @property
    def span(self) -> tuple[int, int]:
        """The bytes from the first to the last element."""
        if 0 in self.size:
            return 0, 0
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride))
        start = self.offset * self.dtype.itemsize
        return start, start + (last + 1) * self.dtype.itemsize


class Kernel(NamedTuple):
    """An operator, with pieces in place of tensors."""

    operator: Any
    arguments: list[Any]  # flat
    spec: TreeSpec
    outputs: list[Piece | None]  # None where it is an argument, or no tensor
    rng_state: torch.Tensor | None  # of what draws random numbers


class HostRead(NamedTuple):
    """An operator whose result the host goes on with."""

    kernel: Kernel
    value: Any


class Poisoning(NamedTuple):
    """Memory is freed."""

    memory: Memory


class Meeting(NamedTuple):
    """A collective, and for each of its ranks the input and the output."""

    call: Call
    inputs: list[Piece]
    outputs: list[Piece]


Work = Kernel | HostRead | Poisoning | Meeting


@dataclass(eq=False)
class Entry:
    """What one stream has to do, or one of each rank for a collective."""

    index: int  # in the order of issue
    streams: tuple[Stream, ...]
    label: str
    line: tuple[str, int, str]
    work: Work
    before: frozenset[Entry]  # what must have run
    reads: list[Piece]
    writes: list[Piece]

    def __str__(self) -> str:
        file, number, function = self.line
        at = f"{file.rpartition('/')[2]}:{number} {function}"
        where = ", ".join(f"{s.rank.number}:{s.name}" for s in self.streams)
        return f"[{where}] {self.label} ({at})"


class Change(NamedTuple):
    """Memory was allocated, or else freed."""

    memory: Memory
    is_free: bool


@dataclass
class Recording:
    """What all ranks issued."""

    entries: list[Entry] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    # What was still there at the end, and its bytes then
    final: list[tuple[Memory, torch.Tensor]] = field(default_factory=list)
    # The number of entries at each `Rank.mark`
    marks: list[int] = field(default_factory=list)
    visited: set[tuple[str, int]] = field(default_factory=set)


# Streams and events #


class Stream:
    """A queue of one rank. The host is one as well."""

    def __init__(self, rank: Rank, name: str):
        self.rank, self.name = rank, name
        # What the next entry must come after
        self.last: frozenset[Entry] = frozenset()

    def wait_stream(self, other: Stream) -> None:
        if self.rank.comes_to_call():
            self.last |= other.last

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.rank)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.rank.host.wait_stream(self)

    def query(self) -> bool:
        self.synchronize()
        return True

    def __repr__(self) -> str:
        return self.name


class Event:
    """Without a record, nothing waits for it."""

    def __init__(self, rank: Rank):
        self.rank = rank
        self.after: frozenset[Entry] = frozenset()

    def record(self, stream: Stream | None = None) -> None:
        is_made = self.rank.comes_to_call()
        self.after = (stream or self.rank.stream).last if is_made else frozenset()

    def wait(self, stream: Stream | None = None) -> None:
        if self.rank.comes_to_call():
            stream = stream or self.rank.stream
            stream.last |= self.after

    def synchronize(self) -> None:
        self.wait(self.rank.host)

    def query(self) -> bool:
        self.synchronize()
        return True


class _Pending(dist.distributed_c10d.Work):
    """An asynchronous collective, which keeps its tensors until waited for."""

    def __init__(self, done: Event, tensors: Sequence[torch.Tensor]):
        super().__init__()
        self.done, self.tensors = done, tensors

    def wait(self, timeout: Any = None) -> bool:
        self.done.wait()
        self.tensors = ()
        return True


class DeviceHandle:
    """Stands in for ``torch.cuda`` and its like, for each rank's own thread."""

    def __init__(self, device: Recorder):
        self._device = device

    def Stream(self, *args: Any, **kwargs: Any) -> Stream:
        frame = sys._getframe(1)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        assigned = re.search(r"(\w+) = ", line)
        return self._device.rank.new_stream(assigned[1] if assigned else None)

    def Event(self, *args: Any, **kwargs: Any) -> Event:
        return Event(self._device.rank)

    def current_stream(self, device: Any = None) -> Stream:
        return self._device.rank.stream

    def synchronize(self, device: Any = None) -> None:
        self._device.rank.synchronize()

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        rank = self._device.rank
        previous = rank.stream
        # A call of ours, the context manager's and then the site's
        if rank.comes_to_call():
            rank.stream = stream
        try:
            yield
        finally:
            rank.collect()
            rank.stream = previous


# Ranks #


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    return [v for v in values if _is_on_device(v)]


def _is_on_device(value: Any) -> bool:
    return type(value) in _PLAIN and value.device.type == "cpu"


class Rank:
    """
    One rank of a recording, in a thread of its own: a
    :class:`torch.distributed` group of that many ranks is there, and the devices'
    handles that ``fully_shard`` asks for are stand-ins.
    """

    def __init__(self, device: Recorder, number: int):
        self.device, self.number = device, number
        self.handle = device.handle
        self.host = Stream(self, "host")
        self.default_stream = self.stream = Stream(self, "default")
        self.streams = [self.default_stream]
        self.is_paused = False
        self._memory: dict[int, tuple[StorageWeakRef, Memory]] = {}
        self._comm_streams: dict[Any, Stream] = {}
        self._groups: dict[Any, Any] = {}
        # Functional collectives by their results' storage
        self._pending: dict[int, Any] = {}
        self._recorded: set[Memory] = set()  # in streams, so freed after them
        # By owner: memory that its next allocation may get
        self._freed: dict[Stream, list[Memory]] = {}

    # What a program may use #
    def new_stream(self, name: str | None = None) -> Stream:
        name = name or f"stream {len(self.streams)}"
        same = sum(s.name.partition("#")[0] == name for s in self.streams)
        stream = Stream(self, f"{name}#{same}" if same else name)
        self.streams.append(stream)
        return stream

    def synchronize(self) -> None:
        """Makes the host wait for all streams."""
        self.collect()
        for stream in self.streams:
            self.host.last |= stream.last

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
        """What the schedules of the happens-before checker call."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused

    # Entries #
    def comes_to_call(self) -> bool:
        """Takes note of a call that orders streams, and says whether it is made."""
        self.collect()
        return not self.device.leaves_out_call()

    def _add(
        self,
        work: Work,
        label: Any,
        reads: list[Piece],
        writes: list[Piece],
        stream: Stream,
    ) -> Entry:
        before = stream.last | self.host.last
        entry = self.device.new_entry(
            (stream,), str(label), work, before, reads, writes
        )
        stream.last = frozenset((entry,))
        return entry

    def issue(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an operator, and records it unless it moves no data."""
        self.collect()
        if operator.namespace == "_c10d_functional":
            return self._issue_collective(operator, args, kwargs)
        if _is_view(operator):
            return operator(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        arguments = [self._piece(v) if _is_on_device(v) else v for v in flat]
        nbytes = [v.untyped_storage().nbytes() for v in _tensors_in(flat)]
        rng_state = None
        if torch.Tag.nondeterministic_seeded in operator.tags:
            generator = kwargs.get("generator") or torch.default_generator
            rng_state = generator.get_state()
        result = operator(*args, **kwargs)
        if nbytes != [v.untyped_storage().nbytes() for v in _tensors_in(flat)]:
            raise NotImplementedError(f"{operator} resizes its arguments' memory")
        results = tree_flatten(result)[0]
        name = operator._schema.name
        if name in _ALLOCATING:
            for tensor in _tensors_in(results):
                self._piece(tensor, label="empty")
            return result
        used = [v.memory.owner for v in arguments if isinstance(v, Piece)]
        on_host = bool(used) and all(owner is self.host for owner in used)
        stream = self.host if on_host else self.stream
        outputs = [self._output(v, operator, stream) for v in results]
        kernel = Kernel(operator, arguments, spec, outputs, rng_state)
        reads, writes = self._accesses(operator, args, kwargs, outputs)
        if name in _HOST_READING:
            entry = self._add(HostRead(kernel, result), operator, reads, [], stream)
            self.host.last |= {entry}
        elif writes or not _tensors_in(results):  # else it returned an argument
            self._add(kernel, operator, reads, writes, stream)
        return result

    def _output(self, value: Any, operator: Any, stream: Stream) -> Piece | None:
        if not _is_on_device(value) or self._is_known(value):
            return None
        return self._piece(value, str(operator), stream)

    def _accesses(
        self,
        operator: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outputs: list[Piece | None],
    ) -> tuple[list[Piece], list[Piece]]:
        written = _written_names(operator)
        written |= _WRITTEN_BESIDES.get(operator._schema.name, frozenset())
        names = [argument.name for argument in operator._schema.arguments]
        reads: list[Piece] = []
        writes = [piece for piece in outputs if piece is not None]
        for name, value in [*zip(names, args), *kwargs.items()]:
            pieces = [self._piece(t) for t in _tensors_in(tree_flatten(value)[0])]
            (writes if name in written else reads).extend(pieces)
        return reads, writes

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
        expired = [key for key, (ref, _) in self._memory.items() if ref.expired()]
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
        flat, spec = tree_flatten(((source,), {}))
        kernel = Kernel(torch.ops.aten.clone.default, flat, spec, [target], None)
        entry = self._add(kernel, "copy across", [source], [target], self.stream)
        if not non_blocking:
            self.host.last |= {entry}
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
    ) -> _Pending | None:
        """Takes part in a collective."""
        self.collect()
        stream = self.stream
        if is_async:
            stream = self._comm_streams.get(group) or self.new_stream("comm")
            self._comm_streams[group] = stream
            stream.last |= self.stream.last
        self.device.meet(self, call, self._key(group), stream, source, target)
        if not is_async:
            return None
        done = Event(self)
        done.after = stream.last
        return _Pending(done, (source, target))

    def _issue_collective(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Takes part in a functional collective, as DTensor issues them."""
        names = [argument.name for argument in operator._schema.arguments]
        given = dict(zip(names, args)) | kwargs
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


class _OperatorMode(TorchDispatchMode):
    def __init__(self, rank: Rank):
        super().__init__()
        self.rank = rank

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # DTensor finds a placement
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # its own dispatch comes here with plain tensors
        if self.rank.is_paused:
            return func(*args, **kwargs)
        return self.rank.issue(func, args, kwargs)


# All ranks together #


class Stuck(RuntimeError):
    """All ranks wait, for collectives that others do not come to."""


@dataclass
class _Arrival:
    stream: Stream
    before: frozenset[Entry]
    tensors: tuple[torch.Tensor, torch.Tensor]
    call: Call


class Recorder:
    """Runs ranks in turns and records what they issue."""

    def __init__(
        self,
        ranks: int,
        *,
        watched: Iterable[Any] = (),
        without: Site | None = None,
        comms_in_order: bool = True,
    ):
        self.recording = Recording()
        self.handle = DeviceHandle(self)
        self.ranks = [Rank(self, number) for number in range(ranks)]
        self._local = threading.local()
        self._watched = {inspect.getsourcefile(module) for module in watched}
        self._without = without
        self._comms_in_order = comms_in_order
        self._arrivals: dict[Any, dict[int, Any]] = {}
        self._last_meetings: dict[Any, Entry] = {}
        # Whose turn it is, and who could go on
        self._turn = threading.Condition()
        self._running: int | None = 0
        self._can_run = set(range(ranks))
        self._errors: list[BaseException] = []

    @property
    def rank(self) -> Rank:
        return self._local.rank

    def record(self, program: Callable[[Rank], Any], seed: int = 0) -> Recording:
        """
        Runs a program on all ranks.

        Raises:
            Stuck: if they do not all come to the same collectives.
        """
        torch.manual_seed(seed)
        with self._patched():
            threads = [
                threading.Thread(target=self._run, args=(program, rank))
                for rank in self.ranks
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]
        return self.recording

    def _run(self, program: Callable[[Rank], Any], rank: Rank) -> None:
        self._local.rank = rank
        try:
            self._wait_for_turn(rank.number)
            dist.init_process_group(
                "fake", store=FakeStore(), rank=rank.number, world_size=len(self.ranks)
            )
            try:
                with _OperatorMode(rank):
                    kept = program(rank)
                    rank.collect()
                rank.finish()
                del kept
            finally:
                dist.destroy_process_group()
        except BaseException as error:
            self._errors.append(error)
        finally:
            with self._turn:
                self._can_run.discard(rank.number)
                self._pass_on()

    # Turns #
    def _wait_for_turn(self, number: int) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._running == number or self._errors)
        if self._errors:
            raise Stuck(f"rank {number} was given up, another one failed")

    def _pass_on(self) -> None:
        if not self._can_run and self._arrivals:
            waiting = {group: sorted(a) for group, a in self._arrivals.items()}
            self._errors.append(Stuck(f"ranks wait for others: {waiting}"))
        self._running = min(self._can_run, default=None)
        self._turn.notify_all()

    def meet(
        self,
        rank: Rank,
        call: Call,
        group: Any,
        stream: Stream,
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        before = stream.last | rank.host.last
        arrival = _Arrival(stream, before, (source, target), call)
        arrivals = self._await_others(rank, group, group[0], arrival)
        if arrivals is not None:
            self._complete(group, [arrivals[number] for number in group[0]])

    def mark(self, rank: Rank) -> None:
        if self._await_others(rank, "mark", range(len(self.ranks)), None) is not None:
            self.recording.marks.append(len(self.recording.entries))

    def _await_others(
        self, rank: Rank, key: Any, members: Sequence[int], arrival: Any
    ) -> dict[int, Any] | None:
        """Returns what all members came with, to the last of them."""
        arrivals = self._arrivals.setdefault(key, {})
        arrivals[rank.number] = arrival
        if len(arrivals) == len(members):
            del self._arrivals[key]
            with self._turn:
                self._can_run |= {*members}
            return arrivals
        with self._turn:
            self._can_run.discard(rank.number)
            self._pass_on()
        self._wait_for_turn(rank.number)
        return None

    def _complete(self, group: Any, arrivals: list[_Arrival]) -> None:
        call, *others = [arrival.call for arrival in arrivals]
        if any(other != call for other in others):
            raise Stuck(f"ranks issue different collectives: {[call, *others]}")
        pairs = [a.stream.rank.pieces(a.tensors) for a in arrivals]
        with contextlib.ExitStack() as stack:
            for arrival in arrivals:
                stack.enter_context(arrival.stream.rank.paused())
            inputs, outputs = zip(*(arrival.tensors for arrival in arrivals))
            with torch.no_grad():
                call.run(inputs, outputs)
        before = frozenset().union(*(a.before for a in arrivals))
        if self._comms_in_order and group in self._last_meetings:
            before |= {self._last_meetings[group]}
        sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        entry = self.new_entry(
            tuple(a.stream for a in arrivals),
            call.name,
            Meeting(call, sources, targets),
            before,
            sources,
            targets,
        )
        self._last_meetings[group] = entry
        for arrival in arrivals:
            arrival.stream.last = frozenset((entry,))

    def new_entry(
        self,
        streams: tuple[Stream, ...],
        label: str,
        work: Work,
        before: frozenset[Entry],
        reads: list[Piece],
        writes: list[Piece],
    ) -> Entry:
        entries = self.recording.entries
        entry = Entry(
            len(entries), streams, label, _caller_line(), work, before, reads, writes
        )
        entries.append(entry)
        return entry

    # Calls that are left out #
    def leaves_out_call(self) -> bool:
        if not self._watched:
            return False
        frame = sys._getframe(1)
        left_out = False
        while frame is not None:
            file = frame.f_code.co_filename
            if file in self._watched:
                line = file, frame.f_lineno
                self.recording.visited.add(line)
                if self._without is not None:
                    left_out |= self._without.is_at(line)
            elif file not in (__file__, contextlib.__file__):
                break
            frame = frame.f_back
        return left_out

    # Patches #
    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            for name, module in [*sys.modules.items()]:
                is_fsdp = name.startswith(fsdp_package.__name__)
                if is_fsdp and hasattr(module, "_get_device_handle"):
                    handle = mock.Mock(return_value=self.handle)
                    enter(mock.patch.object(module, "_get_device_handle", handle))
            for name in COLLECTIVES:
                collective = self._collective(name, getattr(dist, name))
                enter(mock.patch.object(dist, name, collective))
            enter(mock.patch.object(dist, "barrier", self._barrier))
            for owner, name, call in self._methods():
                enter(mock.patch.object(owner, name, call))
            gc.collect()
            gc.disable()  # or one rank's cycles would be found by another
            stack.callback(gc.enable)
            torch._C._distributed_c10d._set_thread_isolation_mode(True)
            stack.callback(torch._C._distributed_c10d._set_thread_isolation_mode, False)
            multi_threaded_pg._install_threaded_pg()
            stack.callback(multi_threaded_pg._uninstall_threaded_pg)
            yield

    def _methods(self) -> Iterator[tuple[Any, str, Any]]:
        resize, to = torch.UntypedStorage.resize_, torch.Tensor.to
        tolist = torch.Tensor.tolist

        @functools.wraps(resize)
        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            return self.rank.resize(storage, resize, nbytes)

        @functools.wraps(to)
        def to_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._is_copied(tensor) and "non_blocking" in kwargs:
                return self.rank.copy_across(tensor, kwargs["non_blocking"])
            return to(tensor, *args, **kwargs)

        @functools.wraps(tolist)
        def tolist_(tensor: torch.Tensor) -> Any:
            if self._is_copied(tensor) and not self.rank.is_on_host(tensor):
                tensor = self.rank.copy_across(tensor, non_blocking=False)
            return tolist(tensor)

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            self.rank.record_stream(tensor)

        yield torch.UntypedStorage, "resize_", resize_
        yield torch.Tensor, "to", to_
        yield torch.Tensor, "tolist", tolist_
        yield torch.Tensor, "record_stream", record_stream

    def _is_copied(self, tensor: torch.Tensor) -> bool:
        return _is_on_device(tensor) and not self.rank.is_paused

    def _collective(self, name: str, original: Callable) -> Callable[..., Any]:
        signature = inspect.signature(original)
        source, target = COLLECTIVES[name]

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> _Pending | None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if any(given.get(f"{side}_split_sizes") for side in ("input", "output")):
                raise NotImplementedError(f"{name} with split sizes")
            operation = getattr(given.get("op"), "op", given.get("op"))
            kind = Call(name, getattr(operation, "name", None))
            tensors = given[source], given[target]
            return self.rank.meet(kind, given["group"], *tensors, given["async_op"])

        return call

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        self.rank.synchronize()
