"""
Runs random schedules of training steps over units of one dtype with whatever torch is
imported, and saves what came of them: the bits of losses, gradients and parameters,
every call of a collective in order, and the warnings.

The tests run it once on the release and once on this branch and compare. A schedule is
drawn from its number alone, so that all ranks of both have the same ones. What the
release does not get right is not drawn:

- gradients of other parameters in microbatches that share one all-reduce, or of
  other parameters of a unit in those that share one reduction;
- units frozen whole, under a policy, before the first forward or an unshard;
- gradients that wait to be reduced when an exception ends the step;
- a block left out before it has run once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fsdp_common.parity_layers import (
    batch_of,
    BF16,
    digest,
    FP32,
    gradients,
    loss_of,
    LR,
    parameters,
    Record,
    shard_stack,
    Stack,
    stack,
    units_of,
)
from fsdp_common.run_ranks import run_ranks

import torch
import torch._dynamo  # the first hook would, in each rank anew
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import distributed_c10d
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    _fully_shard,
    CPUOffloadPolicy,
    fully_shard,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import Shard


RANKS = 4
SCHEDULES = 60
STEPS = 5
BLOCKS = 2
DIM = 8  # divides by 4 ranks, as `Shard(1)` must


# What a schedule is #


@dataclass(frozen=True)
class Microbatch:
    sync: str  # "none", "scatter" (no all-reduce) or "all"
    skip_blocks: tuple[int, ...] = ()
    skip: tuple[str, ...] = ()  # parameters of each block's first layer
    reshards: bool = True
    is_last: bool = True


@dataclass(frozen=True)
class Step:
    actions: tuple[str, ...]  # before the first microbatch, names of ACTIONS
    microbatches: tuple[Microbatch, ...]
    to_none: bool  # how gradients are zeroed afterwards


@dataclass(frozen=True)
class Schedule:
    parallelism: str  # "shard", "hybrid" or "replicate"
    ranks: int
    stored: torch.dtype
    policy: tuple[torch.dtype | None, torch.dtype | None]
    reshard: bool | int | None
    offloads: bool
    shards_columns: bool
    prefetch: str  # "none", "forward", "backward" or "both"
    input_buffers: int
    steps: tuple[Step, ...]


# How schedules are drawn #


def draw(number: int) -> Schedule:
    rng = random.Random(number)
    parallelism = rng.choice(("shard", "shard", "shard", "hybrid", "replicate"))
    ranks = 4 if parallelism != "shard" else rng.choice((2, 2, 4))
    reshards = [None, True, False]
    if parallelism == "shard" and ranks == 4:
        reshards += [2, 2]
    is_sharded = parallelism != "replicate"
    reshard = rng.choice(reshards) if is_sharded else None
    policies = ((None, None), (None, None), (BF16, FP32), (BF16, None), (None, BF16))
    policy, stored = rng.choice(policies), rng.choice((FP32, FP32, FP32, BF16))
    # Resharded over fewer ranks, columns divide by neither in the release
    shards_columns = is_sharded and reshard != 2 and rng.random() < 0.3
    may_freeze_blocks = policy == (None, None) and stored == FP32
    steps = (
        _draw_step(rng, i, parallelism, may_freeze_blocks=may_freeze_blocks)
        for i in range(STEPS)
    )
    return Schedule(
        parallelism,
        ranks,
        stored,
        policy,
        reshard,
        offloads=rng.random() < 0.2,
        shards_columns=shards_columns,
        prefetch=rng.choice(("none", "none", "forward", "backward", "both")),
        input_buffers=rng.choice((1, 1, 2)),
        steps=tuple(steps),
    )


def _draw_step(
    rng: random.Random, i: int, parallelism: str, *, may_freeze_blocks: bool
) -> Step:
    actions = ["save", "reshard by hand", "unshard", "unshard async", "evaluate"]
    if i > 0:
        actions += ["freeze weights", "unfreeze", "load", "load and assign", "fail"]
        actions += ["reshard after forward", "keep after forward", "unshard"]
        actions += ["freeze a block"] if may_freeze_blocks else []
    chosen = rng.sample(actions, rng.choice((0, 0, 1, 2, 3)))
    # In the order of the table: nothing unsharded is saved, frozen or given up
    chosen.sort(key=[*ACTIONS].index)
    may_put_off = parallelism != "shard" and rng.random() < 0.5
    kind = rng.choice(("plain", "plain", "accumulate", "several"))
    if may_put_off:
        kind = "put off"
    return Step(tuple(chosen), _draw_microbatches(rng, i, kind), rng.random() < 0.7)


def _draw_microbatches(rng: random.Random, i: int, kind: str) -> tuple[Microbatch, ...]:
    count = 1 if kind == "plain" else rng.choice((2, 3))
    may_keep = kind != "plain" and rng.random() < 0.3
    skips = [_draw_skips(rng, i) for _ in range(count)]
    microbatches = []
    for n in range(count):
        is_end = n == count - 1
        skip_blocks, skip = skips[0] if kind == "put off" else skips[n]
        if kind == "accumulate":
            skip = skips[0][1]
        sync = {"accumulate": "none", "put off": "scatter"}.get(kind, "all")
        microbatches.append(
            Microbatch(
                "all" if is_end else sync,
                skip_blocks,
                skip,
                reshards=is_end or not may_keep,
                is_last=is_end or kind != "several",
            )
        )
    return tuple(microbatches)


def _draw_skips(rng: random.Random, i: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if i == 0 or rng.random() < 0.6:
        return (), ()
    if rng.random() < 0.5:
        return (rng.randrange(BLOCKS),), ()
    return (), (rng.choice(("weight", "gain", "shift")),)


# What a schedule does before a step #


@dataclass
class Training:
    """A model in training, and what was saved of it."""

    schedule: Schedule
    model: Stack
    rank: int  # in the mesh
    optimizer: torch.optim.Optimizer
    saved: dict[str, Any]

    def remake_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def save(self) -> None:
        state = self.model.state_dict()
        self.saved = {name: value.detach().clone() for name, value in state.items()}


def save(training: Training) -> None:
    training.save()


def load(training: Training) -> None:
    training.model.load_state_dict(training.saved)


def load_and_assign(training: Training) -> None:
    copies = {name: value.clone() for name, value in training.saved.items()}
    training.model.load_state_dict(copies, assign=True)
    training.remake_optimizer()


def freeze_weights(training: Training) -> None:
    for block in training.model.blocks:
        block.layers[0].weight.requires_grad_(False)


def freeze_a_block(training: Training) -> None:
    training.model.blocks[0].requires_grad_(False)


def unfreeze(training: Training) -> None:
    training.model.requires_grad_(True)


def fail(training: Training) -> None:
    """Gives up a forward in its middle, and starts anew."""

    def stop(*args: Any) -> None:
        raise ArithmeticError("as meant")

    model = training.model
    handle = model.blocks[1].layers[0].register_forward_pre_hook(stop)
    with contextlib.suppress(ArithmeticError):
        model(batch_of(99, training.rank, dim=DIM))
    handle.remove()
    model.reset_iter_state()


def evaluate(training: Training) -> None:
    with torch.no_grad():
        training.model(batch_of(98, training.rank, dim=DIM))


def reshard_after_forward(training: Training, reshards: bool = True) -> None:
    if training.schedule.parallelism != "replicate":
        training.model.set_reshard_after_forward(reshards)


def reshard_by_hand(training: Training) -> None:
    for unit in units_of(training.model):
        unit.unshard()
        unit.reshard()


def unshard(training: Training) -> None:
    for unit in units_of(training.model):
        unit.unshard()


def unshard_async(training: Training) -> None:
    """Waits for one of them, and leaves the others to forward."""
    handles = [unit.unshard(async_op=True) for unit in units_of(training.model)]
    handles[0].wait()


ACTIONS: dict[str, Callable[[Training], None]] = {
    "save": save,
    "load": load,
    "load and assign": load_and_assign,
    "freeze weights": freeze_weights,
    "freeze a block": freeze_a_block,
    "unfreeze": unfreeze,
    "fail": fail,
    "evaluate": evaluate,
    "reshard after forward": reshard_after_forward,
    "keep after forward": functools.partial(reshard_after_forward, reshards=False),
    "reshard by hand": reshard_by_hand,
    "unshard": unshard,
    "unshard async": unshard_async,
}


# What is seen of it #

# Of `torch.distributed`: those that other ranks must answer
COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "new_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


class Watch:
    """Notes the collectives that this rank issues, and what is reduced first."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        # Of the units' reductions: which parameters, and how far
        self.patterns: list[tuple[Any, ...]] = []
        self._depth = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as patches:
            for name in COLLECTIVES:
                watched = self._watch(name, getattr(distributed_c10d, name))
                # Only the branch has the last, which compares ranks
                agreement = getattr(_fully_shard, "_fsdp_agreement", None)
                for owner in (dist, distributed_c10d, agreement):
                    if hasattr(owner, name):
                        patches.enter_context(mock.patch.object(owner, name, watched))
            reduce = self._watch_reduce(_fsdp_param_group.foreach_reduce)
            patches.enter_context(
                mock.patch.object(_fsdp_param_group, "foreach_reduce", reduce)
            )
            yield

    def take(self) -> dict[str, Any]:
        """Returns what was noted since the last call."""
        calls, self.calls = self.calls, []
        patterns, self.patterns = self.patterns, []
        return {"collectives": calls, "patterns": patterns}

    def _watch(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:  # one collective may call another
                bound = signature.bind(*args, **kwargs).arguments
                self.calls.append((name, *_describe(bound)))
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _watch_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            # A unit that is unsharded before the first forward has no names yet
            infos = [param._module_info for param in bound["fsdp_params"]]
            names = tuple((id(info.module), info.param_name) for info in infos)
            self.patterns.append((names, bound["all_reduce_grads"]))
            return original(*args, **kwargs)

        return call


def _describe(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what can be compared of a collective's arguments, in their order."""
    seen: list[Any] = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            seen.append((name, str(value.dtype), value.numel()))
        elif isinstance(value, list):
            sizes = [v.numel() for v in value if isinstance(v, torch.Tensor)]
            seen.append((name, sizes))
        elif isinstance(value, dist.ProcessGroup):
            seen.append((name, tuple(dist.get_process_group_ranks(value))))
        elif name == "op":
            seen.append((name, getattr(value, "op", value).name))
    return tuple(seen)


# Running #


@dataclass(frozen=True)
class Meshes:
    all: DeviceMesh
    pairs: DeviceMesh  # of all ranks, in two dims

    def of(self, schedule: Schedule) -> DeviceMesh:
        if schedule.parallelism == "hybrid":
            return self.pairs
        return self.all if schedule.ranks == RANKS else self.pairs["shard"]


def place_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 else None


def sharded_model(schedule: Schedule, mesh: DeviceMesh) -> Stack:
    param_dtype, reduce_dtype = schedule.policy
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    kwargs: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if schedule.offloads:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if schedule.shards_columns:
        kwargs["shard_placement_fn"] = place_columns
    apply = replicate
    if schedule.parallelism != "replicate":
        apply, kwargs["reshard_after_forward"] = fully_shard, schedule.reshard
    model = stack((schedule.stored, schedule.stored), blocks=BLOCKS, dim=DIM)
    shard_stack(model, apply, **kwargs)
    model.set_reduce_scatter_max_input_buffers(schedule.input_buffers)
    first, second = model.blocks
    if schedule.prefetch in ("forward", "both"):
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second])
    if schedule.prefetch in ("backward", "both"):
        model.set_modules_to_backward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    return model


