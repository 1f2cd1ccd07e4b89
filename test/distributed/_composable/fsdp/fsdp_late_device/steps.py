"""
Steps that are small enough to run in every order, on 2 ranks of a device that is
late. Each trains once before, so that nothing is set up in the step itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_late_device.queues import Recording
from fsdp_late_device.ranks import Rank
from fsdp_late_device.record import Recorder

import torch
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


RANKS = 2

STEPS: dict[str, Callable[[Rank], None]] = {}


def step(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    STEPS[function.__name__] = function
    return function


def record(name: str, **options: Any) -> Recording:
    """Records a step, whose entries are those from its only mark on."""
    return Recorder(RANKS, **options).record(STEPS[name])


class Scales(nn.Module):
    """As few operators as there can be with several parameters."""

    def __init__(self, *dtypes: torch.dtype):
        super().__init__()
        for i, dtype in enumerate(dtypes):
            weight = torch.linspace(0.5 + i, 1.5 + i, 4, dtype=dtype)
            self.register_parameter(f"p{i}", nn.Parameter(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for param in self.parameters():
            x = x * param
        return x


_UNIFORM = torch.float32, torch.float32
_MIXED = torch.float32, torch.bfloat16


def _input(rank: Rank, number: int) -> torch.Tensor:
    return torch.full((4,), 1 + 0.5 * rank.number + 0.25 * number)


def _train(rank: Rank, model: nn.Module, backwards: int = 1) -> None:
    for is_marked in (False, True):
        if is_marked:
            rank.mark()
        for number in range(backwards):
            if backwards > 1:
                model.set_requires_all_reduce(number == backwards - 1)
            out = model(_input(rank, number + backwards * is_marked))
            out.backward(torch.ones_like(out))
        with torch.no_grad():
            for param in model.parameters():
                param._local_tensor.sub_(param.grad._local_tensor)
                param.grad = None


def _mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])


@step
def uniform(rank: Rank) -> None:
    _train(rank, fully_shard(Scales(*_UNIFORM), mesh=_mesh(2)))


@step
def mixed(rank: Rank) -> None:
    _train(rank, fully_shard(Scales(*_MIXED), mesh=_mesh(2)))


@step
def mixed_gathered_twice(rank: Rank) -> None:
    model = fully_shard(Scales(*_MIXED), mesh=_mesh(2), reshard_after_forward=True)
    _train(rank, model)


@step
def mixed_replicas(rank: Rank) -> None:
    _train(rank, fully_shard(Scales(*_MIXED), mesh=_mesh(2, 1)))


@step
def replicated(rank: Rank) -> None:
    _train(rank, replicate(Scales(*_MIXED), mesh=_mesh(2)))


@step
def put_off(rank: Rank) -> None:
    """The all-reduce of the first microbatch waits for that of the second."""
    _train(rank, fully_shard(Scales(torch.bfloat16), mesh=_mesh(2, 1)), 2)


@step
def two_units(rank: Rank) -> None:
    model = nn.Sequential(*(Scales(torch.float32) for _ in range(2)))
    for unit in model:
        fully_shard(unit, mesh=_mesh(2))
    _train(rank, fully_shard(model, mesh=_mesh(2)))


@step
def offloaded(rank: Rank) -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    model = Scales(torch.float32)
    fully_shard(model, mesh=_mesh(2), offload_policy=policy)
    rank.put_on_host(param._local_tensor for param in model.parameters())
    _train(rank, model)
