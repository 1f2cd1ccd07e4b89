"""
What a program issues to a device that is late: which rank put what into which
stream, after what, and in which memory. ``check.py`` tells what for.

Ranks are threads that take turns, so that a recording is the same each time. They
run what they issue at once, on tensors of their own: that gives the shapes, what the
host reads, and the bits to expect. What they issued runs again, in other orders and
in other memory: ``memory.py``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fsdp_late_device.collectives import Call
from fsdp_late_device.queues import Entry, Meeting, Piece, Recording, Work
from fsdp_late_device.ranks import Rank
from fsdp_streams.devices import DeviceHandle, Pending, Stream
from fsdp_streams.operators import COLLECTIVES, is_on_device, OperatorMode
from fsdp_streams.sites import caller_line, CHECKERS, Site, Watch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.fake_pg import FakeStore


CHECKERS.add(__file__)


class Stuck(RuntimeError):
    """All ranks wait, for collectives that others do not come to."""


@dataclass
class _Arrival:
    stream: Stream
    before: frozenset[Entry]
    tensors: tuple[torch.Tensor, torch.Tensor]
    call: Call


class Recorder:
    """
    Runs ranks in turns and records what they issue. ``alone``, only the first runs, in
    a group of ``ranks``: collectives take what it gives for what all of them do.
    """

    def __init__(
        self,
        ranks: int,
        *,
        watched: Iterable[Any] = (),
        without: Site | None = None,
        comms_in_order: bool = True,
        alone: bool = False,
    ):
        self.watch = Watch(watched, without)
        self.recording = Recording(visited=self.watch.visited)
        self.handle = DeviceHandle(lambda: self.rank)
        self._world_size = ranks
        self.ranks = [Rank(self, number) for number in range(1 if alone else ranks)]
        self._local = threading.local()
        self._comms_in_order = comms_in_order
        self._arrivals: dict[Any, dict[int, Any]] = {}
        self._last_meetings: dict[Any, Entry] = {}
        # Whose turn it is, and who could go on
        self._turn = threading.Condition()
        self._running: int | None = 0
        self._can_run = {rank.number for rank in self.ranks}
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
                "fake", store=FakeStore(), rank=rank.number, world_size=self._world_size
            )
            try:
                with OperatorMode(rank):
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
        before = stream.clock | rank.host.clock
        arrival = _Arrival(stream, before, (source, target), call)
        members = [number for number in group[0] if number < len(self.ranks)]
        arrivals = self._await_others(rank, group, members, arrival)
        if arrivals is not None:
            # Who is not recorded comes with what is there
            all_of = [arrivals.get(number, arrival) for number in group[0]]
            self._complete(group, all_of)

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
        pairs = [a.stream.issuer.pieces(a.tensors) for a in arrivals]
        with contextlib.ExitStack() as stack:
            for arrival in arrivals:
                stack.enter_context(arrival.stream.issuer.paused())
            inputs, outputs = zip(*(arrival.tensors for arrival in arrivals))
            with torch.no_grad():
                call.run(inputs, outputs)
        before = frozenset().union(*(a.before for a in arrivals))
        if self._comms_in_order and group in self._last_meetings:
            before |= {self._last_meetings[group]}
        sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        entry = self.new_entry(
            tuple(dict.fromkeys(a.stream for a in arrivals)),
            call.name,
            Meeting(call, sources, targets),
            before,
            sources,
            targets,
        )
        self._last_meetings[group] = entry
        for arrival in arrivals:
            arrival.stream.clock = frozenset((entry,))

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
            len(entries), streams, label, caller_line(), work, before, reads, writes
        )
        entries.append(entry)
        return entry

    # Patches #
    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(self.handle.in_place(self._collective))
            enter(mock.patch.object(dist, "barrier", self._barrier))
            for owner, name, call in self._methods():
                enter(mock.patch.object(owner, name, call))
            gc.disable()  # or one rank's cycles would be found by another
            stack.callback(gc.enable)
            gc.freeze()  # what a schedule collects is its own
            stack.callback(gc.unfreeze)
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
        return is_on_device(tensor) and not self.rank.is_paused

    def _collective(
        self, name: str, original: Callable[..., Any], given: dict[str, Any]
    ) -> Pending | None:
        if any(given.get(f"{side}_split_sizes") for side in ("input", "output")):
            raise NotImplementedError(f"{name} with split sizes")
        operation = getattr(given.get("op"), "op", given.get("op"))
        kind = Call(name, getattr(operation, "name", None))
        tensors = (given[argument] for argument in COLLECTIVES[name])
        return self.rank.meet(kind, given["group"], *tensors, given["async_op"])

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        self.rank.synchronize()
