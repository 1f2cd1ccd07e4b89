# Owner(s): ["oncall: distributed"]

"""
A device that is late: what it takes for ordered and what not, and that a wait missing
from ``fully_shard`` gives other bits on it. Which stream waits for which is in
``test_fully_shard_streams.py``, and the rules are in docs/architecture.md.
"""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_common.utils import DeviceFreeTest
from fsdp_late_device import schedules
from fsdp_late_device.check import check, examine
from fsdp_late_device.record import Rank, record
from fsdp_late_device.sites import find_sites, MODULES

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


pytestmark = pytest.mark.timeout(600)


@instantiate_parametrized_tests
class TestDevice(DeviceFreeTest):
    def check_orders(self, program: Any, is_clean: bool) -> None:
        report = check(program, ranks=2, orders=20)
        self.assertEqual(report.unordered == [], is_clean, report)
        self.assertEqual(report.findings == [], is_clean, report)

    @pytest.mark.quick
    @parametrize("how", ["not", "unrecorded", "too early", "stream", "event", "host"])
    def test_reading_what_another_stream_writes(self, how: str) -> None:
        def program(rank: Rank) -> torch.Tensor:
            side, default = rank.new_stream("side"), rank.default_stream
            x, event = torch.ones(3), rank.handle.Event()
            if how == "too early":
                event.record()
            x += 1
            if how == "event":
                event.record()
            if how == "stream":
                side.wait_stream(default)
            elif how == "host":
                default.synchronize()
            elif how != "not":
                side.wait_event(event)
            with rank.handle.stream(side):
                return x * 3

        self.check_orders(program, is_clean=how in ("stream", "event", "host"))

    @parametrize(
        "how",
        ["dropped", "resized", "written", "waited for", "recorded", "no allocation"],
    )
    def test_memory_that_another_stream_reads(self, how: str) -> None:
        """It may be handed out again at the next allocation in its own stream."""

        def program(rank: Rank) -> Any:
            side, default = rank.new_stream("side"), rank.default_stream
            x = torch.ones(3)
            side.wait_stream(default)
            with rank.handle.stream(side):
                y = x * 2
            if how == "waited for":
                default.wait_stream(side)
            elif how == "recorded":
                x.record_stream(side)
            if how == "resized":
                x.untyped_storage().resize_(0)
            elif how == "written":
                x.view(3).zero_()
            else:
                del x
            with rank.handle.stream(side if how == "no allocation" else default):
                return y, torch.empty(1)

        is_clean = how in ("waited for", "recorded", "no allocation")
        self.check_orders(program, is_clean)

    @parametrize("what", ["item", "equal", "blocking copy", "not waited for"])
    def test_what_the_host_reads(self, what: str) -> None:
        def program(rank: Rank) -> Any:
            side = rank.new_stream("side")
            x = torch.ones(3)
            if what == "item":
                read: Any = x.sum().item()
            elif what == "equal":
                read = torch.equal(x, x)
            elif what == "blocking copy":
                read = x.to("cpu", non_blocking=False)
            else:
                with rank.handle.stream(side):
                    read = x.sum().item()
            with rank.handle.stream(side):  # behind the host, and so behind x
                return read, x * 2

        self.check_orders(program, is_clean=what != "not waited for")

    @parametrize("waits", [True, False])
    def test_copy_to_the_host_runs_late(self, waits: bool) -> None:
        def program(rank: Rank) -> torch.Tensor:
            copy = torch.ones(3).to("cpu", non_blocking=True)
            if waits:
                rank.default_stream.record_event().synchronize()
            self.assertTrue(rank.is_on_host(copy))
            self.assertFalse(rank.is_on_host(copy.to("cpu", non_blocking=True)))
            return copy + 1  # on the host

        self.check_orders(program, is_clean=waits)

    @parametrize("waits", [True, False])
    def test_asynchronous_collective(self, waits: bool) -> None:
        def program(rank: Rank) -> torch.Tensor:
            out, x = torch.empty(4), torch.ones(2)
            work = dist.all_gather_single(out, x, async_op=True)
            if waits:
                work.wait()
            return out + 1

        self.check_orders(program, is_clean=waits)

    def test_collectives_take_what_one_rank_has(self) -> None:
        def program(rank: Rank) -> None:
            mine, (gathered, scattered) = torch.arange(6.0), torch.empty(2, 18)
            exchanged, largest = torch.empty(6), mine.clone()
            dist.all_gather_single(gathered, mine)
            dist.reduce_scatter_single(scattered[:2], mine)
            dist.all_to_all_single(exchanged, mine)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            self.assertEqual(gathered.tolist(), mine.tolist() * 3)
            self.assertEqual(scattered[:2].tolist(), [6, 9])
            self.assertEqual(exchanged.tolist(), [2, 3] * 3)
            self.assertEqual(largest.tolist(), mine.tolist())

        self.assertTrue(examine(record(program, 3, number=1), 4).is_clean)

    def test_same_values_again(self) -> None:
        """Of random numbers. What nobody wrote has none, and must not be told of."""

        def program(rank: Rank) -> Any:
            drawn = torch.dropout(torch.randn(50), 0.5, train=True)
            return drawn, torch.isnan(torch.empty(3)).sum()

        self.check_orders(program, is_clean=True)

    def test_two_writes_are_found_that_nobody_reads(self) -> None:
        """Each gives its own bits in any order; what they leave differs."""

        def program(rank: Rank) -> torch.Tensor:
            x, side = torch.ones(3), rank.new_stream("side")
            side.wait_stream(rank.default_stream)
            x.fill_(2)
            with rank.handle.stream(side):
                x.fill_(3)
            return x

        report = check(program, orders=["late:default"])
        self.assertIn("what is left in memory", str(report))

    def test_both_of_a_pair_are_told(self) -> None:
        """Each with its stream, operator and line."""

        def program(rank: Rank) -> torch.Tensor:
            x = torch.ones(3) * 2
            with rank.handle.stream(rank.new_stream("side")):
                return x + 1

        report = str(check(program, orders=8))
        self.assertIn("of 8 orders give other bits", report)
        self.assertRegex(report, r"\[default\] aten.mul.Tensor \(test_.*:\d+ program")
        self.assertRegex(report, r"\[side\] aten.add.Tensor \(test_.*:\d+ program\)")

    def test_optimizer(self) -> None:
        def train(rank: Rank) -> nn.Module:
            model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(2):
                model(torch.ones(2, 4) * (1 + step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return model

        report = check(train, ranks=2, orders=16)
        self.assertTrue(report.is_clean, report)
        self.assertIn("0 of 16 orders give other bits", str(report))


# Calls that order streams, and what shows by other bits that they are missing
_WAITS = {
    "foreach_all_gather > wait_stream #0": "uniform",
    "reduce_buckets > wait_stream #0": "mixed",
    "foreach_all_gather_copy_out > wait_event #0": "mixed, cast",
}


@instantiate_parametrized_tests
class TestWaits(DeviceFreeTest):
    @pytest.mark.quick
    @parametrize("site,kind", [*_WAITS.items()])
    def test_a_wait_left_out_gives_other_bits(self, site: str, kind: str) -> None:
        sites = {str(s): s for module in MODULES for s in find_sites(module)}
        recording = schedules.record("implicit_prefetch", kind, without=[sites[site]])
        report = examine(recording, 12)
        self.assertNotEqual(report.unordered, [])
        self.assertNotEqual(report.findings, [])
        again = examine(recording, [report.findings[0].order])
        self.assertEqual(again.findings, report.findings[:1])


if __name__ == "__main__":
    run_tests()
