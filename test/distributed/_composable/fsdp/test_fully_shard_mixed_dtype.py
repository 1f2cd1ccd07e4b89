# Owner(s): ["oncall: distributed"]

"""
Mixed units on four ranks where the release has no counterpart: it would lose imaginary
parts, or refuses to reshard.
"""

import itertools
from typing import Any

import pytest

from fsdp_helpers.common.parity_layers import BF16, FP32, loss_of
from fsdp_helpers.common.utils import (
    FSDPProcessTest,
    linear_stack,
    record_collectives,
    shard_blocks,
    shard_mesh,
)
from fsdp_helpers.parity.models import batch_of, DIM, FP16
from fsdp_helpers.parity.modes import shard_last_dim

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
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
    def train(self, model: nn.Module, **kwargs: Any) -> list[torch.Tensor]:
        """Returns the parameters after two steps of square layers, each a unit."""
        shard_blocks(model.to(self.device), mesh=shard_mesh(), **kwargs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        for step in range(2):
            loss_of(model(batch_of(step, self.rank).to(self.device))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.full_tensor() for param in model.parameters()]

    @pytest.mark.quick
    def test_reshards_to_two_ranks_on_another_dim(self) -> None:
        def train(reshard_after_forward: int | bool) -> list[torch.Tensor]:
            return self.train(
                linear_stack([BF16, FP32, FP16], dim=DIM),
                reshard_after_forward=reshard_after_forward,
                shard_placement_fn=shard_last_dim,
            )

        with record_collectives() as recorder:
            actual = train(2)
        sizes = [call.group_size for call in recorder.all_gathers]
        self.assertEqual(sizes, ([4] * 3 + [2] * 3) * 2)
        self.assertEqual(actual, train(True), atol=0, rtol=0)

    @parametrize("reduce_dtype", [None, FP32])
    def test_reduce_dtype_keeps_imaginary_parts(
        self, reduce_dtype: torch.dtype | None
    ) -> None:
        model = ComplexPart().to(self.device)
        microbatches = range(2)
        expected: dict[str, torch.Tensor] = {}
        for name, param in model.named_parameters():
            expected[name] = torch.zeros_like(param, dtype=torch.complex128)
        for key in itertools.product(microbatches, range(self.world_size)):
            loss_of(model(batch_of(*key).to(self.device))).backward()
            for name, param in model.named_parameters():
                expected[name] += param.grad / self.world_size
            model.zero_grad()
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        fully_shard(model, mesh=shard_mesh(), mp_policy=policy)
        with record_collectives() as recorder:
            for i in microbatches:
                model.set_requires_gradient_sync(i == 1)
                loss_of(model(batch_of(i, self.rank).to(self.device))).backward()
        dtypes = [call.dtype for call in recorder.reduce_scatters]
        real = [FP32] if reduce_dtype else [FP32, BF16]
        self.assertEqual(dtypes, [torch.complex64, *real])
        self.assertTrue((expected["pole"].imag != 0).all())
        for name, param in model.named_parameters():
            grad = param.grad.full_tensor().to(torch.complex128)
            precision = torch.finfo(param.dtype).eps * 8
            self.assertEqual(grad, expected[name], atol=precision, rtol=precision)


instantiate_parametrized_tests(TestMixedDtypeTraining)


if __name__ == "__main__":
    run_tests()
