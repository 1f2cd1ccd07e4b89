"""
Peak memory of one rank in a step, as torch's own tracker counts it.

``FSDPMemTracker`` adds up the storages of all tensors: parameters, gradients,
activations, communication buffers. Its figures are the same in every run. There is no
optimizer, whose state would come on top: for parameters upcast to fp32, twice as much.
"""

from typing import Any

from _models import (
    language_model,
    tokens,
    training_step,
    Weights,
    weights_model,
)
from _ratios import alternate, Group, Subject
from _rows import PartResult, Timed, timed_rows
from _sides import Side
from _step_time import groups_of, late_groups, rows_of

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker


KIB = 2**10


def measure(*, device: str, block: str, way: str) -> dict[str, Any]:
    """Returns the peak of the second step, in KiB."""
    if block == COPY_IN:
        model = weights_model(way == MIXED, device)
        x = torch.ones(2, Weights.DIM, dtype=torch.bfloat16, device=device)
    else:
        model, x = language_model(block, way, device), tokens(way, device)
    training_step(model, x)  # what is made once is there before it is tracked
    tracker = FSDPMemTracker(model)
    tracker.track_inputs((x,))
    with tracker:
        training_step(model, x)
    peak = tracker.get_tracker_snapshot("peak")[torch.device(device)]
    return {"peak_kib": peak["Total"] / KIB}


# Of four bf16 weights whose gradients are reduced in fp32. The first row is the same
# for both sides, the second what one fp32 parameter of 64 elements adds to it.
COPY_IN, UNIFORM, MIXED = "four bf16 weights, reduced in fp32", "uniform", "mixed"


def _copy_in_rows() -> tuple[Group, list[Timed]]:
    release, branch = f"release, {UNIFORM}", f"branch, {UNIFORM}"
    mixed = "branch, and one fp32"
    subjects = (
        Subject(release, "release", {"block": COPY_IN, "way": UNIFORM}),
        Subject(branch, "branch", {"block": COPY_IN, "way": UNIFORM}),
        Subject(mixed, "branch", {"block": COPY_IN, "way": MIXED}),
    )
    timed = [
        Timed(COPY_IN, COPY_IN, branch, release, None),
        Timed(COPY_IN, f"{COPY_IN}, and one fp32", mixed, release, None),
    ]
    return Group(COPY_IN, subjects), timed


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> PartResult:
    """Compares the peak of each way."""
    groups = groups_of({}, promoted=True) + late_groups({})
    del quick, rounds  # the same in every run
    copy_in, timed = _copy_in_rows()
    samples = alternate("memory", sides, [*groups, copy_in], rounds=1)
    quantity, metric = "peak KiB of a rank", "peak_kib"
    result = rows_of("memory", quantity, metric, groups, samples)
    rows = timed_rows("memory", quantity, metric, samples, timed)
    return PartResult([*result.rows, *rows], result.data)
