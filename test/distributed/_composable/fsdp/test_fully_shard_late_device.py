# Owner(s): ["oncall: distributed"]

"""
A device that is late: what it takes for ordered and what not, small steps in every
order, schedules in a few, and races that were published of FSDP2, which it has to find.
Which stream waits for which is in ``test_fully_shard_streams.py``, and the rules are in
docs/architecture.md. ``python fsdp_late_device`` starts longer runs by hand.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_common.release_rules import FOLLOWS_GRAD_DTYPE
from fsdp_common.tiers import quick_alone
from fsdp_common.utils import DeviceFreeTest, run_python
from fsdp_late_device import races, schedules, steps
from fsdp_late_device.check import (
    check,
    examine,
    main,
    replay,
    show_one,
    unordered,
)
from fsdp_late_device.memory import Device, PATTERNS, place, REUSES
from fsdp_late_device.orders import (
    by_name,
    conflicts,
    explore,
    Graph,
    in_order,
    names,
    run,
    TooMany,
)
from fsdp_late_device.queues import Recording
from fsdp_late_device.races import RACES
from fsdp_late_device.ranks import Rank
from fsdp_late_device.record import Recorder, Stuck
from fsdp_late_device.runs import MODULES
from fsdp_late_device.schedules import KINDS, SCHEDULES
from fsdp_streams.sites import find_sites

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.long


Program = Callable[[Rank], Any]


def record(program: Program, ranks: int = 1) -> Recording:
    return Recorder(ranks).record(program)


def count_of_others(program: Program, ranks: int = 1, orders: int = 20) -> int:
    """Returns in how many orders a program gives other bits."""
    return len(check(program, ranks=ranks, orders=orders).findings)


# What orders and what does not #


class TestDevice(DeviceFreeTest):
    def check_orders(self, program: Program, is_clean: bool, ranks: int = 1) -> None:
        report = check(program, ranks=ranks, orders=20)
        self.assertEqual(report.is_clean, is_clean, report)
        self.assertEqual(bool(report.findings), not is_clean, report)

    def test_pair_without_an_order_is_told(self) -> None:
        """Streams, operators and lines of both."""

        def program(rank: Rank) -> torch.Tensor:
            x = torch.ones(3)
            with rank.handle.stream(rank.new_stream("side")):
                return x + 1

        (pair,) = unordered(record(program))
        first, second = pair.splitlines()
        here = f"({Path(__file__).name}:"
        for text, stream, operator in (
            (first, "[0:default]", "aten.ones.default"),
            (second, "[0:side]", "aten.add.Tensor"),
        ):
            self.assertIn(f"{stream} {operator}", text)
            self.assertIn(here, text)
            self.assertIn(" program)", text)

    @pytest.mark.quick
    @parametrize("how", ["not", "unrecorded", "stream", "event", "host"])
    def test_reading_what_another_stream_writes(self, how: str) -> None:
        def program(rank: Rank) -> torch.Tensor:
            side, default = rank.new_stream("side"), rank.default_stream
            x = torch.ones(3) * 2
            if how == "stream":
                side.wait_stream(default)
            elif how == "event":
                side.wait_event(default.record_event())
            elif how == "unrecorded":
                side.wait_event(rank.handle.Event())
            elif how == "host":
                default.synchronize()
            with rank.handle.stream(side):
                return x + 1

        self.check_orders(program, is_clean=how not in ("not", "unrecorded"))

    @parametrize("waits", [True, False])
    def test_writing_what_another_stream_reads(self, waits: bool) -> None:
        def program(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
            side, default = rank.new_stream("side"), rank.default_stream
            x = torch.ones(3)
            side.wait_stream(default)
            with rank.handle.stream(side):
                y = x + 1
            if waits:
                default.wait_stream(side)
            x.view(3).zero_()
            return x, y

        self.check_orders(program, is_clean=waits)

    def test_event_covers_what_was_before_it(self) -> None:
        def program(rank: Rank) -> torch.Tensor:
            side, default = rank.new_stream("side"), rank.default_stream
            x = torch.ones(3)
            event = default.record_event()
            x += 1
            side.wait_event(event)
            with rank.handle.stream(side):
                return x * 3

        self.check_orders(program, is_clean=False)

    @parametrize("how", ["dropped", "resized", "kept", "waited for", "recorded"])
    def test_freed_memory(self, how: str) -> None:
        """It may be handed out again at the next allocation in its own stream."""

        def program(rank: Rank) -> Any:
            side, default = rank.new_stream("side"), rank.default_stream
            x = torch.ones(3)
            side.wait_stream(default)
            with rank.handle.stream(side):
                y = x * 2
            kept = [x] if how == "kept" else []
            if how == "waited for":
                default.wait_stream(side)
            if how == "recorded":
                x.record_stream(side)
            if how == "resized":
                x.untyped_storage().resize_(0)
            else:
                del x
            return y, kept, torch.empty(1)

        self.check_orders(program, is_clean=how not in ("dropped", "resized"))

    def test_freed_memory_that_its_stream_does_not_need(self) -> None:
        """A stream that allocates no more hands nothing out, nor does another one."""

        def program(rank: Rank) -> Any:
            side, default = rank.new_stream("side"), rank.default_stream
            x = torch.ones(3)
            side.wait_stream(default)
            with rank.handle.stream(side):
                y = x * 2
                del x
                return y, torch.ones(3)

        self.check_orders(program, is_clean=True)

    def test_freeing_comes_before_a_later_wait(self) -> None:
        def program(rank: Rank) -> torch.Tensor:
            side, default = rank.new_stream("side"), rank.default_stream
            with rank.handle.stream(side):
                x = torch.ones(3)
            default.wait_stream(side)
            y = x * 2
            del x
            with rank.handle.stream(side):
                torch.empty(1)
            side.wait_stream(default)
            return y

        self.check_orders(program, is_clean=False)

    def test_backward_runs_late_as_well(self) -> None:
        def program(rank: Rank) -> torch.Tensor:
            x = torch.ones(3, requires_grad=True)
            weight = torch.full((3,), 2.0)
            side = rank.new_stream("side")
            side.wait_stream(rank.default_stream)
            with rank.handle.stream(side):
                (x * weight).sum().backward()
            weight.zero_()
            return x.grad

        self.check_orders(program, is_clean=False)

    @parametrize("what", ["item", "tolist", "equal", "blocking copy"])
    def test_what_the_host_reads_is_waited_for(self, what: str) -> None:
        def program(rank: Rank) -> Any:
            x, side = torch.ones(3), rank.new_stream("side")
            if what == "item":
                read: Any = x.sum().item()
            elif what == "tolist":
                read = x.tolist()
            elif what == "equal":
                read = torch.equal(x, x)
            else:
                read = x.to("cpu", non_blocking=False)
            with rank.handle.stream(side):  # behind the host, and so behind x
                return read, x * 2

        self.check_orders(program, is_clean=True)

    def test_host_reads_another_value_where_nothing_orders(self) -> None:
        def program(rank: Rank) -> None:
            side = rank.new_stream("side")
            with rank.handle.stream(side):
                x = torch.ones(1)
            self.assertEqual(x.item(), 1)  # as it was issued

        self.check_orders(program, is_clean=False)

    @parametrize("waits", [True, False])
    def test_copy_to_the_host_runs_late(self, waits: bool) -> None:
        def program(rank: Rank) -> torch.Tensor:
            x = torch.ones(3)
            copy = x.to("cpu", non_blocking=True)
            if waits:
                rank.default_stream.record_event().synchronize()
            self.assertTrue(rank.is_on_host(copy))
            self.assertFalse(rank.is_on_host(copy.to("cpu", non_blocking=True)))
            return copy + 1  # on the host

        self.check_orders(program, is_clean=waits)

    def test_random_numbers_are_the_same_again(self) -> None:
        def program(rank: Rank) -> torch.Tensor:
            return torch.dropout(torch.randn(50), 0.5, train=True)

        self.check_orders(program, is_clean=True)

    def test_memory_that_nobody_wrote(self) -> None:
        """... has no values, in order either: what reads it must not be told of."""

        def program(rank: Rank) -> torch.Tensor:
            return torch.isnan(torch.empty(3)).sum()

        self.check_orders(program, is_clean=True)
        for reuse in REUSES:
            device = Device(record(program), reuse=reuse)
            self.assertEqual(device.name, f"{reuse}-ff")


class TestCollectives(DeviceFreeTest):
    def test_of_a_rank_that_is_alone(self) -> None:
        """It has a group, and the others come with what it has."""
        found: list[Any] = []

        def program(rank: Rank) -> None:
            gathered, scattered = torch.empty(6), torch.empty(1)
            dist.all_gather_single(gathered, torch.arange(2.0))
            dist.reduce_scatter_single(scattered, torch.ones(3))
            found.extend((dist.get_world_size(), gathered.tolist(), scattered.item()))

        recording = Recorder(3, alone=True).record(program)
        self.assertEqual(found, [3, [0, 1, 0, 1, 0, 1], 3])
        self.assertEqual({len(entry.streams) for entry in recording.entries}, {1})
        self.assertTrue(examine(recording, 20).is_clean)

    def test_starts_when_all_ranks_have_come(self) -> None:
        def program(rank: Rank) -> torch.Tensor:
            out = torch.empty(6)
            dist.all_gather_single(out, torch.ones(2) * rank.number)
            return out

        recording = record(program, 3)
        (meeting,) = [e for e in recording.entries if len(e.streams) > 1]
        self.assertEqual([s.issuer.number for s in meeting.streams], [0, 1, 2])
        ranks = {entry.streams[0].issuer.number for entry in meeting.before}
        self.assertEqual(ranks, {0, 1, 2})
        self.assertTrue(check(program, ranks=3, orders=20).is_clean)

    @parametrize("waits", [True, False])
    def test_asynchronous(self, waits: bool) -> None:
        def program(rank: Rank) -> torch.Tensor:
            out, x = torch.empty(4), torch.ones(2)
            work = dist.all_gather_single(out, x, async_op=True)
            if waits:
                work.wait()
            return out + 1

        self.assertEqual(count_of_others(program, ranks=2) == 0, waits)

    @parametrize("in_order", [True, False])
    def test_those_of_a_group_are_in_order(self, in_order: bool) -> None:
        """In two streams, with nothing else to order them: as one communicator does."""

        def program(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = torch.ones(3), torch.ones(3)
            side = rank.new_stream("side")
            side.wait_stream(rank.default_stream)
            dist.all_reduce(x)
            with rank.handle.stream(side):
                dist.all_reduce(y)
            return x, y

        recording = Recorder(2, comms_in_order=in_order).record(program)
        first, second = [e for e in recording.entries if len(e.streams) > 1]
        self.assertEqual(first in second.before, in_order)

    def test_what_they_compute(self) -> None:
        found: dict[int, list[Any]] = {}

        def program(rank: Rank) -> None:
            mine = torch.arange(4.0) + 10 * rank.number
            scattered, exchanged = torch.empty(2), torch.empty(4)
            dist.reduce_scatter_single(scattered, mine, op=dist.ReduceOp.AVG)
            dist.all_to_all_single(exchanged, mine)
            largest = mine.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            tensors = scattered, exchanged, largest
            found[rank.number] = [tensor.tolist() for tensor in tensors]

        record(program, 2)
        self.assertEqual(found[0], [[5, 6], [0, 1, 10, 11], [10, 11, 12, 13]])
        self.assertEqual(found[1], [[7, 8], [2, 3, 12, 13], [10, 11, 12, 13]])

    def test_a_rank_that_does_not_come(self) -> None:
        def program(rank: Rank) -> None:
            if rank.number == 0:
                dist.all_reduce(torch.ones(1))

        with self.assertRaisesRegex(Stuck, "wait for others"):
            record(program, 2)

    def test_ranks_that_come_to_different_ones(self) -> None:
        def program(rank: Rank) -> None:
            operation = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank.number]
            dist.all_reduce(torch.ones(1), op=operation)

        with self.assertRaisesRegex(Stuck, "different collectives.*SUM.*MAX"):
            record(program, 2)

    def test_a_rank_that_fails(self) -> None:
        def program(rank: Rank) -> None:
            if rank.number == 1:
                raise ValueError("of rank 1")
            dist.all_reduce(torch.ones(1))

        with self.assertRaisesRegex(ValueError, "of rank 1"):
            record(program, 2)
        self.assertFalse(dist.is_initialized())


# Orders #


def _two_queues(first: int, second: int) -> Program:
    def program(rank: Rank) -> Any:
        x, y = torch.ones(2), torch.ones(2)
        side = rank.new_stream("side")
        rank.mark()
        for _ in range(first):
            x.add_(1)
        with rank.handle.stream(side):
            for _ in range(second):
                y.mul_(2)
        return x, y

    return program


class TestOrders(DeviceFreeTest):
    @parametrize("first,second", [(0, 3), (4, 4), (7, 5)])
    def test_all_are_counted(self, first: int, second: int) -> None:
        recording = record(_two_queues(first, second))
        graph = Graph(recording)
        explored = explore(Device(recording), graph, start=recording.marks[0])
        self.assertEqual(explored.orders, math.comb(first + second, first))
        self.assertEqual(explored.states, (first + 1) * (second + 1) - 1)
        self.assertIsNone(explored.finding)

    def test_too_many(self) -> None:
        recording = record(_two_queues(9, 9))
        with self.assertRaises(TooMany):
            explore(Device(recording), Graph(recording), max_states=20)

    def test_a_difference_is_found_in_the_last_state(self) -> None:
        """Of two updates that commute but for the last bits."""

        def program(rank: Rank) -> torch.Tensor:
            x, side = torch.ones(3), rank.new_stream("side")
            rank.mark()
            x.mul_(3)
            with rank.handle.stream(side):
                x.add_(1)
            return x

        recording = record(program)
        graph, device = Graph(recording), Device(recording)
        finding = explore(device, graph, start=recording.marks[0]).finding
        self.assertIsNotNone(finding)
        self.assertEqual(len(conflicts(recording, graph)), 1)

    def test_two_writes_are_found_that_nobody_reads(self) -> None:
        """Each gives its own bits in any order; what they leave differs."""

        def program(rank: Rank) -> torch.Tensor:
            x, side = torch.ones(3), rank.new_stream("side")
            rank.mark()
            x.fill_(2)
            with rank.handle.stream(side):
                x.fill_(3)
            return x

        recording = record(program)
        graph, device = Graph(recording), Device(recording)
        finding = explore(device, graph, start=recording.marks[0]).finding
        self.assertIsNotNone(finding)
        finding = run(device, graph, by_name(graph, "late:/default"))
        self.assertIn("leaves, other bits", str(finding))

    def test_each_keeps_the_edges(self) -> None:
        recording = steps.record("mixed_replicas")
        graph = Graph(recording)
        seen = set()
        for name in ("in order", *names(graph, 40)):
            ran = [*graph.linear(by_name(graph, name).pick)]
            self.assertEqual(sorted(ran), [*range(len(graph.entries))])
            place_of = {index: at for at, index in enumerate(ran)}
            for index, before in enumerate(graph.before):
                for other in before:
                    self.assertLess(place_of[other], place_of[index], name)
            seen.add(tuple(ran))
        self.assertGreater(len(seen), 20)

    def test_late_streams_are_late(self) -> None:
        recording = record(_two_queues(3, 3))
        graph = Graph(recording)
        for name, last in (("late:/default", "default"), ("late:0/side", "side")):
            ran = [*graph.linear(by_name(graph, name).pick)]
            streams = [graph.entries[index].streams[0].name for index in ran]
            self.assertEqual(streams[-3:], [last] * 3)

    def test_unknown_name(self) -> None:
        with self.assertRaisesRegex(ValueError, "there is no order 'first'"):
            by_name(Graph(record(_two_queues(1, 1))), "first")

    def test_a_recording_is_the_same_again(self) -> None:
        texts = []
        for _ in range(2):
            recording = schedules.record("hsdp", "mixed, cast")
            entries = recording.entries
            texts.append([(str(e), sorted(b.index for b in e.before)) for e in entries])
        self.assertEqual(*texts)

    def test_an_entry_is_printed_alone(self) -> None:
        """With all that it comes after, texts would be too long for a failing test."""
        for entry in record(_two_queues(2, 2)).entries:
            self.assertEqual(repr(entry), str(entry))

    def test_a_finding_is_found_again_by_its_names(self) -> None:
        race = RACES["inputs reused between reductions"]
        recording = races.record(race, "implicit_prefetch", "uniform")
        report = examine(recording, 24)
        self.assertTrue(report.findings)
        again = races.record(race, "implicit_prefetch", "uniform")
        for finding in report.findings[:3]:
            other = replay(again, finding.order, finding.device)
            self.assertEqual(str(other), str(finding))
        text = repr(report.findings[0])  # what a test that fails prints
        self.assertIn("order '", text)
        self.assertIn("free ", text)
        self.assertLess(len(text.splitlines()), 20)


class TestMemory(DeviceFreeTest):
    def test_blocks_overlap_only_after_they_are_freed(self) -> None:
        recording = schedules.record("hsdp", "mixed, cast")
        sizes = {}
        for reuse in REUSES:
            addresses, sizes[reuse] = place(recording, reuse)
            live: set[int] = set()
            owners: dict[int, set[Any]] = {}
            for memory, is_free in recording.changes:
                if memory.nbytes == 0:
                    continue
                address = addresses[memory]
                if is_free:
                    live.remove(address)
                else:
                    self.assertNotIn(address, live)
                    live.add(address)
                    owners.setdefault(address, set()).add(memory.owner)
            # Never in another stream
            self.assertEqual({len(streams) for streams in owners.values()}, {1})
        self.assertLess(sizes["last"] * 4, sizes["none"])

    def test_both_patterns_show(self) -> None:
        race = RACES["inputs reused between reductions"]
        recording = races.record(race, "implicit_prefetch", "mixed")
        graph = Graph(recording)
        for pattern in PATTERNS:
            device = Device(recording, reuse="none", pattern=pattern)
            self.assertIsNone(run(device, graph, in_order(graph)))
            late = by_name(graph, "late:/reduce_scatter_stream")
            self.assertIsNotNone(run(device, graph, late))


# FSDP2 #


# Calls that order streams, and the step that shows each
_WAITS = {
    "foreach_all_gather > wait_stream #0": "uniform",
    "reduce_buckets > wait_stream #0": "mixed",
    "_reduce_together > wait_stream #0": "mixed_replicas",
    "foreach_all_gather_copy_out > wait_event #0": "two_units",
}
if not FOLLOWS_GRAD_DTYPE:  # since 2.15 the root has waited before
    _WAITS["wait_current_stream_on_reductions > wait_event #0"] = "mixed_replicas"


class TestSteps(DeviceFreeTest):
    @pytest.mark.quick
    @parametrize("name", [*steps.STEPS])
    def test_every_order(self, name: str) -> None:
        recording = steps.record(name)
        (start,) = recording.marks
        explored = explore(
            Device(recording), Graph(recording), start=start, max_states=8000
        )
        self.assertIsNone(explored.finding)
        self.assertGreater(explored.orders, 10**8)

    @parametrize("site,name", [*_WAITS.items()])
    def test_a_wait_left_out_is_found(self, site: str, name: str) -> None:
        sites = {str(s): s for module in MODULES for s in find_sites(module)}
        self.assertIn(site, sites)
        recording = steps.record(name, watched=MODULES, without=sites[site])
        (start,) = recording.marks
        explored = explore(
            Device(recording), Graph(recording), start=start, max_states=8000
        )
        self.assertIsNotNone(explored.finding)


# They take longest, and races or the release's run below go through most of them
_BY_HAND = {
    "backward_given_up",
    "backwards_in_two_streams",
    "offload_pinned",
    "part_of_a_unit",
    "part_of_a_unit_after_the_root",
    "two_backwards_per_forward",
}
# Each schedule in one of them; by hand in all
_KINDS = [kind for kind in KINDS if kind != "mixed, Shard(1)"]


class TestSchedules(DeviceFreeTest):
    @parametrize("name", [name for name in SCHEDULES if name not in _BY_HAND])
    def test_gives_the_same_bits(self, name: str) -> None:
        kind = _KINDS[[*SCHEDULES].index(name) % len(_KINDS)]
        recording = schedules.record(name, kind)
        report = examine(recording, 1, reuses=("last",))
        self.assertTrue(report.is_clean, f"{kind}: {report}")

    @parametrize("title", quick_alone("inputs reused between reductions", RACES))
    def test_published_race_is_found(self, title: str) -> None:
        race = RACES[title]
        recording = races.record(race, race.schedules[0], race.kinds[-1])
        self.assertEqual(show_one(recording) is not None, race.shows)


# In which schedules of the release, by which order in which memory
_FOUND = {
    "all_reduce_hook": ("late:/hook#2", "last-ff"),
    "backwards_in_two_streams": ("priorities:0", "any-ff"),
    "gather_given_up": ("late:0/default", "last-ff"),
}
_OF_THE_RELEASE = f"""
from fsdp_late_device.check import check, main
from fsdp_late_device.schedules import Chosen, KINDS
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

