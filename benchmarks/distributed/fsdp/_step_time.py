"""
Wall-clock time of a training step of four gloo processes.

The processes share the machine's cores, so what is computed and what is sent both
count. Each round starts with a barrier, and takes the median of its steps. On a CPU that
has no instructions for products of half precision, both sides compute them in fp32:
otherwise hardly anything else would be measured.
"""

import time
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from _models import (
    ALL_FP32,
    AS_IT_IS,
    BLOCKS,
    language_model,
    LATE,
    NARROW,
    PER_DTYPE,
    PROMOTED,
    tokens,
    training_step,
    UNIFORM_BLOCKS,
    WIDE,
)
from _ratios import alternate, Group, Samples, Subject
from _rows import PartResult, Timed, timed_rows
from _sides import Side

import torch.distributed as dist
from _half_products import widen_half_products
from torch import nn, Tensor


SIDE_OPTIONS = {"backend": "gloo", "world_size": 4}


class Run(NamedTuple):
    model: nn.Module
    x: Tensor


@cache
def _build(block: str, way: str, device: str) -> Run:
    widen_half_products()
    run = Run(language_model(block, way, device), tokens(way, device))
    for _ in range(3):
        training_step(*run)
    return run


def measure(*, device: str, block: str, way: str, steps: int) -> dict[str, Any]:
    """Returns the median step of several, in milliseconds."""
    run = _build(block, way, device)
    training_step(*run)  # not counted: the other side has used the caches since
    dist.barrier()
    ends = [time.perf_counter()]
    for _ in range(steps):
        training_step(*run)
        ends.append(time.perf_counter())
    return {"wall_ms": float(np.median(np.diff(ends))) * 1e3}


# What is compared #

BRANCH = "branch"
PER_DTYPE_RELEASE = "release, one unit per dtype"
UNIFORM_RELEASE = "release"
ALL_FP32_RELEASE = "release, all fp32"
# The branch can be told to do so: by a policy that reduces in fp32
PROMOTED_BRANCH = "gradients promoted (by the branch)"
EARLY_BRANCH = "BACKWARD_PRE, the default (by the branch)"
WIDE_BRANCH = "the same sums, sent in fp32 (by the branch)"


def groups_of(extra: dict[str, Any], *, promoted: bool) -> list[Group]:
    """Returns each block in all ways that run, release and branch in turns."""
    groups = []
    for block in BLOCKS:
        uniform = block in UNIFORM_BLOCKS
        ways = [
            (UNIFORM_RELEASE if uniform else PER_DTYPE_RELEASE, "release", PER_DTYPE),
            (BRANCH, "branch", AS_IT_IS),
            (ALL_FP32_RELEASE, "release", ALL_FP32),
        ]
        if promoted and not uniform:
            ways.append((PROMOTED_BRANCH, "branch", PROMOTED))
        subjects = [
            Subject(name, side, {"block": block, "way": way, **extra})
            for name, side, way in ways
        ]
        groups.append(Group(block, tuple(subjects)))
    return groups


def late_groups(extra: dict[str, Any]) -> list[Group]:
    """Returns each block with units that gather the next one after their backward."""
    groups = []
    for block in BLOCKS:
        release = UNIFORM_RELEASE if block in UNIFORM_BLOCKS else PER_DTYPE_RELEASE
        subjects = [
            Subject(name, side, {"block": block, "way": way, **extra})
            for name, side, way in (
                (release, "release", PER_DTYPE),
                (BRANCH, "branch", LATE),
                (EARLY_BRANCH, "branch", AS_IT_IS),
            )
        ]
        groups.append(Group(f"{block}, {LATE}", tuple(subjects)))
    return groups


def narrow_groups(extra: dict[str, Any]) -> list[Group]:
    """Returns blocks in bf16 whose gradients are added in fp32, sent in both ways."""
    ways = ((BRANCH, NARROW), (WIDE_BRANCH, WIDE))
    return [
        Group(
            f"{block}, grad_comm_dtype",
            tuple(
                Subject(name, "branch", {"block": block, "way": way, **extra})
                for name, way in ways
            ),
        )
        for block in UNIFORM_BLOCKS
    ]


def rows_of(
    part: str,
    quantity: str,
    metric: str,
    groups: list[Group],
    samples: Samples,
    bar: float | None = None,
) -> PartResult:
    """Compares the branch with every other way."""
    timed = [
        Timed(group.name, _case(group.name), BRANCH, subject.name, bar)
        for group in groups
        for subject in group.subjects
        if subject.name != BRANCH
    ]
    rows = timed_rows(part, quantity, metric, samples, timed)
    return PartResult(rows, {"samples": samples.as_json()})


def _case(group: str) -> str:
    block, comma, setting = group.partition(",")
    return f"{block} blocks{comma}{setting}"


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> PartResult:
    """Compares the time of a step."""
    steps = {"steps": 3 if quick else 5}
    groups = groups_of(steps, promoted=True) + narrow_groups(steps) + late_groups(steps)
    if quick:
        groups = [group for group in groups if group.name not in UNIFORM_BLOCKS][:1]
    samples = alternate(
        "step",
        sides,
        groups,
        rounds=rounds or (2 if quick else 10),
        launches=1 if quick else 2,
    )
    return rows_of("step", "ms / step", "wall_ms", groups, samples, bar=1.0)
