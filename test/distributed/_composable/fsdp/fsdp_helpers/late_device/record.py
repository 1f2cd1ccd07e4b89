"""
Records what a program issues to a late device: into which stream, after what, and in
which memory. One rank runs, at once; what the others do is what it does.
"""

import contextlib
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from fsdp_helpers.common.utils import COLLECTIVES
from fsdp_helpers.late_device import devices, operators
from fsdp_helpers.late_device.devices import Event, Memory, Pending, Piece, Stream
from fsdp_helpers.late_device.operators import is_on_device
from fsdp_helpers.late_device.sites import caller_line, Line, Watch

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard as fsdp_package
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves


# Arguments that an operator writes, though its schema does not say so
_WRITTEN_BESIDES = {"fsdp::all_gather_copy_in": frozenset(("all_gather_output",))}


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the bytes of its storage from the first to the last element."""
    if tensor.numel() == 0:
        return 0, 0
    steps = zip(tensor.size(), tensor.stride())
    first = tensor.storage_offset()
    last = first + sum((n - 1) * step for n, step in steps)
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


class Rank:
    """Stands for a rank in a program, and records all that this issues."""

    number = 0

    def __init__(self, watch: Watch):
        self._watch = watch
        self.recording = devices.Recording(visited=watch.visited)
        self.handle = devices.DeviceHandle(self)
        self.host = Stream(self, "host")
        self.default_stream = self.stream = Stream(self, "default")
        self._streams = [self.default_stream]
        self._comm_streams: dict[Any, Stream] = {}
        self._memory: dict[int, tuple[StorageWeakRef, Memory]] = {}
        # By owner: memory that its next allocation may get
        self._freed: dict[Stream, list[Memory]] = {}
        self._events: weakref.WeakSet[Event] = weakref.WeakSet()

    # For programs #
    def new_stream(self, name: str | None = None) -> Stream:
        stream = Stream(self, name or f"stream {len(self._streams)}")
        self._streams.append(stream)
        return stream

    def put_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declares the memory of these tensors to be the host's, once it has waited."""
        self.collect()
        for stream in self._streams:
            self.host.clock |= stream.clock
        for tensor in tensors:
            self._piece(tensor).memory.owner = self.host

    def end_step(self) -> None:
        """Notes how many events are still alive."""
        self.recording.events_left.append(len(self._events))

    # For the stand-ins #
    def new_event(self) -> Event:
        event = Event(self)
        self._events.add(event)
        return event

    def comes_to_call(self) -> bool:
        self.collect()
        return self._watch.comes_to_call()

    # Entries #
    def _add(
        self, label: Any, reads: list[Piece], writes: list[Piece], stream: Stream
    ) -> None:
        entries, before = self.recording.entries, stream.clock | self.host.clock
        entry = devices.Entry(
            len(entries), stream, str(label), caller_line(), before, reads, writes
        )
        entries.append(entry)
        stream.clock = frozenset((entry,))

    def issue(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an operator, and records it unless it moves no data."""
        self.collect()
        if operator.namespace.startswith("_c10d_functional"):
            raise NotImplementedError(f"the functional collective {operator}")
        if operators.is_view(operator):
            return operator(*args, **kwargs)
        reads, writes = self._given(operator, args, kwargs)
        result = operator(*args, **kwargs)
        results = tree_leaves(result)
        if operator._schema.name in operators.ALLOCATING:
            for tensor in filter(is_on_device, results):
                self._piece(tensor, label="empty")
            return result
        owners = [piece.memory.owner for piece in (*reads, *writes)]
        on_host = bool(owners) and all(owner is self.host for owner in owners)
        stream = self.host if on_host else self.stream
        for value in filter(is_on_device, results):
            if value.untyped_storage()._cdata not in self._memory:
                writes.append(self._piece(value, str(operator), stream))
        if writes or not any(map(is_on_device, results)):
            # else it returned an argument
            self._add(operator, reads, writes, stream)
        return result

    def _given(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Piece], list[Piece]]:
        """Returns what an operator reads and writes of the tensors that it is given."""
        written = operators.written_names(operator)
        written |= _WRITTEN_BESIDES.get(operator._schema.name, frozenset())
        named = {**dict(zip(operators.argument_names(operator), args)), **kwargs}
        reads: list[Piece] = []
        writes: list[Piece] = []
        for name, value in named.items():
            pieces = map(self._piece, filter(is_on_device, tree_leaves(value)))
            (writes if name in written else reads).extend(pieces)
        return reads, writes

    # Memory #
    def _piece(
        self,
        tensor: torch.Tensor,
        label: str | None = None,
        owner: Stream | None = None,
    ) -> Piece:
        """Returns where a tensor lies. With a label, it was allocated right now."""
        storage = tensor.untyped_storage()
        known = self._memory.get(storage._cdata)
        memory = known[1] if known else self._allocate(storage, label, owner)
        return Piece(memory, _span(tensor))

    def _allocate(
        self, storage: torch.UntypedStorage, label: str | None, owner: Stream | None
    ) -> Memory:
        """Notes memory that its owner gets, maybe of what it freed: all is written."""
        owner = owner or self.stream
        for memory in self._freed.pop(owner, ()):
            whole = Piece(memory, (0, memory.nbytes))
            freed = f"free {memory.nbytes} bytes of {memory.label}"
            self._add(freed, [], [whole], memory.owner)
        memory = Memory(owner, storage.nbytes(), label or "someone before")
        # The weak reference keeps another storage from getting the same key
        self._memory[storage._cdata] = StorageWeakRef(storage), memory
        if label is not None and owner is not self.host:
            whole = Piece(memory, (0, memory.nbytes))
            self._add(f"allocate {label}", [], [whole], owner)
        return memory

    def collect(self) -> None:
        """Finds out which memory was let go of since the last call."""
        # Not a method of the storage: this runs at each operator, for all memory
        is_expired = torch.UntypedStorage._expired
        for key in [k for k, (ref, _) in self._memory.items() if is_expired(ref.cdata)]:
            self._free(self._memory.pop(key)[1])

    def _free(self, memory: Memory) -> None:
        if memory.nbytes == 0 or memory.owner is self.host:
            return  # pinned memory waits for its copies by itself
        self._freed.setdefault(memory.owner, []).append(memory)

    def resize(self, original: Any, storage: torch.UntypedStorage, nbytes: int) -> Any:
        self.collect()
        before = storage.nbytes()
        result = original(storage, nbytes)
        if before == nbytes or storage.device.type != "cpu":
            return result
        known = self._memory.pop(storage._cdata, None)
        if known is not None and before > 0:
            self._free(known[1])
        self._allocate(storage, "resize_", None)
        return result

    def copy_across(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Copies from host to device or back, in the current stream."""
        self.collect()
        source = self._piece(tensor)
        to_device = source.memory.owner is self.host
        with _disable_current_modes():
            copy = tensor.detach().clone()
        owner = self.stream if to_device else self.host
        target = self._piece(copy, "copy across", owner)
        self._add("copy across", [source], [target], self.stream)
        if not non_blocking:
            self.host.clock |= self.stream.clock
        return copy

    # Collectives #
    def meet(
        self, name: str, group: Any, tensors: Sequence[torch.Tensor], is_async: bool
    ) -> Pending | None:
        self.collect()
        source, target = tensors
        stream = self.stream
        if is_async:  # one for each group, after ours
            if group not in self._comm_streams:
                comm = f"comm {len(self._comm_streams)}"
                self._comm_streams[group] = self.new_stream(comm)
            stream = self._comm_streams[group]
            stream.clock |= self.stream.clock
        read, written = self._piece(source), self._piece(target)
        with _disable_current_modes(), torch.no_grad():
            operators.exchange(name, source, target, dist.get_world_size(group))
        self._add(name, [read], [written], stream)
        if not is_async:
            return None
        done = self.new_event()
        done.clock = stream.clock
        return Pending(done, tensors)


# Recording a program #


def record(
    program: Callable[[Rank], Any], ranks: int = 1, *, without: Line | None = None
) -> devices.Recording:
    """Runs a program on one of ``ranks``, without a line that orders streams."""
    torch.manual_seed(0)
    rank = Rank(Watch(without))
    with _patched(rank):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            with operators.OperatorMode(rank):
                program(rank)
                rank.collect()
        finally:
            dist.destroy_process_group()
    return rank.recording


@contextlib.contextmanager
def _patched(rank: Rank) -> Iterator[None]:
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, call: Callable[..., Any]) -> None:
            stack.enter_context(mock.patch.object(owner, name, call))

        for name, module in [*sys.modules.items()]:
            is_fsdp = name.startswith(fsdp_package.__name__)
            if is_fsdp and hasattr(module, "_get_device_handle"):
                patch(module, "_get_device_handle", lambda *unused: rank.handle)
        for name, tensors in COLLECTIVES.items():
            patch(dist, name, _collective(rank, name, tensors))
        for name, single in operators.COALESCED.items():
            patch(dist.ProcessGroup, name, _coalesced(rank, single))
        resize = torch.UntypedStorage.resize_
        patch(torch.UntypedStorage, "resize_", lambda *call: rank.resize(resize, *call))
        patch(torch.Tensor, "to", _to(rank))
        gc.disable()  # or memory would be freed at other places each time
        stack.callback(gc.enable)
        gc.freeze()  # what a schedule collects is its own
        stack.callback(gc.unfreeze)
        yield


def _collective(rank: Rank, name: str, tensors: tuple[str, str]) -> Callable[..., Any]:
    original = getattr(dist, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Pending | None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if given.get("input_split_sizes") or given.get("output_split_sizes"):
            raise NotImplementedError(f"{name} with split sizes")
        both = [given[argument] for argument in tensors]
        return rank.meet(name, given["group"], both, given["async_op"])

    return call


def _coalesced(rank: Rank, name: str) -> Callable[..., Pending | None]:
    def call(group: Any, targets: Any, sources: Any, options: Any) -> Pending | None:
        pairs = zip(sources, targets, strict=True)
        return [rank.meet(name, group, pair, options.asyncOp) for pair in pairs][-1]

    return call


def _to(rank: Rank) -> Callable[..., torch.Tensor]:
    original = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if is_on_device(tensor) and "non_blocking" in kwargs:
            return rank.copy_across(tensor, kwargs["non_blocking"])
        return original(tensor, *args, **kwargs)

    return to
