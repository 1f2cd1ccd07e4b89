"""
A sharded model beside a twin that starts from the same values, and that none of what a
test does to the model is done to: after each step both have the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from fsdp_helpers.common.parity_layers import local_of, loss_of, LR
from fsdp_helpers.common.utils import FSDPProcessTest, shard_mesh
from fsdp_helpers.parity.models import batch_of
from fsdp_helpers.parity.modes import shard_blocks

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy


class SideBySide:
    """A model and its twin, which are trained on the same batches."""

    def __init__(
        self,
        test: FSDPProcessTest,
        model: nn.Module,
        shard: Callable[..., None] = shard_blocks,
        *,
        policy: MixedPrecisionPolicy | None = None,
        **kwargs: Any,
    ):
        self.test = test
        self.model: Any = model.to(test.device)
        self.twin: Any = copy.deepcopy(self.model)
        kwargs.setdefault("mesh", shard_mesh())
        self.optimizers = []
        for each in (self.model, self.twin):
            shard(each, mp_policy=policy or MixedPrecisionPolicy(), **kwargs)
            self.optimizers.append(torch.optim.SGD(each.parameters(), lr=LR))
        self._batch = 0

    def next_batch(self) -> torch.Tensor:
        """Returns a batch of this rank that no other call returns."""
        self._batch += 1
        return batch_of(self._batch, self.test.rank).to(self.test.device)

    def backward(self) -> None:
        """Runs one microbatch on both."""
        batch = self.next_batch()
        losses = [loss_of(each(batch)) for each in (self.model, self.twin)]
        self.test.assertEqual(*losses, atol=0, rtol=0)
        for loss in losses:
            loss.backward()

    def forget(self) -> None:
        """Gives up the step so far, of both."""
        for each in (self.model, self.twin):
            each.reset_iter_state()
            each.zero_grad()

    def step(self) -> None:
        """Compares gradients, steps both and compares parameters."""
        self._compare(lambda param: param.grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._compare(lambda param: param)

    def _compare(self, get: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
        twins = dict(self.twin.named_parameters())
        for name, param in self.model.named_parameters():
            actual, expected = get(param), get(twins.pop(name))
            if actual is None or expected is None:
                self.test.assertIs(actual, expected, name)
                continue
            self.test.assertEqual(actual.dtype, expected.dtype, name)
            # A NaN equals nothing
            is_same = torch.equal(local_of(actual), local_of(expected))
            self.test.assertTrue(is_same, f"{name}: {actual}, not {expected}")
        self.test.assertEqual(len(twins), 0)

    def train(self, *, steps: int = 2) -> None:
        for _ in range(steps):
            self.backward()
            self.step()
