"""
Uses sharded towers with what else torch has, with whatever torch is imported, and
saves what came of it: activation checkpointing, functorch, the compiler, pipelining,
the memory tracker, the profiler, logging, and the utilities of torch's own tests.

The tests run it once on the release and once on this branch and compare:

- ``uniform`` towers are cut into the same units in both;
- ``mixed`` towers are cut into one unit for each dtype with ``--units dtype``, which
  the release can do, and into blocks of three dtypes with ``--units block``, which
  only this branch can.

Of the four ranks, two make a mesh, and the two halves take turns; a pipeline takes
all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import logging
import pickle
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fsdp_common.run_ranks import run_ranks
from fsdp_parity.models import (
    batch_of,
    BF16,
    FP32,
    loss_of,
    mixed_tower,
    Part,
    Tower,
    uniform_tower,
)
from fsdp_parity.modes import bits_of, LR, Record

import torch
import torch._dynamo  # the first hook would, in each rank anew
import torch._dynamo.backends.debugging  # as would the first compilation
import torch.distributed as dist
import torch.nn as nn
import torch.testing._internal.common_fsdp as common_fsdp
from torch.distributed._tools import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    CheckpointImpl,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPParamGroup,
    RegisterPostBackwardFunction,
)
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint


_ALL_GATHER = torch.ops.c10d._allgather_base_
STEPS = 2
RANKS = 4
MICROBATCHES = 2


@dataclass(frozen=True)
class Run:
    """What a scenario runs with."""

    kind: str  # "uniform" or "mixed"
    is_by_dtype: bool  # whether a mixed tower is cut into units of one dtype
    rank: int  # in the mesh
    # Of all ranks: "shard" is a half, "pipe" is over both
    meshes: DeviceMesh

    @property
    def is_cut_by_dtype(self) -> bool:
        return self.is_by_dtype and self.kind == "mixed"

    @property
    def policy(self) -> MixedPrecisionPolicy:
        if self.kind == "mixed":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)

    def tower(self) -> Tower:
        return mixed_tower() if self.kind == "mixed" else uniform_tower(FP32)

    def small_tower(self) -> Tower:
        """One block, for what takes its time per module."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if self.kind == "mixed":
                return Tower([(FP32, BF16)])
            return Tower([(FP32, FP32)], stem=FP32)

    def shard(
        self,
        model: nn.Module,
        units: list[nn.Module] | None = None,
        mesh: DeviceMesh | None = None,
    ) -> Any:
        """Makes each block a unit, or what it consists of, and the rest one."""
        mesh = self.meshes["shard"] if mesh is None else mesh
        kwargs = {"mesh": mesh, "mp_policy": self.policy, "reshard_after_forward": True}
        units = list(model.blocks) if units is None else units
        if self.is_cut_by_dtype:
            units = [module for module in model.modules() if isinstance(module, Part)]
        for unit in units:
            fully_shard(unit, **kwargs)
        return fully_shard(model, **kwargs)

    def sharded_tower(self) -> Tower:
        return self.shard(self.tower())

    def hybrid_tower(self) -> Tower:
        return self.shard(self.tower(), mesh=self.meshes)

    def batch(self, step: int, microbatch: int = 0) -> torch.Tensor:
        return batch_of(step, microbatch, self.rank)


# Runs the step of a number, and returns the loss where there is one
Step = Callable[[nn.Module, int], Any]
Facts = dict[str, Any]

TRAINING: dict[str, Callable[[Run], Record]] = {}
FACTS: dict[str, Callable[[Run], Facts]] = {}
# Of all ranks at once
PIPELINES: dict[str, Callable[[Run], Record]] = {}
FOR_ALL: dict[str, Callable[[Run], Facts]] = {}


def listed(registry: dict[str, Any]) -> Callable[[Any], Any]:
    def enlist(scenario: Any) -> Any:
        registry[scenario.__name__] = scenario
        return scenario

    return enlist


