# Owner(s): ["oncall: distributed"]
"""
What loading a state dict costs a unit, and what it leaves of a ``grad_dtype``.
"""

from __future__ import annotations

import copy
import json

from fsdp_common.utils import DeviceFreeTest, FakeGroupTest, run_python

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


BF16, FP32 = torch.bfloat16, torch.float32

# Prints how many functions of FSDP2 a load calls, by whether it assigns and whether
# a forward has run, for a unit of as many modules as the argument says
COUNT_CALLS = """
import json, sys
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
modules = [nn.Linear(1, 2, bias=False) for _ in range(int(sys.argv[1]))]
model = fully_shard(nn.Sequential(*modules), mesh=init_device_mesh("cpu", (2,)))
found = []
for has_run in (False, True):
    for assign in (False, True):
        state, count = model.state_dict(), 0
        def profile(frame, event, arg):
            global count
            path = frame.f_code.co_filename
            count += event == "call" and "_fully_shard" in path
        sys.setprofile(profile)
        model.load_state_dict(state, assign=assign)
        sys.setprofile(None)
        found.append(count)
    model.unshard()
    model.reshard()
print(json.dumps(found))
"""


class TestCost(DeviceFreeTest):
    def test_calls_for_each_parameter_are_at_most_the_releases(self) -> None:
        sizes = (50, 500)
        found = {
            (size, on_release): json.loads(
                run_python("-c", COUNT_CALLS, str(size), on_base=on_release)
            )
            for size in sizes
            for on_release in (False, True)
        }
        few, many = sizes
        for own, release in zip(found[many, False], found[many, True], strict=True):
            self.assertLessEqual(own, release)
            self.assertGreaterEqual(own, many)  # each parameter was looked at
        for before, after in zip(found[few, False], found[many, False], strict=True):
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
        mesh = init_device_mesh("cpu", (self.ranks,))
        return fully_shard(module, mesh=mesh, mp_policy=policy)

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

    @parametrize("what", ["load", "assign", "unshard", "move", "forward"])
    def test_taken_back_it_does_not_come_back(self, what: str) -> None:
        module = self.unit()
        self.assertEqual(module.weight.grad_dtype, FP32)
        module.weight.grad_dtype = BF16
        for _ in range(2):
            self.pass_by(module, what)
            self.assertEqual(module.weight.grad_dtype, BF16)

    @parametrize("what", ["load", "assign", "unshard", "move", "forward"])
    def test_set_it_stays(self, what: str) -> None:
        for module in (self.unit(), self.unit(None)):
            module.weight.grad_dtype = FP32
            for _ in range(2):
                self.pass_by(module, what)
                self.assertEqual(module.weight.grad_dtype, FP32)

    def test_taken_back_and_set_again_between_loads(self) -> None:
        module = self.unit()
        for dtype in (BF16, FP32, BF16, FP32):
            module.weight.grad_dtype = dtype
            self.pass_by(module, "assign")
            self.assertEqual(module.weight.grad_dtype, dtype)
        self.pass_by(module, "forward")
        self.assertEqual(module.weight.grad.dtype, FP32)

    def test_errors_name_what_a_plugin_has_replaced(self) -> None:
        module = self.unit()
        group = module._get_fsdp_state()._fsdp_param_group
        group.fsdp_params = [copy.copy(param) for param in group.fsdp_params]
        plain = {"weight": torch.zeros(4, 4, dtype=BF16)}
        with self.assertRaisesRegex(AttributeError, "^weight must be the DTensor"):
            module.load_state_dict(plain, assign=True)


if __name__ == "__main__":
    run_tests()
