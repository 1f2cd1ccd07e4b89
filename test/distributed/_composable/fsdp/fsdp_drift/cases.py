"""
Lets ranks drift apart in many ways, and prints as JSON what each of them sees.

Each case runs on ranks of its own, processes forked from this one: what is sent to
the wrong partner leaves a process group that nobody can use again.
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # what the hooks import: once for all ranks
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard, set_backward_prefetch


RANKS = 2
ODD = 1  # the rank that does something else
GOOD_STEPS = 3
AT_ONCE = 10  # cases: most of them wait most of the time
# Of the process group, however late a rank is on a busy machine
TIME_LIMIT = datetime.timedelta(seconds=300)
# From where ranks drift apart that nothing but this stops
SHORT_TIME_LIMIT = datetime.timedelta(seconds=6)
SWITCH = "TORCH_FSDP_CHECK_RANKS_AGREE"
NAMES = ("gate", "up", "shift")


# What trains #


class Block(nn.Module):
    """Uses those of its parameters that it is told to: two of them of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.ones(4)) for _ in range(2))
        self.shift = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, used: Sequence[str]) -> torch.Tensor:
        for name in used:
            x = x * getattr(self, name).float().mean()
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(
        self,
        x: torch.Tensor,
        used: Sequence[str] = NAMES,
        skipped: Sequence[int] = (),
    ) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i not in skipped:
                x = layer(x, used)
        return x


@dataclass
class Rank:
    """One rank of a case, and how far it has come."""

    number: int
    hangs: bool = False  # where it has drifted apart
    steps: int = 0

    @property
    def is_odd(self) -> bool:
        return self.number == ODD

    def shard(
        self, model: Model | None = None, apply: Callable[..., Any] = fully_shard
    ) -> Any:
        model = model or Model()
        for layer in model.layers:
            apply(layer)
        return apply(model)

    def microbatch(self, model: Model, **kwargs: Any) -> None:
        x = torch.ones(3, requires_grad=True)
        model(x, **kwargs).sum().backward()

    def step(self, model: Model, microbatches: int = 1, **kwargs: Any) -> None:
        for _ in range(microbatches):
            self.microbatch(model, **kwargs)
        model.zero_grad()
        self.steps += 1

    def trained(
        self, microbatches: int = 1, steps: int = GOOD_STEPS, **kwargs: Any
    ) -> Any:
        """Returns a model after some steps that are alike on all ranks."""
        model = self.shard(**kwargs)
        for _ in range(steps):
            self.step(model, microbatches)
        self.steps = 0
        if self.hangs:
            dist.barrier()
            dist.distributed_c10d._set_pg_timeout(SHORT_TIME_LIMIT)
        return model


# How ranks drift #

# What comes of it
ALL_RAISE, OTHERS_RAISE = "all raise", "others raise"
TIME_OUT, NOT_SEEN, FINE = "time limit", "not seen", "fine"
MODES = ("1", "always")  # by default, and where ranks always compare


class Case(NamedTuple):
    run: Callable[[Rank], None]
    outcomes: dict[str, str]  # by mode
    says: str  # what errors say where all ranks raise


CASES: dict[str, Case] = {}


def case(by_default: str, says: str = "") -> Callable[..., Any]:
    """Makes a case of a function: where ranks always compare, all may raise."""

    def add(run: Callable[[Rank], None]) -> Callable[[Rank], None]:
        always = ALL_RAISE if says else by_default
        outcomes = dict(zip(MODES, (by_default, always), strict=True))
        CASES[run.__name__] = Case(run, outcomes, says)
        return run

    return add


@case(TIME_OUT, says=r"layers.2.gate gets a gradient.* gets no gradient, .* on rank 1")
def parameter_later(rank: Rank) -> None:
    """It skips a parameter, after steps that were alike."""
    model = rank.trained()
    for _ in range(2):
        rank.step(model, used=NAMES[1:] if rank.is_odd else NAMES)


@case(
    TIME_OUT, says=r"'layers.1' .* as number 2 on rank 0; .*'layers.2' .* number 3 on"
)
def unit_later(rank: Rank) -> None:
    """It skips a unit, after such steps."""
    model = rank.trained()
    for _ in range(2):
        rank.step(model, skipped=(1,) if rank.is_odd else ())


@case(
    TIME_OUT, says=r"'layers.2' .* as number 3 on rank 0; .*'layers.1' .* number 2 on"
)
def unit_at_first(rank: Rank) -> None:
    """It skips the last unit from the first step on."""
    model = rank.trained(steps=0)
    rank.step(model, skipped=(2,) if rank.is_odd else ())


@case(NOT_SEEN, says=r"'layers.1' .* as number 2 on rank 0; .*'layers.0' .* number 3")
def replicated_unit_later(rank: Rank) -> None:
    """It skips a unit of `replicate`, after such steps."""
    model = rank.trained(apply=replicate)
    for _ in range(2):
        rank.step(model, skipped=(1,) if rank.is_odd else ())