def run_microbatches(training: Training, step: int) -> list[str | None]:
    model, losses = training.model, []
    for n, microbatch in enumerate(training.schedule.steps[step].microbatches):
        model.set_requires_gradient_sync(microbatch.sync != "none")
        if training.schedule.parallelism != "shard":
            model.set_requires_all_reduce(microbatch.sync == "all")
        model.set_reshard_after_backward(microbatch.reshards)
        model.set_is_last_backward(microbatch.is_last)
        batch = batch_of(step, n, training.rank, dim=DIM)
        loss = loss_of(model(batch, microbatch.skip_blocks, microbatch.skip))
        loss.backward()
        losses.append(digest(loss))
    return losses


def run_schedule(schedule: Schedule, mesh: DeviceMesh, rank: int) -> list[Record]:
    """Returns what is seen of each step, and at last of the parameters."""
    model = sharded_model(schedule, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    training = Training(schedule, model, rank, optimizer, {})
    training.save()
    watch, records = Watch(), []
    with watch.watching():
        for i, step in enumerate(schedule.steps):
            for action in step.actions:
                ACTIONS[action](training)
            losses = run_microbatches(training, i)
            record = {"losses": losses, "actions": step.actions, **watch.take()}
            record |= dict(gradients(model))
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=step.to_none)
            records.append(record)
    return [*records, dict(parameters(model))]


def run_case(number: int, meshes: Meshes, rank: int) -> Record:
    schedule = draw(number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = meshes.of(schedule)
        try:
            steps = run_schedule(schedule, mesh, rank % schedule.ranks)
        except Exception as error:
            # All ranks do the same, so that they also fail alike
            return {"error": f"{type(error).__name__}: {error}"}
    texts = [(each.category.__name__, str(each.message)) for each in caught]
    return {"steps": steps, "warnings": texts}


def run_all(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (RANKS,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    meshes = Meshes(mesh, pairs)
    results: dict[str, Any] = {}
    turn = 0
    for number in args.only or range(SCHEDULES):
        if draw(number).ranks == 2:
            turn += 1
            if turn % 2 != rank // 2:
                continue  # the other half's
        results[f"{number}"] = run_case(number, meshes, rank)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for a file of each rank")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of schedules")
    run_ranks(run_all, parser.parse_args(), RANKS)


if __name__ == "__main__":
    sys.exit(main())
