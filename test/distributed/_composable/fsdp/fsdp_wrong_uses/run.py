"""What wrong uses of ``fully_shard`` are tried on, and the table of their errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdp_common.comms import BF16, FP32

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Replicate, Shard


INT32 = torch.int32
# Divides by no number of ranks, so that one of 4 has no row
DIM = 6


class Scaled(nn.Module):
    """A bf16 matrix beside an fp32 gain."""

    def __init__(self, **extra: nn.Parameter) -> None:
        super().__init__()
        values = torch.arange(DIM * DIM, dtype=FP32).view(DIM, DIM) % 7 - 3
        self.weight = nn.Parameter(values.to(BF16))
        self.gain = nn.Parameter(torch.arange(DIM, dtype=FP32) - 2)
        for name, param in extra.items():
            self.register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight).to(FP32) * self.gain


class OwnReduction(ReduceScatter):
    """Has no ``exchange``, which ``grad_comm_dtype`` needs."""

    allocate = DefaultReduceScatter.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return DefaultReduceScatter()(*args, **kwargs)


@dataclass
class Run:
    """One rank, on which one wrong use is tried."""

    device: torch.device
    mesh: DeviceMesh
    # Of what can go on: how to undo what was wrong, before `reset_iter_state`
    root: Any = None
    undo: Callable[[], object] | None = None
    blocks: list[Any] = field(default_factory=list)

    def fully_shard(self, module: Any, **kwargs: Any) -> Any:
        return fully_shard(module, **{"mesh": self.mesh, **kwargs})

    def model(self, **kwargs: Any) -> Any:
        """Returns two blocks, each a unit, in a root that is one as well."""
        self.blocks = [Scaled().to(self.device) for _ in range(2)]
        model = nn.Sequential(*self.blocks)
        for block in self.blocks:
            self.fully_shard(block, **kwargs)
        self.root = self.fully_shard(model, **kwargs)
        return self.root

    def trained(self, **kwargs: Any) -> Any:
        model = self.model(**kwargs)
        self.step(model)
        model.zero_grad()
        return model

    def input(self) -> torch.Tensor:
        x = torch.arange(2 * DIM, dtype=FP32, device=self.device).view(2, DIM) - 5
        return x.requires_grad_()

    def step(self, model: nn.Module) -> None:
        model(self.input()).sum().backward()

    def ones(self, *size: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.ones(size, device=self.device).to(dtype)

    def like(self, param: torch.Tensor, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local.to(self.device), self.mesh, [Shard(0)], run_check=False,
            shape=param.size(), stride=param.stride(),
        )  # fmt: skip

    def replicated(self) -> DTensor:
        placements = [Replicate()]
        return DTensor.from_local(
            self.ones(DIM), self.mesh, placements, run_check=False
        )


# Prepares what is needed, and returns the call that must raise
Case = Callable[[Run], Callable[[], object]]


class WrongUse(NamedTuple):
    kind: type[Exception]
    # How a line of the error or its notes begins, and what follows. "…" is anything
    text: str
    case: Case


class Errors(dict[str, WrongUse]):
    """What each case raises, by its name."""

    def add(self, kind: type[Exception], text: str, **cases: Case) -> None:
        for name, case in cases.items():
            self[name] = WrongUse(kind, text, case)
