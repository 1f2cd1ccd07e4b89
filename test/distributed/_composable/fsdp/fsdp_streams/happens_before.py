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

import ast
import contextlib
import functools
import inspect
import linecache
import re
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard as fsdp_package
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


# Sites: calls in a module that order streams #

# Methods of streams, events and works, and the handle's context
_ORDERING_METHODS = frozenset(
    ("wait_stream", "wait_event", "wait", "synchronize", "record_event", "record")
    + ("stream",)
)
# Functions that only wait, by the names that their modules give them
_WAITING_HELPER = re.compile(r"_(wait|order|drop)_|wait_all_gather_streams")


class Site(NamedTuple):
    """
    A call that orders streams, and where it stands. It prints as function,
    callee and the call's place among such calls there, which edits elsewhere
    do not change.
    """

    function: str
    callee: str
    ordinal: int
    file: str
    first_line: int
    last_line: int

    def __str__(self) -> str:
        return f"{self.function} > {self.callee} #{self.ordinal}"

    def is_at(self, line: tuple[str, int]) -> bool:
        file, number = line
        return file == self.file and self.first_line <= number <= self.last_line


def find_sites(module: ModuleType) -> list[Site]:
    """Lists all calls in the module that order streams, used or not."""
    file = inspect.getsourcefile(module)
    sites: list[Site] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            callee = node.func.attr
            if callee in _ORDERING_METHODS or _WAITING_HELPER.match(callee):
                same = [s for s in sites if s[:2] == (function, callee)]
                lines = (node.lineno, node.end_lineno or node.lineno)
                sites.append(Site(function, callee, len(same), file, *lines))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(Path(file).read_text()), "")
    return sites


# Streams and events #

Clock = dict["Stream", int]


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


class Stream:
    """Stands in for a device's stream."""

    def __init__(self, checker: HappensBefore, name: str):
        self.checker, self.name = checker, name
        self.clock: Clock = {self: 0}

    def is_behind(self, access: Access) -> bool:
        return self.clock.get(access.stream, 0) >= access.tick

    def wait_stream(self, other: Stream) -> None:
        if self.checker.comes_to_call():
            _join(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.checker)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.checker.host.wait_stream(self)

    def __repr__(self) -> str:
        return self.name


class Event:
    """Stands in for a device's event. Without a record, nothing waits for it."""

    def __init__(self, checker: HappensBefore):
        self.checker = checker
        self.clock: Clock = {}
        checker.events.add(self)

    def record(self, stream: Stream | None = None) -> None:
        is_made = self.checker.comes_to_call()
        stream = stream or self.checker.stream
        self.clock = dict(stream.clock) if is_made else {}

    def wait(self, stream: Stream | None = None) -> None:
        if self.checker.comes_to_call():
            _join((stream or self.checker.stream).clock, self.clock)

    def synchronize(self) -> None:
        self.wait(self.checker.host)


class Pending(dist.distributed_c10d.Work):
    """An asynchronous collective, which keeps its tensors until waited for."""

    def __init__(self, done: Any, tensors: Sequence[torch.Tensor]):
        super().__init__()
        self.done, self.tensors = done, tensors

    def wait(self, timeout: Any = None) -> bool:
        self.done.wait()
        self.tensors = ()
        return True


class Watch:
    """
    Takes note in ``visited`` of the lines of the watched modules that order streams,
    and leaves out the calls of one site.
    """

    def __init__(self, watched: Iterable[ModuleType], without: Site | None):
        self.visited: set[tuple[str, int]] = set()  # files and lines
        self._files = {inspect.getsourcefile(module) for module in watched}
        self._without = without

    def comes_to_call(self) -> bool:
        """Says whether the call that orders streams now is made."""
        if not self._files:
            return True
        frame: FrameType | None = sys._getframe(1)
        is_made = True
        while frame is not None:
            file = frame.f_code.co_filename
            if file in self._files:
                self.visited.add(line := (file, frame.f_lineno))
                if self._without is not None:
                    is_made &= not self._without.is_at(line)
            elif file not in CHECKERS and file != contextlib.__file__:
                break
            frame = frame.f_back
        return is_made


class Issuer:
    """
    Who issues what the device does: a checker, or a rank of the device that is late.
    It has ``new_stream`` and ``new_event``, and ``synchronize`` if that is called.
    """

    stream: Any  # the current one
    watch: Watch
    is_paused = False  # takes no note of operators

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused

    def comes_to_call(self) -> bool:
        return self.watch.comes_to_call()


