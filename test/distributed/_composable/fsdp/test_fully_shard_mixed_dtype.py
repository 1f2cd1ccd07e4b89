# Owner(s): ["oncall: distributed"]

"""
Units of fp32, bf16 and fp16 parameters on four ranks, beside the same model unsharded.
Over two ranks each mode has the bits of the release (``test_fully_shard_parity.py``);
what is here has no such counterpart: the release makes another sum, or refuses it.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

from collections.abc import Callable
from typing import Any

import pytest

from fsdp_common.utils import (
    FSDPProcessTest,
    linear_stack,
    record_collectives,
)
from fsdp_common.utils import (
    shard_blocks as shard_children,
)
from fsdp_parity.models import BF16, DIM, FP16, FP32, mixed_tower
from fsdp_parity.modes import shard_last_dim, shard_root_only
from fsdp_parity.reference import run_model, run_skipping, SideBySide

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


POLICIES = {
    "none": MixedPrecisionPolicy(),
    "param_bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "reduce_fp32": MixedPrecisionPolicy(reduce_dtype=FP32),
    "reduce_bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
    "param_bf16_reduce_fp32": MixedPrecisionPolicy(BF16, FP32),
    "param_fp16_reduce_bf16": MixedPrecisionPolicy(FP16, BF16),
    "inputs_not_cast": MixedPrecisionPolicy(BF16, FP32, cast_forward_inputs=False),
}


class ComplexPart(nn.Module):
    """A complex parameter beside two real ones, as in a state-space model."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        pole = torch.randn(DIM, 2, generator=generator)
        self.pole = nn.Parameter(torch.view_as_complex(pole))
        self.gain = nn.Parameter(torch.ones(DIM))
        self.mix = nn.Parameter(torch.randn(3, DIM, generator=generator).to(BF16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        response = (x.to(torch.complex64) * self.pole).square()
        y = torch.tanh(response.real + 2 * response.imag) * self.gain
        return F.linear(y.to(self.mix.dtype), self.mix)


class TestMixedDtypeTraining(FSDPProcessTest):
    def side_by_side(self, *args: Any, **kwargs: Any) -> SideBySide:
        return SideBySide(self, mixed_tower(), *args, **kwargs)

    @parametrize("policy", list(POLICIES))
    def test_policy(self, policy: str) -> None:
        self.side_by_side(policy=POLICIES[policy]).train()

    @pytest.mark.quick
    def test_resharded_to_two(self) -> None:
        pair = self.side_by_side(reshard_after_forward=2)
        pair.train(steps=1)
        with record_collectives() as recorder:
            pair.backward()
        sizes = [call.group_size for call in recorder.all_gathers]
        self.assertEqual(sizes, [4] * 3 + [2] * 3)
        pair.step()
        # On another dim: the release's own part of this wants both dims to divide
        kwargs = {"reshard_after_forward": 2, "shard_placement_fn": shard_last_dim}
        model = linear_stack([BF16, FP32, FP16], dim=DIM)
        SideBySide(self, model, shard_children, **kwargs).train()

    @parametrize("policy", ["none", "param_bf16_reduce_fp32"])
    def test_accumulate_in_turns(self, policy: str) -> None:
        """
        Fresh and accumulated gradients meet in one unit, in bf16 and in fp32 if
        they are reduced in another dtype than computed (pytorch 196996).
        """
        pair = self.side_by_side(policy=POLICIES[policy])
        for _ in range(2):
            pair.accumulate(run_skipping(1, 2), run_skipping(0, 2), run_skipping(0))
            pair.step()

    @parametrize("policy", ["none", "param_bf16_reduce_fp32", "reduce_bf16"])
    def test_unfreeze_after_a_first_forward(self, policy: str) -> None:
        """What is reduced later is reduced in the policy's dtype (pytorch 186998)."""
        pair = self.side_by_side(
            shard_root_only, policy=POLICIES[policy], reshard_after_forward=True
        )
        pair.model.requires_grad_(False)
        self.assertFalse(pair.model(pair.next_batches()[0]).requires_grad)
        pair.model.requires_grad_(True)
        pair.reference.model.requires_grad_(True)
        with record_collectives() as recorder:
            pair.backward()
        self.assertEqual(
            [call.dtype for call in recorder.reduce_scatters],
            {
                "none": [FP32, BF16, FP16],
                "param_bf16_reduce_fp32": [FP32],
                "reduce_bf16": [BF16],
            }[policy],
        )
        pair.step()
        pair.train(steps=1)

    @parametrize("reduce_dtype", [None, FP32])
    def test_complex_parameter(self, reduce_dtype: torch.dtype | None) -> None:
        """The policy's reduce dtype must not take its imaginary part away."""
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        pair = SideBySide(self, ComplexPart(), shard_root_only, policy=policy)
        with record_collectives() as recorder:
            pair.accumulate(run_model, run_model)
        dtypes = [call.dtype for call in recorder.reduce_scatters]
        real = [FP32] if reduce_dtype else [FP32, BF16]
        self.assertEqual(dtypes, [torch.complex64, *real])
        self.assertTrue((pair.reference.gradients["pole"].imag != 0).all())
        pair.step()
        pair.train()

    @parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_inference_before_training(self, mode: Callable[[], Any]) -> None:
        pair = self.side_by_side()
        for _ in range(2):
            x = pair.next_batches()[0]
            with mode():
                pair.check_equal(pair.model(x), pair.reference.computing()(x))
            pair.train(steps=1)


instantiate_parametrized_tests(TestMixedDtypeTraining)


if __name__ == "__main__":
    run_tests()