def name_of(fqn: str) -> str:
    """Returns a name as it is without wrappers around modules."""
    return re.sub(r"\._(checkpoint_wrapped_module|orig_mod)\b", "", fqn)


def train(run: Run, model: nn.Module, step_of: Step | None = None) -> Record:
    """Returns every step's losses and sharded gradients, and the final parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    record: Record = {}
    for step in range(STEPS):
        loss = (step_of or functools.partial(one_step, run))(model, step)
        if loss is not None:
            record[f"step {step} loss"] = bits_of(loss)
        for name, param in model.named_parameters():
            if param.grad is not None:
                record[f"step {step} gradient {name_of(name)}"] = bits_of(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        record[f"final {name_of(name)}"] = bits_of(param)
    return record


def one_step(run: Run, model: nn.Module, step: int) -> torch.Tensor:
    loss = loss_of(model(run.batch(step)))
    loss.backward()
    return loss


def two_forwards(run: Run, model: nn.Module, step: int) -> torch.Tensor:
    """Runs backward once, after both."""
    loss = loss_of(model(run.batch(step, 0))) + loss_of(model(run.batch(step, 1)))
    loss.backward()
    return loss


@listed(TRAINING)
def plain(run: Run) -> Record:
    return train(run, run.sharded_tower())


@listed(TRAINING)
def plain_two_forwards(run: Run) -> Record:
    return train(run, run.sharded_tower(), functools.partial(two_forwards, run))


# Activation checkpointing #


def wrap_blocks(model: Tower, impl: CheckpointImpl) -> None:
    """Computes blocks again in backward, with the hooks that they have by now."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=impl)


def checkpointed_inside(run: Run, *, use_reentrant: bool) -> Record:
    model = run.tower()
    for block in model.blocks:
        forward = type(block).forward.__get__(block)

        def again(x: torch.Tensor, skip: Any = (), forward: Any = forward) -> Any:
            return checkpoint(forward, x, skip, use_reentrant=use_reentrant)

        block.forward = again
    return train(run, run.shard(model))


@listed(TRAINING)
def checkpoint_in_unit(run: Run) -> Record:
    return checkpointed_inside(run, use_reentrant=False)


@listed(TRAINING)
def checkpoint_in_unit_reentrant(run: Run) -> Record:
    return checkpointed_inside(run, use_reentrant=True)


@listed(TRAINING)
def wrapper_around_unit(run: Run) -> Record:
    model = run.sharded_tower()
    wrap_blocks(model, CheckpointImpl.NO_REENTRANT)
    return train(run, model)


@listed(TRAINING)
def wrapper_around_unit_reentrant(run: Run) -> Record:
    model = run.sharded_tower()
    wrap_blocks(model, CheckpointImpl.REENTRANT)
    return train(run, model)


@listed(TRAINING)
def unit_around_wrapper(run: Run) -> Record:
    model = run.tower()
    wrap_blocks(model, CheckpointImpl.NO_REENTRANT)
    return train(run, run.shard(model))


@listed(TRAINING)
def unit_around_wrapper_reentrant(run: Run) -> Record:
    model = run.tower()
    wrap_blocks(model, CheckpointImpl.REENTRANT)
    return train(run, run.shard(model))


def nested_units(model: Tower) -> list[nn.Module]:
    return [unit for block in model.blocks for unit in (block.parts[0], block)]


@listed(TRAINING)
def nested_wrapper_around_unit(run: Run) -> Record:
    model = run.tower()
    run.shard(model, nested_units(model))
    wrap_blocks(model, CheckpointImpl.NO_REENTRANT)
    return train(run, model)


@listed(TRAINING)
def nested_unit_around_wrapper_two_forwards(run: Run) -> Record:
    model = run.tower()
    inner = [block.parts[0] for block in model.blocks]
    wrap_blocks(model, CheckpointImpl.NO_REENTRANT)
    units = [unit for pair in zip(inner, model.blocks) for unit in pair]
    run.shard(model, units)
    return train(run, model, functools.partial(two_forwards, run))


