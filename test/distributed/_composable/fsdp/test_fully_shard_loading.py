# Owner(s): ["oncall: distributed"]
"""What loading a state dict costs a unit, and what it leaves of a ``grad_dtype``."""

from __future__ import annotations

import json

import pytest

from fsdp_helpers.common.utils import DeviceFreeTest, FakeGroupTest, run_python

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


BF16, FP32 = torch.bfloat16, torch.float32

# Prints how many functions of FSDP2 a load calls, by whether it assigns and whether
# a forward has run, in a line for a unit of as many modules as each argument says
COUNT_CALLS = """
import json, sys
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

def count_calls(size):
    modules = [nn.Linear(1, 2, bias=False) for _ in range(size)]
    model = fully_shard(nn.Sequential(*modules), mesh=init_device_mesh("cpu", (2,)))
    for has_run in (False, True):
        for assign in (False, True):
            state, count = model.state_dict(), 0
            def profile(frame, event, arg):
                nonlocal count
                path = frame.f_code.co_filename
                count += event == "call" and "_fully_shard" in path
            sys.setprofile(profile)
            model.load_state_dict(state, assign=assign)
            sys.setprofile(None)
            yield count
        model.unshard()
        model.reshard()

for size in sys.argv[1:]:
    print(json.dumps([*count_calls(int(size))]))
"""


class TestCost(DeviceFreeTest):
    def test_calls_for_each_parameter_are_at_most_the_releases(self) -> None:
        few, many = (20, 100)
        args = ("-c", COUNT_CALLS, str(few), str(many))
        (own_of_few, own), (_, release) = (
            map(json.loads, run_python(*args, on_release=on_release).splitlines())
            for on_release in (False, True)
        )
        for mine, theirs in zip(own, release, strict=True):
            self.assertLessEqual(mine, theirs)
            self.assertGreaterEqual(mine, many)  # each parameter was looked at
        for before, after in zip(own_of_few, own, strict=True):
            self.assertEqual(after / many, before / few)


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

    def test_taken_back_and_set_again_between_loads(self) -> None:
        module = self.unit()
        for dtype in (BF16, FP32, BF16, FP32):
            module.weight.grad_dtype = dtype
            self.pass_by(module, "assign")
            self.assertEqual(module.weight.grad_dtype, dtype)
            self.pass_by(module, "forward")
            self.assertEqual(module.weight.grad.dtype, dtype)
            module.weight.grad = None


if __name__ == "__main__":
    run_tests()
