"""
Peak memory of one rank of a fake group in a step, without an optimizer: on a CPU as
``FSDPMemTracker`` counts, on a device as the caching allocator does.
"""

from typing import Any

from _models import language_model, LATE, training_step
from _ratios import alternate, Row
from _sides import Side
from _step_time import groups_of, PER_DTYPE_RELEASE, RELEASE, rows_of

import torch
from torch import nn, Tensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker


KIB = 2**10


def measure(*, device: str, block: str, way: str) -> dict[str, Any]:
    """Returns peaks of a step, in KiB."""
    model, x = language_model(block, way, device)
    training_step(model, x)  # what is made once is there before it is tracked
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        training_step(model, x)
        reserved = torch.cuda.max_memory_reserved() / KIB
        peak = torch.cuda.max_memory_allocated() / KIB
        return {"peak_kib": peak, "reserved_kib": reserved}
    return {"peak_kib": tracked_peak(model, x) / KIB}


def tracked_peak(model: nn.Module, x: Tensor) -> int:
    """Returns the most bytes that the tracker counts in one step."""
    tracker = FSDPMemTracker(model)
    tracker.track_inputs((x,))
    with tracker:
        training_step(model, x)
    return tracker.get_tracker_snapshot("peak")[x.device]["Total"]


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> list[Row]:
    """Compares the peak of each way."""
    samples = alternate(__name__, sides, [*groups_of(sides, quick=quick)])
    # Half a percent for sizes that an allocator rounds up. Adapters in units of their
    # own are gathered and freed one by one, which no unit for all can have.
    what = "memory", "peak KiB of a rank", "peak_kib"
    rows = rows_of(*what, samples, {RELEASE: 1.005})
    for row in rows:
        if "adapters" in row.case and row.versus == PER_DTYPE_RELEASE:
            row.bar = 1.05 if LATE in row.case else 1.25
    what = "memory", "reserved KiB of a rank", "reserved_kib"  # on a device alone
    return rows + rows_of(*what, samples, {RELEASE: 1.05})
