"""
Runs random cases whose units have one dtype with whatever torch is imported, and saves
what came of them: the bits of losses, gathered values, gradients and parameters, every
call of a collective in order, and the warnings.

The tests run it once on the release and once on this branch and compare. A case is drawn
from its number alone, so that all ranks of both have the same ones. What the release
does not get right is not drawn:

- gradients of other parameters in microbatches that share one all-reduce, or of
  other parameters of a unit in those that share one reduction;
- units frozen whole, under a policy, before the first forward or an unshard;
- gradients that wait to be reduced when an exception ends the step;
- a block left out before it has run once;
- another setting for resharding while units are resharded to fewer ranks.
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
from types import FunctionType
from typing import Any
from unittest import mock

from fsdp_common.parity_layers import (
    digest,
    gradients,
    LR,
    parameters,
    Record,
    units_of,
)
from fsdp_common.run_ranks import run_ranks
from fsdp_random.cases import (
    BF16,
    Case,
    draw_mesh,
    draw_reshard,
    fill,
    FP32,
    Microbatch,
    Model,
    Param,
    run_forward,
    run_microbatch,
    shard_model,
    Step,
)

import torch
import torch._dynamo  # the first hook would, in each rank anew
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import _fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group


RANKS = 4
CASES = 40
STEPS = 5
BLOCKS = 3  # the last is the root's own
PARAMS = 3


# How cases are drawn #


def draw(number: int) -> Case:
    rng = random.Random(number)
    parallelism, mesh = draw_mesh(rng, RANKS, has_replicas=rng.random() < 0.4)
    reshard = draw_reshard(rng, parallelism, mesh)
    policies = ((None, None), (None, None), (BF16, FP32), (BF16, None), (None, BF16))
    policy, stored = rng.choice(policies), rng.choice((FP32, FP32, FP32, BF16))
    # Resharded over fewer ranks, columns divide by neither in the release
    may_shard_columns = parallelism != "replicate" and reshard != 2
    shapes = (rng.randint(1, 17),), (3, 4 * rng.randint(1, 2)), (rng.randint(1, 9), 4)
    steps = [
        _draw_step(
            rng,
            step,
            has_replicas=parallelism != "shard",
            may_freeze_blocks=policy == (None, None) and stored == FP32,
        )
        for step in range(STEPS)
    ]
    return Case(
        (tuple(Param(shape, stored) for shape in shapes),) * BLOCKS,
        parallelism,
        mesh,
        tuple(steps),
        *policy,
        reshard,
        prefetch=(rng.choice((0, 0, 1, 2)), rng.choice((0, 0, 1))),
        offloads=rng.random() < 0.2,
        shards_columns=may_shard_columns and rng.random() < 0.4,
        input_buffers=rng.choice((1, 1, 2)),
    )


def _draw_step(
    rng: random.Random, step: int, *, has_replicas: bool, may_freeze_blocks: bool
) -> Step:
    actions = ["save", "reshard", "unshard", "unshard_async", "evaluate"]
    if step > 0:
        actions += ["freeze_parameters", "unfreeze", "load", "load_and_assign", "fail"]
        actions += ["reshard_after_forward", "keep_after_forward", "unshard"]
        actions += ["freeze_a_block"] if may_freeze_blocks else []
    chosen = rng.sample(actions, rng.choice((0, 0, 1, 2, 3)))
    # In their order below: nothing unsharded is saved, frozen or given up
    chosen.sort(key=ACTIONS.index)
    kind = rng.choice(("plain", "plain", "accumulate", "several"))
    if has_replicas and rng.random() < 0.5:
        kind = "deferred"
    count = 1 if kind == "plain" else rng.choice((2, 3))
    may_keep = kind != "plain" and rng.random() < 0.3
    skips = [_draw_skips(rng, step) for _ in range(count)]
    microbatches = []
    for n, (blocks, params) in enumerate(skips):
        is_end = n == count - 1
        if kind == "deferred":
            blocks = skips[0][0]
        if kind in ("deferred", "accumulate"):
            params = skips[0][1]
        sync = {"accumulate": "none", "deferred": "scatter"}.get(kind, "all")
        microbatches.append(
            Microbatch(
                "all" if is_end else sync,
                blocks,
                params,
                reshards=is_end or not may_keep,
                is_last=is_end or kind != "several",
            )
        )
    return Step(tuple(microbatches), tuple(chosen), rng.random() < 0.7)


def _draw_skips(rng: random.Random, step: int) -> tuple[frozenset, frozenset]:
    """Returns blocks and parameters to leave out."""
    if step == 0 or rng.random() < 0.6:
        return frozenset(), frozenset()
    if rng.random() < 0.5:
        return frozenset((rng.randrange(BLOCKS - 1),)), frozenset()
    param = rng.randrange(PARAMS)
    return frozenset(), frozenset((block, param) for block in range(BLOCKS))


# What a case does before a step #


class Actions:
    """Acts on a model in training, and has what was saved of it."""

    def __init__(self, case: Case, rank: int, model: Model):
        self._case, self._rank, self._model = case, rank, model
        self.save()

    def save(self) -> None:
        state = self._model.state_dict()
        self._saved = {name: value.detach().clone() for name, value in state.items()}

    def load(self) -> None:
        self._model.load_state_dict(self._saved)

    def load_and_assign(self) -> None:
        copies = {name: value.clone() for name, value in self._saved.items()}
        self._model.load_state_dict(copies, assign=True)

    def freeze_parameters(self) -> None:
        for block in self._model.blocks:
            block.p0.requires_grad_(False)

    def freeze_a_block(self) -> None:
        self._model.blocks[0].requires_grad_(False)

    def unfreeze(self) -> None:
        self._model.requires_grad_(True)

    def _forward(self) -> None:
        batch = {"step": 0, "batch": 9, "rank": self._rank}
        run_forward(self._case, self._model, Microbatch(), **batch)

    def fail(self) -> None:
        """Gives up a forward in its middle, and starts anew."""

        def stop(*args: Any) -> None:
            raise ArithmeticError("as meant")

        handle = self._model.blocks[1].register_forward_pre_hook(stop)
        with contextlib.suppress(ArithmeticError):
            self._forward()
        handle.remove()
        self._model.reset_iter_state()

    def reshard_after_forward(self, reshards: bool = True) -> None:
        if self._case.parallelism != "replicate":
            self._model.set_reshard_after_forward(reshards)

    def keep_after_forward(self) -> None:
        self.reshard_after_forward(False)

    def evaluate(self) -> None:
        with torch.no_grad():
            self._forward()

    def reshard(self) -> None:
        for unit in units_of(self._model):
            unit.unshard()
            unit.reshard()

    def unshard(self) -> None:
        for unit in units_of(self._model):
            unit.unshard()

    def unshard_async(self) -> None:
        """Waits for one of them, and leaves the others to forward."""
        handles = [unit.unshard(async_op=True) for unit in units_of(self._model)]
        handles[0].wait()


ACTIONS = [name for name in vars(Actions) if not name.startswith("_")]


def optimize(model: Model, to_none: bool) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.to_local().sub_(LR * param.grad.to_local())
    model.zero_grad(set_to_none=to_none)


# What is seen of it #

_KINDS = ("all_", "barrier", "broadcast", "gather", "monitored_", "new_group")
# Of `torch.distributed`: those that other ranks must answer
COLLECTIVES = [
    name
    for name, value in vars(distributed_c10d).items()
    if name.startswith((*_KINDS, "reduce", "scatter")) and type(value) is FunctionType
]


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
            # Only the branch has the last, which compares ranks
            agreement = getattr(_fully_shard, "_fsdp_agreement", None)
            for name in COLLECTIVES:
                call = self._watch(getattr(distributed_c10d, name), self._note_call)
                for owner in (dist, distributed_c10d, agreement):
                    if hasattr(owner, name):
                        patches.enter_context(mock.patch.object(owner, name, call))
            call = self._watch(_fsdp_param_group.foreach_reduce, self._note_reduction)
            patches.enter_context(
                mock.patch.object(_fsdp_param_group, "foreach_reduce", call)
            )
            yield

    def take(self) -> dict[str, Any]:
        """Returns what was noted since the last call."""
        taken = {"collectives": [*self.calls], "patterns": [*self.patterns]}
        self.calls.clear()
        self.patterns.clear()
        return taken

    def _watch(
        self, original: Callable[..., Any], note: Callable[[str, dict[str, Any]], None]
    ) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            note(original.__name__, signature.bind(*args, **kwargs).arguments)
            is_collective = original.__name__ in COLLECTIVES
            self._depth += is_collective
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= is_collective

        return call

    def _note_call(self, name: str, arguments: dict[str, Any]) -> None:
        if self._depth == 0:  # one collective may call another
            self.calls.append((name, *_describe(arguments)))

    def _note_reduction(self, name: str, arguments: dict[str, Any]) -> None:
        # A unit that is unsharded before the first forward has no names yet
        infos = [param._module_info for param in arguments["fsdp_params"]]
        names = tuple((id(info.module), info.param_name) for info in infos)
        self.patterns.append((names, arguments["all_reduce_grads"]))


def _describe(arguments: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yields what can be compared of a collective's arguments, in their order."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, str(value.dtype), value.numel()
        elif isinstance(value, list):
            yield name, [v.numel() for v in value if isinstance(v, torch.Tensor)]
        elif isinstance(value, dist.ProcessGroup):
            yield name, tuple(dist.get_process_group_ranks(value))
        elif name == "op":
            yield name, getattr(value, "op", value).name


# Running #


def run_steps(case: Case, rank: int) -> list[Record]:
    """Returns what is seen of each step, and at last of the parameters."""
    model = shard_model(case, "cpu")
    fill(case, model, 0)
    actions, watch, records = Actions(case, rank, model), Watch(), []
    with watch.watching():
        for number, step in enumerate(case.steps):
            for action in step.actions:
                getattr(actions, action)()
            record: Record = {"actions": step.actions}
            for batch in range(len(step.microbatches)):
                loss = run_microbatch(case, model, number, batch, rank)
                seen = [block.seen.values() for block in model.all_blocks()]
                tensors = [loss, *(value for values in seen for value in values)]
                record[f"microbatch {batch}"] = [digest(each) for each in tensors]
            record |= watch.take() | dict(gradients(model))
            optimize(model, step.to_none)
            records.append(record)
    return [*records, dict(parameters(model))]


def run_case(number: int, rank: int) -> Record:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            steps = run_steps(draw(number), rank)
        except Exception as error:
            # All ranks do the same, so that they also fail alike
            return {"error": f"{type(error).__name__}: {error}"}
    texts = [(each.category.__name__, str(each.message)) for each in caught]
    return {"steps": steps, "warnings": texts}


def run_all(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    return {f"{n}": run_case(n, rank) for n in args.only or range(CASES)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for a file of each rank")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of cases")
    run_ranks(run_all, parser.parse_args(), RANKS)


if __name__ == "__main__":
    sys.exit(main())
