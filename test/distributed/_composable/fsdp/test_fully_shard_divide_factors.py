# Owner(s): ["oncall: distributed"]

"""
By what gradients are divided, and when: before the reduction, in it or after it.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

import itertools
import json
import math
from typing import Any, NamedTuple
from unittest import mock

import pytest

from fsdp_helpers.common.comms import count_operators
from fsdp_helpers.common.release_rules import FOLLOWS_GRAD_DTYPE
from fsdp_helpers.common.run_both import check_torch
from fsdp_helpers.common.utils import DeviceFreeTest, op_name, run_python

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_scaling as scaling
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    _get_gradient_divide_factors,
)
from torch.distributed.fsdp._fully_shard._fsdp_scaling import get_divide_factors
from torch.testing._internal.common_utils import run_tests


class FakeGroup:
    def __init__(self, size: int):
        self.size = lambda: size


class Factors(NamedTuple):
    """What gradients are divided by, and how they are reduced."""

    before: float | None
    after: float | None
    shard_op: str
    scale: float | None  # of a scaled sum
    replica_op: str

    @classmethod
    def of(cls, result: tuple) -> "Factors":
        before, after, shard_op, replica_op = result
        is_scaled = op_name(shard_op) == "PREMUL_SUM"
        scale = shard_op.factor if is_scaled else None
        return cls(before, after, op_name(shard_op), scale, op_name(replica_op))

    def divisor(self, shards: int, replicas: int) -> float:
        """Returns what the sum over all ranks is divided by, all in all."""
        divisor = (self.before or 1) * (self.after or 1)
        divisor *= shards if self.shard_op == "AVG" else 1 / (self.scale or 1)
        return divisor * (replicas if self.replica_op == "AVG" else 1)


SIZES = (None, 1, 2, 3, 4, 6, 8, 32, 128)
REPLICAS = (None, 1, 2, 6)
DTYPES = ("float32", "bfloat16", "float16", "float64")
FACTORS = (None, 0.5, 1.0, 1.5, 3.0, 8.0, 48.0, 100.0)
CASES = [*itertools.product(SIZES, REPLICAS, DTYPES, FACTORS, (False, True))]

# The same calls, made on the release
_PRINT_RELEASE = """
import json, sys
import torch, torch.distributed.fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

class Group:
    def __init__(self, size):
        self.size = lambda: size

results = []
for shards, replicas, dtype, factor, force_sum in json.loads(sys.argv[1]):
    groups = [None if size is None else Group(size) for size in (shards, replicas)]
    before, after, shard_op, replica_op = collectives._get_gradient_divide_factors(
        *groups, getattr(torch, dtype), "cuda", factor, force_sum
    )
    names = [getattr(op, "op", op).name for op in (shard_op, replica_op)]
    scale = shard_op.factor if names[0] == "PREMUL_SUM" else None
    results.append([before, after, names[0], scale, names[1]])
schemas = {
    name: str(getattr(torch.ops.fsdp, name).default._schema)
    for name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
}
print(json.dumps([torch.__file__, schemas, results]))
"""


class TestDivideFactors(DeviceFreeTest):
    def factors(self, case: tuple, backend: str, scales_bf16: bool = True) -> Factors:
        *sizes, dtype, factor, force_sum = case
        groups = [None if size is None else FakeGroup(size) for size in sizes]
        names = {"backend_name": lambda *_: backend, "SCALES_BF16": scales_bf16}
        with mock.patch.multiple(scaling, **names):
            return Factors.of(
                _get_gradient_divide_factors(
                    *groups, getattr(torch, dtype), "cuda", factor, force_sum
                )
            )

    @pytest.mark.quick
    def test_equal_to_the_release_and_so_are_the_schemas(self):
        printed = run_python("-c", _PRINT_RELEASE, json.dumps(CASES), on_release=True)
        path, schemas, results = json.loads(printed)
        check_torch(path, on_release=True)
        for name, schema in schemas.items():
            operator = getattr(torch.ops.fsdp, name).default
            self.assertEqual(str(operator._schema), schema)
        found = [self.factors(case, "nccl") for case in CASES]
        expected = [Factors(*result) for result in results]
        wrong = [i for i in zip(CASES, found, expected, strict=True) if i[1] != i[2]]
        self.assertEqual(wrong, [])

    def test_without_scaled_sums_the_divisor_is_the_same(self):
        """That is the number of ranks, or the factor: gloo divides after the sum."""
        for case in CASES:
            sizes = [size or 1 for size in case[:2]]
            expected = math.prod(sizes) if case[3] is None else case[3]
            nccl, gloo = (self.factors(case, name) for name in ("nccl", "gloo"))
            for found in (nccl, gloo):
                self.assertTrue(math.isclose(found.divisor(*sizes), expected), case)
            # Over one rank no collective runs that would scale
            is_scaled = nccl.shard_op == "PREMUL_SUM" and sizes[0] > 1
            plain = Factors(None, case[3], "SUM", None, "SUM")
            self.assertEqual(gloo, plain if is_scaled else nccl)

    def test_bf16_is_divided_after_the_sum_where_its_scaled_sum_may_be_wrong(self):
        """As over gloo. 2.15.0 has the fix of NCCL's factors."""
        self.assertEqual(scaling.SCALES_BF16, FOLLOWS_GRAD_DTYPE)
        for case in CASES:
            backend = "gloo" if case[2] == "bfloat16" else "nccl"
            found = self.factors(case, "nccl", scales_bf16=False)
            self.assertEqual(found, self.factors(case, backend), case)

    def test_over_one_rank_nothing_is_left_to_the_reduce_scatter(self):
        """Which does not run there, so that its input is divided."""
        keys = [(getattr(torch, dtype), None) for dtype in DTYPES]
        keys.append((torch.float32, torch.bfloat16))
        flags = (False, True)
        for case in itertools.product((None, 1), keys, REPLICAS, FACTORS, flags):
            shards, key, replicas, factor, force_sum = case
            groups = [None if n is None else FakeGroup(n) for n in (shards, replicas)]
            found = Factors.of(
                get_divide_factors(key, *groups, "cuda", factor, force_sum)
            )
            alone = found._replace(shard_op="SUM", scale=None)
            expected = (replicas or 1) if factor is None else factor
            divisor = alone.divisor(1, replicas or 1)
            self.assertTrue(math.isclose(divisor, expected), (case, found))

    def test_a_factor_of_one_is_no_kernel(self):
        grad = torch.ones(2)
        with count_operators() as counts:
            for factor in (None, 1, 1.0, 2.0):
                scaling._div_if_needed(grad, factor)
        self.assertEqual(counts, {"aten::div_": 1})

    def test_a_group_has_a_backend_for_each_device(self):
        class Both:
            def _get_backend(self, device: torch.device) -> Any:
                names = {"cpu": "gloo", "cuda": "nccl"}
                return mock.Mock(**{"name.return_value": names[device.type]})

        group: Any = Both()
        for device, name in (("cpu", "gloo"), ("cuda", "nccl"), ("cpu", "gloo")):
            found = scaling.backend_name(group, torch.device(device))
            self.assertEqual(found, name)


if __name__ == "__main__":
    run_tests()
