"""
Ways in which ranks drift apart. As a program, prints as JSON what each rank then sees.

There each case runs on ranks of its own, processes forked from this one: what is sent
to the wrong partner leaves a process group that nobody can use again.
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the hooks import: once for all ranks
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard


RANKS = 2
ODD = 1  # the rank that does something else
GOOD_STEPS = 3
# Of the process group, however late a rank is on a busy machine
TIME_LIMIT = datetime.timedelta(seconds=300)
# From where ranks drift apart that nothing but this stops
SHORT_TIME_LIMIT = datetime.timedelta(seconds=6)


# What trains #


class Scales(nn.Module):
    """Parameters of these sizes, or values. Uses those that it is told to."""

    def __init__(self, dtype: torch.dtype = torch.float32, **params: Any):
        super().__init__()
        for name, size in (params or {"gate": 4, "up": 8}).items():
            is_value = isinstance(size, torch.Tensor)
            value = size if is_value else torch.ones(size, dtype=dtype)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: torch.Tensor, used: Sequence[str] = ()) -> torch.Tensor:
        for name, param in self.named_parameters():
            if not used or name in used:
                x = x * param.float().mean().to(x.dtype)
        return x


class Chain(nn.Sequential):
    """Runs those of its blocks, with those of their parameters, that it is told to."""

    def forward(
        self,
        x: torch.Tensor,
        used: Sequence[str] = (),
        run: Sequence[int] | None = None,
    ) -> torch.Tensor:
        for i in range(len(self)) if run is None else run:
            x = self[i](x, used)
        return x


@dataclass
class Rank:
    """One rank of a case, and how far it has come."""

    number: int
    device: torch.device
    hangs: bool = False  # where it has drifted apart
    steps: int = 0

    @property
    def is_odd(self) -> bool:
        return self.number == ODD

    def microbatch(self, model: nn.Module, **kwargs: Any) -> None:
        x = torch.ones(3, requires_grad=True, device=self.device)
        model(x, **kwargs).sum().backward()

    def step(self, model: nn.Module, microbatches: int = 1, **kwargs: Any) -> None:
        for _ in range(microbatches):
            self.microbatch(model, **kwargs)
        model.zero_grad()
        self.steps += 1

    def trained(
        self,
        microbatches: int = 1,
        steps: int = GOOD_STEPS,
        apply: Callable[..., Any] = fully_shard,
    ) -> Any:
        """Returns a model after some steps that are alike on all ranks."""
        shift = torch.ones(4, dtype=torch.bfloat16)
        blocks = [Scales(gate=4, up=4, shift=shift.clone()) for _ in range(3)]
        model: Any = Chain(*blocks).to(self.device)
        for block in blocks:
            apply(block)
        model = apply(model)
        for _ in range(steps):
            self.step(model, microbatches)
        self.steps = 0
        if self.hangs:
            dist.barrier()
            dist.distributed_c10d._set_pg_timeout(SHORT_TIME_LIMIT)
        return model


# How ranks drift #


def other_step(odd: dict[str, Any], **trained: Any) -> Callable[[Rank], None]:
    """The odd rank's step is another, after steps that were alike."""

    def run(rank: Rank) -> None:
        model = rank.trained(**trained)
        alike = {"microbatches": trained.get("microbatches", 1)}
        for _ in range(2):
            rank.step(model, **alike | (odd if rank.is_odd else {}))

    return run


def dies_in_backward(rank: Rank) -> None:
    model = rank.trained()
    if rank.is_odd:
        model[1].register_full_backward_pre_hook(lambda *_: os._exit(3))
    rank.step(model)


@dataclass(frozen=True)
class Case:
    run: Callable[[Rank], None]
    # Regex of what all ranks raise if they always compare; empty: the same as by default
    says: str = ""
    # By default, ranks wait for one another until their time limit, but for those that
    # the odd one leaves behind: then these are the steps that each has done until then
    is_left_after: tuple[int, int] | None = None


CASES = {
    "parameter_skipped": Case(
        other_step({"used": ("up", "shift")}),
        r"2.gate gets a gradient.* gets no gradient, .* on rank 1",
    ),
    "unit_skipped": Case(
        other_step({"run": (0, 2)}),
        r"'1' .* on ranks? 0[^;]*; .*'2' .* on rank 1",
    ),
    # All-reduces of units of one size meet unnoticed, until a rank has none left
    "replicated_unit_skipped": Case(
        other_step({"run": (0, 2)}, apply=replicate),
        r"'1' .* on ranks? 0[^;]*; .*'0' .* on rank 1",
        is_left_after=(1, 2),
    ),
    "microbatch_skipped": Case(
        other_step({"microbatches": 1}, microbatches=2),
        r"has earlier gradients .* on ranks? 0[^;]*; .* has no earlier .* rank 1",
        is_left_after=(1, 2),
    ),
    "dies_in_backward": Case(dies_in_backward, is_left_after=(0, 0)),
}


# Running them #


def run_rank(name: str, number: int, folder: Path) -> None:
    # Anew after the fork, before threads of autograd do so, which may abort since 2.15
    torch.set_num_threads(1)
    hangs = CASES[name].is_left_after is None
    rank, found = Rank(number, torch.device("cpu"), hangs), {}
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=number, world_size=RANKS, timeout=TIME_LIMIT
    )
    try:
        CASES[name].run(rank)
    except Exception as error:
        lines = [str(error), *getattr(error, "__notes__", ())]
        found["error"] = f"{type(error).__name__}: " + "\n".join(lines)
    found["steps"] = rank.steps
    (folder / f"{number}.json").write_text(json.dumps(found))


def start(name: str, number: int, folder: Path) -> None:
    if os.fork():
        return
    try:
        # What a backend says as it aborts the process
        log = os.open(folder / f"{number}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 2)
        run_rank(name, number, folder)
    finally:
        os._exit(0)  # as one that fails, without a word to the others


def found_in(folder: Path, number: int) -> dict[str, Any]:
    if (path := folder / f"{number}.json").exists():
        return json.loads(path.read_text())
    return {"died": (folder / f"{number}.log").read_text()[-400:]}


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        folders = {name: Path(root) / name for name in CASES}
        for name, folder in folders.items():
            folder.mkdir()
            for number in range(RANKS):
                start(name, number, folder)
        for _ in range(RANKS * len(CASES)):  # most of them wait most of the time
            os.wait()
        found = {
            name: [found_in(folder, number) for number in range(RANKS)]
            for name, folder in folders.items()
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
