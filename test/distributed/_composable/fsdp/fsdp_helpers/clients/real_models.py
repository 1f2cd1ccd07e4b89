"""
Real models for tests: their dtypes, losses and batches, and training beside one process.
Importing this makes ``examples/`` importable, whose ``kept_in_fp32.py`` is asked for the
dtypes. The sharded model and the one process multiply alike: see ``half_products``.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Callable, Collection, Iterator
from importlib.util import find_spec
from typing import Any

from fsdp_helpers.clients.half_products import widen_half_products
from fsdp_helpers.clients.one_process import (
    Difference,
    LossFunction,
    train_side_by_side,
)
from fsdp_helpers.common.utils import PRELOADED, REPO_ROOT

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


sys.path.append(str(REPO_ROOT / "examples"))
PRELOADED += ["transformers", "peft", "diffusers"]
# In each process of a test: tiny bf16 models would mostly wait for slow products
widen_half_products()

VOCABULARY = 64
SEQUENCE_LENGTH = 16


def needs(*packages: str) -> Any:
    """
    Skips tests where packages of other people's are missing: one that was yanked stops
    no test of FSDP itself. Continuous integration has all of them.
    """
    missing = [name for name in packages if find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed, see pyproject.toml"
    return unittest.skipIf(bool(missing) and not os.environ.get("CI"), reason)


def make_mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),))


def cast_parameters(
    model: nn.Module, dtype: torch.dtype, *, but_fp32: Collection[str]
) -> None:
    """Casts every parameter to ``dtype``, but those of the given names to fp32.

    A name fits where a parameter's ends with it: ``gate.weight`` is the weight of
    every module called ``gate``. Buffers stay as they are.
    """
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


def train(
    build_model: Callable[[], nn.Module],
    shard: Callable[[nn.Module, DeviceMesh], object],
    mesh: DeviceMesh,
    batches: Iterator[Tensor],
    device: torch.device,
    loss_of: LossFunction = causal_loss,
) -> Iterator[list[Difference]]:
    """Trains the model sharded, and yields its steps, compared with one process."""
    torch.manual_seed(0)
    model = build_model().to(device)
    return train_side_by_side(model, shard, mesh, loss_of, batches)
