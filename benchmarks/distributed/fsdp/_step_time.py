"""
Wall-clock time of a training step of four gloo processes, or on a device.

Processes share the machine's cores, so what is computed and what is sent both count.
"""

import time
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import _models
import numpy as np
from _models import AS_IT_IS, COALESCED, LATE, PER_DTYPE, training_step
from _ratios import alternate, Comparison, Group, Row, Samples, Subject
from _sides import Side

import torch
import torch.distributed as dist
from torch import nn, Tensor


@cache
def _build(block: str, way: str, device: str) -> tuple[nn.Module, Tensor]:
    run = _models.language_model(block, way, device)
    for _ in range(3):
        training_step(*run)
    return run


def measure(*, device: str, block: str, way: str, steps: int) -> dict[str, Any]:
    """Returns the median step of several, in milliseconds."""
    run = _build(block, way, device)
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else int
    training_step(*run)  # not counted: the other side has used the caches since
    dist.barrier()
    wait()
    ends = [time.perf_counter()]
    for _ in range(steps):
        training_step(*run)
        wait()
        ends.append(time.perf_counter())
    return {"wall_ms": float(np.median(np.diff(ends))) * 1e3}


# Models and ways that are compared #

QUICK_BLOCK = "Nemotron-H-like"
BRANCH, RELEASE = "branch", "release"
PER_DTYPE_RELEASE = "release, one unit per dtype"
ALL_FP32_RELEASE = "release, all fp32"
EARLY = "BACKWARD_PRE, the default (by the branch)"
PROMOTED, SERIES = "2.15.0, gradients promoted", "2.15.0, the series"
BARS = {RELEASE: 1.0, PROMOTED: 1.0}


def groups_of(
    sides: Collection[str], *, quick: bool = False, **extra: Any
) -> Iterator[Group]:
    """Yields each block, or one, in each way, and what it is compared with."""
    for block in [QUICK_BLOCK] if quick else _models.BLOCKS:
        is_uniform = block == _models.UNIFORM_BLOCK
        release = RELEASE if is_uniform else PER_DTYPE_RELEASE
        theirs = release, RELEASE, PER_DTYPE
        fp32 = ALL_FP32_RELEASE, RELEASE, _models.ALL_FP32
        ways = {
            "": [theirs, (BRANCH, BRANCH, AS_IT_IS), fp32],
            LATE: [theirs, (BRANCH, BRANCH, LATE), (EARLY, BRANCH, AS_IT_IS)],
        }
        if is_uniform:
            default = "the default (by the branch)", BRANCH, AS_IT_IS
            wide = "release, the same sums", RELEASE, _models.WIDE
            ways[COALESCED] = [theirs, (BRANCH, BRANCH, COALESCED), default]
            ways["grad_comm_dtype"] = [(BRANCH, BRANCH, _models.NARROW), wide]
        elif PROMOTED in sides:
            ways[""].append((PROMOTED, PROMOTED, AS_IT_IS))
        for setting, of_setting in ways.items():
            subjects = [
                Subject(name, side, {"block": block, "way": way, **extra})
                for name, side, way in of_setting
            ]
            yield Group(f"{block} blocks{setting and f', {setting}'}", subjects)


def rows_of(
    part: str, quantity: str, metric: str, samples: Samples, bars: dict[str, float]
) -> list[Row]:
    """Compares the branch with every other way; ``bars`` are by the start of its name."""
    compared = []
    for group, subject, measured in samples.values:
        if measured == metric and subject != BRANCH:
            bar = next((b for s, b in bars.items() if subject.startswith(s)), None)
            compared.append(Comparison(group, BRANCH, subject, bar))
    return samples.rows(part, quantity, metric, compared)


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> list[Row]:
    """Compares the time of a step."""
    groups = [*groups_of(sides, quick=quick, steps=3 if quick else 5)]
    groups = groups[:1] if quick else groups
    rounds, launches = (rounds or 2, 1) if quick else (rounds or 10, 2)
    samples = alternate(__name__, sides, groups, rounds, launches)
    return rows_of("step", "ms / step", "wall_ms", samples, BARS)
