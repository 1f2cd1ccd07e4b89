"""
Peak memory of one rank in a step, as torch's own tracker counts it.

``FSDPMemTracker`` adds up the storages of all tensors: parameters, gradients,
activations, communication buffers. Its figures are the same in every run. There is no
optimizer, whose state would come on top: for parameters upcast to fp32, twice as much.
"""

from typing import Any

from _models import language_model, tokens, training_step
from _ratios import alternate
from _rows import PartResult
from _sides import Side
from _step_time import groups_of, rows_of

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker


KIB = 2**10


def measure(*, device: str, block: str, way: str) -> dict[str, Any]:
    """Returns the peak of the second step, in KiB."""
    model = language_model(block, way, device)
    x = tokens(way, device)
    training_step(model, x)  # what is made once is there before it is tracked
    tracker = FSDPMemTracker(model)
    tracker.track_inputs((x,))
    with tracker:
        training_step(model, x)
    peak = tracker.get_tracker_snapshot("peak")[torch.device(device)]
    return {"peak_kib": peak["Total"] / KIB}


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> PartResult:
    """Compares the peak of each way."""
    groups = groups_of({}, promoted=True)
    del quick, rounds  # the same in every run
    samples = alternate("memory", sides, groups, rounds=1)
    return rows_of("memory", "peak KiB of a rank", "peak_kib", groups, samples)
