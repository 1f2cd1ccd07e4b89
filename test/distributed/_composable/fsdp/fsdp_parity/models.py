"""
The towers that modes are trained on. They keep the parameters of each dtype in a
module of their own, so that the release, which wants one dtype in a unit,
can shard those modules where this branch shards their parent.

Where gradients of several uses meet, there are two of them: a sum of two does not
depend on its order, so models cut into different units give equal bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F


# Divides by 4 ranks; the other sizes do not
DIM = 8
HIDDEN = 5
CODE = 3

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MIXED = ((FP32, BF16, FP16), (FP16, FP32, BF16))


class Decoder(nn.Module):
    """Uses another module's parameter under a name of its own."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, code: torch.Tensor) -> torch.Tensor:
        return F.linear(code, self.weight.t())


class Part(nn.Module):
    """
    Parameters of one dtype: evenly and unevenly sharded ones, one of a single
    element, one that is shared and one that is frozen.
    """

    def __init__(self, dtype: torch.dtype, *, is_tied: bool = True):
        super().__init__()
        self.gain = nn.Parameter(1 + torch.randn(DIM).mul(0.1).to(dtype))
        self.up = nn.Parameter(torch.randn(HIDDEN, DIM).mul(0.4).to(dtype))
        self.down = nn.Parameter(torch.randn(DIM, HIDDEN).mul(0.4).to(dtype))
        self.scale = nn.Parameter(torch.rand(1).add(0.5).to(dtype))
        self.code = nn.Parameter(torch.randn(CODE, DIM).mul(0.3).to(dtype))
        self.shift = nn.Parameter(torch.randn(DIM).to(dtype), requires_grad=False)
        weight = self.code if is_tied else nn.Parameter(self.code.detach().clone())
        self.decoder = Decoder(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.up.dtype) * self.gain + self.shift
        y = F.linear(torch.tanh(F.linear(y, self.up)), self.down) * self.scale
        y = y + self.decoder(F.linear(y, self.code))
        return x + y.to(x.dtype)


class Block(nn.Module):
    """Parts one after the other, of which a forward may skip some."""

    def __init__(self, dtypes: Sequence[torch.dtype], *, is_tied: bool = True):
        super().__init__()
        self.parts = nn.ModuleList(Part(dtype, is_tied=is_tied) for dtype in dtypes)

    def forward(self, x: torch.Tensor, skip: Collection[int] = ()) -> torch.Tensor:
        for i, part in enumerate(self.parts):
            if i not in skip:
                x = part(x)
        return x


class Tower(nn.Module):
    """Blocks between a stem and a head, which are the root's own parameters."""

    def __init__(
        self,
        dtypes: Sequence[Sequence[torch.dtype]] = MIXED,
        *,
        stem: torch.dtype = BF16,
        head: torch.dtype = FP32,
        is_tied: bool = True,
    ):
        super().__init__()
        self.stem = Part(stem, is_tied=is_tied)
        self.blocks = nn.ModuleList(Block(each, is_tied=is_tied) for each in dtypes)
        self.head = Part(head, is_tied=is_tied)

    @property
    def all_parts(self) -> list[Part]:
        return [module for module in self.modules() if isinstance(module, Part)]

    def forward(
        self,
        x: torch.Tensor,
        skip: Collection[int] = (),
        blocks: Collection[int] | None = None,
    ) -> torch.Tensor:
        """
        Args:
            skip: Parts that no block runs.
            blocks: The blocks to run; None runs all.
        """
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            if blocks is None or i in blocks:
                x = block(x, skip=skip)
        return self.head(x)


def mixed_tower(*, seed: int = 0, is_tied: bool = True) -> Tower:
    """Returns a tower of three dtypes, with the same values on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Tower(is_tied=is_tied)


def uniform_tower(dtype: torch.dtype) -> Tower:
    """Returns a tower of one dtype, with the same values on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tower(((dtype, dtype),) * 2, stem=dtype, head=dtype)


def batch_of(*key: int) -> torch.Tensor:
    """Returns the input that belongs to ``key``, e.g. a step and a rank."""
    seed = sum(part * 1000**i for i, part in enumerate(key))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, DIM, generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()
