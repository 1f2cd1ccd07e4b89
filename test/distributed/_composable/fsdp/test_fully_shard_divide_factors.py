# Owner(s): ["oncall: distributed"]

"""
By what gradients are divided, and when: before the reduction, in it or after it.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_common.comms import SCHEMAS
from fsdp_common.utils import DeviceFreeTest, op_name, RELEASE_ROOT, run_python

import torch
from torch.distributed.fsdp._fully_shard import (
    _fsdp_scaling as scaling,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    _get_gradient_divide_factors,
)
from torch.distributed.fsdp._fully_shard._fsdp_scaling import get_divide_factors
from torch.testing._internal.common_utils import run_tests


class FakeGroup:
    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size


@dataclass(frozen=True)
class Factors:
    """What gradients are divided by, and how they are reduced."""

    before: float | None
    after: float | None
    shard_op: str
    scale: float | None  # of a scaled sum
    replica_op: str

    @classmethod
    def of(cls, result: tuple) -> "Factors":
        before, after, shard_op, replica_op = result
        scale = getattr(shard_op, "factor", None)
        scale = scale if op_name(shard_op) == "PREMUL_SUM" else None
        return cls(before, after, op_name(shard_op), scale, op_name(replica_op))

    def divisor(self, shards: int, replicas: int) -> float:
        """Returns what the sum over all ranks is divided by, all in all."""
        divisor = (self.before or 1) * (self.after or 1)
        # Over one rank no collective runs: its input is divided in its place
        divisor *= shards if self.shard_op == "AVG" else 1 / (self.scale or 1)
        return divisor * (replicas if self.replica_op == "AVG" else 1)


SIZES = (1, 2, 3, 4, 6, 8, 32, 128)
DTYPES = ("float32", "bfloat16", "float16", "float64")

# The same calls, made on the release
_PRINT_RELEASE = """
import json, sys
import torch, torch.distributed.fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_groups

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
    def raw_factors(
        self, shards, replicas, dtype, factor=None, force_sum=False, *, premul=True
    ) -> tuple:
        sizes, dtype = (shards, replicas), getattr(torch, dtype)
        groups = [None if size is None else FakeGroup(size) for size in sizes]
        name = "nccl" if premul else "gloo"
        with mock.patch.object(scaling, "backend_name", lambda *_: name):
            return _get_gradient_divide_factors(
                *groups, dtype, "cuda", factor, force_sum
            )

    def factors(self, *case: Any, **how: Any) -> Factors:
        return Factors.of(self.raw_factors(*case, **how))

    def test_a_group_has_a_backend_for_each_device(self):
        class Both:
            def _get_backend(self, device: torch.device) -> Any:
                names = {"cpu": "gloo", "cuda": "nccl"}
                return mock.Mock(**{"name.return_value": names[device.type]})

        group: Any = Both()
        for device, name in (("cpu", "gloo"), ("cuda", "nccl"), ("cpu", "gloo")):
            found = scaling.backend_name(group, torch.device(device))
            self.assertEqual(found, name)

    def test_fp32_and_bf16_are_averaged_by_the_collective(self):
        for dtype, shards in itertools.product(("float32", "bfloat16"), SIZES[1:]):
            for replicas in (None, 2, 8):
                factors = self.factors(shards, replicas, dtype)
                self.assertEqual(factors, Factors(None, None, "AVG", None, "AVG"))

    def test_fp16_is_divided_before_and_after(self):
        for workers, before, after in (
            (1, 1, 1),
            (2, 2, 1),
            (3, 2, 1.5),
            (4, 2, 2),
            (6, 4, 1.5),
            (8, 4, 2),
            (32, 8, 4),
            (128, 16, 8),
        ):
            expected = Factors(before, after, "SUM", None, "SUM")
            self.assertEqual(self.factors(workers, None, "float16"), expected)
            self.assertEqual(self.factors(workers, 1, "float16"), expected)
            self.assertEqual(self.factors(1, workers, "float16"), expected)
            self.assertEqual(self.factors(None, workers, "float16"), expected)
            if workers % 2 == 0:
                halves = self.factors(workers // 2, 2, "float16")
                self.assertEqual(halves, expected)

    def test_fp16_factors_multiply_to_the_divisor_and_are_balanced(self):
        for factor in (*SIZES, 5, 7, 12, 24, 48, 96, 100, 256, 0.5, 1.5, 10.0):
            found = self.factors(4, 2, "float16", float(factor))
            powers = (2**k for k in itertools.count())
            before = next(f for f in powers if factor % f or factor <= f * f)
            self.assertEqual((found.before, found.after), (before, factor / before))
            self.assertEqual((found.shard_op, found.replica_op), ("SUM", "SUM"))

    def test_forced_sums_are_divided_after(self):
        for dtype, shards in itertools.product(("float32", "bfloat16"), SIZES):
            for replicas, factor in itertools.product((None, 2), (None, 5.0)):
                divisor = shards * (replicas or 1) if factor is None else factor
                factors = self.factors(shards, replicas, dtype, factor, True)
                self.assertEqual(factors, Factors(None, divisor, "SUM", None, "SUM"))

    def test_custom_factor_is_a_scaled_sum_where_the_backend_has_one(self):
        for dtype in ("float32", "bfloat16"):
            scaled = Factors(None, None, "PREMUL_SUM", 0.2, "SUM")
            self.assertEqual(self.factors(8, None, dtype, 5.0), scaled)
            self.assertEqual(self.factors(8, 4, dtype, 5.0), scaled)
            plain = Factors(None, 5.0, "SUM", None, "SUM")
            self.assertEqual(self.factors(8, None, dtype, 5.0, premul=False), plain)
            self.assertEqual(self.factors(8, 4, dtype, 5.0, premul=False), plain)

    def test_factor_of_the_shard_group_is_its_average(self):
        for premul in (True, False):
            factors = self.factors(8, 4, "float32", 8.0, premul=premul)
            self.assertEqual(factors, Factors(None, None, "AVG", None, "SUM"))

    def test_no_average_where_there_is_a_single_rank_in_all(self):
        for dtype, shards in itertools.product(("float32", "bfloat16"), (None, 1)):
            for replicas in (None, 1):
                found = self.factors(shards, replicas, dtype)
                self.assertEqual((found.shard_op, found.replica_op), ("SUM", "SUM"))
            found = self.factors(shards, 4, dtype)
            self.assertEqual((found.shard_op, found.replica_op), ("AVG", "AVG"))
            found = self.factors(4, 1, dtype)
            self.assertEqual((found.shard_op, found.replica_op), ("AVG", "AVG"))

    def test_all_in_all_it_is_the_number_of_ranks_or_the_factor(self):
        shards, replicas = (None, *SIZES), (None, 1, 2, 6)
        factors, flags = (None, 1.0, 3.0, 8.0), (False, True)
        wrong = []
        for case in itertools.product(shards, replicas, DTYPES, factors, flags, flags):
            *case, premul = case
            found = self.factors(*case, premul=premul)
            sizes = [size or 1 for size in case[:2]]
            expected = math.prod(sizes) if case[3] is None else case[3]
            if not math.isclose(found.divisor(*sizes), expected):
                wrong.append((case, premul, found))
        self.assertEqual(wrong, [])

    def test_over_one_rank_nothing_is_left_to_the_reduce_scatter(self):
        """Which does not run there, so that its input is divided."""
        keys = [(getattr(torch, dtype), None) for dtype in DTYPES]
        keys.append((torch.float32, torch.bfloat16))
        replicas, factors, flags = (None, 1, 2, 6), (None, 3.0, 8.0), (False, True)
        wrong = []
        for case in itertools.product((None, 1), keys, replicas, factors, flags):
            shards, key, replicas, factor, force_sum = case
            groups = [None if n is None else FakeGroup(n) for n in (shards, replicas)]
            found = Factors.of(
                get_divide_factors(key, *groups, "cuda", factor, force_sum)
            )
            alone = replace(found, shard_op="SUM", scale=None)
            expected = (replicas or 1) if factor is None else factor
            if not math.isclose(alone.divisor(1, replicas or 1), expected):
                wrong.append((case, found))
        self.assertEqual(wrong, [])

    @pytest.mark.quick
    def test_equal_to_the_release_and_so_are_the_schemas(self):
        replicas, factors = (None, 1, 2, 6), (None, 1.0, 3.0, 8.0)
        cases = [
            *itertools.product((None, *SIZES), replicas, DTYPES, factors, (False, True))
        ]
        printed = run_python("-c", _PRINT_RELEASE, json.dumps(cases), on_release=True)
        path, schemas, results = json.loads(printed)
        self.assertTrue(Path(path).is_relative_to(RELEASE_ROOT))
        self.assertEqual(schemas, SCHEMAS)
        differing = [
            (case, self.factors(*case), Factors(*result))
            for case, result in zip(cases, results, strict=True)
            if self.factors(*case) != Factors(*result)
        ]
        self.assertEqual(differing, [])


if __name__ == "__main__":
    run_tests()