@case(NOT_SEEN, says=r"has earlier gradients .* on rank 0; .* has no earlier .* rank 1")
def microbatch(rank: Rank) -> None:
    """It skips a microbatch, where each microbatch reduces."""
    model = rank.trained(microbatches=2)
    for _ in range(2):
        rank.step(model, microbatches=1 if rank.is_odd else 2)


@case(
    TIME_OUT,
    says=r"'layers.2' is reduced .* on rank 0; unit 'layers.0' is gathered .* rank",
)
def sync_of_a_microbatch(rank: Rank) -> None:
    """It has gradient sync off where the others sync."""
    model = rank.trained()
    for _ in range(2):
        model.set_requires_gradient_sync(not rank.is_odd)
        rank.microbatch(model)
        model.set_requires_gradient_sync(True)
        rank.step(model)


@case(TIME_OUT, says="is gathered")
def prefetch(rank: Rank) -> None:
    """It gathers ahead in backward, where the others do not."""
    model = rank.trained()
    if not rank.is_odd:
        set_backward_prefetch(model, None)
    for _ in range(2):
        rank.step(model)


@case(OTHERS_RAISE)
def fewer_steps(rank: Rank) -> None:
    """It has data for fewer steps, and ends."""
    model = rank.trained()
    for _ in range(1 if rank.is_odd else 2):
        rank.step(model)


@case(
    TIME_OUT, says=r"'layers.2' is gathered .* on rank 0; unit 'layers.0' is gathered"
)
def step_given_up_by_one_rank(rank: Rank) -> None:
    """It gives up a step (out of memory) and goes on with the next."""
    model = rank.trained()
    if rank.is_odd:  # as if its batch had been too large, and goes on with the next
        handle = model.layers[1].register_forward_pre_hook(_out_of_memory)
        try:
            rank.step(model)
        except torch.OutOfMemoryError:
            handle.remove()
            model.reset_iter_state()
            model.zero_grad()
    for _ in range(2):
        rank.step(model)


def _out_of_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError("on purpose")


@case(FINE)
def units_sharded_in_another_order(rank: Rank) -> None:
    """It calls `fully_shard` on the blocks in another order."""
    model = Model()
    for layer in [*model.layers][:: -1 if rank.is_odd else 1]:
        fully_shard(layer)
    rank.step(fully_shard(model))


@case(OTHERS_RAISE)
def root_sharded_first(rank: Rank) -> None:
    """It calls `fully_shard` on the root first."""
    model = Model()
    if rank.is_odd:
        fully_shard(model)
    rank.step(rank.shard(model))


@case(OTHERS_RAISE)
def dies_in_backward(rank: Rank) -> None:
    """It dies in backward."""
    model = rank.trained()
    if rank.is_odd:
        model.layers[1].register_full_backward_pre_hook(lambda *_: os._exit(3))
    rank.step(model)


# Running them #


def run_rank(name: str, mode: str, number: int, folder: Path) -> None:
    # Anew after the fork, before threads of autograd do so, which may abort since 2.15
    torch.set_num_threads(1)
    os.environ[SWITCH] = mode
    run, outcomes, _ = CASES[name]
    rank, found = Rank(number, hangs=outcomes[mode] == TIME_OUT), {}
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=number, world_size=RANKS, timeout=TIME_LIMIT
    )
    try:
        run(rank)
    except Exception as error:
        lines = [str(error), *getattr(error, "__notes__", ())]
        found["error"] = f"{type(error).__name__}: " + "\n".join(lines)
    found["steps"] = rank.steps
    (folder / f"{number}.json").write_text(json.dumps(found))


def start(name: str, mode: str, number: int, folder: Path) -> None:
    if os.fork():
        return
    try:
        # What a backend says as it aborts the process
        log = os.open(folder / f"{number}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 2)
        run_rank(name, mode, number, folder)
    finally:
        os._exit(0)  # as one that fails, without a word to the others


def found_in(folder: Path, number: int) -> dict[str, Any]:
    if (path := folder / f"{number}.json").exists():
        return json.loads(path.read_text())
    return {"died": (folder / f"{number}.log").read_text()[-400:]}


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        folders = {run: Path(root) / "-".join(run) for run in product(CASES, MODES)}
        running = 0
        for run, folder in folders.items():
            folder.mkdir()
            for number in range(RANKS):
                if running == AT_ONCE * RANKS:
                    os.wait()
                    running -= 1
                start(*run, number, folder)
                running += 1
        while running:
            os.wait()
            running -= 1
        found = [
            [*run, [found_in(f, i) for i in range(RANKS)]] for run, f in folders.items()
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
