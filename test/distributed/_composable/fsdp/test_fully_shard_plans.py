# Owner(s): ["oncall: distributed"]

"""
Plans of copies: they outlive an explicit unshard and follow what changes.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest

from fsdp_common.utils import DeviceFreeTest, FakeGroupTest
from fsdp_parity.memory import BF16, Block, FP32, RANKS

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_copies as copies
from torch.distributed.fsdp._fully_shard import _fsdp_layout as layouts
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.common_utils import run_tests
from torch.utils._python_dispatch import TorchDispatchMode


def unit_of(*dtypes: torch.dtype, **kwargs: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    return fully_shard(Block([((8, 4), d) for d in dtypes]), mesh=mesh, **kwargs)


def step(model: nn.Module) -> None:
    model(torch.ones(1, requires_grad=True)).sum().backward()
    model.zero_grad()


class TestCachedPlans(FakeGroupTest):
    ranks = RANKS

    @pytest.mark.quick
    def test_an_explicit_unshard_plans_nothing_anew(self) -> None:
        reduce_fp32 = MixedPrecisionPolicy(reduce_dtype=FP32)
        for name, model in (
            ("uniform", unit_of(BF16, BF16)),
            ("uniform, reduce fp32", unit_of(BF16, BF16, mp_policy=reduce_fp32)),
            ("mixed, reduce fp32", unit_of(BF16, FP32, mp_policy=reduce_fp32)),
        ):
            step(model)
            with (
                mock.patch.object(layouts, "plan_gather", side_effect=AssertionError),
                mock.patch.object(layouts, "plan_copy_in", side_effect=AssertionError),
            ):
                group = model._get_fsdp_state()._fsdp_param_groups[0]
                buckets = dict(group._cache.buckets)
                for _ in range(2):
                    model.unshard()
                    model.reshard()
                    step(model)
            self.assertEqual(len(buckets), 1, name)
            for pattern, planned in group._cache.buckets.items():
                self.assertIs(buckets[pattern], planned, name)

    def test_an_explicit_unshard_reads_what_has_changed(self) -> None:
        """A parameter's dtypes are read once, if it has a policy of its own as well."""
        own = MixedPrecisionPolicy(
            reduce_dtype=FP32, param_dtype_override_fn=lambda _: BF16
        )
        reads: list[Any] = []
        read = FSDPParam.init_dtype_attrs

        def noting(fsdp_param: FSDPParam, policy: Any) -> None:
            reads.append(fsdp_param)
            read(fsdp_param, policy)

        mesh = init_device_mesh("cpu", (RANKS,))
        for policy in (MixedPrecisionPolicy(param_dtype=BF16), own):
            model = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
            group = model._get_fsdp_state()._fsdp_param_group
            params = group.fsdp_params
            changes = (
                partial(setattr, model.bias, "grad_dtype", BF16),
                partial(setattr, model.bias, "grad_dtype", FP32),
                partial(model.requires_grad_, False),
                partial(setattr, group, "mp_policy", MixedPrecisionPolicy(BF16, FP32)),
            )
            with mock.patch.object(FSDPParam, "init_dtype_attrs", noting):
                model(torch.ones(1, 4, dtype=BF16))
                for change in changes:
                    self.assertEqual(reads, params)
                    reads.clear()
                    model.unshard()
                    model.reshard()
                    self.assertEqual(reads, [])
                    change()
                    model.unshard()
                    model.reshard()
                self.assertEqual(reads, params)
                with mock.patch.object(FSDPParamGroup, "_init_mp_dtypes") as replaced:
                    model.unshard()
                    model.unshard()
                self.assertEqual(replaced.call_count, 2)
                reads.clear()
                model.unshard()  # what replaced it may have set anything
                self.assertEqual(reads, params)
                reads.clear()
                model.to("meta")
                for _ in range(2):
                    with self.assertRaisesRegex(RuntimeError, "materialized"):
                        model.unshard()

    def test_a_dtype_that_changes_plans_anew(self) -> None:
        model = unit_of(BF16, BF16, BF16, BF16)
        step(model)
        group = model._get_fsdp_state()._fsdp_param_groups[0]
        (planned,) = group._cache.buckets.values()
        group.fsdp_params[0].sharded_param.grad_dtype = FP32
        model.unshard()
        step(model)
        (planned_anew,) = group._cache.buckets.values()
        self.assertIsNot(planned_anew, planned)
        local = torch.ones(1, requires_grad=True)
        model(local).sum().backward()
        dtypes = [param.grad.dtype for param in model.parameters()]
        self.assertEqual(dtypes, [FP32, BF16, BF16, BF16])

    def test_a_list_that_changes_in_place_plans_anew(self) -> None:
        model = unit_of(BF16, BF16, BF16, BF16)
        step(model)
        group = model._get_fsdp_state()._fsdp_param_groups[0]
        (planned,) = group._cache.buckets.values()
        model.set_reshard_after_backward(False)
        loss = model(torch.ones(1, requires_grad=True)).sum()
        group.fsdp_params.reverse()
        loss.backward()
        (planned_anew,) = group._cache.buckets.values()
        self.assertIsNot(planned_anew, planned)


class Moves(TorchDispatchMode):
    """Notes how many tensors that were moved are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[weakref.ref] = []
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.moved.append(weakref.ref(result))
            alive = [ref for ref in self.moved if ref() is not None]
            self.most = max(self.most, len(alive))
        return result


class TestOffload(DeviceFreeTest):
    """From the host to a device, which has no memory here."""

    @pytest.mark.quick
    def test_shards_are_moved_one_at_a_time(self) -> None:
        """If they are to be cast there, and not again what an extension has moved."""
        for dtype, devices, expected in (
            (FP32, ["cpu"] * 5, (0, 0)),
            (BF16, ["cpu"] * 5, (5, 1)),
            (BF16, ["meta", "cpu", "cpu"], (2, 1)),
        ):
            shards = [torch.ones(8, device=device) for device in devices]
            layout = layouts.plan_gather([dtype] * len(shards), [8] * len(shards))
            planned = layouts.plan_copy_in(layout, [FP32] * len(shards))
            segment = torch.empty(8 * len(shards), dtype=dtype, device="meta")
            with Moves() as moves:
                copies._copy_in(segment, planned, shards)
            self.assertEqual((len(moves.moved), moves.most), expected)


if __name__ == "__main__":
    run_tests()
