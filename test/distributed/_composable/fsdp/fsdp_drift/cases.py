"""
Lets ranks drift apart in many ways, and prints as JSON what each of them sees.

Each case runs on ranks of its own, processes forked from this one: what is sent to
the wrong partner leaves a process group that nobody can use again.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the hooks import: once for all ranks
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    fully_shard,
    MixedPrecisionPolicy,
    set_backward_prefetch,
)


RANKS = 2
ODD = 1  # the rank that does something else
GOOD_STEPS = 3
AT_ONCE = 10  # cases: most of them wait most of the time
# Of the process group, however late a rank is on a busy machine
TIME_LIMIT = datetime.timedelta(seconds=300)
# From where ranks drift apart that nothing but this stops
SHORT_TIME_LIMIT = datetime.timedelta(seconds=6)
BF16, FP32 = torch.bfloat16, torch.float32
SWITCH = "TORCH_FSDP_CHECK_RANKS_AGREE"


# What trains #


class Block(nn.Module):
    """Uses those of its parameters that it is told to: two of them of one size."""

    NAMES = ("gate", "up", "scale", "shift")

    def __init__(self, dtype: torch.dtype = FP32):
        super().__init__()
        sizes = (4, 4, 6, 4)
        dtypes = (dtype, FP32, FP32, BF16)
        for name, size, dtype in zip(self.NAMES, sizes, dtypes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.ones(size, dtype=dtype)))

    def forward(self, x: torch.Tensor, used: Sequence[str]) -> torch.Tensor:
        for name in used:
            x = x * getattr(self, name).float().mean()
        return x


class Model(nn.Module):
    def __init__(self, **kwargs: Any):
        super().__init__()
        self.layers = nn.ModuleList(Block(**kwargs) for _ in range(3))

    def forward(
        self,
        x: torch.Tensor,
        used: Sequence[str] = Block.NAMES,
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

    def shard(self, model: Model | None = None, **kwargs: Any) -> Model:
        model = model or Model()
        for layer in model.layers:
            fully_shard(layer, **kwargs)
        return fully_shard(model, **kwargs)

    def replicate(self) -> Model:
        model = Model()
        for layer in model.layers:
            replicate(layer)
        return replicate(model)

    def microbatch(self, model: Model, **kwargs: Any) -> None:
        x = torch.ones(3, requires_grad=True)
        model(x, **kwargs).sum().backward()

    def step(self, model: Model, microbatches: int = 1, **kwargs: Any) -> None:
        for _ in range(microbatches):
            self.microbatch(model, **kwargs)
        self.finish(model)

    def finish(self, model: Model) -> None:
        model.zero_grad()
        self.steps += 1

    def good_steps(self, model: Model, microbatches: int = 1) -> Model:
        """Returns the model after some steps that are alike on all ranks."""
        for _ in range(GOOD_STEPS):
            self.step(model, microbatches)
        self.steps = 0
        if self.hangs:
            dist.barrier()
            dist.distributed_c10d._set_pg_timeout(SHORT_TIME_LIMIT)
        return model


# How ranks drift #


# What the odd rank does, in words, and how
CASES: dict[str, Callable[[Rank], None]] = {}


# What comes of it, and of each case: by default, and where ranks always compare
ALL_RAISE, OTHERS_RAISE = "all raise", "others raise"
TIME_OUT, NOT_SEEN, FINE = "time limit", "not seen", "fine"
OUTCOMES: dict[str, tuple[str, str]] = {}
MODES = ("1", "always")  # those of the outcomes


def case(by_default: str, *, always: str | None = None) -> Callable[..., Any]:
    """Makes a case of a function; its docstring is what the odd rank does."""

    def add(run: Callable[[Rank], None]) -> Callable[[Rank], None]:
        CASES[run.__doc__ or ""] = run
        OUTCOMES[run.__doc__ or ""] = (by_default, always or by_default)
        return run

    return add


def train_with(rank: Rank, model: Model, odd: Sequence[str], others: Sequence[str]):
    for _ in range(2):
        rank.step(model, used=odd if rank.is_odd else others)


@case(ALL_RAISE)
def parameter_from_the_first_step(rank: Rank) -> None:
    """it uses another parameter, of the same size, from the first step on"""
    train_with(rank, rank.shard(), ("gate", "shift"), ("up", "shift"))


@case(ALL_RAISE)
def parameter_of_another_size(rank: Rank) -> None:
    """it uses another parameter, of another size, from the first step on"""
    train_with(rank, rank.shard(), ("gate", "shift"), ("scale", "shift"))


@case(ALL_RAISE)
def bucket_from_the_first_step(rank: Rank) -> None:
    """it has no gradient in a dtype that the others have one in"""
    train_with(rank, rank.shard(), ("gate", "up", "scale"), Block.NAMES)


@case(ALL_RAISE)
def frozen_parameter(rank: Rank) -> None:
    """it has frozen a parameter"""
    model = Model()
    for layer in model.layers:
        layer.gate.requires_grad_(not rank.is_odd)
    rank.shard(model)
    rank.step(model)


@case(TIME_OUT, always=ALL_RAISE)
def parameter_later(rank: Rank) -> None:
    """it skips a parameter, after steps that were alike"""
    model = rank.good_steps(rank.shard())
    train_with(rank, model, ("gate", "scale", "shift"), Block.NAMES)


@case(ALL_RAISE)
def other_parameter_later(rank: Rank) -> None:
    """all skip a parameter after such steps, but another one each"""
    model = rank.good_steps(rank.shard())
    train_with(rank, model, ("gate", "shift"), ("up", "shift"))


@case(TIME_OUT, always=ALL_RAISE)
def bucket_later(rank: Rank) -> None:
    """it skips all parameters of a dtype, after such steps"""
    model = rank.good_steps(rank.shard())
    train_with(rank, model, ("gate", "up", "scale"), Block.NAMES)


@case(TIME_OUT, always=ALL_RAISE)
def unfrozen_parameter_later(rank: Rank) -> None:
    """it unfreezes a parameter, after such steps"""
    model = Model()
    for layer in model.layers:
        layer.gate.requires_grad_(False)
    rank.good_steps(rank.shard(model))
    for layer in model.layers:
        layer.gate.requires_grad_(rank.is_odd)
    for _ in range(2):
        rank.step(model)


@case(TIME_OUT, always=ALL_RAISE)
def unit_later(rank: Rank) -> None:
    """it skips a unit, after such steps"""
    model = rank.good_steps(rank.shard())
    for _ in range(2):
        rank.step(model, skipped=(1,) if rank.is_odd else ())


@case(NOT_SEEN, always=ALL_RAISE)
def replicated_unit_later(rank: Rank) -> None:
    """it skips a unit of `replicate`, after such steps"""
    model = rank.good_steps(rank.replicate())
    for _ in range(2):
        rank.step(model, skipped=(1,) if rank.is_odd else ())


@case(NOT_SEEN, always=ALL_RAISE)
def microbatch(rank: Rank) -> None:
    """it skips a microbatch, where each microbatch reduces"""
    model = rank.good_steps(rank.shard(), microbatches=2)
    for _ in range(2):
        rank.step(model, microbatches=1 if rank.is_odd else 2)


@case(NOT_SEEN, always=ALL_RAISE)
def replicated_microbatch(rank: Rank) -> None:
    """it skips a microbatch of `replicate`, where each reduces"""
    model = rank.good_steps(rank.replicate(), microbatches=2)
    for _ in range(2):
        rank.step(model, microbatches=1 if rank.is_odd else 2)


@case(TIME_OUT, always=ALL_RAISE)
def sync_of_a_microbatch(rank: Rank) -> None:
    """it has gradient sync off where the others sync"""
    model = rank.good_steps(rank.shard())
    for _ in range(2):
        model.set_requires_gradient_sync(not rank.is_odd)
        rank.microbatch(model)
        model.set_requires_gradient_sync(True)
        rank.step(model)


@case(TIME_OUT, always=ALL_RAISE)
def prefetch(rank: Rank) -> None:
    """it gathers ahead in backward, where the others do not"""
    model = rank.good_steps(rank.shard())
    if not rank.is_odd:
        set_backward_prefetch(model, None)
    for _ in range(2):
        rank.step(model)


@case(OTHERS_RAISE)
def step_that_another_rank_has_no_data_for(rank: Rank) -> None:
    """it has data for fewer steps, and ends"""
    model = rank.good_steps(rank.shard())
    for _ in range(1 if rank.is_odd else 2):
        rank.step(model)


@case(TIME_OUT, always=ALL_RAISE)
def step_given_up_by_one_rank(rank: Rank) -> None:
    """it gives up a step (out of memory) and goes on with the next"""
    model = rank.good_steps(rank.shard())
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


@case(ALL_RAISE)
def stored_dtype(rank: Rank) -> None:
    """it has a parameter stored in another dtype"""
    rank.step(rank.shard(Model(dtype=BF16 if rank.is_odd else FP32)))


@case(FINE)
def stored_dtype_that_is_cast(rank: Rank) -> None:
    """it has a parameter stored in another dtype, and a policy casts it"""
    model = Model(dtype=BF16 if rank.is_odd else FP32)
    # Since 2.15 the second would be what is stored
    rank.step(rank.shard(model, mp_policy=MixedPrecisionPolicy(FP32, FP32)))


@case(ALL_RAISE)
def policy(rank: Rank) -> None:
    """it has another policy"""
    dtype = BF16 if rank.is_odd else FP32
    rank.step(rank.shard(mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype)))


@case(ALL_RAISE)
def policy_of_replicas(rank: Rank) -> None:
    """it has another policy, and is a replica that gathers nothing"""
    dtype = BF16 if rank.is_odd else FP32
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    rank.step(rank.shard(mesh=mesh, mp_policy=policy))


@case(FINE)
def units_sharded_in_another_order(rank: Rank) -> None:
    """it calls `fully_shard` on the blocks in another order"""
    model = Model()
    for layer in [*model.layers][:: -1 if rank.is_odd else 1]:
        fully_shard(layer)
    rank.step(fully_shard(model))


@case(OTHERS_RAISE)
def root_sharded_first(rank: Rank) -> None:
    """it calls `fully_shard` on the root first"""
    model = Model()
    if rank.is_odd:
        fully_shard(model)
    rank.step(rank.shard(model))


@case(ALL_RAISE)
def unit_that_one_rank_does_not_shard(rank: Rank) -> None:
    """it does not make a unit of one block"""
    model = Model()
    for i, layer in enumerate(model.layers):
        if i != 1 or not rank.is_odd:
            fully_shard(layer)
    rank.step(fully_shard(model))


@case(OTHERS_RAISE)
def dies_between_steps(rank: Rank) -> None:
    """it dies between steps"""
    model = rank.good_steps(rank.shard())
    if rank.is_odd:
        os._exit(3)
    rank.step(model)


@case(OTHERS_RAISE)
def dies_in_backward(rank: Rank) -> None:
    """it dies in backward"""
    model = rank.good_steps(rank.shard())
    if rank.is_odd:
        model.layers[1].register_full_backward_pre_hook(lambda *_: os._exit(3))
    rank.step(model)


@case(TIME_OUT)
def waits_for_something_else(rank: Rank) -> None:
    """it waits for something else, longer than the time limit"""
    model = rank.good_steps(rank.shard())
    if rank.is_odd:
        time.sleep(1.5 * SHORT_TIME_LIMIT.total_seconds())
    rank.step(model)


# Without comparing, ranks add up what is not the same and go on
NOTICED_BY_COMPARING = (parameter_from_the_first_step, other_parameter_later)


# Running them #


def run_rank(name: str, mode: str, number: int, folder: Path) -> None:
    # Anew after the fork, before threads of autograd do so, which may abort since 2.15
    torch.set_num_threads(1)
    os.environ[SWITCH] = mode
    outcome = dict(zip(MODES, OUTCOMES[name], strict=True)).get(mode)
    rank, found = Rank(number, hangs=outcome == TIME_OUT), {}
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=number, world_size=RANKS, timeout=TIME_LIMIT
    )
    try:
        CASES[name](rank)
    except Exception as error:
        lines = [str(error), *getattr(error, "__notes__", ())]
        found["error"] = f"{type(error).__name__}: " + "\n".join(lines)
    found["steps"] = rank.steps
    (folder / f"{number}.json").write_text(json.dumps(found))


class Run:
    """The forked ranks of a case."""

    def __init__(self, name: str, mode: str, folder: Path):
        self.name, self.mode, self.folder = name, mode, folder
        folder.mkdir()
        self.numbers = {self._fork(number): number for number in range(RANKS)}
        self.found: list[dict[str, Any]] = [{} for _ in range(RANKS)]

    def _fork(self, number: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            # What a backend says as it aborts the process
            log = os.open(self.folder / f"{number}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 2)
            run_rank(self.name, self.mode, number, self.folder)
        finally:
            os._exit(0)  # as one that fails, without a word to the others

    def end(self, pid: int, status: int) -> None:
        number = self.numbers[pid]
        path = self.folder / f"{number}.json"
        if path.exists():
            self.found[number] = json.loads(path.read_text())
        else:
            said = (self.folder / f"{number}.log").read_text()[-400:]
            code = os.waitstatus_to_exitcode(status)
            self.found[number] = {"died": code, "said": said}


def run_all(wanted: Sequence[tuple[str, str]], root: Path) -> list[Run]:
    waiting, by_pid, runs = [*wanted], {}, []
    while waiting or by_pid:
        while waiting and len(by_pid) < AT_ONCE * RANKS:
            name, mode = waiting.pop(0)
            run = Run(name, mode, root / str(len(runs)))
            runs.append(run)
            by_pid.update(dict.fromkeys(run.numbers, run))
        pid, status = os.wait()
        by_pid.pop(pid).end(pid, status)
    return runs


def main(modes: Sequence[str]) -> None:
    wanted = [
        (name, mode)
        for mode in modes
        for name, case in CASES.items()
        if mode != "0" or case in NOTICED_BY_COMPARING
    ]
    results: dict[str, dict[str, Any]] = {mode: {} for mode in modes}
    with tempfile.TemporaryDirectory() as root:
        for run in run_all(wanted, Path(root)):
            results[run.mode][run.name] = run.found
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
