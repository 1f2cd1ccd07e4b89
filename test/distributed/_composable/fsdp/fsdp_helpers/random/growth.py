"""
Runs many steps of each mode on one of eight ranks, whose group moves nothing, and counts
what lives after few steps, after half, after all, and when the model is gone.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

from fsdp_helpers.random.cases import (
    BF16,
    Case,
    FP16,
    FP32,
    Microbatch,
    Param,
    run_microbatch,
    shard_model,
    Step,
)

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPCommContext,
    FSDPParamGroup,
)


WARM_UP = 20
EVENTS = (torch.Event, torch.cpu.Event)
UNITS = (nn.Module, FSDPParam, FSDPParamGroup, FSDPCommContext)
BLOCK = (
    Param((9, 3), FP32),
    Param((16,), BF16, has_two_names=True),
    Param((5, 2), FP16),
    Param((4,), FP32, reduce=BF16),
    Param((3,), BF16, is_trained=False),
)
PARTS = (
    Microbatch("scatter", skipped_params=frozenset([(0, 0), (1, 2)]), is_last=False),
    Microbatch("scatter", skipped_blocks=frozenset([1]), is_last=False),
    Microbatch(),
)
UNREDUCED = (Microbatch("none", is_last=False),) * 2 + (Microbatch(),)


def case(parallelism: str, *microbatches: Microbatch, **changes: Any) -> Case:
    mesh = (2, 4) if parallelism == "hybrid" else (8,)
    step = Step(microbatches or (Microbatch(),))
    return Case((BLOCK,) * 3, parallelism, mesh, (step,), **changes)


MODES = {
    "resharded to 4, prefetched": case("shard", reshard=4, prefetch=(2, 2)),
    "bf16 compute, recomputed, offloaded": case(
        "shard", param_dtype=BF16, reduce_dtype=FP32, recomputes=True, offloads=True
    ),
    "accumulated": case("shard", *UNREDUCED),
    "hybrid, deferred all-reduce": case("hybrid", *PARTS),
}


class MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library: ``hblkhd``, ``uordblks`` and others."""

    _fields_ = [("sizes", ctypes.c_size_t * 10)]


def allocated_nbytes() -> int:
    """
    Returns what the C library's allocator has given out, of whatever no object of
    Python's owns as well, and 0 where it does not tell.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", lambda: MallInfo())
    mallinfo.restype = MallInfo
    sizes = mallinfo().sizes
    return sizes[4] + sizes[7]


def living() -> dict[str, int]:
    """Returns how much there is of what could grow."""
    for _ in range(4):  # each leaves out one more level of nested tuples
        gc.collect()
    objects = gc.get_objects()
    # By type: what `isinstance` asks may make things
    tensors = [o for o in objects if issubclass(type(o), torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return {
        "objects": len(objects),
        # Meshes, which live on, have others
        "tensors": sum(tensor.is_floating_point() for tensor in tensors),
        "bytes": sum(storage.nbytes() for storage in storages.values()),
        "units": sum(issubclass(type(o), UNITS) for o in objects),
        "events": sum(issubclass(type(o), EVENTS) for o in objects),
        "allocated_bytes": allocated_nbytes(),
    }


def run_mode(case: Case, steps: int) -> list[dict[str, int]]:
    """Returns what lives before, after a few, half and all steps, and afterwards."""
    found = [living()]
    model = shard_model(case, "cpu")
    for step in range(1, steps + 1):
        for batch in range(len(case.steps[0].microbatches)):
            run_microbatch(model, 0, batch)
        model.zero_grad()
        if step in (WARM_UP, steps // 2, steps):
            found.append(living())
    del model
    return [*found, living()]
