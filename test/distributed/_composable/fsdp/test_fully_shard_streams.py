# Owner(s): ["oncall: distributed"]

"""
Which stream waits for which: every schedule of ``fully_shard`` is recorded on one
rank of :mod:`fsdp_late_device`, with units of one dtype and of several, and nothing
that it issues may use memory that something else uses without an order.

Then each call in our modules that orders streams is left out, one at a time, as
is each reference that keeps memory from being reused, and some schedule has to
show a pair without an order (:class:`TestWhatOrders`). These show nothing, alone,
and why; "all" stands for each call of the function:

======================================================  ========================
call                                                    why nothing shows
======================================================  ========================
wait_all_gather_streams_on_event > wait_event #1        the gather stream waits
                                                        for the copy-in stream
                                                        before each gather, and
                                                        allocates nothing
reduce > wait #0, wait > _wait_current_stream #0        a group's reductions
                                                        follow one another in one
                                                        stream, unless settings
                                                        change between backwards
reset > wait #0                                         the root has waited for
                                                        every stream's last event
_reset_iter_state > _order_gathers_after_reshard #0     the next root forward
                                                        orders gathers behind the
                                                        current stream; what
                                                        matters is that the event
                                                        is dropped
recycle_reduce_buffers > wait_event #2                  the memory goes back to
                                                        the stream that has waited
                                                        already; it bounds how
                                                        many inputs are there at
                                                        once
release_all_gather_state_on_current_stream > ...        the current stream itself
                                                        copied out
post_backward > _wait_current_stream #0                 nothing that is freed
                                                        there is in use by another
                                                        stream: the release waits
                                                        for what it met on ROCm
======================================================  ========================
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest

from fsdp_common.utils import DeviceFreeTest
from fsdp_late_device.check import unordered
from fsdp_late_device.queues import Entry
from fsdp_late_device.races import forgets, never_blocks
from fsdp_late_device.runs import MODULES
from fsdp_late_device.schedules import KINDS, Kit, record_alone, SCHEDULES
from fsdp_streams.devices import Event, Stream
from fsdp_streams.sites import find_sites, Site

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import (
    _fsdp_copies as copies,
)
from torch.distributed.fsdp._fully_shard import (
    _fsdp_param_group as param_group,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    TrainingState,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.long


# The reasons are at the top
UNSEEN = frozenset(
    (
        "wait_all_gather_streams_on_event > wait_event #1",
        "reduce > wait #0",
        "wait > _wait_current_stream #0",
        "reset > wait #0",
        "_reset_iter_state > _order_gathers_after_reshard #0",
        "post_backward > _wait_current_stream #0",
        "recycle_reduce_buffers > wait_event #2",
        "release_all_gather_state_on_current_stream > wait_event #0",
    )
)


# Running them #


def run(name: str, kind: str, **options: Any) -> list[str]:
    """Returns the pairs of a schedule that nothing orders."""
    return unordered(record_alone(name, kind, watched=MODULES, **options))


@functools.cache
def run_clean(name: str, kind: str) -> Clean:
    recording = record_alone(name, kind, watched=MODULES)
    return Clean(unordered(recording), recording.visited, recording.events_left)


class Clean(NamedTuple):
    """What a schedule shows with nothing left out."""

    unordered: list[str]
    visited: set[tuple[str, int]]
    events_left: list[int]


class TestSites(DeviceFreeTest):
    @pytest.mark.quick
    def test_sites(self) -> None:
        names = [str(site) for module in MODULES for site in find_sites(module)]
        self.assertEqual(len(names), len(set(names)))
        self.assertIn("foreach_all_gather > wait_stream #0", names)


class TestSchedules(DeviceFreeTest):
    @parametrize("kind", [*KINDS])
    def test_all_is_ordered(self, kind: str) -> None:
        for name in SCHEDULES:
            with self.subTest(name):
                self.assertEqual(run_clean(name, kind).unordered, [])

    @parametrize("kind", [*KINDS])
    def test_events_do_not_outlive_a_step(self, kind: str) -> None:
        for name in SCHEDULES:
            left = run_clean(name, kind).events_left
            if name == "part_of_a_unit_after_the_root":
                # What it reduces after the root's end is waited for by the next
                # step: two of each model, of which the last is not collected yet
                self.assertLessEqual(max(left), 4)
            else:
                self.assertEqual({*left}, {0}, name)

    def test_finalization_by_hand_is_among_them_where_there_is_one(self) -> None:
        names = [name for name in SCHEDULES if name.startswith("finalized_")]
        has_it = hasattr(FSDPModule, "finalize_backward")
        self.assertEqual(len(names), 4 * has_it)

    @pytest.mark.quick
    @parametrize("kind", ["uniform", "mixed"])
    def test_backward_waits_for_a_part_of_a_unit(self, kind: str) -> None:
        """Until all of its reduction is done, though no buffer here needs it."""
        waits: list[tuple[bool, bool]] = []
        note = mock.patch.object(
            param_group.FSDPParamGroup, "post_backward", noting_wait(waits)
        )
        with note:
            run("part_of_a_unit_after_the_root", kind)
        # Three of four post-backwards of the unit come while its forward is not
        # complete, and only the fourth overlaps with what follows
        parts = [is_part for is_part, _ in waits]
        self.assertEqual(parts, [True, True, True, False] * 6)
        self.assertTrue(all(waited for is_part, waited in waits if is_part))
        self.assertIn((False, False), waits)

    @pytest.mark.quick
    @parametrize("shape", [(4,), (2, 2)])
    def test_a_shared_input_is_held_for_the_last_bucket(self, shape: tuple) -> None:
        """The first and the last bucket are sent by one all-to-all, the second is not."""

        def dtype_by_dim(of_vectors: torch.dtype, of_matrices: torch.dtype | None):
            return lambda p: of_matrices if p.ndim == 2 else of_vectors

        fp64, fp32, bf16 = torch.float64, torch.float32, torch.bfloat16
        policy = MixedPrecisionPolicy(
            param_dtype=fp32,
            reduce_dtype_override_fn=dtype_by_dim(fp64, fp32),
            grad_comm_dtype_override_fn=lambda p: (
                None if p.dtype is torch.float16 else fp32 if p.ndim == 1 else bf16
            ),
        )

        def train(kit: Kit) -> None:
            kit.train(kit.sharded_net(mesh=kit.mesh(*shape), mp_policy=policy))

        self.assertEqual(unordered(record_alone(train, "mixed", watched=MODULES)), [])

    @parametrize("kind", [*KINDS])
    def test_devices_are_told_who_reads_gradients(self, kind: str) -> None:
        """Of all memory that sharded gradients lie in: whoever runs backward."""
        told: list[tuple[torch.Tensor, Stream]] = []
        # The tensors are kept, so that nothing else gets their memory
        note = mock.patch.object(
            copies, "record_grad_output_stream", lambda *call: told.append(call)
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
            record_alone(backward, kind)


instantiate_parametrized_tests(TestSchedules)


def noting_wait(waits: list[tuple[bool, bool]]) -> Callable[..., None]:
    """
    Notes of each reduction of a unit of several modules whether its forward was
    complete, and whether post-backward waited for all of it.
    """
    post_backward = param_group.FSDPParamGroup.post_backward

    def call(group: Any, *args: Any) -> None:
        earlier = group._reducer.event
        is_part = group._training_state == TrainingState.FORWARD
        post_backward(group, *args)
        event = group._reducer.event
        if len(group.modules) > 1 and event not in (None, earlier):
            waited = event.clock <= all_before(group.device_handle.current_stream())
            waits.append((is_part, waited))

    return call


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


def scattered_too_early() -> contextlib.AbstractContextManager:
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

    return mock.patch.object(param_group, "foreach_reduce", foreach_reduce)


_CONTEXT, _GROUP = param_group.FSDPCommContext, param_group.FSDPParamGroup
# What to break to how, and the schedules that show it
BROKEN = {
    "all_gather_state": (
        forgets(_CONTEXT, "all_gather_state"),
        ("implicit_prefetch", "evaluation_between"),
    ),
    "reduce_scatter_states": (
        forgets(_CONTEXT, "reduce_scatter_states"),
        ("implicit_prefetch", "two_input_buffers", "hsdp", "one_rank"),
    ),
    "all_reduce_states": (
        forgets(_CONTEXT, "all_reduce_states"),
        ("hsdp", "hsdp_deferred", "all_reduce_hook"),
    ),
    "input of one rank": (scattered_too_early, ("one_rank",)),
    "blocking copies": (
        never_blocks,
        ("offload_pinned_accumulation", "offload_pinned_hook"),
    ),
}


class SeveralSites(tuple[Site, ...]):
    """Are left out together: what shows nothing then shows nothing alone."""

    def is_at(self, line: tuple[str, int]) -> bool:
        return any(site.is_at(line) for site in self)


class TestWhatOrders(DeviceFreeTest):
    kinds = ("uniform", "uniform, cast", "mixed", "mixed, cast", "mixed, joined")

    def test_each_call_matters(self) -> None:
        for module in MODULES:
            for site in find_sites(module):
                if str(site) not in UNSEEN:
                    with self.subTest(str(site)):
                        self._check_is_seen(site)

    def test_what_is_left_out_of_this_is_still_unseen(self) -> None:
        """Of all at once nothing shows, and so of none."""
        sites = [s for module in MODULES for s in find_sites(module)]
        unseen = [site for site in sites if str(site) in UNSEEN]
        self.assertEqual({*map(str, unseen)}, UNSEEN)
        # A sample: all of it takes minutes
        for name, kind in zip(SCHEDULES, itertools.cycle(self.kinds), strict=False):
            with self.subTest(f"{name}, {kind}"):
                self.assertEqual(run(name, kind, without=SeveralSites(unseen)), [])

    def _check_is_seen(self, site: Site) -> None:
        visitors = [
            (name, kind)
            for name in SCHEDULES
            for kind in self.kinds
            if any(site.is_at(line) for line in run_clean(name, kind).visited)
        ]
        self.assertTrue(visitors, "no schedule comes here")
        for name, kind in visitors:
            if run(name, kind, without=site):
                return
        self.fail(f"nothing shows without it in {visitors}")

    @parametrize("what", [*BROKEN])
    def test_each_kept_reference_matters(self, what: str) -> None:
        broken, names = BROKEN[what]
        for name in names:
            kinds = [k for k in KINDS if run(name, k, broken=broken)]
            self.assertNotEqual(kinds, [], name)


instantiate_parametrized_tests(TestWhatOrders)


if __name__ == "__main__":
    run_tests()
