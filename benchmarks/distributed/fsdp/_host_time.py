"""
Host time of FSDP2 per unit and step, with a process group that moves nothing.

[Note: What host time is]
The model is a stack of units of small parameters, each used by one multiplication of
128 elements. Host time per unit is the processor time of a step, forward and backward,
less that of the same model without ``fully_shard``, over the number of units. It is
that of the fastest step of a round, because what disturbs a step (caches that others
have filled, a garbage collection) only ever adds. Gradients are cleared outside of what
is timed.
"""

import gc
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from types import FrameType
from typing import Any

from _models import PRECISIONS, scales_block, SHAPE, shard_scales
from _ratios import alternate, Comparison, Group, Row, Subject
from _sides import Side

import torch
from torch import nn


MIN_STEPS = 5


@cache
def build(
    precision: str, units: int, params: int, per_dtype: bool, device: str
) -> tuple[nn.Module, nn.Module]:
    """Returns a model as FSDP2 runs it, and the same without, both in steady steps."""
    dtypes, policy = PRECISIONS[precision]
    sharded, plain = (
        nn.Sequential(*(scales_block(params, dtypes) for _ in range(units))).to(device)
        for _ in range(2)
    )
    shard_scales(sharded, per_dtype=per_dtype, policy=policy, device=device)
    plain.to(policy.get("param_dtype"))
    for model in (sharded, plain):
        for _ in range(3):  # state is initialized lazily, and plans are made once
            fastest_step(model, device, seconds=0)
    # Collections in later steps need not look through all that has been imported
    gc.collect()
    gc.freeze()
    return sharded, plain


def fastest_step(model: nn.Module, device: str, seconds: float) -> float:
    """Returns the microseconds of the fastest step of as many as fit in ``seconds``."""
    x = torch.ones(SHAPE, device=device, requires_grad=True)

    def step() -> float:
        begun = time.process_time_ns()
        model(x).sum().backward()
        ns = time.process_time_ns() - begun
        if device == "cuda":
            torch.cuda.synchronize()  # no step waits for what the last one left there
        for parameter in (x, *model.parameters()):
            parameter.grad = None
        return ns / 1e3

    step()  # not counted: the other side has used the caches since
    steps: list[float] = []
    end = time.perf_counter() + seconds
    while len(steps) < MIN_STEPS or time.perf_counter() < end:
        steps.append(step())
    return min(steps)


def count_calls(
    precision: str, units: int, params: int, per_dtype: bool, device: str
) -> dict[str, float]:
    """Returns the Python calls, for each parameter, of what is done once."""
    dtypes, policy = PRECISIONS[precision]
    x = torch.ones(SHAPE, device=device, requires_grad=True)
    counts: dict[str, float] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        counts[step] += (event == "call") / (units * params)

    for observer in (None, note):  # before it counts, torch is initialized lazily
        blocks = [scales_block(params, dtypes) for _ in range(units)]
        model = nn.Sequential(*blocks).to(device)
        saved: dict[str, Any] = {}
        shard = partial(shard_scales, per_dtype=per_dtype, policy=policy, device=device)
        steps: dict[str, Callable[[], object]] = {
            "fully_shard": partial(shard, model),
            "first forward": partial(model, x),
            "state_dict": partial(model.state_dict, destination=saved),
            "load_state_dict": partial(model.load_state_dict, saved),
        }
        for step, run_step in steps.items():
            counts[step] = 0.0
            gc.collect()  # not while calls are counted
            sys.setprofile(observer)
            run_step()
            sys.setprofile(None)
    return counts


def measure(
    *, device: str, seconds: float, once: bool = False, **of_model: Any
) -> dict[str, float]:
    """Returns host time per unit, see [Note: What host time is], or calls."""
    if once:
        return count_calls(device=device, **of_model)
    sharded, plain = build(device=device, **of_model)
    us = fastest_step(sharded, device, seconds)
    us -= fastest_step(plain, device, seconds / 4)
    return {"unit_us": us / of_model["units"]}


# Models and ways that are compared #

UNIFORM, PER_DTYPE = "release, uniform fp32", "release, one unit per dtype"
# Subject: side, precision, one unit per dtype
SUBJECTS: dict[str, tuple[str, str, bool]] = {
    UNIFORM: ("release", "fp32", False),
    "branch, uniform fp32": ("branch", "fp32", False),
    "release, fp32, bf16 compute": ("release", "fp32, bf16 compute", False),
    "branch, fp32, bf16 compute": ("branch", "fp32, bf16 compute", False),
    PER_DTYPE: ("release", "mixed", True),
    "branch, mixed": ("branch", "mixed", False),
}
# Branch, release, bar for units of 16 parameters. README promises about half; a mixed unit
# of three dtypes has three reductions, and replaces three units of the release
COMPARISONS = (
    ("branch, uniform fp32", UNIFORM, 0.55),
    ("branch, fp32, bf16 compute", "release, fp32, bf16 compute", 0.55),
    ("branch, mixed", UNIFORM, 0.70),
    ("branch, mixed", PER_DTYPE, 0.40),
)
UNITS, PARAMS = 8, (4, 16, 64)
# What is done once: units and their parameters, and at most so many of the release's calls
ONCE = ((8, 16), (10, 400))
ONCE_AT_MOST = {"fully_shard": None, "first forward": 1.0}
ONCE_AT_MOST |= {"state_dict": 1.0, "load_state_dict": 1.0}


def group_of(units: int, params: int, seconds: float) -> Group:
    subjects = []
    for name, (side, precision, per_dtype) in SUBJECTS.items():
        request = {"precision": precision, "units": units, "params": params}
        request |= {"per_dtype": per_dtype, "seconds": seconds}
        subjects.append(Subject(name, side, request))
    return Group(f"{params} parameters x {units}", subjects)


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> list[Row]:
    """Compares host time per unit, for several numbers of parameters a unit."""
    params = PARAMS[1:2] if quick else PARAMS
    groups = [group_of(UNITS, count, 0.06 if quick else 0.12) for count in params]
    rounds, launches = (rounds or 2, 1) if quick else (rounds or 12, 3)
    samples = alternate(__name__, sides, groups, rounds, launches)
    rows = run_once(sides)
    for branch, versus, bar in COMPARISONS:
        compared = [
            Comparison(group.name, branch, versus, bar if count == 16 else None)
            for count, group in zip(params, groups)
        ]
        quantity = f"us / unit and step, {branch.partition(', ')[2]}"
        rows += samples.rows("host", quantity, "unit_us", compared)
    return rows


def run_once(sides: dict[str, Side]) -> list[Row]:
    """Compares what is done once, for few parameters a unit and for many."""
    groups = [group_of(units, params, 0.0) for units, params in ONCE]
    for subject in (subject for group in groups for subject in group.subjects):
        subject.request["once"] = True
    samples, rows = alternate(__name__, sides, groups), []
    for branch, versus, _ in COMPARISONS[:2]:
        for step, bar in ONCE_AT_MOST.items():
            compared = [Comparison(group.name, branch, versus, bar) for group in groups]
            quantity = f"calls / parameter, {step}, {branch.partition(', ')[2]}"
            rows += samples.rows("host", quantity, step, compared)
    return rows
