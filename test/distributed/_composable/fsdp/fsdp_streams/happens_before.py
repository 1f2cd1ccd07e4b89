"""
A happens-before checker for ``fully_shard``: it stands in for the device's
streams and events while tensors are on the CPU, and complains where two streams
use the same memory and nothing orders them.

    with HappensBefore() as checker:
        model = fully_shard(...)  # one process of a fake group is enough
        model(x).sum().backward()
    assert not checker.complaints

What it knows:

- **Order.** Each stream has a vector clock. Events, ``wait_event`` and
  ``wait_stream`` carry clocks from stream to stream. The host is a stream as
  well: whatever it did is before what it launches later, and it is behind a
  stream only after ``synchronize``, ``item`` or a blocking copy.
- **Accesses.** A dispatch mode sees every operator, those of backward as well.
  By the operator's schema, mutable arguments and new outputs are written and
  other tensors are read, in the current stream. Views are no access. A read
  must be ordered after the last write, and a write after that and after all
  reads since.
- **Collectives** of ``torch.distributed`` read and write in the current stream.
  With ``async_op=True`` they run in a stream of their group's own, hold on to
  their tensors, and are waited for with the work.
- **Memory.** Storage belongs to the stream that was current when it was
  allocated, or resized from nothing. Once its last reference is gone, or it was
  resized to nothing, the caching allocator may hand it out again in that stream
  and only there. So the next allocation in that stream, of whatever size, must
  be ordered after what all streams did with the storage. That is the strictest
  rule that the allocator's keeping to one stream allows: the sizes of a real
  model are not those of a test.
- **Host memory** (:meth:`HappensBefore.put_on_host`), for CPU offload: an
  operator on host memory alone runs on the host, and ``Tensor.to`` with
  ``non_blocking`` copies between host and device. What the host reads, a stream
  must have written before the host synchronized with it. The allocator of pinned
  memory waits for copies by itself, so that freeing it orders nothing.

What it does not see: temporaries within a kernel, accesses through pointers,
functional collectives other than as ordinary operators, and whether other ranks
come along.

To show that a wait matters, :func:`find_sites` lists the calls in a module that
order streams, and ``HappensBefore(without=site)`` leaves out all that is
ordered through one of them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from fsdp_streams.devices import DeviceHandle, Event, Issuer, Pending, Stream
from fsdp_streams.operators import (
    ALLOCATING,
    COLLECTIVES,
    HOST_READING,
    is_on_device,
    is_view,
    OperatorMode,
    PLAIN,
    written_names,
)
from fsdp_streams.sites import caller_line, CHECKERS, Site, Watch

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef


CHECKERS.add(__file__)

# From streams to how far they have come
Clock = dict[Stream, int]


# Memory #


class Access(NamedTuple):
    """One use of one storage."""

    stream: Stream
    tick: int  # of the stream's clock
    operator: Any  # an overload or a name
    line: tuple[str, int, str]  # file, number and function

    def is_before(self, stream: Stream) -> bool:
        return stream.clock.get(self.stream, 0) >= self.tick

    def __str__(self) -> str:
        file, number, function = self.line
        line = f"{Path(file).name}:{number} {function}"
        return f"{self.operator} in stream {self.stream} ({line})"


@dataclass(eq=False)
class Block:
    """Memory from its allocation until it is freed."""

    storage: StorageWeakRef
    owner: Stream  # the host for host memory
    dtype: torch.dtype
    shape: torch.Size
    origin: Access | None  # None if it was there before
    last_write: Access | None = None
    # Of each stream, since the last write
    reads: dict[Stream, Access] = field(default_factory=dict)

    def accesses(self) -> list[Access]:
        writes = [] if self.last_write is None else [self.last_write]
        return [*writes, *self.reads.values()]

    def __str__(self) -> str:
        what = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return f"{what} allocated by {self.origin or 'someone before'}"


def _device_tensors(value: Any) -> list[torch.Tensor]:
    if is_on_device(value):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _device_tensors(item)]
    return []


class HappensBefore(Issuer):
    """
    Checks what is done inside its context. Devices' handles are asked for when
    a model is sharded, so that is to happen inside as well.

    ``without`` leaves out the waits, records and stream contexts that are
    reached through the given site. ``watched`` are the modules whose lines are
    kept in ``visited`` when they order streams. ``events_left`` has the number of
    events that somebody still held at each :meth:`end_step`.
    """

    START: Clock = {}

    def __init__(
        self, *, watched: Iterable[ModuleType] = (), without: Site | None = None
    ):
        super().__init__(Watch(watched, without))
        self.complaints: list[str] = []
        self.visited = self.watch.visited
        self.events: weakref.WeakSet[Event] = weakref.WeakSet()
        self.events_left: list[int] = []
        self.handle = DeviceHandle(lambda: self)
        self._blocks: dict[int, Block] = {}
        # By owner: those that other streams used, and those that were freed
        self._shared: dict[Stream, dict[Block, None]] = defaultdict(dict)
        self._freed: dict[Stream, list[Block]] = defaultdict(list)
        self._exit_stack = contextlib.ExitStack()

    # Context #
    def __enter__(self) -> HappensBefore:
        enter = self._exit_stack.enter_context
        enter(self.handle.in_place(self._collective))
        enter(mock.patch.object(dist, "barrier", self._barrier))
        resize_ = self._resize(torch.UntypedStorage.resize_)
        enter(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
        enter(mock.patch.object(torch.Tensor, "to", self._to(torch.Tensor.to)))
        enter(OperatorMode(self))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._exit_stack.close()

    def end_step(self) -> None:
        self.events_left.append(len(self.events))

    # Clocks #
    def join(self, clock: Clock, other: Clock) -> Clock:
        latest = {
            stream: max(tick, clock.get(stream, 0)) for stream, tick in other.items()
        }
        return clock | latest

    def new_event(self) -> Event:
        event = super().new_event()
        self.events.add(event)
        return event

    # Accesses #
    def issue(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Takes note of an operator, in the current stream or on the host."""
        result = func(*args, **kwargs)
        if is_view(func):
            return result
        names = [arg.name for arg in func._schema.arguments]
        read, written = [], []
        for name, value in [*zip(names, args), *kwargs.items()]:
            target = written if name in written_names(func) else read
            target.extend(_device_tensors(value))
        arguments = [self._block_of(tensor) for tensor in (*read, *written)]
        on_host = bool(arguments) and all(b.owner is self.host for b in arguments)
        stream = self.host if on_host else self.stream
        access = self._new_access(func, stream)
        allocates_only = func._schema.name in ALLOCATING
        if not allocates_only:
            self._use(access, read, written)
        for tensor in _device_tensors(result):
            if not self._is_known(tensor.untyped_storage()):
                block = self._allocate(tensor, access)
                if not allocates_only:
                    self._write(block, access)
        if func._schema.name in HOST_READING:
            self.host.comes_after(stream.clock)
        return result

    def _new_access(self, operator: Any, stream: Stream) -> Access:
        stream.comes_after(self.host.clock)  # launched now
        tick = stream.clock.get(stream, 0) + 1
        stream.clock = stream.clock | {stream: tick}
        return Access(stream, tick, operator, caller_line())

    def _use(
        self,
        access: Access,
        read: Iterable[torch.Tensor],
        written: Iterable[torch.Tensor],
    ) -> None:
        for tensor in read:
            self._read(self._block_of(tensor), access)
        for tensor in written:
            self._write(self._block_of(tensor), access)

    def _read(self, block: Block, access: Access) -> None:
        write = block.last_write
        if write is not None and not write.is_before(access.stream):
            self._complain(f"{access} reads {block} while {write} writes it")
        block.reads[access.stream] = access
        self._note_sharing(block, access)

    def _write(self, block: Block, access: Access) -> None:
        for other in block.accesses():
            if not other.is_before(access.stream):
                verb = "writes" if other is block.last_write else "reads"
                text = f"{access} writes {block} while {other} {verb} it"
                self._complain(text)
        block.last_write = access
        block.reads.clear()
        self._note_sharing(block, access)

    def _note_sharing(self, block: Block, access: Access) -> None:
        if access.stream is not block.owner and block.owner is not self.host:
            self._shared[block.owner][block] = None

    def _complain(self, text: str) -> None:
        if text not in self.complaints:
            self.complaints.append(text)

    # Memory #
    def _is_known(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._blocks

    def _block_of(self, tensor: torch.Tensor) -> Block:
        """Returns a tensor's memory; one from before belongs to the default stream."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is None:
            shape = tensor.dtype, tensor.shape
            storage = tensor.untyped_storage()
            block = self._add_block(storage, *shape, self.default_stream, None)
        return block

    def _add_block(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        shape: torch.Size,
        owner: Stream,
        origin: Access | None,
    ) -> Block:
        # The weak reference keeps another storage from getting the same key
        block = Block(StorageWeakRef(storage), owner, dtype, shape, origin)
        self._blocks[storage._cdata] = block
        return block

    def _allocate(
        self, tensor: torch.Tensor, access: Access, owner: Stream | None = None
    ) -> Block:
        owner = owner or access.stream
        if owner is access.stream:
            self._check_reuse(access)
        storage = tensor.untyped_storage()
        return self._add_block(storage, tensor.dtype, tensor.shape, owner, access)

    def _check_reuse(self, access: Access) -> None:
        """
        Checks that an allocation in a stream is ordered after what any stream
        did with the memory that was freed there until now.
        """
        owner = access.stream
        shared, freed = self._shared[owner], self._freed[owner]
        expired = [block for block in shared if block.storage.expired()]
        for block in expired:
            del shared[block]
            self._blocks.pop(block.storage.cdata, None)
        for block in (*expired, *freed):
            for other in block.accesses():
                if not other.is_before(owner):
                    text = f"the memory of {block}, still used by {other}"
                    self._complain(f"{access} may get {text}")
        freed.clear()

    def _free(self, block: Block) -> None:
        self._shared[block.owner].pop(block, None)
        if block.owner is not self.host:
            self._freed[block.owner].append(block)

    def _resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            before = storage.nbytes()
            result = original(storage, nbytes)
            if self.is_paused or before == nbytes or storage.device.type != "cpu":
                return result
            if (block := self._blocks.pop(storage._cdata, None)) and before > 0:
                self._free(block)
            access = self._new_access("resize_", self.stream)
            if nbytes > 0:
                self._check_reuse(access)
            shape = torch.Size([nbytes])
            self._add_block(storage, torch.uint8, shape, self.stream, access)
            return result

        return resize_

    # Host #
    def put_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declares the memory of these tensors to be the host's."""
        for tensor in tensors:
            self._block_of(tensor).owner = self.host

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return self._block_of(tensor).owner is self.host

    def _to(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_plain = type(tensor) in PLAIN
            if self.is_paused or not is_plain or "non_blocking" not in kwargs:
                return original(tensor, *args, **kwargs)
            return self._copy_across(tensor, kwargs["non_blocking"])

        return to

    def _copy_across(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Copies from host to device or back, in the current stream."""
        to_device = self.is_on_host(tensor)
        with self.paused():
            copy = tensor.detach().clone()
        access = self._new_access("copy across", self.stream)
        self._use(access, [tensor], [])
        owner = self.stream if to_device else self.host
        block = self._allocate(copy, access, owner)
        self._write(block, access)
        if not non_blocking:
            self.host.comes_after(self.stream.clock)
        return copy

    # Collectives #
    def _collective(
        self, name: str, original: Callable[..., Any], arguments: dict[str, Any]
    ) -> Pending | None:
        with self.paused():
            original(**arguments)
        source, target = (arguments[argument] for argument in COLLECTIVES[name])
        is_async, stream = arguments["async_op"], self.stream
        if is_async:
            stream = self.comm_stream(arguments["group"])
        read = [] if source is target else [source]
        self._use(self._new_access(name, stream), read, [target])
        return self.pending(stream, *read, target) if is_async else None

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        self.host.comes_after(self.stream.clock)
