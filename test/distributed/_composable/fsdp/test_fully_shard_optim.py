# Owner(s): ["oncall: distributed"]
"""Steps and clipping with gradients of several dtypes, beside one process."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from fsdp_helpers.common import utils

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import AdamW, Muon, Optimizer, SGD
from torch.testing._internal.common_utils import parametrize, run_tests


STEPS = 3
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Powers of two: a product is exact, so that it does not matter which kernels round it
# before they add and which do not
LR = 0.25
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    # fp16 cannot hold the usual eps
    "adamw_fused": partial(AdamW, lr=0.01, eps=1e-3, fused=True),
    "sgd": partial(SGD, lr=LR, momentum=0.5, foreach=True),
}


class Pair:
    """A sharded model and, in one process, one that is given its gradients."""

    def __init__(self, test: utils.FSDPProcessTest):
        self.rank = test.rank
        self.model = utils.mixed_model().to(test.device)
        self.alone = copy.deepcopy(self.model)
        utils.shard_blocks(self.model, mesh=utils.hybrid_mesh(utils.WORLD_SIZE // 2))

    def backward(self, step: int) -> None:
        x = utils.random_input(4, 9, seed=utils.WORLD_SIZE * step + self.rank)
        self.model(x).float().square().mean().backward()
        for param, alone in self.params():
            alone.grad = full(param.grad)

    def step(self, step: int, *optimizers: Optimizer) -> None:
        self.backward(step)
        for each in optimizers:
            each.step()
        self.model.zero_grad()

    def params(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Returns pairs of a sharded parameter and the whole one."""
        pair = self.model.parameters(), self.alone.parameters()
        return list(zip(*pair, strict=True))


def full(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


class TestOptim(utils.FSDPProcessTest):
    def check_equal(self, sharded: Any, whole: Any, tolerance: float = 0) -> None:
        actual = full(sharded)
        self.assertEqual(actual.dtype, whole.dtype)
        self.assertEqual(actual, whole, rtol=tolerance, atol=tolerance * LR)

    @parametrize("name", list(OPTIMIZERS))
    def test_optimizer_steps_as_one_process(self, name: str) -> None:
        """To the last bit, but that Adam's kernels may round once less in a step."""
        pair = Pair(self)
        optimizer = OPTIMIZERS[name](pair.model.parameters())
        alone = OPTIMIZERS[name](pair.alone.parameters())
        before = [whole.detach().clone() for _, whole in pair.params()]
        for step in range(STEPS):
            pair.step(step, optimizer, alone)
        for (param, whole), start in zip(pair.params(), before, strict=True):
            eps = torch.finfo(whole.dtype).eps
            tolerance = STEPS * eps if name.startswith("adam") else 0
            self.check_equal(param, whole, tolerance)
            self.assertFalse(torch.equal(whole, start))
            for key, state in alone.state[whole].items():
                if key != "step":
                    self.check_equal(optimizer.state[param][key], state, tolerance)
                    self.assertEqual(state.dtype, whole.dtype)

    def test_muon_steps_as_one_process(self) -> None:
        """Orthogonalizes whole matrices in bf16, which sums in another order."""
        pair = Pair(self)
        matrices = [each for each in pair.params() if each[0].dim() == 2]
        self.assertEqual({param.dtype for param, _ in matrices}, {BF16, FP16})
        optimizers = [Muon(params, lr=0.1) for params in zip(*matrices)]
        before = [whole.detach().clone() for _, whole in matrices]
        for step in range(STEPS):
            pair.step(step, *optimizers)
        for (param, whole), start in zip(matrices, before, strict=True):
            moved = (whole - start).float().norm()
            self.assertLess((full(param) - whole).float().norm(), 2**-4 * moved)

    @parametrize("foreach", [None, False])
    def test_clipping_scales_all_dtypes_by_one_norm(self, foreach: bool | None) -> None:
        """One norm over all dtypes, and each gradient scaled in its own."""
        pair = Pair(self)
        pair.backward(0)
        grads = [whole.grad.double() for _, whole in pair.params()]
        exact = torch.stack([grad.norm() for grad in grads]).norm()
        args = {"foreach": foreach}
        total = get_total_norm([param.grad for param, _ in pair.params()], **args)
        norm = clip_grad_norm_(pair.model.parameters(), 0.1, **args)
        self.assertGreater(exact, 0.1)
        for each in (total, norm):
            # The norm of a bf16 gradient is bf16 itself
            self.assertEqual(each.dtype, FP32)
            eps = torch.finfo(BF16).eps
            self.assertEqual(full(each).double(), exact, rtol=eps, atol=0)
        for (param, whole), grad in zip(pair.params(), grads, strict=True):
            self.assertEqual(param.grad.dtype, whole.dtype)
            scaled = grad * (0.1 / (full(norm).double() + 1e-6))
            finfo = torch.finfo(whole.dtype)
            least = finfo.smallest_normal * finfo.eps  # fp16 may be subnormal
            actual = full(param.grad).double()
            # The factor is rounded to the gradient's dtype, and the product is
            self.assertEqual(actual, scaled, rtol=2 * finfo.eps, atol=least)

    @parametrize("overflows", [False, True])
    def test_grad_scaler_skips_the_step_of_all_ranks(self, overflows: bool) -> None:
        """What overflows on one rank makes all of them skip the step."""
        units = utils.linear_stack([FP32, BF16, FP32]), utils.linear_stack([BF16, FP32])
        model = nn.Sequential(*units).to(self.device)
        policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32)
        utils.shard_blocks(model, mesh=utils.shard_mesh(), mp_policy=policy)
        optimizer = SGD(model.parameters(), lr=LR)
        how = {"init_scale": 2.0**8, "growth_interval": 1}
        scaler = torch.amp.GradScaler(self.device.type, **how)
        before = [full(param).clone() for param in model.parameters()]
        loss = model(utils.random_input(4, 9, seed=self.rank)).float().square().mean()
        factor = float("inf") if overflows and self.rank == 1 else 1.0
        scaler.scale(factor * loss).backward()
        scaler.unscale_(optimizer)
        grads = [full(param.grad) for param in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        self.assertEqual(scaler.get_scale(), 2.0**7 if overflows else 2.0**9)
        self.assertEqual({grad.dtype for grad in grads}, {BF16, FP32})
        for param, start, grad in zip(model.parameters(), before, grads, strict=True):
            expected = start if overflows else start - LR * grad
            self.check_equal(param, expected)
            # Far from the scale, by which all gradients were multiplied
            self.assertTrue(overflows or grad.float().norm() < 8)


if __name__ == "__main__":
    run_tests()