class DeviceHandle:
    """Stands in for ``torch.cuda`` and its like, for who issues right now."""

    def __init__(self, issuer: Callable[[], Any]):
        self._issuer = issuer

    def Stream(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a stream, named after what the line that asks for it sets."""
        frame = sys._getframe(1)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        assigned = re.search(r"(\w+) = ", line)
        return self._issuer().new_stream(assigned[1] if assigned else None)

    def Event(self, *args: Any, **kwargs: Any) -> Any:
        return self._issuer().new_event()

    def current_stream(self, device: Any = None) -> Any:
        return self._issuer().stream

    def synchronize(self, device: Any = None) -> None:
        self._issuer().synchronize()

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        issuer = self._issuer()
        previous = issuer.stream
        # A call of ours, the context manager's and then the site's
        if issuer.comes_to_call():
            issuer.stream = stream
        try:
            yield
        finally:
            issuer.stream = previous


# Memory #


class Access(NamedTuple):
    """One use of one storage."""

    stream: Stream
    tick: int  # of the stream's clock
    operator: Any  # an overload or a name
    line: tuple[str, int, str]  # file, number and function

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


_PACKAGE_DIR = str(Path(fsdp_package.__file__).parent)
_TORCH_DIR = str(Path(torch.__file__).parent)
# Files that look on, whose lines tell nothing
CHECKERS = {__file__}


@functools.cache
def _is_worth_telling(file: str) -> bool:
    is_torch = file.startswith((_TORCH_DIR, "<")) or "importlib" in file
    return file.startswith(_PACKAGE_DIR) or not (is_torch or file in CHECKERS)


def _caller_line() -> tuple[str, int, str]:
    """
    Returns the innermost line of ``fully_shard`` or of what is not torch: in
    backward that is a hook's line or the call of backward.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if _is_worth_telling(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return "unknown", 0, ""


# Operators #

# They allocate, and neither read nor write
_ALLOCATING = frozenset(
    "aten::" + name
    for name in ("empty", "empty_like", "empty_strided", "new_empty")
    + ("new_empty_strided", "empty_permuted")
)
_HOST_READING = frozenset(("aten::_local_scalar_dense", "aten::equal"))


@functools.cache
def _is_view(func: torch._ops.OpOverload) -> bool:
    aliases = [arg.alias_info for arg in func._schema.arguments if arg.alias_info]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


@functools.cache
def _written_names(func: torch._ops.OpOverload) -> frozenset[str]:
    return frozenset(
        arg.name
        for arg in func._schema.arguments
        if arg.alias_info is not None and arg.alias_info.is_write
    )


def _device_tensors(value: Any) -> list[torch.Tensor]:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return [value] if value.device.type == "cpu" else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _device_tensors(item)]
    return []


class _OperatorMode(TorchDispatchMode):
    def __init__(self, checker: HappensBefore):
        super().__init__()
        self.checker = checker

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)  # DTensor finds a placement
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # its own dispatch comes here with plain tensors
        result = func(*args, **kwargs)
        if self.checker.is_paused or _is_view(func):
            return result
        written_names = _written_names(func)
        names = [arg.name for arg in func._schema.arguments]
        read, written = [], []
        for name, value in [*zip(names, args), *kwargs.items()]:
            target = written if name in written_names else read
            target.extend(_device_tensors(value))
        self.checker.on_operator(func, read, written, _device_tensors(result))
        return result


# Collective of `torch.distributed` to the tensors that it reads and writes
_COLLECTIVES = {
    "all_gather_single": (("input_tensor",), ("output_tensor",)),
    "all_gather_into_tensor": (("input_tensor",), ("output_tensor",)),
    "reduce_scatter_single": (("input",), ("output",)),
    "reduce_scatter_tensor": (("input",), ("output",)),
    "all_reduce": ((), ("tensor",)),
    "all_to_all_single": (("input",), ("output",)),
}


