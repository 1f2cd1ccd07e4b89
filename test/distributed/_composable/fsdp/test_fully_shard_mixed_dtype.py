# Owner(s): ["oncall: distributed"]

"""
Mixed units on four ranks, beside the same model unsharded, where the release has no
counterpart: it would lose imaginary parts, or refuses to reshard.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

import pytest

from fsdp_common.utils import (
    FSDPProcessTest,
    linear_stack,
    record_collectives,
)
from fsdp_common.utils import (
    shard_blocks as shard_children,
)
from fsdp_parity.models import BF16, DIM, FP16, FP32
from fsdp_parity.modes import shard_last_dim, shard_root_only
from fsdp_parity.reference import SideBySide

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


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
    @pytest.mark.quick
    def test_reshards_to_two_ranks_on_another_dim(self) -> None:
        kwargs = {"reshard_after_forward": 2, "shard_placement_fn": shard_last_dim}
        model = linear_stack([BF16, FP32, FP16], dim=DIM)
        pair = SideBySide(self, model, shard_children, **kwargs)
        with record_collectives() as recorder:
            pair.train(steps=1)
        sizes = [call.group_size for call in recorder.all_gathers]
        self.assertEqual(sizes, [4] * 3 + [2] * 3)
        pair.train(steps=1)

    @parametrize("reduce_dtype", [None, FP32])
    def test_reduce_dtype_keeps_imaginary_parts(
        self, reduce_dtype: torch.dtype | None
    ) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        pair = SideBySide(self, ComplexPart(), shard_root_only, policy=policy)
        with record_collectives() as recorder:
            pair.accumulate(microbatches=2)
        dtypes = [call.dtype for call in recorder.reduce_scatters]
        real = [FP32] if reduce_dtype else [FP32, BF16]
        self.assertEqual(dtypes, [torch.complex64, *real])
        self.assertTrue((pair.reference.gradients["pole"].imag != 0).all())
        pair.step()
        pair.train()


instantiate_parametrized_tests(TestMixedDtypeTraining)


if __name__ == "__main__":
    run_tests()
