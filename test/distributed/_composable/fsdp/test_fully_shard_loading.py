# Owner(s): ["oncall: distributed"]
"""What loading a state dict costs a unit, and what it leaves of a ``grad_dtype``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_helpers.common.release_rules import FOLLOWS_GRAD_DTYPE
from fsdp_helpers.common.utils import FakeGroupTest

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


BF16, FP32 = torch.bfloat16, torch.float32


class TestCost(FakeGroupTest):
    ranks = 2

    def calls(self, size: int) -> Iterator[int]:
        """Yields how many functions of FSDP2 each load into so many modules calls."""
        modules = [nn.Linear(1, 2, bias=False) for _ in range(size)]
        model = fully_shard(nn.Sequential(*modules), mesh=self.mesh)
        count = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            path = frame.f_code.co_filename
            count += event == "call" and "_fully_shard" in path

        for _ in ("before a forward", "after it"):
            for assign in (False, True):
                state, count = model.state_dict(), 0
                sys.setprofile(profile)
                model.load_state_dict(state, assign=assign)
                sys.setprofile(None)
                yield count
            model.unshard()
            model.reshard()

    def test_calls_for_each_parameter_are_few(self) -> None:
        """Of each parameter before the first forward, and after it."""
        limits = (3, 4, 6, 7) if FOLLOWS_GRAD_DTYPE else (2, 2, 5, 5)
        counts = zip(self.calls(20), self.calls(100), limits, strict=True)
        for few, many, most in counts:
            self.assertEqual(many, 5 * few)
            self.assertIn(few, range(20, 20 * most + 1))  # each was looked at


@instantiate_parametrized_tests
class TestGradDtype(FakeGroupTest):
    """``grad_dtype`` of a sharded parameter is what users set last."""

    ranks = 2

    def unit(self, grad_dtype: torch.dtype | None = FP32) -> nn.Linear:
        module = nn.Linear(4, 4, bias=False, dtype=BF16)
        if grad_dtype is not None:
            module.weight.grad_dtype = grad_dtype
        policy = MixedPrecisionPolicy(reduce_dtype=FP32)
        return fully_shard(module, mesh=self.mesh, mp_policy=policy)

    def pass_by(self, module: nn.Linear, what: str) -> None:
        match what:
            case "load" | "assign":
                module.load_state_dict(module.state_dict(), assign=what == "assign")
            case "unshard":
                module.unshard()
                module.reshard()
            case "move":
                module.to("cpu")
                module.reshard()
            case "forward":
                module(torch.ones(2, 4, dtype=BF16)).sum().backward()

    @pytest.mark.quick
    @parametrize("what", ["load", "assign", "unshard", "move", "forward"])
    def test_what_was_set_last_stays(self, what: str) -> None:
        for first, last in ((FP32, BF16), (FP32, FP32), (None, FP32)):
            module = self.unit(first)
            module.weight.grad_dtype = last
            for _ in range(2):
                self.pass_by(module, what)
                self.assertEqual(module.weight.grad_dtype, last)


if __name__ == "__main__":
    run_tests()