class HappensBefore(Issuer):
    """
    Checks what is done inside its context. Devices' handles are asked for when
    a model is sharded, so that is to happen inside as well.

    ``without`` leaves out the waits, records and stream contexts that are
    reached through the given site. ``watched`` are the modules whose lines are
    kept in ``visited`` when they order streams. ``events_left`` has the number of
    events that somebody still held at each :meth:`end_step`.
    """

    def __init__(
        self, *, watched: Iterable[ModuleType] = (), without: Site | None = None
    ):
        self.complaints: list[str] = []
        self.watch = Watch(watched, without)
        self.visited = self.watch.visited
        self.events: weakref.WeakSet[Event] = weakref.WeakSet()
        self.events_left: list[int] = []
        self.host = Stream(self, "host")
        self.default_stream = self.stream = Stream(self, "default")
        self.handle = DeviceHandle(lambda: self)
        self._streams = 0
        self._comm_streams: dict[Any, Stream] = {}
        self._blocks: dict[int, Block] = {}
        # By owner: those that other streams used, and those that were freed
        self._shared: dict[Stream, dict[Block, None]] = defaultdict(dict)
        self._freed: dict[Stream, list[Block]] = defaultdict(list)
        self._exit_stack = contextlib.ExitStack()

    # Context #
    def __enter__(self) -> HappensBefore:
        enter = self._exit_stack.enter_context
        for name, module in [*sys.modules.items()]:
            is_ours = name.startswith(fsdp_package.__name__)
            if is_ours and hasattr(module, "_get_device_handle"):
                get_handle = mock.Mock(return_value=self.handle)
                enter(mock.patch.object(module, "_get_device_handle", get_handle))
        for name, (reads, writes) in _COLLECTIVES.items():
            collective = self._collective(name, reads, writes)
            enter(mock.patch.object(dist, name, collective))
        enter(mock.patch.object(dist, "barrier", self._barrier))
        resize_ = self._resize(torch.UntypedStorage.resize_)
        enter(mock.patch.object(torch.UntypedStorage, "resize_", resize_))
        enter(mock.patch.object(torch.Tensor, "to", self._to(torch.Tensor.to)))
        enter(_OperatorMode(self))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._exit_stack.close()

    def end_step(self) -> None:
        self.events_left.append(len(self.events))

    def new_stream(self, name: str | None = None) -> Stream:
        self._streams += 1
        return Stream(self, name or f"stream {self._streams}")

    def new_event(self) -> Event:
        return Event(self)

    # Accesses #
    def on_operator(
        self,
        func: torch._ops.OpOverload,
        read: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Takes note of an operator that ran in the current stream, or on the host."""
        arguments = [self._block_of(tensor) for tensor in (*read, *written)]
        on_host = bool(arguments) and all(b.owner is self.host for b in arguments)
        stream = self.host if on_host else self.stream
        access = self._new_access(func, stream)
        allocates_only = func._schema.name in _ALLOCATING
        if not allocates_only:
            self._use(access, read, written)
        for tensor in results:
            if not self._is_known(tensor.untyped_storage()):
                block = self._allocate(tensor, access)
                if not allocates_only:
                    self._write(block, access)
        if func._schema.name in _HOST_READING:
            _join(self.host.clock, stream.clock)

    def _new_access(self, operator: Any, stream: Stream) -> Access:
        _join(stream.clock, self.host.clock)  # launched now
        stream.clock[stream] += 1
        return Access(stream, stream.clock[stream], operator, _caller_line())

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
        if write is not None and not access.stream.is_behind(write):
            self._complain(f"{access} reads {block} while {write} writes it")
        block.reads[access.stream] = access
        self._note_sharing(block, access)

    def _write(self, block: Block, access: Access) -> None:
        for other in block.accesses():
            if not access.stream.is_behind(other):
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
                if not owner.is_behind(other):
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
            is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
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
            _join(self.host.clock, self.stream.clock)
        return copy

    # Collectives #
    def _collective(
        self, name: str, reads: Sequence[str], writes: Sequence[str]
    ) -> Callable[..., Any]:
        original = getattr(dist, name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Pending | None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            with self.paused():
                original(*args, **kwargs)
            read = [arguments[argument] for argument in reads]
            written = [arguments[argument] for argument in writes]
            if not arguments["async_op"]:
                self._use(self._new_access(name, self.stream), read, written)
                return None
            stream = self._comm_stream(arguments["group"])
            _join(stream.clock, self.stream.clock)
            self._use(self._new_access(name, stream), read, written)
            done = Event(self)
            done.clock = dict(stream.clock)
            return Pending(done, (*read, *written))

        return call

    def _comm_stream(self, group: Any) -> Stream:
        if group not in self._comm_streams:
            name = f"comm {len(self._comm_streams)}"
            self._comm_streams[group] = self.new_stream(name)
        return self._comm_streams[group]

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        _join(self.host.clock, self.stream.clock)
