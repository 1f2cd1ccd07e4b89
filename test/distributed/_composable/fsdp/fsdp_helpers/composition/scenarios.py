"""
Uses sharded models with what else torch has: activation checkpointing, functorch, the
compiler, pipelining, the memory tracker, logging, and the utilities of torch's own
tests.

Each scenario runs with ``uniform`` models, which are cut into the same units by the
release and by this branch, and with ``mixed`` ones, whose blocks are units of two
dtypes. The release cuts these into one unit for each dtype.
"""

import inspect
import logging
import sys
import unittest
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from fsdp_helpers.common import parity_layers as layers
from fsdp_helpers.common import scenarios as common
from fsdp_helpers.common.parity_layers import batch_of, loss_of, Record, Stack
from fsdp_helpers.common.scenarios import one_backward, Setup, train
from fsdp_helpers.composition.contract import find_all

import torch
import torch._dynamo.backends.debugging  # the first compilation would
import torch.distributed as dist
import torch.nn as nn
import torch.testing._internal.common_fsdp as common_fsdp
from torch.distributed import pipelining
from torch.distributed._tools import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    CheckpointImpl,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPParamGroup,
    RegisterPostBackwardFunction,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor.debug import CommDebugMode


MICROBATCHES = 2
SCENARIOS = common.Scenarios()

# A mixed unit gives the numbers of one unit for each dtype
same_numbers = partial(SCENARIOS.add, as_by_dtype=True, by_halves=True)
# A mixed unit gives what a uniform one does: no numbers, but what units do
seen_alike = partial(SCENARIOS.add, by_halves=True)


def shard(setup: Setup, model: nn.Module, units: Any = None, mesh: Any = None) -> Any:
    """Makes each block a unit, or the layers that it consists of, and the rest one."""
    policy = common.POLICIES["none" if setup.is_mixed else "bf16_reduce_fp32"]
    kwargs = {"mesh": mesh or setup.mesh, "mp_policy": policy}
    kwargs["reshard_after_forward"] = True
    if setup.is_by_dtype:
        units = [each for each in model.modules() if isinstance(each, layers.Layer)]
    for unit in units or model.blocks:
        fully_shard(unit, **kwargs)
    return fully_shard(model, **kwargs)


def sharded_stack(setup: Setup) -> Stack:
    return shard(setup, setup.stack())


def two_forwards(model: nn.Module, setup: Setup, step: int) -> torch.Tensor:
    """Runs backward once, after both."""
    losses = [loss_of(model(batch_of(step, i, setup.rank))) for i in range(2)]
    loss = losses[0] + losses[1]
    loss.backward()
    return loss


# Activation checkpointing #


def step_from_input(model: nn.Module, setup: Setup, step: int) -> torch.Tensor:
    """Reentrant checkpoints compute again only what has an input to differentiate."""
    loss = loss_of(model(batch_of(step, setup.rank).requires_grad_()))
    loss.backward()
    return loss


def wrap_blocks(model: Stack, impl: CheckpointImpl) -> None:
    """Computes blocks again in backward, with the hooks that they have by now."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=impl)


@same_numbers
def wrapper_around_unit_and_unit_around_wrapper(setup: Setup) -> Record:
    record: Record = {}
    for impl in CheckpointImpl:
        inner, outer = sharded_stack(setup), setup.stack()
        for model in (inner, outer):
            wrap_blocks(model, impl)
        shard(setup, outer)
        for name, model in (("unit in it", inner), ("unit around it", outer)):
            record[f"{impl.name}, {name}"] = train(model, setup, run=step_from_input)
    return record


@same_numbers
def nested_unit_around_wrapper_two_forwards(setup: Setup) -> Record:
    model = setup.stack()
    inner = [block.layers[0] for block in model.blocks]
    wrap_blocks(model, CheckpointImpl.NO_REENTRANT)
    units = [unit for pair in zip(inner, model.blocks) for unit in pair]
    return train(shard(setup, model, units), setup, run=two_forwards)


# Functorch #


def jvp_of(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    output, tangent, *_ = torch.func.jvp(model, (x.requires_grad_(),), (t,))
    return loss_of(output) + loss_of(tangent)


def vmap_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_of(torch.func.vmap(model)(torch.stack([x, y]).requires_grad_()))


def step_through(transformed: Callable[..., torch.Tensor]) -> common.Step:
    def step_of(model: nn.Module, setup: Setup, step: int) -> torch.Tensor:
        loss = transformed(model, *(batch_of(step, i, setup.rank) for i in range(2)))
        loss.backward()
        return loss

    return step_of


@same_numbers
def backward_through_functorch(setup: Setup) -> Record:
    return {
        each.__name__: train(sharded_stack(setup), setup, run=step_through(each))
        for each in (jvp_of, vmap_of)
    }


# The compiler #


def train_compiled(setup: Setup, model: nn.Module, run: Any = one_backward) -> Record:
    """Trains, and makes sure that something has been compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    record = train(model, setup, run=run)
    stats = torch._dynamo.utils.counters["stats"]
    # Hooks inside of what is compiled may leave nothing to compile
    if not stats["unique_graphs"] and not setup.is_by_dtype:
        raise AssertionError("Expected something to be compiled")
    return record


@same_numbers
def compiled_blocks(setup: Setup) -> Record:
    model = setup.stack(blocks=1)
    model.blocks[0].compile(backend="aot_eager")
    return train_compiled(setup, shard(setup, model))


@same_numbers
def compiled_model(setup: Setup) -> Record:
    model = shard(setup, setup.stack(blocks=1))
    compiled = torch.compile(model, backend="aot_eager")
    return train_compiled(
        setup, model, lambda _, setup, step: one_backward(compiled, setup, step)
    )


