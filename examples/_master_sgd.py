"""SGD for parameters whose own dtype is too coarse to step in."""

from collections.abc import Iterable

import torch
from torch import nn


LEARNING_RATE = 0.1
WARMUP_STEPS = 20
# Gradients of fp16 parameters would underflow without it. As a power of two, it leaves
# the digits of every gradient as they are.
LOSS_SCALE = 2.0**12


class MasterSGD:
    """SGD with momentum that steps fp32 copies of the parameters.

    A bf16 parameter has 8 significant bits: most single updates are too small for it,
    and would be lost. The copies are as sharded as the parameters, so that FSDP still
    moves parameters and gradients at their own width.

    Adam's steps hardly depend on how large the gradients are. SGD's do: were one
    dtype's gradients divided by a wrong number of ranks, the comparison would tell.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], total_steps: int) -> None:
        self.parameters = list(parameters)
        self.masters = [p.detach().float() for p in self.parameters]
        self.sgd = torch.optim.SGD(self.masters, lr=LEARNING_RATE, momentum=0.9)
        warmup = min(WARMUP_STEPS, total_steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.sgd,
            lambda step: min((step + 1) / warmup, 1 - step / total_steps),
        )

    @torch.no_grad()
    def step(self) -> None:
        """Takes gradients of ``LOSS_SCALE * loss``, and frees them."""
        for parameter, master in zip(self.parameters, self.masters):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / LOSS_SCALE
            parameter.grad = None
        self.sgd.step()
        self.schedule.step()
        for parameter, master in zip(self.parameters, self.masters):
            parameter.copy_(master)
