# Owner(s): ["oncall: distributed"]
"""
How many collectives a step of a mixed unit issues, in which order, and how many bytes
they carry. Whether their results are right is in ``test_fully_shard_parity.py`` and
``test_fully_shard_random.py``, but for complex parameters, which the release gets wrong
or refuses.
"""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from fsdp_helpers.common import comms, utils
from fsdp_helpers.common.comms import BF16, FP16, FP32, FP64, policy_of, Spec
from fsdp_helpers.common.parity_layers import batch_of, DIM, loss_of
from fsdp_helpers.common.release_rules import compute_dtype, reduce_dtype, reduce_dtypes

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.common_utils import parametrize, run_tests


# Storage dtypes of a unit's parameters, and its policy
UNITS = {
    "fp32": ([FP32], policy_of()),
    "bf16": ([BF16], policy_of()),
    "fp16": ([FP16, FP16, FP16], policy_of()),
    "two dtypes": ([FP32, BF16, FP32, BF16], policy_of()),
    "four dtypes": ([FP16, BF16, FP64, FP32, FP16], policy_of()),
    "reduced in one": ([BF16, FP32, FP16, FP32], policy_of(None, FP32)),
    "computed in one": ([BF16, FP32, FP16, FP32], policy_of(BF16)),
    "computed and reduced in one": ([BF16, FP32, FP16, FP32], policy_of(BF16, FP32)),
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


class TestUnits(utils.FSDPProcessTest):
    def module(self, specs: Sequence[Spec], policy: MixedPrecisionPolicy) -> Any:
        how: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": True}
        return comms.sharded(specs, utils.shard_mesh(), device=utils.DEVICE_TYPE, **how)

    def weights(self, specs: Sequence[Spec], rank: int) -> list[torch.Tensor]:
        """Returns small integers, which every dtype holds."""
        return [
            utils.random_input(*spec.size, seed=100 * rank + i).mul(4).round()
            for i, spec in enumerate(specs)
        ]

    def expected_gather(
        self, specs: Sequence[Spec], policy: MixedPrecisionPolicy
    ) -> tuple[torch.dtype, int]:
        """Returns dtype and bytes of a rank: each of several dtypes is padded to 16."""
        nbytes: dict[torch.dtype, int] = {}
        for spec in specs:
            dtype = compute_dtype(policy, spec.dtype)
            numel = spec.padded_shard_numel(self.world_size)
            nbytes[dtype] = nbytes.get(dtype, 0) + numel * dtype.itemsize
        if len(nbytes) == 1:
            return next(iter(nbytes.items()))
        return torch.uint8, sum(n + -n % 16 for n in nbytes.values())

    def expected_reductions(
        self, specs: Sequence[Spec], policy: MixedPrecisionPolicy
    ) -> list[utils.Collective]:
        """Returns one for each reduce dtype, the widest first."""
        numels = dict.fromkeys(reduce_dtypes(policy, [s.dtype for s in specs]), 0)
        for spec in specs:
            numel = spec.padded_shard_numel(self.world_size)
            numels[reduce_dtype(policy, spec.dtype)] += numel * self.world_size
        ops = dict.fromkeys((BF16, FP32), "AVG")
        return [
            utils.Collective("reduce_scatter", d, n, ops.get(d, "SUM"), self.world_size)
            for d, n in numels.items()
        ]

    def assert_same_on_all_ranks(self, calls: list[utils.Collective]) -> None:
        everywhere: list[Any] = [None] * self.world_size
        dist.all_gather_object(everywhere, calls)
        self.assertEqual(everywhere, [calls] * self.world_size)

    @pytest.mark.quick
    @parametrize("name", [*UNITS])
    def test_one_gather_each_way_and_one_reduction_by_dtype(self, name: str) -> None:
        dtypes, policy = UNITS[name]
        specs = [Spec((3 + i, 3), dtype) for i, dtype in enumerate(dtypes)]
        module = self.module(specs, policy)
        with utils.record_collectives() as recorded:
            module(self.weights(specs, self.rank)).backward()
        forward, backward, *reductions = recorded.calls
        for gather in (forward, backward):
            self.assertEqual(gather.name, "all_gather")
            found = gather.dtype, gather.nbytes_per_rank
            self.assertEqual(found, self.expected_gather(specs, policy))
        self.assertEqual(reductions, self.expected_reductions(specs, policy))
        self.assert_same_on_all_ranks(recorded.calls)

    @parametrize("dtypes", [(None, None), (BF16, None), (BF16, FP32)])
    def test_unused_parameters_reduce_zeros_in_their_dtype(self, dtypes: tuple) -> None:
        """Even ranks use the first parameter, odd ones the second, none the third."""
        policy = policy_of(*dtypes)
        specs = [Spec((5, 3), BF16), Spec((1,), FP32), Spec((7, 2), FP16)]
        module = self.module(specs, policy)
        module.set_reduce_scatter_unused_params(True)

        def used_by(rank: int) -> list[torch.Tensor | None]:
            weights = self.weights(specs, rank)
            return [w if i == rank % 2 else None for i, w in enumerate(weights)]

        with utils.record_collectives() as recorded:
            module(used_by(self.rank)).backward()
        expected = self.expected_reductions(specs, policy)
        self.assertEqual(recorded.reduce_scatters, expected)
        self.assert_same_on_all_ranks(recorded.calls)
        totals = [torch.zeros(spec.size, device=self.device) for spec in specs]
        for rank in range(self.world_size):
            for total, weight in zip(totals, used_by(rank)):
                total += 0 if weight is None else weight
        for param, total in zip(module.parameters(), totals, strict=True):
            mean = (total / self.world_size).to(param.dtype)
            self.assertEqual(param.grad.full_tensor(), mean)

    def train_in_one_region(
        self,
        dtype: torch.dtype,
        *,
        keeps_casts: bool,
        first_has_grads: bool = True,
        zeros_for_unused: bool = False,
    ) -> tuple[list[list[torch.Tensor]], list[utils.Collective]]:
        """Returns the gradients of each step of two microbatches, and the reductions."""
        model = utils.linear_stack([FP32, dtype] * 3).to(self.device)
        for i in (0, 2, 4):
            fully_shard([model[i], model[i + 1]], mesh=utils.shard_mesh())
        fully_shard(model, mesh=utils.shard_mesh())
        model.set_reduce_scatter_unused_params(zeros_for_unused)
        steps: list[list[torch.Tensor]] = []
        with utils.record_collectives() as recorder:
            for _ in range(2):
                with torch.autocast(utils.DEVICE_TYPE, BF16, cache_enabled=keeps_casts):
                    for i in range(2):
                        x = utils.random_input(2, 9, seed=2 * self.rank + i)
                        with torch.set_grad_enabled(i == 1 or first_has_grads):
                            loss = model(x).float().square().mean()
                        if loss.requires_grad:
                            loss.backward()
                steps.append([p.grad.to_local().clone() for p in model.parameters()])
                model.zero_grad()
        return steps, recorder.reduce_scatters

    @parametrize("dtype", [FP32, BF16])
    @parametrize("first_has_grads", [True, False])
    def test_microbatches_in_one_autocast_region_reduce_all_gradients(
        self, dtype: torch.dtype, first_has_grads: bool
    ) -> None:
        """Those of casts that autocast has kept come after the unit's post-backward."""
        how = {"first_has_grads": first_has_grads}
        expected, calls = self.train_in_one_region(dtype, keeps_casts=False, **how)
        steps, reductions = self.train_in_one_region(dtype, keeps_casts=True, **how)
        self.assertEqual(steps, expected, atol=0, rtol=0)
        self.assert_same_on_all_ranks(reductions)
        self.assertEqual(sorted(map(str, reductions)), sorted(map(str, calls)))

    def test_gradients_that_come_late_on_some_ranks_only_are_warned_of(self) -> None:
        """As zeros that stand for others allow: what one rank has is not reduced."""
        for keeps in (False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _, reductions = self.train_in_one_region(
                    FP32, keeps_casts=keeps, zeros_for_unused=True
                )
            self.assertEqual(len(reductions), 2 * 2 * 3)  # steps, microbatches, units
            late = [w for w in caught if "came after their unit had reduced" in str(w)]
            self.assertEqual(bool(late), keeps)
        text = str(late[0].message)
        self.assertIn("Gradients of 2.weight, 2.bias, 3.weight, 3.bias came aft", text)
        self.assertIn("Give each microbatch an autocast region, or", text)

    @parametrize("reduce_dtype", [None, FP32])
    def test_reduce_dtype_keeps_imaginary_parts(self, reduce_dtype: Any) -> None:
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
        fully_shard(model, mesh=utils.shard_mesh(), mp_policy=policy)
        with utils.record_collectives() as recorder:
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


if __name__ == "__main__":
    run_tests()
