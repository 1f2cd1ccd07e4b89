"""
What a wrong use of ``fully_shard`` is told of by, what it is tried on, and the rows of
all that are found, by the phase of training in which they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
INT32, FP8 = torch.int32, torch.float8_e4m3fn
# Divides by no number of ranks, so that one of 4 has no row
DIM = 6


class Scaled(nn.Module):
    """A bf16 matrix beside an fp32 gain."""

    def __init__(self, **others: nn.Parameter) -> None:
        super().__init__()
        values = torch.arange(DIM * DIM, dtype=FP32).view(DIM, DIM) % 7 - 3
        self.weight = nn.Parameter(values.to(BF16))
        self.gain = nn.Parameter(torch.arange(DIM, dtype=FP32) - 2)
        for name, param in others.items():
            self.register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight).to(FP32) * self.gain


class Lookup(nn.Module):
    """An embedding, whose gradients are sparse if it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(DIM, DIM, sparse=True)
        self.scaled = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.table((x > 0).long()[:, 0]))


class Narrow(Scaled):
    """Trains a parameter of 8 bits."""

    def __init__(self) -> None:
        super().__init__(narrow=nn.Parameter(torch.ones(DIM).to(FP8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.narrow.to(FP32)


@dataclass
class Run:
    """One rank, on which one wrong use is tried."""

    device: torch.device
    mesh: DeviceMesh
    # Of what can go on: how to undo what was wrong, before `reset_iter_state`
    root: Any = None
    mend: Callable[[], object] | None = None
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

    def like(self, param: torch.Tensor, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local.to(self.device), self.mesh, [Shard(0)], run_check=False,
            shape=param.size(), stride=param.stride(),
        )  # fmt: skip

    def replicated(self, size: int = DIM) -> DTensor:
        ones = torch.ones(size, device=self.device)
        return DTensor.from_local(ones, self.mesh, [Replicate()], run_check=False)


Case = Callable[[Run], Callable[[], object]]


@dataclass(frozen=True)
class WrongUse:
    name: str
    use: str
    found: str
    kind: type[Exception]
    begins: str
    do: str
    # The parameter or unit that the error must name, where one is concerned
    about: str
    # Whether the error has the words of ``do``. Others are the release's, or torch's,
    # or say it in words that depend on the case
    is_ours: bool
    case: Case


MAKING = "Policies and `fully_shard`"
SETTING = "Settings"
STARTING = "Before the first step"
STEPPING = "In a step"

WRONG_USES: dict[str, WrongUse] = {}
# In the page's order, whatever order the rows are added in
SECTIONS: dict[str, list[str]] = {
    section: [] for section in (MAKING, SETTING, STARTING, STEPPING)
}


def wrong(
    section: str,
    use: str,
    found: str,
    kind: type[Exception],
    begins: str,
    do: str,
    about: str = "",
    is_ours: bool = True,
) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        name = case.__name__
        row = WrongUse(name, use, found, kind, begins, do, about, is_ours, case)
        WRONG_USES[name] = row
        SECTIONS[section].append(name)
        return case

    return add


def add_each(
    section: str,
    rows: Iterable[tuple[str, str, Case, type[Exception], str]],
    *,
    found: str,
    do: str,
    about: str = "",
    is_ours: bool = True,
) -> None:
    """Adds rows that differ in little: (name, use, case, kind, begins) of each."""
    for name, use, case, kind, begins in rows:
        row = WrongUse(name, use, found, kind, begins, do, about, is_ours, case)
        WRONG_USES[name] = row
        SECTIONS[section].append(name)
