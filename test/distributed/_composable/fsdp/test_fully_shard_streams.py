# Owner(s): ["oncall: distributed"]

"""
Which stream waits for which: every schedule of ``fully_shard`` is recorded on one
rank of :mod:`fsdp_helpers.late_device`, with units of one dtype and of several, and
nothing that it issues may use memory that something else uses without an order.

Then each call in our modules that orders streams is left out, one at a time, as
is each reference that keeps memory from being reused, and some schedule has to
show a pair without an order (:class:`TestWhatOrders`), but for :data:`UNSEEN`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest

from fsdp_helpers.common.utils import DeviceFreeTest
from fsdp_helpers.late_device.check import unordered
from fsdp_helpers.late_device.devices import Event, Stream
from fsdp_helpers.late_device.queues import Entry
from fsdp_helpers.late_device.record import Rank
from fsdp_helpers.late_device.schedules import KINDS, Kit, record, SCHEDULES
from fsdp_helpers.late_device.sites import find_sites, MODULES

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard import _fsdp_reduce as reduce_file
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_context import HeldAllReduces
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.timeout(600)


_IN_ONE_STREAM = (
    "a group's reductions follow one another in one stream, unless settings change"
)
# Calls without which, alone, nothing shows, and why
UNSEEN = {
    "wait_all_gather_streams_on_event > wait_event #1": "the gather stream waits for "
    "the copy-in stream before each gather, and allocates nothing",
    "_wait_for_post_backward > wait_current_stream #0": _IN_ONE_STREAM,
    "_reset_iter_state > _wait_for_post_backward #0": "the root has waited for every "
    "stream's last event",
    "_reset_iter_state > wait_all_gather_streams_on_event #0": "the next root forward "
    "orders gathers behind the current stream; what matters is that the event is "
    "dropped",
    "recycle_reduce_buffers > wait_event #1": "the memory goes back to the stream that "
    "has waited already; it bounds how many inputs are there at once",
    "release_all_gather_state_on_current_stream > wait_current_stream #0": "the current stream "
    "itself copied out",
    "post_backward > wait_current_stream #0": "nothing that is freed there is in use "
    "by another stream: the release waits for what it met on ROCm",
}

# In these all schedules run, and in each of the others some
IN_FULL = ("mixed, cast", "mixed, joined", "mixed, direct")
_OTHERS = [kind for kind in KINDS if kind not in IN_FULL]
SCHEDULES_OF = dict.fromkeys(IN_FULL, [*SCHEDULES]) | {
    kind: dict.fromkeys(("implicit_prefetch", "hsdp", *[*SCHEDULES][n :: len(_OTHERS)]))
    for n, kind in enumerate(_OTHERS)
}

SITES = {str(site): site for module in MODULES for site in find_sites(module)}


def run(name: str | Callable[[Kit], None], kind: str, **options: Any) -> list[str]:
    """Returns the pairs of a schedule that nothing orders."""
    return unordered(record(name, kind, **options))


class Clean(NamedTuple):
    """What a schedule shows with nothing left out."""

    unordered: list[str]
    events_left: list[int]
    sites: list[str]


@functools.cache
def run_clean(name: str, kind: str) -> Clean:
    recording = record(name, kind)
    sites = [
        name for name, site in SITES.items() if any(map(site.is_at, recording.visited))
    ]
    return Clean(unordered(recording), recording.events_left, sites)


@instantiate_parametrized_tests
class TestSchedules(DeviceFreeTest):
    @parametrize("kind", [*KINDS])
    def test_all_is_ordered(self, kind: str) -> None:
        for name in SCHEDULES_OF[kind]:
            with self.subTest(name):
                self.assertEqual(run_clean(name, kind).unordered, [])

    @parametrize("kind", [*KINDS])
    def test_events_do_not_outlive_a_step(self, kind: str) -> None:
        for name in SCHEDULES_OF[kind]:
            left = run_clean(name, kind).events_left
            if name == "part_of_a_unit_after_the_root":
                # What it reduces after the root's end is waited for by the next
                # step: two of each model, of which the last is not collected yet
                self.assertLessEqual(max(left), 4)
            else:
                self.assertEqual({*left}, {0}, name)

    @pytest.mark.quick
    @parametrize("kind", ["uniform", "mixed"])
    def test_backward_waits_for_a_part_of_a_unit(self, kind: str) -> None:
        """Until all of its reduction is done, though no buffer here needs it."""
        waits: list[tuple[bool, bool]] = []
        post_backward = param_group.FSDPParamGroup.post_backward

        def noting_wait(group: Any, *args: Any) -> None:
            earlier = group._post_reduce_event
            is_part = group._training_state == TrainingState.FORWARD
            post_backward(group, *args)
            event = group._post_reduce_event
            if len(group.modules) > 1 and event not in (None, earlier):
                before = all_before(group.device_handle.current_stream())
                waits.append((is_part, event.clock <= before))

        with mock.patch.object(
            param_group.FSDPParamGroup, "post_backward", noting_wait
        ):
            run("part_of_a_unit_after_the_root", kind)
        # Three of four post-backwards of the unit come while its forward is not
        # complete, and only the fourth overlaps with what follows
        parts = [is_part for is_part, _ in waits]
        self.assertEqual(parts, [True, True, True, False] * 6)
        self.assertTrue(all(waited for is_part, waited in waits if is_part))
        self.assertIn((False, False), waits)

    @pytest.mark.quick
    @parametrize("kind", ["uniform", "mixed, cast"])
    @parametrize("ranks", [(2, 2), (4, 1)])
    def test_backward_waits_for_no_all_reduce_while_there_is_room(
        self, kind: str, ranks: tuple[int, int]
    ) -> None:
        post_backward = param_group.FSDPParamGroup.post_backward
        waited: list[set[Entry]] = []

        def noting_waits(group: Any, *args: Any) -> None:
            post_backward(group, *args)
            context = group.comm_ctx
            streams = (
                group.device_handle.current_stream(),
                context.reduce_scatter_stream,
            )
            entries = set().union(*map(all_before, streams))
            waited.append({e for e in entries if e.stream is context.all_reduce_stream})

        def backward(kit: Kit) -> None:
            kit.backward(kit.sharded_net(mesh=kit.mesh(*ranks)))

        with mock.patch.object(
            param_group.FSDPParamGroup, "post_backward", noting_waits
        ):
            record(backward, kind)
        self.assertEqual(waited, [set()] * 4)

    @parametrize("kind", [*KINDS])
    def test_devices_are_told_who_reads_gradients(self, kind: str) -> None:
        """Of all memory that sharded gradients lie in: whoever runs backward."""
        told: list[tuple[torch.Tensor, Stream]] = []
        # The tensors are kept, so that nothing else gets their memory
        note = mock.patch.object(
            reduce_file, "record_grad_output_stream", lambda *call: told.append(call)
        )

        def backward(kit: Kit) -> None:
            net = kit.sharded_net(mesh=kit.mesh(2, 2))
            kit.backward(net)
            self.assertEqual({stream for _, stream in told}, {kit.rank.default_stream})
            places = {buffer.untyped_storage().data_ptr() for buffer, _ in told}
            for param in net.parameters():
                local = param.grad._local_tensor
                self.assertIn(local.untyped_storage().data_ptr(), places)

        with note:
            record(backward, kind)


def all_before(stream: Stream) -> set[Entry]:
    """Returns all entries that what comes next in a stream comes after."""
    found: set[Entry] = set()
    rest = [*stream.clock]
    while rest:
        if (entry := rest.pop()) not in found:
            found.add(entry)
            rest.extend(entry.before)
    return found


# Breaking things #

Broken = Callable[[], contextlib.AbstractContextManager]


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, HeldAllReduces):
        return replace(value, states=_without_tensors(value.states))
    if isinstance(value, tuple):
        items = [_without_tensors(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class _Forgetful(list):
    def append(self, item: Any) -> None:
        super().append(_without_tensors(item))


def forgets(name: str) -> Broken:
    """Keeps the events of what the context holds under a name, but not the tensors."""

    def set_attribute(instance: Any, attribute: str, value: Any) -> None:
        if attribute == name:
            is_list = isinstance(value, list)
            value = _Forgetful(value) if is_list else _without_tensors(value)
        object.__setattr__(instance, attribute, value)

    context = param_group.FSDPCommContext
    return lambda: mock.patch.object(context, "__setattr__", set_attribute)


def never_blocks() -> contextlib.AbstractContextManager:
    """Gradients are copied to pinned memory, and nobody waits for the copies."""
    copy = Rank.copy_across
    return mock.patch.object(
        Rank, "copy_across", lambda rank, tensor, non_blocking: copy(rank, tensor, True)
    )


@contextlib.contextmanager
def scattered_too_early() -> Iterator[None]:
    """Gives the first event of a reduction for that after which its input is free."""
    reduce, record_event = param_group.foreach_reduce, Stream.record_event

    @functools.wraps(reduce)
    def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
        events: list[Event] = []

        def collect(stream: Stream, event: Event | None = None) -> Event:
            events.append(record_event(stream, event))
            return events[-1]

        with mock.patch.object(Stream, "record_event", collect):
            result = reduce(*args, **kwargs)
        return result._replace(reduce_scatter_event=events[0])

    with mock.patch.object(param_group, "foreach_reduce", foreach_reduce):
        yield


# What to break to how, and the schedules that show it
BROKEN: dict[str, tuple[Broken, tuple[str, ...]]] = {
    "all_gather_state": (
        forgets("all_gather_state"),
        ("implicit_prefetch",),
    ),
    "reduce_scatter_states": (
        forgets("reduce_scatter_states"),
        ("implicit_prefetch", "two_input_buffers", "hsdp", "one_rank"),
    ),
    "all_reduce_states": (
        forgets("all_reduce_states"),
        ("hsdp_without_room", "all_reduce_hook"),
    ),
    "input of one rank": (scattered_too_early, ("one_rank",)),
    "blocking copies": (never_blocks, ("offload_pinned", "offload_pinned_hook")),
}


@instantiate_parametrized_tests
class TestWhatOrders(DeviceFreeTest):
    @parametrize("name", [name for name in SITES if name not in UNSEEN])
    def test_each_call_matters(self, name: str) -> None:
        visitors = [
            (schedule, kind)
            for kind in IN_FULL
            for schedule in SCHEDULES
            if name in run_clean(schedule, kind).sites
        ]
        self.assertTrue(visitors, "no schedule comes here")
        shown = (run(*visitor, without=[SITES[name]]) for visitor in visitors)
        self.assertTrue(any(shown), f"nothing shows without it in {visitors}")

    def test_what_is_left_out_of_this_is_still_unseen(self) -> None:
        """Of all at once nothing shows, and so of none."""
        unseen = [SITES[name] for name in UNSEEN]
        # A sample: all of it takes minutes
        for name, kind in zip([*SCHEDULES][::2], itertools.cycle(IN_FULL)):
            with self.subTest(f"{name}, {kind}"):
                self.assertEqual(run(name, kind, without=unseen), [])

    @parametrize("what", [*BROKEN])
    def test_each_kept_reference_matters(self, what: str) -> None:
        broken, names = BROKEN[what]
        for name in names:
            shown = (run(name, kind, broken=broken) for kind in KINDS)
            self.assertTrue(any(shown), name)


if __name__ == "__main__":
    run_tests()
