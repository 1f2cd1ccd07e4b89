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

import contextlib
import functools
import inspect
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from fsdp_helpers.common import parity_layers as layers
from fsdp_helpers.common.parity_layers import Record, units_of
from fsdp_helpers.common.scenarios import IS_BRANCH, RANKS, Scenario, Scenarios, Setup
from fsdp_helpers.random import cases
from fsdp_helpers.random.cases import Case, Model, run_forward

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group


CASES = 24
STEPS = 5


# Changes before a step #


def save(model: Model) -> None:
    state = model.state_dict()
    model.saved = {name: value.detach().clone() for name, value in state.items()}


def load_and_assign(model: Model) -> None:
    copies = {name: value.clone() for name, value in model.saved.items()}
    model.load_state_dict(copies, assign=True)


def freeze_parameters(model: Model) -> None:
    for block in model.blocks:
        block.p0.requires_grad_(False)


@torch.no_grad()
def evaluate(model: Model) -> None:
    run_forward(model, 0, 0)


def fail(model: Model) -> None:
    """Gives up a forward in its middle, and starts anew."""

    def stop(*args: Any) -> None:
        raise ArithmeticError("as meant")

    handle = model.blocks[-1].register_forward_pre_hook(stop)
    with contextlib.suppress(ArithmeticError):
        run_forward(model, 0, 0)
    handle.remove()
    model.reset_iter_state()


def unshard(model: Model) -> None:
    for unit in units_of(model):
        unit.unshard()


def reshard(model: Model) -> None:
    for unit in units_of(model):
        unit.unshard()
        unit.reshard()


def unshard_async(model: Model) -> None:
    """Waits for one of them, and leaves the others to forward."""
    handles = [unit.unshard(async_op=True) for unit in units_of(model)]
    handles[0].wait()


# In the order in which a step has them: nothing unsharded is saved, frozen or given up
ACTIONS: dict[str, Callable[[Model], Any]] = {
    "save": save,
    "load": lambda model: model.load_state_dict(model.saved),
    "load_and_assign": load_and_assign,
    "freeze_parameters": freeze_parameters,
    "freeze_a_block": lambda model: model.blocks[0].requires_grad_(False),
    "unfreeze": lambda model: model.requires_grad_(True),
    "fail": fail,
    "reshard_after_forward": lambda model: model.set_reshard_after_forward(True),
    "keep_after_forward": lambda model: model.set_reshard_after_forward(False),
    "evaluate": evaluate,
    "reshard": reshard,
    "unshard": unshard,
    "unshard_async": unshard_async,
}
# Those of what has run before
LATER_ACTIONS = {*ACTIONS} - {"save", "evaluate", "reshard", "unshard", "unshard_async"}


@functools.cache
def draw(number: int) -> Case:
    rng = random.Random(number)
    case = cases.draw_case(rng, (RANKS,), uniform_steps=STEPS)
    if rng.random() < 0.6:  # most often without a policy
        case = replace(case, param_dtype=None, reduce_dtype=None)
    never = set()
    if case.parallelism == "replicate" or case.reshard == 2:
        never = {"reshard_after_forward", "keep_after_forward"}
    has_policy = case.param_dtype is not None or case.reduce_dtype is not None
    if has_policy or case.blocks[0][0].dtype != cases.FP32:
        never.add("freeze_a_block")
    steps = []
    for n, step in enumerate(case.steps):
        left_out = never if n > 0 else never | LATER_ACTIONS
        possible = [name for name in ACTIONS if name not in left_out]
        some = rng.sample(range(len(possible)), rng.choice((0, 0, 1, 2, 3)))
        actions = tuple(possible[i] for i in sorted(some))
        if n == 0 or rng.random() < 0.5:  # all blocks run at first, most often all do
            microbatches = [
                replace(m, skipped_blocks=frozenset(), skipped_params=frozenset())
                for m in step.microbatches
            ]
            step = replace(step, microbatches=tuple(microbatches))
        steps.append(replace(step, actions=actions, to_none=rng.random() < 0.7))
    return replace(case, steps=tuple(steps))


def optimize(model: Model, to_none: bool) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.to_local().sub_(layers.LR * param.grad.to_local())
    model.zero_grad(set_to_none=to_none)


# Records of a case #

# Methods of a process group that other ranks must answer
COLLECTIVES = [
    name
    for name in vars(dist.ProcessGroup)
    if re.match("_?(all|barrier|broadcast|gather|monitored|reduce|scatter)", name)
]


class Watch:
    """Notes the collectives that this rank issues, and what the release reduces."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        # Which parameters each reduction of a unit has, and how far it goes
        self.patterns: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as patches:
            for name in COLLECTIVES:
                patches.enter_context(self._watch(dist.ProcessGroup, name))
            # The branch compares no ranks before a reduction that a plugin replaced
            if not IS_BRANCH:
                patches.enter_context(self._watch(_fsdp_param_group, "foreach_reduce"))
            yield

    def take(self) -> dict[str, Any]:
        """Returns what was noted since the last call."""
        taken = {"collectives": self.calls, "patterns": self.patterns}
        self.calls, self.patterns = [], []
        return taken

    def _watch(self, owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "foreach_reduce":
                bound = inspect.signature(original).bind(*args, **kwargs).arguments
                params = tuple(map(id, bound["fsdp_params"]))
                self.patterns.append((params, bound["all_reduce_grads"]))
            else:
                self.calls.append((name, *map(_describe, (*args, *kwargs.values()))))
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)


def _describe(value: Any) -> Any:
    """Returns what can be compared of a collective's argument."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.numel()
    if isinstance(value, list):
        return [*map(_describe, value)]
    if isinstance(value, dist.ProcessGroup):
        return dist.get_process_group_ranks(value)
    op = getattr(value, "reduceOp", value)  # of options
    return op.op.name if isinstance(op, dist.ReduceOp) else None


# Running #


def run_steps(case: Case) -> list[Record]:
    """Returns what is seen of each step, and at last of the parameters."""
    model = cases.shard_model(case, "cpu")
    cases.fill(model, 0)
    save(model)
    watch, records = Watch(), []
    with watch.watching():
        for number, step in enumerate(case.steps):
            for action in step.actions:
                ACTIONS[action](model)
            record: Record = {"actions": step.actions}
            for batch in range(len(step.microbatches)):
                loss = cases.run_microbatch(model, number, batch)
                seen = [block.seen.values() for block in model.all_blocks()]
                tensors = [loss, *(value for values in seen for value in values)]
                record[f"microbatch {batch}"] = [*map(layers.digest, tensors)]
            record |= watch.take() | dict(layers.gradients(model))
            optimize(model, step.to_none)
            records.append(record)
    return [*records, dict(layers.parameters(model))]


def run_case(setup: Setup, number: int) -> Record:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = run_steps(draw(number))
    texts = [(each.category.__name__, str(each.message)) for each in caught]
    return {"steps": steps, "warnings": texts}


SCENARIOS = Scenarios(
    {f"{n}": Scenario(functools.partial(run_case, number=n)) for n in range(CASES)}
)


if __name__ == "__main__":
    sys.exit(SCENARIOS.main(__doc__))
