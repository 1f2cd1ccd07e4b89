"""
What stands in for a device: streams, events and collectives. They order what is issued
and leave to the :class:`Issuer` what that is.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from fsdp_streams.operators import COLLECTIVES
from fsdp_streams.sites import CHECKERS, Watch

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard as fsdp_package


CHECKERS.add(__file__)


class Stream:
    """
    Stands in for a device's stream, or for the host. What it does next comes after
    all that is in its clock.
    """

    def __init__(self, issuer: Issuer, name: str):
        self.issuer, self.name = issuer, name
        self.clock = issuer.START

    def comes_after(self, clock: Any) -> None:
        self.clock = self.issuer.join(self.clock, clock)

    def wait_stream(self, other: Stream) -> None:
        if self.issuer.comes_to_call():
            self.comes_after(other.clock)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.issuer.new_event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.issuer.host.wait_stream(self)

    def query(self) -> bool:
        self.synchronize()
        return True

    def __repr__(self) -> str:
        return self.name


class Event:
    """Stands in for a device's event. Without a record, nothing waits for it."""

    def __init__(self, issuer: Issuer):
        self.issuer = issuer
        self.clock = issuer.START

    def record(self, stream: Stream | None = None) -> None:
        is_made = self.issuer.comes_to_call()
        stream = stream or self.issuer.stream
        self.clock = stream.clock if is_made else self.issuer.START

    def wait(self, stream: Stream | None = None) -> None:
        if self.issuer.comes_to_call():
            (stream or self.issuer.stream).comes_after(self.clock)

    def synchronize(self) -> None:
        self.wait(self.issuer.host)

    def query(self) -> bool:
        self.synchronize()
        return True


class Pending(dist.distributed_c10d.Work):
    """An asynchronous collective, which keeps its tensors until waited for."""

    def __init__(self, done: Event, tensors: Sequence[torch.Tensor]):
        super().__init__()
        self.done, self.tensors = done, tensors

    def wait(self, timeout: Any = None) -> bool:
        self.done.wait()
        self.tensors = ()
        return True


class Issuer:
    """
    Who issues what the device does: one rank.
    Its clocks are never changed in place, so streams and events share them.
    """

    START: Any  # the clock of a stream that has done nothing
    is_paused = False  # takes no note of operators

    def __init__(self, watch: Watch):
        self.watch = watch
        self.host = Stream(self, "host")
        self.default_stream = self.stream = Stream(self, "default")
        self.streams = [self.default_stream]
        self._comm_streams: dict[Any, Stream] = {}

    def join(self, clock: Any, other: Any) -> Any:
        """Returns a clock that comes after both."""
        raise NotImplementedError

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused

    def comes_to_call(self) -> bool:
        return self.watch.comes_to_call()

    def new_stream(self, name: str | None = None) -> Stream:
        name = name or f"stream {len(self.streams)}"
        same = sum(s.name.partition("#")[0] == name for s in self.streams)
        stream = Stream(self, f"{name}#{same}" if same else name)
        self.streams.append(stream)
        return stream

    def new_event(self) -> Event:
        return Event(self)

    def synchronize(self) -> None:
        """Makes the host wait for all streams."""
        for stream in self.streams:
            self.host.comes_after(stream.clock)

    def comm_stream(self, group: Any) -> Stream:
        """Returns the stream of a group's asynchronous collectives, after ours."""
        if group not in self._comm_streams:
            name = f"comm {len(self._comm_streams)}"
            self._comm_streams[group] = self.new_stream(name)
        stream = self._comm_streams[group]
        stream.comes_after(self.stream.clock)
        return stream

    def pending(self, stream: Stream, *tensors: torch.Tensor) -> Pending:
        """Returns what to wait for the collective by that is the last in a stream."""
        done = self.new_event()
        done.clock = stream.clock
        return Pending(done, tensors)


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

    @contextlib.contextmanager
    def in_place(self, collective: Callable[..., Pending | None]) -> Iterator[None]:
        """
        Is the handle that ``fully_shard`` finds. Collectives are handed to
        ``collective``: the name, the original, and the arguments by name.
        """
        with contextlib.ExitStack() as stack:
            for name, module in [*sys.modules.items()]:
                is_fsdp = name.startswith(fsdp_package.__name__)
                if is_fsdp and hasattr(module, "_get_device_handle"):
                    get = mock.Mock(return_value=self)
                    patch = mock.patch.object(module, "_get_device_handle", get)
                    stack.enter_context(patch)
            for name in COLLECTIVES:
                call = _handed_over(name, collective)
                stack.enter_context(mock.patch.object(dist, name, call))
            yield


def _handed_over(
    name: str, collective: Callable[..., Pending | None]
) -> Callable[..., Pending | None]:
    original = getattr(dist, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Pending | None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return collective(name, original, bound.arguments)

    return call
