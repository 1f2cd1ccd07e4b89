# Owner(s): ["oncall: distributed"]

"""
By what gradients are divided where the release has no rule, or its rule does not hold.
``test_fully_shard_composition.py`` compares all other factors with the release.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

import itertools
import math
from typing import Any
from unittest import mock

from fsdp_helpers.common.comms import count_operators
from fsdp_helpers.common.release_rules import FOLLOWS_GRAD_DTYPE
from fsdp_helpers.common.utils import DeviceFreeTest, op_name
from fsdp_helpers.composition.contract import (
    DTYPES,
    FACTOR_CASES,
    FACTORS,
    factors_of_branch,
    FakeGroup,
    REPLICAS,
)

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_scaling as scaling
from torch.testing._internal.common_utils import run_tests


class TestDivideFactors(DeviceFreeTest):
    def test_gloo_divides_after_the_sum(self):
        """And bf16, where its scaled sum may be wrong: 2.15.0 has the fix of NCCL's."""
        self.assertEqual(scaling.SCALES_BF16, FOLLOWS_GRAD_DTYPE)
        for case in FACTOR_CASES:
            shards, _, dtype, factor, _ = case
            nccl, gloo = (factors_of_branch(case, name) for name in ("nccl", "gloo"))
            # Over one rank no collective runs that would scale
            is_scaled = nccl[2] == "PREMUL_SUM" and (shards or 1) > 1
            plain = [None, factor, "SUM", None, "SUM"]
            self.assertEqual(gloo, plain if is_scaled else nccl, case)
            found = factors_of_branch(case, "nccl", scales_bf16=False)
            self.assertEqual(found, gloo if dtype == "bfloat16" else nccl, case)

    def test_over_one_rank_nothing_is_left_to_the_reduce_scatter(self):
        """Which does not run there, so that its input is divided."""
        keys = [(getattr(torch, dtype), None) for dtype in DTYPES]
        keys.append((torch.float32, torch.bfloat16))
        flags = (False, True)
        for case in itertools.product((None, 1), keys, REPLICAS, FACTORS, flags):
            shards, key, replicas, factor, force_sum = case
            groups = [None if n is None else FakeGroup(n) for n in (shards, replicas)]
            before, after, _, replica_op = scaling.get_divide_factors(
                key, *groups, "cuda", factor, force_sum
            )
            divisor = (before or 1) * (after or 1)
            divisor *= (replicas or 1) if op_name(replica_op) == "AVG" else 1
            expected = (replicas or 1) if factor is None else factor
            self.assertTrue(math.isclose(divisor, expected), case)

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
