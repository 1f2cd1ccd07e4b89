# Owner(s): ["oncall: distributed"]
"""
Which stream waits for which: schedules are recorded on one rank of
:mod:`fsdp_helpers.late_device`, and nothing may use memory that something else uses
without an order. Each call in our modules that orders streams is left out in turn, and
some schedule must show it, but for :data:`UNSEEN`.
"""

import functools
import itertools
from collections import defaultdict
from typing import Any, NamedTuple
from unittest import mock

import pytest

from fsdp_helpers.common.utils import DeviceFreeTest
from fsdp_helpers.late_device.check import check, unordered
from fsdp_helpers.late_device.devices import Entry, Stream
from fsdp_helpers.late_device.record import Rank
from fsdp_helpers.late_device.schedules import KINDS, record, ScheduleKit, SCHEDULES
from fsdp_helpers.late_device.sites import Line

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_reduce as reduce_file
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.timeout(600)


# Calls without which, alone, nothing shows, and why
UNSEEN = {
    "wait_all_gather_streams_on_event: self.all_gather_stream.wait_event(event)": "the "
    "gather stream waits for the copy-in stream before each gather, and allocates nothing",
    "_wait_for_post_backward: self.comm_ctx.wait_current_stream(event)": "a group's "
    "reductions follow one another in one stream, unless settings change",
    "_reset_iter_state: self._wait_for_post_backward()": "the root has waited for every "
    "stream's last event",
    "release_all_gather_state_on_current_stream: "
    "self.wait_current_stream(state.event)": "the current stream itself copied out",
    "post_backward: self.comm_ctx.wait_current_stream(self._post_reduce_event)": "nothing "
    "that is freed there is in use by another stream: the release waits for what it met "
    "on ROCm",
}

# In these all schedules run, and in each of the others some
IN_FULL = ("mixed, cast", "mixed, joined", "mixed, direct")
_OTHERS = [kind for kind in KINDS if kind not in IN_FULL]
PARTS = 4  # of the calls that are left out
SCHEDULES_OF = dict.fromkeys(IN_FULL, [*SCHEDULES]) | {
    kind: dict.fromkeys(("implicit_prefetch", "hsdp", *[*SCHEDULES][n :: len(_OTHERS)]))
    for n, kind in enumerate(_OTHERS)
}


class Clean(NamedTuple):
    """What a schedule shows with nothing left out."""

    unordered: list[str]
    events_left: list[int]
    sites: list[Line]


@functools.cache
def run_clean(name: str, kind: str) -> Clean:
    found = record(name, kind)
    return Clean(unordered(found), found.events_left, sorted(found.visited))


class TestSchedules(DeviceFreeTest):
    @parametrize("kind", [*KINDS])
    def test_schedule_is_ordered_and_no_event_outlives_a_step(self, kind: str) -> None:
        for name in SCHEDULES_OF[kind]:
            with self.subTest(name):
                clean = run_clean(name, kind)
                self.assertEqual(clean.unordered, [])
                # What is reduced after the root's end, the next step waits for: two
                # of each model, of which the last is not collected yet
                most = 4 * (name == "part_of_a_unit_after_the_root")
                self.assertLessEqual(max(clean.events_left), most)

    @pytest.mark.quick
    def test_backward_waits_for_a_part_of_a_unit(self) -> None:
        """Until all of its reduction is done, though no buffer here needs it."""
        waits: list[tuple[bool, bool]] = []
        post_backward = FSDPParamGroup.post_backward

        def noting_wait(group: Any, *args: Any) -> None:
            earlier = group._post_reduce_event
            is_part = group._training_state == TrainingState.FORWARD
            post_backward(group, *args)
            event = group._post_reduce_event
            if len(group.modules) > 1 and event not in (None, earlier):
                before = all_before(group.device_handle.current_stream())
                waits.append((is_part, event.clock <= before))

        with mock.patch.object(FSDPParamGroup, "post_backward", noting_wait):
            record("part_of_a_unit_after_the_root", "mixed")
        # Three of four post-backwards of the unit come while its forward is not
        # complete, and only the fourth overlaps with what follows
        parts = [is_part for is_part, _ in waits]
        self.assertEqual(parts, [True, True, True, False] * 6)
        self.assertTrue(all(waited for is_part, waited in waits if is_part))
        self.assertIn((False, False), waits)

    @pytest.mark.quick
    @parametrize("kind", ["uniform", "mixed, cast"])
    @parametrize("ranks", [(2, 2), (4, 1)])
    def test_hsdp_backward_waits_for_no_all_reduce_while_there_is_room(
        self, kind: str, ranks: tuple[int, int]
    ) -> None:
        post_backward = FSDPParamGroup.post_backward
        waited: list[set[Entry]] = []

        def noting_waits(group: Any, *args: Any) -> None:
            post_backward(group, *args)
            context = group.comm_ctx
            current = group.device_handle.current_stream()
            entries = all_before(current) | all_before(context.reduce_scatter_stream)
            waited.append({e for e in entries if e.stream is context.all_reduce_stream})

        def backward(kit: ScheduleKit) -> None:
            kit.backward(kit.sharded_net(mesh=kit.mesh(*ranks)))

        with mock.patch.object(FSDPParamGroup, "post_backward", noting_waits):
            record(backward, kind)
        self.assertEqual(waited, [set()] * 4)

    @parametrize("kind", [*KINDS])
    def test_devices_are_told_who_reads_gradients(self, kind: str) -> None:
        """Whoever runs backward reads all memory that sharded gradients lie in."""
        told: list[tuple[torch.Tensor, Stream]] = []
        # The tensors are kept, so that nothing else gets their memory
        note = mock.patch.object(
            reduce_file, "record_grad_output_stream", lambda *call: told.append(call)
        )

        def backward(kit: ScheduleKit) -> None:
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


class TestLeftOut(DeviceFreeTest):
    @parametrize("part", range(PARTS))
    def test_each_call_that_orders_streams_matters(self, part: int) -> None:
        visitors: defaultdict[Line, list[tuple[str, str]]] = defaultdict(list)
        for kind, schedule in itertools.product(IN_FULL, SCHEDULES):
            for site in run_clean(schedule, kind).sites:
                visitors[site].append((schedule, kind))
        for site in sorted(visitors)[part::PARTS]:
            if str(site) not in UNSEEN:
                with self.subTest(str(site)):
                    found = (record(*v, without=site) for v in visitors[site])
                    self.assertTrue(any(map(unordered, found)), visitors[site])

    @parametrize("is_ordered", [True, False])
    def test_check_tells_both_of_a_pair(self, is_ordered: bool) -> None:
        """In any program, with each one's stream, operator and line."""

        def program(rank: Rank) -> None:
            side, x = rank.new_stream("side"), torch.ones(3) * 2
            if is_ordered:
                side.wait_stream(rank.default_stream)
            with rank.handle.stream(side):
                x.fill_(3)

        found = check(program)
        self.assertEqual(found == [], is_ordered)
        line = r"\(test_.*:\d+ program\)"
        pair = rf"\[default\] aten.mul.Tensor {line}\n  \[side\] aten.fill_.S\w+ {line}"
        for report in found[-1:]:
            self.assertRegex(report, pair)


if __name__ == "__main__":
    run_tests()
