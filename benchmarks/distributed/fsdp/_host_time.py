"""Host time of FSDP2 per unit and step, with a process group that moves nothing.

[Note: What host time is]
The model is a stack of units of small parameters, each used by one multiplication of
128 elements, so that hardly anything is computed. Host time per unit is the time of a
step, forward and backward, less the time of the same step of the same model without
``fully_shard``, over the number of units. The time of a step is the processor time of
the process, which has one thread: what other programs do meanwhile does not count. It
is that of the fastest step of a round, because what disturbs a step (caches that others
have filled, a garbage collection) only ever adds. Wall-clock time is measured as well.

The process group is ``fake``: it has 8 ranks, of which this process is the first, and
its collectives do next to nothing on the host. A step clears the gradients, as an
optimizer does, outside of what is timed.
"""

import gc
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

from _models import PRECISIONS, scales_block, SHAPE, shard_scales
from _ratios import alternate, Group, Subject
from _rows import as_json, PartResult, Timed, timed_rows
from _sides import Side

import torch
import torch.distributed as dist
from torch import nn


MIN_STEPS = 5


class StepTime(NamedTuple):
    """Of one step, in seconds."""

    cpu: float
    wall: float


class Pair(NamedTuple):
    """A model as FSDP2 runs it, and the same without."""

    sharded: nn.Module
    plain: nn.Module


@cache
def build(
    precision: str, units: int, params: int, per_dtype: bool, device: str
) -> Pair:
    """Returns the models, whose steps are like all later ones from now on."""
    dtypes, policy = PRECISIONS[precision]
    models = [
        nn.Sequential(*(scales_block(params, dtypes) for _ in range(units))).to(device)
        for _ in range(2)
    ]
    sharded = shard_scales(
        models[0],
        per_dtype=per_dtype,
        policy=policy,
        world_size=dist.get_world_size(),
        device=device,
    )
    plain = models[1].to(policy.get("param_dtype"))
    for model in (sharded, plain):
        for _ in range(3):  # state is initialized lazily, and plans are made once
            time_steps(model, device, seconds=0)
    # Collections in later steps need not look through all that has been imported
    gc.collect()
    gc.freeze()
    return Pair(sharded, plain)


def time_steps(model: nn.Module, device: str, seconds: float) -> StepTime:
    """Returns the fastest step of as many as fit into ``seconds``."""
    x = torch.ones(SHAPE, device=device, requires_grad=True)
    synchronize: Callable[[], None] = (
        torch.cuda.synchronize if device == "cuda" else lambda: None
    )

    def step() -> StepTime:
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        model(x).sum().backward()
        cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
        synchronize()  # no step waits for what the one before it left on the device
        for parameter in model.parameters():
            parameter.grad = None
        x.grad = None
        return StepTime(cpu / 1e9, wall / 1e9)

    step()  # not counted: the other side has used the caches since
    steps: list[StepTime] = []
    end = time.perf_counter() + seconds
    while len(steps) < MIN_STEPS or time.perf_counter() < end:
        steps.append(step())
    return StepTime(*map(min, zip(*steps)))


def measure(
    *,
    device: str,
    precision: str,
    units: int,
    params: int,
    per_dtype: bool = False,
    seconds: float,
) -> dict[str, float]:
    """
    Returns host time in microseconds, per unit and step or ("step_us") per step, and
    what is not counted as such. See [Note: What host time is].
    """
    models = build(precision, units, params, per_dtype, device)
    sharded = time_steps(models.sharded, device, seconds)
    plain = time_steps(models.plain, device, seconds / 4)
    cpu_us = (sharded.cpu - plain.cpu) * 1e6
    return {
        "cpu_us": cpu_us / units,
        "wall_us": (sharded.wall - plain.wall) / units * 1e6,
        "step_us": cpu_us,
        "plain_us": plain.cpu / units * 1e6,
    }


# What is compared #

UNITS = 8
PARAMS = (4, 16, 64)
UNIFORM = "release, uniform fp32"
PER_DTYPE = "release, one unit per dtype"
# Subject: side, precision, one unit per dtype
SUBJECTS: dict[str, tuple[str, str, bool]] = {
    UNIFORM: ("release", "fp32", False),
    "branch, uniform fp32": ("branch", "fp32", False),
    "release, fp32, bf16 compute": ("release", "fp32, bf16 compute", False),
    "branch, fp32, bf16 compute": ("branch", "fp32, bf16 compute", False),
    PER_DTYPE: ("release", "mixed", True),
    "branch, mixed": ("branch", "mixed", False),
}
# Case, subjects to compare, bar
COMPARISONS = (
    ("uniform fp32", "branch, uniform fp32", UNIFORM, 0.55),
    (
        "fp32, bf16 compute, fp32 reduce",
        "branch, fp32, bf16 compute",
        "release, fp32, bf16 compute",
        0.55,
    ),
    ("fp32, bf16 and fp16 in a unit", "branch, mixed", UNIFORM, 0.70),
    ("fp32, bf16 and fp16 in a unit", "branch, mixed", PER_DTYPE, 0.40),
)


def _group(params: int, seconds: float) -> Group:
    subjects = []
    for name, (side, precision, per_dtype) in SUBJECTS.items():
        request: dict[str, Any] = {
            "precision": precision,
            "units": UNITS,
            "params": params,
            "per_dtype": per_dtype,
            "seconds": seconds,
        }
        subjects.append(Subject(name, side, request))
    return Group(f"{params} parameters", tuple(subjects))


def groups_of_host(params: Iterable[int], seconds: float) -> list[Group]:
    """Returns a group for each number of parameters a unit."""
    return [_group(count, seconds) for count in params]


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> PartResult:
    """Compares host time per unit, for several numbers of parameters a unit."""
    groups = groups_of_host(PARAMS, 0.06 if quick else 0.12)
    samples = alternate(
        "host",
        sides,
        groups,
        rounds=rounds or (2 if quick else 12),
        launches=1 if quick else 3,
    )
    timed = [
        Timed(group.name, f"{case}, {group.name}", branch, versus, bar)
        for case, branch, versus, bar in COMPARISONS
        for group in groups
    ]
    rows = timed_rows("host", "us / unit and step", "cpu_us", samples, timed)
    wall = timed_rows("host", "wall us / unit, step", "wall_us", samples, timed)
    return PartResult(rows, {"samples": samples.as_json(), "wall_rows": as_json(wall)})