# Functorch #


def reverse_over(run: Run, transformed: Callable[..., torch.Tensor]) -> Record:
    """Trains with a loss from ``transformed(model, x, y)``."""

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        loss = transformed(model, run.batch(step, 0), run.batch(step, 1))
        loss.backward()
        return loss

    return train(run, run.sharded_tower(), step_of)


@listed(TRAINING)
def jvp(run: Run) -> Record:
    def transformed(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        output, tangent = torch.func.jvp(model, (x,), (t,))
        return loss_of(output) + loss_of(tangent)

    return reverse_over(run, transformed)


@listed(TRAINING)
def vmap(run: Run) -> Record:
    def transformed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(torch.func.vmap(model)(torch.stack([x, y])))

    return reverse_over(run, transformed)


@listed(TRAINING)
def jvp_of_inputs_with_gradients(run: Run) -> Record:
    def transformed(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        output, tangent = torch.func.jvp(model, (x.requires_grad_(),), (t,))
        return loss_of(output) + loss_of(tangent)

    return reverse_over(run, transformed)


@listed(TRAINING)
def vmap_of_inputs_with_gradients(run: Run) -> Record:
    def transformed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(torch.func.vmap(model)(torch.stack([x, y]).requires_grad_()))

    return reverse_over(run, transformed)


def through_dual(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = model(torch.autograd.forward_ad.make_dual(x, t))
        return torch.autograd.forward_ad.unpack_dual(dual).tangent


@listed(FACTS)
def functorch_of_inputs(run: Run) -> Facts:
    """Derivatives by the inputs, or what refuses them."""
    x, t = run.batch(0, 0), run.batch(0, 1)
    transforms: dict[str, Callable[[nn.Module], Any]] = {
        "vmap": lambda model: torch.func.vmap(model)(torch.stack([x, t])),
        "jvp": lambda model: torch.func.jvp(model, (x,), (t,)),
        "grad": lambda model: torch.func.grad(lambda x: loss_of(model(x)))(x),
        "vjp": lambda model: torch.func.vjp(model, x)[1](t),
        "dual": lambda model: through_dual(model, x.clone().requires_grad_(), t),
        "jacfwd": lambda model: torch.func.jacfwd(model)(x[:1]),
        "jacrev": lambda model: torch.func.jacrev(model)(x[:1]),
    }
    results = {}
    for name, transform in transforms.items():
        for has_grad in (False, True):
            with torch.set_grad_enabled(has_grad):
                label = f"{name}, {'grad' if has_grad else 'no grad'}"
                results[label] = outcome(transform, run.sharded_tower())
    return results


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the bits of all tensors that come of a call, or what it raises."""
    try:
        result = function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return [
        bits_of(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        for leaf in torch.utils._pytree.tree_leaves(result)
    ]


# The compiler #


@listed(TRAINING)
def plain_small(run: Run) -> Record:
    return train(run, run.shard(run.small_tower()))


def train_compiled(run: Run, model: nn.Module, step_of: Step | None = None) -> Record:
    """Trains, and makes sure that something has been compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    record = train(run, model, step_of)
    stats = torch._dynamo.utils.counters["stats"]
    # Hooks inside of what is compiled may leave nothing to compile
    if not stats["unique_graphs"] and not run.is_cut_by_dtype:
        raise AssertionError("Expected something to be compiled")
    return record


@listed(TRAINING)
def compiled_blocks_in_place(run: Run) -> Record:
    model = run.small_tower()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return train_compiled(run, run.shard(model))


@listed(TRAINING)
def compiled_blocks(run: Run) -> Record:
    model = run.small_tower()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")
    return train_compiled(run, run.shard(model))


@listed(TRAINING)
def compiled_model(run: Run) -> Record:
    model = run.shard(run.small_tower())
    compiled = torch.compile(model, backend="aot_eager")
    return train_compiled(run, model, lambda _, step: one_step(run, compiled, step))


@listed(TRAINING)
def compiled_model_in_place(run: Run) -> Record:
    model = run.shard(run.small_tower())
    model.compile(backend="eager")
    return train_compiled(run, model)


@listed(TRAINING)
def compiled_checkpointed_blocks(run: Run) -> Record:
    model = run.small_tower()
    wrap_blocks(model, CheckpointImpl.NO_REENTRANT)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return train_compiled(run, run.shard(model))


# Pipelining #


def modules_in_order(model: Tower) -> dict[str, nn.Module]:
    """Returns what may be cut into stages; stem and head have one dtype."""
    first, second = model.blocks
    return {"stem": model.stem, "0": first, "1": second, "head": model.head}


def stages_of(run: Run, count: int) -> list[nn.Sequential]:
    named = [*modules_in_order(run.tower()).items()]
    size = len(named) // count
    cuts = [named[i : i + size] for i in range(0, len(named), size)]
    stages = [nn.Sequential(OrderedDict(cut)) for cut in cuts]
    for stage in stages:
        run.shard(stage, [*stage])
    return stages


def all_modules_of(stages: list[nn.Sequential]) -> nn.Sequential:
    named = (pair for stage in stages for pair in stage.named_children())
    return nn.Sequential(OrderedDict(named))


def target_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return loss_of(output - target)


def pipelined(run: Run, schedule_class: type, count: int) -> Record:
    stages, pipe = stages_of(run, count), run.meshes["pipe"]
    mine = range(pipe.get_local_rank(), count, pipe.size())
    parts = [
        PipelineStage(stages[i], i, count, torch.device("cpu"), group=pipe.get_group())
        for i in mine
    ]
    first = parts if issubclass(schedule_class, PipelineScheduleMulti) else parts[0]
    schedule = schedule_class(first, MICROBATCHES, loss_fn=target_loss)

    def step_of(model: nn.Module, step: int) -> torch.Tensor | None:
        x = torch.cat([run.batch(step, i) for i in range(MICROBATCHES)])
        args, losses = (x,) if 0 in mine else (), []
        if count - 1 not in mine:
            schedule.step(*args)
            return None
        schedule.step(*args, target=torch.sin(x), losses=losses)
        return torch.stack(losses)

    return train(run, all_modules_of([stages[i] for i in mine]), step_of)


@listed(PIPELINES)
def gpipe(run: Run) -> Record:
    return pipelined(run, ScheduleGPipe, 2)


@listed(PIPELINES)
def one_forward_one_backward(run: Run) -> Record:
    return pipelined(run, Schedule1F1B, 2)


@listed(PIPELINES)
def interleaved(run: Run) -> Record:
    """Unshards, reshards and reduces as the schedule says, not by hooks alone."""
    return pipelined(run, ScheduleInterleaved1F1B, 4)


@listed(PIPELINES)
def not_pipelined(run: Run) -> Record:
    """All modules one after the other on every rank."""
    stages = stages_of(run, 2)

    def step_of(model: nn.Module, step: int) -> torch.Tensor:
        losses = []
        for i in range(MICROBATCHES):
            for stage in stages:
                stage.set_requires_gradient_sync(i == MICROBATCHES - 1)
            x = run.batch(step, i)
            losses.append(target_loss(stages[1](stages[0](x)), torch.sin(x)))
            losses[-1].backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad.div_(MICROBATCHES)
        return torch.stack(losses)

    return train(run, all_modules_of(stages), step_of)


# Moving and casting #


@listed(TRAINING)
def cast_before_first_forward(run: Run) -> Record:
    return train(run, run.sharded_tower().to(BF16))


@listed(TRAINING)
def cast_one_module_before_first_forward(run: Run) -> Record:
    """Makes other units mixed than were sharded."""
    model = run.sharded_tower()
    if run.kind == "mixed":
        model.blocks[0].parts[0].to(BF16)
    else:
        model.blocks[0].to(BF16)
    return train(run, model)


@listed(TRAINING)
def moved_before_first_forward(run: Run) -> Record:
    return train(run, run.sharded_tower().to("cpu").to(torch.device("cpu", 0)))


@listed(TRAINING)
def doubled_in_between(run: Run) -> Record:
    """A cast of all parameters once the units know their dtypes."""
    model = run.sharded_tower()
    record = {f"before {k}": v for k, v in train(run, model).items()}
    scaled = model._apply(lambda tensor: tensor * 2)
    return record | train(run, scaled)


@listed(FACTS)
def copies(run: Run) -> Facts:
    """What copying and pickling comes to."""
    model = run.sharded_tower()
    one_step(run, model, 0)
    state_dict = model.state_dict()
    copied = pickle.loads(pickle.dumps(state_dict["head.gain"].to_local()))
    return {
        "deepcopy of the model": outcome(copy.deepcopy, model),
        "deepcopy of a block": outcome(copy.deepcopy, model.blocks[0]),
        "copy of the model": outcome(copy.copy, model),
        "pickle of the model": outcome(pickle.dumps, model),
        "state dict": {k: bits_of(v) for k, v in copy.deepcopy(state_dict).items()},
        "a parameter with gradient": outcome(copy.deepcopy, model.head.gain),
        "its gradient": outcome(copy.deepcopy, model.head.gain.grad),
        "pickle of a shard": bits_of(copied),
    }


# What is seen from outside #


def two_steps(run: Run, model: nn.Module, watch: AbstractContextManager) -> None:
    """Runs once to initialize, and once more under ``watch``."""
    one_step(run, model, 0)
    with watch:
        one_step(run, model, 1)


@listed(FACTS)
def profiler_ranges(run: Run) -> Facts:
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    two_steps(run, run.sharded_tower(), profile)
    names = [event.name for event in profile.events()]
    return {"ranges": Counter(name for name in names if name.startswith("FSDP::"))}


@contextlib.contextmanager
def logged() -> Iterator[list[tuple[str, str]]]:
    """Collects levels and texts of what FSDP logs, instead of printing it."""
    logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
    before = logger.level, logger.propagate
    messages: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.addFilter(lambda r: r.name == logger.name)  # no tables of layouts
    handler.emit = lambda r: messages.append((r.levelname, name_of(r.getMessage())))
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        level, logger.propagate = before
        logger.setLevel(level)


@listed(FACTS)
def log_messages(run: Run) -> Facts:
    model = run.sharded_tower()
    with logged() as messages:
        one_step(run, model, 0)
        model.set_requires_gradient_sync(False)
        one_step(run, model, 1)
    return {"messages": messages}


@listed(FACTS)
def log_messages_of_checkpointed(run: Run) -> Facts:
    """Tells which units run their hooks, and gather, again in backward."""
    facts: Facts = {}
    for impl in CheckpointImpl:
        model = run.sharded_tower()
        wrap_blocks(model, impl)
        with logged() as facts[impl.name], CommDebugMode() as mode:
            one_step(run, model, 0)
        facts[f"{impl.name} gathers"] = mode.get_comm_counts()[_ALL_GATHER]
    return facts


@listed(FACTS)
def comm_debug_counts(run: Run) -> Facts:
    with CommDebugMode() as mode:
        one_step(run, run.sharded_tower(), 0)
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    return {"counts": counts, "total": mode.get_total_counts()}


@listed(FACTS)
def memory_tracker(run: Run) -> Facts:
    model = run.sharded_tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    x = run.batch(0)
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
    one_step(run, model, 1)  # works as before
    return {
        "phases": phases,
        "categories": {str(getattr(key, "value", key)) for key in peak},
        "total": peak["Total"],
    }


# Utilities of torch's own tests #


# What torch's own tests replace, and by which of their utilities
GROUP_PATCHES = {
    "patch_unshard": (FSDPParamGroup, "unshard"),
    "patch_reshard": (FSDPParamGroup, "reshard"),
    "patch_post_backward": (FSDPParamGroup, "post_backward"),
    "patch_register_post_backward_hook_backward": (
        RegisterPostBackwardFunction,
        "backward",
    ),
}
CALL_PATCHES = {
    "patch_all_gather": (dist, "all_gather_single"),
    "patch_reduce_scatter": (dist, "reduce_scatter_single"),
    "patch_all_reduce": (dist, "all_reduce"),
    "patch_foreach_all_gather": (_fsdp_param_group, "foreach_all_gather"),
    "patch_foreach_reduce": (_fsdp_param_group, "foreach_reduce"),
}


def describe(arg: Any) -> Any:
    """Returns what can be compared between processes of an argument."""
    if isinstance(arg, torch.Tensor):
        return str(arg.dtype), arg.numel()
    if isinstance(arg, list):
        return [describe(each) for each in arg]
    plain_types = (str, bool, int, float, torch.dtype, torch.device, type(None))
    return str(arg) if isinstance(arg, plain_types) else type(arg).__name__


def watching_group(original: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    def call(this: Any, *args: Any) -> Any:
        group = getattr(this, "param_group", this)  # of an autograd context
        seen.append((group._module_fqn, len(args)))
        return original(this, *args)

    return call


def watching_call(original: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        seen.append({name: describe(arg) for name, arg in bound.items()})
        return original(*args, **kwargs)

    return call


def intercepted(run: Run, is_hybrid: bool) -> Facts:
    """What each utility intercepts of one step, in order."""
    seen: dict[str, list[Any]] = {}
    for name, (owner, attribute) in {**GROUP_PATCHES, **CALL_PATCHES}.items():
        watching = watching_group if name in GROUP_PATCHES else watching_call
        calls = seen.setdefault(name, [])
        new = watching(getattr(owner, attribute), calls)
        model = run.hybrid_tower() if is_hybrid else run.sharded_tower()
        with getattr(common_fsdp, name)(new):
            one_step(run, model, 0)
    return seen


@listed(FOR_ALL)
def patches(run: Run) -> Facts:
    return intercepted(run, is_hybrid=False)


@listed(FOR_ALL)
def patches_of_hybrid(run: Run) -> Facts:
    return intercepted(run, is_hybrid=True)


# Running #

# What compiling a model imports: once, and not in each rank anew
COMPILER = (
    "torch._decomp.decompositions_for_jvp",
    "torch._inductor.debug",
    "torch._inductor.pattern_matcher",
)


def run_all(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    torch._dynamo.config.recompile_limit = 64
    shape, names = (RANKS // 2, 2), ("pipe", "shard")
    meshes = init_device_mesh("cpu", shape, mesh_dim_names=names)
    results: dict[str, Any] = {}
    turns = itertools.cycle(range(RANKS // 2))
    for kind in ("uniform", "mixed"):
        by_dtype = args.units == "dtype"
        run = Run(kind, by_dtype, rank % 2, meshes)
        together = {**PIPELINES, **FOR_ALL}
        for name, scenario in {**together, **TRAINING, **FACTS}.items():
            if args.only and name not in args.only:
                continue
            if name not in together and next(turns) != rank // 2:
                continue  # the other half's
            torch._dynamo.reset()
            results[f"{kind} {name}"] = scenario(run)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for a file of each rank")
    parser.add_argument("--units", required=True, choices=("dtype", "block"))
    parser.add_argument("--only", nargs="+", help="scenarios to run, default all")
    args = parser.parse_args()
    for name in COMPILER:
        importlib.import_module(name)
    run_ranks(run_all, args, RANKS)


if __name__ == "__main__":
    sys.exit(main())
