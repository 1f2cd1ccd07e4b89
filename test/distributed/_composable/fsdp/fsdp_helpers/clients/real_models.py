"""
Real models for tests: their dtypes, losses and batches, and training beside one process.
Importing this makes ``examples/`` importable, whose ``kept_in_fp32.py`` is asked for the
dtypes. The sharded model and the one process multiply alike: see ``half_products``.

[Note: what must be equal at each step]
Every process also has the model unsharded. It runs the batches of all ranks through
it, one after the other, and so knows each rank's loss and gradient bit for bit, and
the exact mean of the gradients, which it computes in fp64.

Loss: equal. The operators and the values are the same.

Gradients: the reduction adds one gradient per rank in their own dtype, and divides the
sum. Each of these operations rounds by at most half an eps of a partial sum, and no
partial sum is larger than the sum of the absolute values. With N ranks that is
(N + 1) * eps / 2 of the mean of the absolute values: eps is 2**-7 in bf16 and 2**-23
in fp32. A gradient that went through bf16 on its way to an fp32 parameter is far out.

Parameters: equal. Before the unsharded model steps, it takes over the gradients that
the sharded one has, which were checked just before. So rounding does not add up, and
the last step is compared as strictly as the first.

Accelerators may choose other kernels for shards, or add in any order: there the
tolerances are wider, and still tell a gradient that is wrong by a factor of 2.
"""

import copy
import math
import os
import sys
import unittest
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from fsdp_helpers.clients.half_products import widen_half_products
from fsdp_helpers.common.utils import REPO_ROOT

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor


sys.path.append(str(REPO_ROOT / "examples"))
# In each process of a test: tiny bf16 models would mostly wait for slow products
widen_half_products()

VOCABULARY = 64
SEQUENCE_LENGTH = 16
LEARNING_RATE = 2**-8
ACCELERATOR_TOLERANCE = 2**-3

# Takes the model and a batch of tokens
LossFunction = Callable[[nn.Module, Tensor], Tensor]


# Models and batches #


def needs(*packages: str) -> Any:
    """Skips tests where others' packages are missing. CI has all of them."""
    missing = [name for name in packages if find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed, see pyproject.toml"
    return unittest.skipIf(bool(missing) and not os.environ.get("CI"), reason)


def make_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),))


def cast_parameters(
    model: nn.Module, dtype: torch.dtype, *, but_fp32: Collection[str]
) -> None:
    """Casts all parameters to ``dtype``, and those of which names end so to fp32."""
    found = set()
    for name, parameter in model.named_parameters():
        fits = {end for end in but_fp32 if f".{name}".endswith(f".{end}")}
        parameter.data = parameter.detach().to(torch.float32 if fits else dtype)
        found |= fits
    if found != set(but_fp32):
        raise ValueError(f"no parameter is called {set(but_fp32) - found}")


def causal_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss that transformers' models compute themselves."""
    return model(input_ids=tokens, labels=tokens).loss


def token_batches(
    steps: int, batch_size: int, device: torch.device
) -> Iterator[Tensor]:
    """Yields sequences that count up from random tokens, alike in every process."""
    generator = torch.Generator().manual_seed(0)
    count = torch.arange(SEQUENCE_LENGTH)
    for _ in range(steps):
        first = torch.randint(VOCABULARY, (batch_size, 1), generator=generator)
        yield ((first + count) % VOCABULARY).to(device)


# Beside one process #


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from that of one process, at most, and how far it may be."""

    what: str
    where: str
    relative: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.relative <= self.allowed


def train_side_by_side(
    model: nn.Module,
    shard: Callable[[nn.Module, DeviceMesh], object],
    mesh: DeviceMesh,
    loss_of: LossFunction,
    batches: Iterable[Tensor],
) -> Iterator[list[Difference]]:
    """Trains ``model``, sharded, and yields what differs on this rank by step."""
    reference = OneProcess(copy.deepcopy(model), loss_of)
    shard(model, mesh)
    optimizer = make_optimizer(model)
    for batch in batches:
        chunks = batch.chunk(dist.get_world_size())
        loss = loss_of(model, chunks[dist.get_rank()])
        loss.backward()
        losses = reference.backward(chunks)
        found = [
            _loss_difference(loss.detach(), losses[dist.get_rank()]),
            *reference.gradient_differences(model),
        ]
        reference.step(model)
        optimizer.step()
        optimizer.zero_grad()
        yield [*found, *reference.parameter_differences(model)]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # fp16 has no 1e-8: that would be 0, and 0 is what unused words are divided by
    is_half = any(p.dtype is torch.float16 for p in model.parameters())
    eps = 2**-10 if is_half else 1e-8
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=eps)


class OneProcess:
    """The unsharded model, and the exact gradients of the step."""

    def __init__(self, model: nn.Module, loss_of: LossFunction) -> None:
        self.model = model
        self.loss_of = loss_of
        self.optimizer = make_optimizer(model)
        self.means: dict[str, Tensor] = {}
        self.magnitudes: dict[str, Tensor] = {}  # means of the absolute values

    def backward(self, chunks: tuple[Tensor, ...]) -> list[Tensor]:
        """Computes all ranks' gradients, and returns their losses."""
        losses = []
        self.means, self.magnitudes = {}, {}
        for chunk in chunks:
            loss = self.loss_of(self.model, chunk)
            loss.backward()
            losses.append(loss.detach())
            for name, parameter in self.model.named_parameters():
                if parameter.grad is None:
                    continue
                part = parameter.grad.double() / len(chunks)
                for sums, term in ((self.means, part), (self.magnitudes, part.abs())):
                    sums[name] = sums[name] + term if name in sums else term
                parameter.grad = None
        return losses

    def gradient_differences(self, sharded: nn.Module) -> Iterator[Difference]:
        """Compares what the sharded model has reduced."""
        for name, parameter in sharded.named_parameters():
            kind = f"{_name_of(parameter.dtype)} gradients"
            if parameter.grad is None or name not in self.means:
                both = parameter.grad is None and name not in self.means
                yield Difference(kind, name, 0.0 if both else math.inf, 0.0)
                continue
            gradient = _full(parameter.grad)
            roundings = dist.get_world_size() + 1
            allowed = roundings * torch.finfo(gradient.dtype).eps / 2
            if gradient.device.type != "cpu":
                allowed += ACCELERATOR_TOLERANCE
            apart = (gradient.double() - self.means[name]).abs()
            size = self.magnitudes[name]
            relative = torch.where(apart == 0, 0.0, apart / size).max().item()
            yield Difference(kind, name, relative, allowed)

    def step(self, sharded: nn.Module) -> None:
        """Steps with the gradients of the sharded model."""
        for name, parameter in sharded.named_parameters():
            own = self.model.get_parameter(name)
            own.grad = None if parameter.grad is None else _full(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameter_differences(self, sharded: nn.Module) -> Iterator[Difference]:
        for name, expected in self.model.named_parameters():
            actual = _full(sharded.get_parameter(name))
            same = actual.dtype == expected.dtype and torch.equal(actual, expected)
            kind = f"{_name_of(expected.dtype)} parameters"
            yield Difference(kind, name, 0.0 if same else math.inf, 0.0)


def _loss_difference(loss: Tensor, expected: Tensor) -> Difference:
    relative = ((loss - expected).abs() / expected.abs()).item()
    exact = loss.device.type == "cpu"
    allowed = 0.0 if exact else ACCELERATOR_TOLERANCE
    return Difference("loss", "this rank", relative, allowed)


def _full(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