# Pipelining #


def target_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return loss_of(output - target)


def pipelined(setup: Setup, schedule_class: type, count: int) -> Record:
    """Trains ``count`` stages, of which this rank has every second one."""
    model, pipe = setup.stack(blocks=3), setup.pairs["replicate"]
    named = [*model.blocks.named_children(), ("head", model.head)]
    size, mine = len(named) // count, range(pipe.get_local_rank(), count, pipe.size())
    stages = {i: nn.Sequential(OrderedDict(named[i * size :][:size])) for i in mine}
    parts = []
    for i, stage in stages.items():
        shard(setup, stage, [*stage], mesh=setup.pairs["shard"])
        group = pipe.get_group()
        parts.append(
            pipelining.PipelineStage(stage, i, count, torch.device("cpu"), group=group)
        )
    first = parts if issubclass(schedule_class, PipelineScheduleMulti) else parts[0]
    schedule = schedule_class(first, MICROBATCHES, loss_fn=target_loss)
    rank = setup.pairs["shard"].get_local_rank()

    def step_of(model: nn.Module, setup: Setup, step: int) -> torch.Tensor | None:
        x = torch.cat([batch_of(step, i, rank) for i in range(MICROBATCHES)])
        args, losses = (x,) if 0 in mine else (), []
        if count - 1 not in mine:
            schedule.step(*args)
            return None
        schedule.step(*args, target=torch.sin(x), losses=losses)
        return torch.stack(losses)

    return train(nn.ModuleList(stages.values()), setup, run=step_of)


@partial(SCENARIOS.add, as_by_dtype=True)
def pipelines(setup: Setup) -> Record:
    """Interleaved, units gather and reduce as the schedule says, not by hooks alone."""
    return {
        "GPipe": pipelined(setup, pipelining.ScheduleGPipe, 2),
        "1F1B": pipelined(setup, pipelining.Schedule1F1B, 2),
        "interleaved": pipelined(setup, pipelining.ScheduleInterleaved1F1B, 4),
    }


# Casting #


@same_numbers
def cast_one_module_before_first_forward(setup: Setup) -> Record:
    """Makes other units mixed than were sharded."""
    model = sharded_stack(setup)
    block = model.blocks[0]
    (block.layers[0] if setup.is_mixed else block).to(layers.BF16)
    return train(model, setup)


# Profiles, logs and patches #


@seen_alike
def log_messages(setup: Setup) -> Record:
    """Logs steps with and without a reduction, and with a forward again in backward."""
    model = sharded_stack(setup)
    logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
    with unittest.TestCase().assertLogs(logger, logging.DEBUG) as logged:
        one_backward(model, setup, 0)
        model.set_requires_gradient_sync(False)
        one_backward(model, setup, 1)
        model.set_requires_gradient_sync(True)
        wrap_blocks(model, CheckpointImpl.REENTRANT)
        with CommDebugMode() as mode:
            step_from_input(model, setup, 2)
    records = [r for r in logged.records if r.name == logger.name]  # but for tables
    messages = [(r.levelname, r.getMessage()) for r in records]
    gathers = mode.get_comm_counts()[torch.ops.c10d._allgather_base_]
    return {"messages": messages, "gathers": gathers}


@seen_alike
def memory_tracker(setup: Setup) -> Record:
    model = sharded_stack(setup)
    optimizer = torch.optim.SGD(model.parameters(), lr=layers.LR, momentum=0.9)
    x = batch_of(0, setup.rank)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((x,))
    with tracker:
        loss_of(model(x)).backward()
        optimizer.step()
    phases = {
        stats.mod_fqn: {state.value: len(s) for state, s in stats.snapshots.items()}
        for stats in tracker.memory_tracking.values()
    }
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    one_backward(model, setup, 1)  # works as before
    categories = {str(getattr(key, "value", key)) for key in peak}
    return {"phases": phases, "categories": categories}


# What torch's own tests replace, by a utility called ``patch_`` and a name
PATCHES = {
    "unshard": FSDPParamGroup.unshard,
    "reshard": FSDPParamGroup.reshard,
    "post_backward": FSDPParamGroup.post_backward,
    "register_post_backward_hook_backward": RegisterPostBackwardFunction.backward,
    "all_gather": dist.all_gather_single,
    "reduce_scatter": dist.reduce_scatter_single,
    "all_reduce": dist.all_reduce,
    "foreach_all_gather": _fsdp_param_group.foreach_all_gather,
    "foreach_reduce": _fsdp_param_group.foreach_reduce,
}


def watching(original: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        first = next(iter(bound.values()))
        group = getattr(first, "param_group", first)  # of an autograd context
        what = {name: common.describe(arg) for name, arg in bound.items()}
        seen.append((getattr(group, "_module_fqn", None), what))
        return original(*args, **kwargs)

    return call


@SCENARIOS.add
def patches(setup: Setup) -> Record:
    """What each utility intercepts of a step of HSDP, in order: more for more dtypes."""
    seen: dict[str, list[Any]] = {}
    for name, original in PATCHES.items():
        new = watching(original, seen.setdefault(name, []))
        model = shard(setup, setup.stack(), mesh=setup.pairs)
        with getattr(common_fsdp, f"patch_{name}")(new):
            one_backward(model, setup, 0)
    return seen


if __name__ == "__main__":
    # What compiling a model imports: once, and not in each rank anew
    import torch._decomp.decompositions_for_jvp
    import torch._inductor.debug
    import torch._inductor.pattern_matcher

    torch._dynamo.config.recompile_limit = 64
    sys.exit(SCENARIOS.main(__doc__, beside=find_all))
