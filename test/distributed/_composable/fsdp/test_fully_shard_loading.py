# Owner(s): ["oncall: distributed"]
"""
What loading a state dict costs a unit, what it leaves of a ``grad_dtype``, and what the
file that notices loads does without a param group.
"""

from __future__ import annotations

import copy
import json
import warnings

import pytest

from fsdp_common.utils import DeviceFreeTest, FakeGroupTest, run_python

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    fully_shard,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.fsdp._fully_shard import _fsdp_registrations as registrations
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
        few, many = (50, 500)
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

    @pytest.mark.quick
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
        with self.assertRaisesRegex(
            AttributeError, "^weight of FSDPLinear must be the DTensor"
        ):
            module.load_state_dict(plain, assign=True)


class TestRegistrations(FakeGroupTest):
    """Parameters as modules have registered them, without a param group."""

    ranks = 2

    def setUp(self) -> None:
        super().setUp()
        first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        second.weight = first.weight
        self.module = nn.Sequential(first, second, nn.LayerNorm(4, bias=False))
        policy = MixedPrecisionPolicy.by_name(
            self.module, {"2.*": {"param_dtype": BF16}}
        )
        mesh = init_device_mesh("cpu", (self.ranks,))
        state = fully_shard(self.module, mesh=mesh, mp_policy=policy)._get_fsdp_state()
        self.group = state._fsdp_param_group
        self.fsdp_params = self.group.fsdp_params

    def test_shared_parameters_are_one(self) -> None:
        infos = [fsdp_param._module_info for fsdp_param in self.fsdp_params]
        shared = [(info.param_name, info.shared_param_names) for info in infos]
        self.assertEqual(shared, [("weight", ["weight"]), ("weight", [])])
        self.assertIs(infos[0].shared_modules[0], self.module[1])
        with self.assertRaisesRegex(AssertionError, "not in the module tree"):
            params = [nn.Parameter(torch.ones(1))]
            registrations._get_param_module_infos(params, (self.module,))

    def test_each_has_its_policy(self) -> None:
        dtypes = [p.mp_policy.param_dtype for p in self.fsdp_params]
        self.assertEqual(dtypes, [None, BF16])

    def test_names(self) -> None:
        within = [f"{i}.weight of FSDPSequential" for i in (0, 2)]
        self.assertEqual(registrations.fqns_of(self.group), within)
        for fqn, prefix in (("", ""), ("block", "block.")):
            self.group._module_fqn = fqn
            found = registrations.fqns_of(self.group)
            self.assertEqual(found, [f"{prefix}0.weight", f"{prefix}2.weight"])
        for fsdp_param, fqn in zip(self.fsdp_params, ("model.a", "model.b")):
            fsdp_param._param_fqn = fqn
        self.assertEqual(registrations.fqns_of(self.group), ["model.a", "model.b"])
        replaced = copy.copy(self.fsdp_params[1])
        replaced._param_fqn = None
        self.assertEqual(
            registrations.fqns_of(self.group, replaced), ["block.2.weight"]
        )

    def test_loads_are_noticed(self) -> None:
        before = self.fsdp_params[1].sharded_param
        state = {k: v.to(BF16) for k, v in self.module.state_dict().items()}
        self.module.load_state_dict(state, assign=True)
        self.assertIsNot(self.fsdp_params[1].sharded_param, before)
        self.assertIs(self.fsdp_params[1].sharded_param, self.module[2].weight)

    def test_where_parameters_must_be(self) -> None:
        self.group.offload_policy = CPUOffloadPolicy()
        registrations.check_materialized(self.group)
        self.module.to("meta")
        registrations.reset_sharded_params(self.group)
        for self.group.offload_policy in (OffloadPolicy(), CPUOffloadPolicy()):
            with self.assertRaisesRegex(
                RuntimeError, r"(?s)\['0.weight of FSDPS.*to_empty"
            ):
                registrations.check_materialized(self.group)

    def test_late_parameters(self) -> None:
        self.module[0] = nn.Sequential(self.module[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            registrations.warn_of_late_params(self.group)
        self.group._module_fqn = "block"
        self.module[0].late = nn.Parameter(torch.ones(1))
        with self.assertWarnsRegex(UserWarning, r"\['block.0.late'\] were registered"):
            registrations.warn_of_late_params(self.group)


if __name__ == "__main__":
    run_tests()
