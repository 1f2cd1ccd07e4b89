"""
``grad_comm_dtype``: gradients that are sent in one dtype and added in another, in an
order that does not depend on the mesh.

Gradients are given, see :class:`Weighted`, and compared bit for bit with what one
process adds up by the definition of the tree.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from comm_test_utils import (
    BF16,
    FP16,
    FP32,
    FP64,
    group_of,
    mixed_specs,
    sharded,
    Spec,
    ThreadTest,
    Weighted,
)
from fsdp_test_utils import FakeGroupTest, run_python, THREAD_DEVICE_TYPE
from hypothesis import given, settings
from hypothesis import strategies as st

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    fully_shard,
    MixedPrecisionPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard import _fsdp_tree as tree
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter,
    ProcessGroupAllocReduceScatter,
)
from torch.testing._internal.common_utils import run_tests, TestCase


def policy(
    comm: torch.dtype | None = BF16, reduce: torch.dtype | None = None, **kwargs: Any
) -> MixedPrecisionPolicy:
    kwargs = {"param_dtype": BF16} | kwargs
    return MixedPrecisionPolicy(reduce_dtype=reduce, grad_comm_dtype=comm, **kwargs)


def add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tree, by its definition."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1
    return add(parts[:left]) + add(parts[left:])


def given_weight(rank: int, i: int, spec: Spec, batch: int = 0) -> torch.Tensor:
    """What the ``i``-th parameter gets on a rank: of many magnitudes."""
    generator = torch.Generator().manual_seed((rank * 100 + i) * 100 + batch)
    size = spec.size
    scale = torch.randint(-6, 7, size, generator=generator).double().exp2()
    values = torch.randn(size, generator=generator, dtype=FP64) * scale
    return values.to(THREAD_DEVICE_TYPE)


class TestTree(TestCase):
    """The sum alone."""

    def rows(self, count: int, numel: int, dtype: torch.dtype, seed: int):
        generator = torch.Generator().manual_seed(seed)
        scale = torch.randint(-8, 9, (count, numel), generator=generator)
        values = torch.randn(count, numel, generator=generator)
        return (values * scale.double().exp2()).to(dtype)

    def sum_of(self, rows: torch.Tensor, dtype: torch.dtype, extra: int = 0):
        output = torch.full((rows.size(1),), math.nan, dtype=dtype)
        scratch = torch.empty(rows.numel() + extra, dtype=rows.dtype)[extra:]
        tree.add_in_tree(rows.clone(), output, scratch)
        return output

    @settings(max_examples=1000, deadline=None)
    @given(
        count=st.integers(2, 40),
        numel=st.integers(1, 70),
        dtypes=st.sampled_from(
            [(BF16, FP32), (FP16, FP32), (BF16, FP64), (FP32, FP32), (BF16, BF16)]
        ),
        extra=st.integers(0, 3),
        seed=st.integers(0, 10**6),
    )
    def test_adds_in_the_order_of_the_tree(self, count, numel, dtypes, extra, seed):
        sent, added = dtypes
        rows = self.rows(count, numel, sent, seed)
        actual = self.sum_of(rows, added, extra)
        self.assertTrue(torch.equal(actual, add([*rows.to(added)])))
        # Each element takes part in as many additions as the tree is high, each of
        # which rounds by at most half an ulp of what is no larger than all magnitudes
        height = (count - 1).bit_length()
        bound = rows.double().abs().sum(0) * torch.finfo(added).eps / 2 * height * 1.01
        error = (actual.double() - rows.double().sum(0)).abs()
        self.assertTrue(bool((error <= bound + torch.finfo(added).tiny).all()))

    def test_a_narrow_sum_would_lose_what_this_one_keeps(self):
        rows = torch.tensor([[256.0], [1.0]], dtype=BF16)
        self.assertEqual(self.sum_of(rows, FP32).item(), 257)
        self.assertEqual(rows.sum(0).item(), 256)

    def test_the_order_is_another_than_from_left_to_right(self):
        rows = torch.tensor([[2.0**24], [1.0], [1.0], [1.0]])
        self.assertEqual(self.sum_of(rows, FP32).item(), 2.0**24 + 2)
        self.assertEqual(add([*rows]).item(), 2.0**24 + 2)

    def test_equal_rows_of_a_power_of_two_are_exact(self):
        row = self.rows(1, 50, BF16, 0)
        for count in (2, 4, 8, 16):
            total = self.sum_of(row.repeat(count, 1), FP32)
            self.assertTrue(torch.equal(total / count, row[0].float()))

    def test_goes_by_pieces_where_there_is_little_scratch(self):
        rows = self.rows(6, 31, BF16, 1)
        output = torch.empty(31)
        tree.add_in_tree(rows, output, torch.empty(3 * 31, dtype=BF16))
        self.assertTrue(torch.equal(output, add([*rows.float()])))

    def test_nothing_is_added_to_nothing(self):
        self.assertEqual(self.sum_of(torch.empty(3, 0, dtype=BF16), FP32).numel(), 0)


class GradCommTest(ThreadTest):
    def meshes(self) -> dict[str, DeviceMesh]:
        """All ways to lay out the ranks whose shard groups are powers of two."""
        ranks, names = self.world_size, ("replicate", "shard")
        meshes = {"shard": init_device_mesh(THREAD_DEVICE_TYPE, (ranks,))}
        for shards in (1, 2, 4):
            if ranks % shards == 0 and shards < ranks:
                shape = (ranks // shards, shards)
                mesh = init_device_mesh(THREAD_DEVICE_TYPE, shape, mesh_dim_names=names)
                meshes[f"{shape[0]}x{shards}"] = mesh
        return meshes

    def backward(
        self, module: torch.nn.Module, specs: Sequence[Spec], batch: int = 0, **how: Any
    ) -> None:
        weights = []
        for i, spec in enumerate(specs):
            dtype = module.get_parameter(f"p{i}").dtype if "as_stored" in how else BF16
            weights.append(given_weight(self.rank, i, spec, batch).to(dtype))
        module(weights).backward()

    def full_grads(self, module: torch.nn.Module) -> list[torch.Tensor]:
        return [param.grad.full_tensor() for param in module.parameters()]

    def expected(
        self,
        i: int,
        spec: Spec,
        *,
        comm: torch.dtype = BF16,
        reduce: torch.dtype = FP32,
        batch: int = 0,
        divisor: float | None = None,
    ) -> torch.Tensor:
        ranks = range(self.world_size)
        sent = [given_weight(r, i, spec, batch).to(BF16).to(comm) for r in ranks]
        total = add([part.to(reduce) for part in sent])
        return (total / (divisor or self.world_size)).to(spec.dtype)

    def assert_all_same(
        self, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
    ) -> None:
        for one, other in zip(actual, expected, strict=True):
            self.assert_same(one, other)


class TestGradComm(GradCommTest):
    world_size = 4

    def specs(self) -> list[Spec]:
        return mixed_specs(self.world_size)

    def test_sums_are_those_of_the_tree(self):
        specs = self.specs()
        for comm, reduce in ((BF16, None), (BF16, FP64), (FP32, FP32), (BF16, BF16)):
            module = sharded(
                specs,
                self.mesh(),
                device=THREAD_DEVICE_TYPE,
                mp_policy=policy(comm, reduce),
            )
            self.backward(module, specs)
            how = {"comm": comm, "reduce": reduce or FP32}
            expected = [self.expected(i, s, **how) for i, s in enumerate(specs)]
            self.assert_all_same(self.full_grads(module), expected)


class TestOneRank(TestGradComm):
    world_size = 1


class TestTwoRanks(TestGradComm):
    world_size = 2


class TestThreeRanks(TestGradComm):
    world_size = 3


class TestFiveRanks(TestGradComm):
    world_size = 5


class TestSevenRanks(TestGradComm):
    world_size = 7


class TestMeshes(GradCommTest):
    """The same bits, however the ranks are laid out."""

    world_size = 8

    def test_all_meshes_give_the_same_bits(self):
        specs = mixed_specs(self.world_size)
        flat = [Spec(spec.size, spec.dtype) for spec in specs]
        expected = [self.expected(i, spec) for i, spec in enumerate(flat)]
        for name, mesh in self.meshes().items():
            with self.subTest(name):
                kwargs: dict[str, Any] = {"mp_policy": policy()}
                module = sharded(specs, mesh, device=THREAD_DEVICE_TYPE, **kwargs)
                self.backward(module, specs)
                self.assert_all_same(self.full_grads(module), expected)
        mesh = init_device_mesh(THREAD_DEVICE_TYPE, (self.world_size,))
        module = replicate(
            Weighted(flat, THREAD_DEVICE_TYPE), mesh=mesh, mp_policy=policy()
        )
        self.backward(module, flat)
        self.assert_all_same(self.full_grads(module), expected)

    def test_the_backends_own_order_gives_other_bits(self):
        """So that the test above says something."""
        specs = [Spec((64,), FP32)]
        found = []
        for mesh in self.meshes().values():
            kwargs: dict[str, Any] = {"mp_policy": policy(None, BF16)}
            module = sharded(specs, mesh, device=THREAD_DEVICE_TYPE, **kwargs)
            self.backward(module, specs)
            found += self.full_grads(module)
        expected = self.expected(0, specs[0])
        self.assertFalse(any(torch.equal(grad, expected) for grad in found))

    def test_replicas_are_reduced_in_pieces(self):
        specs = mixed_specs(self.world_size)
        expected = [self.expected(i, spec) for i, spec in enumerate(specs)]
        mesh = self.meshes()["4x2"]
        with mock.patch.object(tree, "_MAX_PIECE_NBYTES", 12):
            module = sharded(
                specs, mesh, device=THREAD_DEVICE_TYPE, mp_policy=policy()
            )
            self.backward(module, specs)
        self.assert_all_same(self.full_grads(module), expected)


if __name__ == "__main__":
    run_tests()