schedules = "--schedules", "--kinds", "uniform, cast", "--only"
for name, (order, memory) in {_FOUND!r}.items():
    options = name, "--order", order, "--memory", memory
    main([*schedules, *options])
main([*schedules, "hsdp_deferred_other_parameters"])

def puts_off(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    unit = fully_shard(Chosen(KINDS["uniform"]), mesh=mesh)
    for is_last, chosen in ((False, ["p0"]), (True, ["q0"])):
        unit.set_requires_all_reduce(is_last)
        unit(torch.ones(1, 16, requires_grad=True), chosen).sum().backward()
    print("gradients", unit.p0.grad, unit.q0.grad.to_local()[0].item())

check(puts_off, ranks=2, orders=1)
"""


@unittest.skipIf(FOLLOWS_GRAD_DTYPE, "2.15 has one of them")
class TestRelease(DeviceFreeTest):
    def test_its_faults_are_found(self) -> None:
        """Those that docs/parity.md lists of the release's own modules."""
        found = run_python("-c", _OF_THE_RELEASE, on_release=True)
        for order, memory in _FOUND.values():
            self.assertIn(f"order '{order}' in memory '{memory}'", found)
        # Sums of microbatches whose all-reduce was put off: of more parameters first
        self.assertIn("The size of tensor a (16) must match", found)
        # and of another one
        self.assertIn("gradients None 2.0", found)


class TestOwnPrograms(DeviceFreeTest):
    def test_optimizer_and_clipping(self) -> None:
        def train(rank: Rank) -> nn.Module:
            mesh = init_device_mesh("cpu", (2,))
            model = fully_shard(nn.Linear(4, 4), mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(2):
                x = torch.ones(2, 4) * (rank.number + step)
                model(x).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            return model

        report = check(train, ranks=2, orders=16)
        self.assertTrue(report.is_clean, report)
        self.assertIn("0 of 16 orders give other bits", str(report))

    def test_command_line(self) -> None:
        text = """
import torch
def late(rank):
    side = rank.new_stream("side")
    x = torch.ones(3) * 2
    with rank.handle.stream(side):
        return x + 1
"""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "program.py"
            file.write_text(text)
            place = f"{file}:late"
            options = place, "--ranks", "1"
            found = self.run_script(*options, "--orders", "8")
            again = self.run_script(*options, "--order", "late:/default")
        self.assertIn("of 8 orders give other bits", found)
        self.assertIn("order 'late:/default' in memory 'last-ff'", again)

    def run_script(self, *args: str) -> str:
        """Returns what is printed of a program that is not clean."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self.assertEqual(main(args), 1)
        return printed.getvalue()


instantiate_parametrized_tests(TestDevice)
instantiate_parametrized_tests(TestCollectives)
instantiate_parametrized_tests(TestOrders)
instantiate_parametrized_tests(TestSteps)
instantiate_parametrized_tests(TestSchedules)


if __name__ == "__main__":
    run_tests()
