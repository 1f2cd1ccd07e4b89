# Owner(s): ["oncall: distributed"]

"""
What a device that is late takes for ordered, and what not. Which stream of
``fully_shard`` waits for which is in ``test_fully_shard_streams.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_helpers.common.utils import DeviceFreeTest
from fsdp_helpers.late_device.check import check
from fsdp_helpers.late_device.record import Rank

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


@instantiate_parametrized_tests
class TestDevice(DeviceFreeTest):
    def check_program(self, program: Any, is_clean: bool) -> None:
        found = check(program, ranks=2)
        self.assertEqual(found == [], is_clean, found)

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

        self.check_program(program, is_clean=how in ("stream", "event", "host"))

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
        self.check_program(program, is_clean)

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

        self.check_program(program, is_clean=what != "not waited for")

    @parametrize("waits", [True, False])
    def test_copy_to_the_host_runs_late(self, waits: bool) -> None:
        def program(rank: Rank) -> torch.Tensor:
            copy = torch.ones(3).to("cpu", non_blocking=True)
            if waits:
                rank.default_stream.record_event().synchronize()
            self.assertTrue(rank.is_on_host(copy))
            self.assertFalse(rank.is_on_host(copy.to("cpu", non_blocking=True)))
            return copy + 1  # on the host

        self.check_program(program, is_clean=waits)

    @parametrize("waits", [True, False])
    def test_asynchronous_collective(self, waits: bool) -> None:
        def program(rank: Rank) -> torch.Tensor:
            out, x = torch.empty(4), torch.ones(2)
            work = dist.all_gather_single(out, x, async_op=True)
            if waits:
                work.wait()
            return out + 1

        self.check_program(program, is_clean=waits)

    def test_both_of_a_pair_are_told(self) -> None:
        """Each with its stream, operator and line, also if both write."""

        def program(rank: Rank) -> None:
            x = torch.ones(3) * 2
            with rank.handle.stream(rank.new_stream("side")):
                x.fill_(3)

        report = "".join(check(program))
        self.assertRegex(report, r"\[default\] aten.mul.Tensor \(test_.*:\d+ program")
        self.assertRegex(report, r"\[side\] aten.fill_.Scalar \(test_.*:\d+ program\)")


if __name__ == "__main__":
    run_tests()
