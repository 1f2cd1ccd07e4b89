"""
Runs many steps of each mode on one of eight ranks, whose group moves nothing, and
prints as JSON what lives after few steps, after all, and when the model is gone.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import weakref
from typing import Any

from fsdp_random.cases import (
    BF16,
    Case,
    FP16,
    FP32,
    Microbatch,
    Param,
    run_microbatch,
    shard_model,
)

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore


WARM_UP = 20
EVENTS = (torch.Event, torch.cpu.Event)
BLOCK = (
    Param((9, 3), FP32),
    Param((16,), BF16, has_two_names=True),
    Param((5, 2), FP16),
    Param((4,), FP32, reduce=BF16),
    Param((3,), BF16, is_trained=False),
)
ALL = Microbatch("all")
PARTS = (
    Microbatch("scatter", skipped_params=frozenset([(0, 0), (1, 2)])),
    Microbatch("scatter", skipped_blocks=frozenset([1])),
    ALL,
)


def case(parallelism: str = "shard", **changes: Any) -> Case:
    fields = {"mesh": (2, 4) if parallelism == "hybrid" else (8,), "schedule": (ALL,)}
    return Case((BLOCK,) * 3, parallelism, **(fields | changes))


MODES = {
    "sharded": case(),
    "kept after forward": case(reshard=False),
    "resharded to 4": case(reshard=4),
    "bf16 compute": case(param_dtype=BF16, reduce_dtype=FP32),
    "prefetched": case(prefetch=2),
    "recomputed": case(recomputes=True),
    "offloaded": case(offloads=True),
    "accumulated": case(schedule=(Microbatch("none"), Microbatch("none"), ALL)),
    "hybrid": case("hybrid"),
    "hybrid, all-reduce put off": case("hybrid", schedule=PARTS),
    "replicated": case("replicate", schedule=PARTS),
}


class MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")
        + ("fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def allocated_nbytes() -> int | None:
    """
    Returns what the C library's allocator has given out, of whatever no object of
    Python's owns as well, and None where it does not tell.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = MallInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def living() -> dict[str, Any]:
    """Returns how much there is of what could grow."""
    for _ in range(4):  # each leaves out one more level of nested tuples
        gc.collect()
    objects = gc.get_objects()
    # By type: what `isinstance` asks may make things
    tensors = [o for o in objects if issubclass(type(o), torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return {
        "objects": len(objects),
        "tensors": len(tensors),
        "bytes": sum(storage.nbytes() for storage in storages.values()),
        "events": sum(issubclass(type(o), EVENTS) for o in objects),
        "allocated_bytes": allocated_nbytes(),
    }


def run_mode(case: Case, steps: int) -> dict[str, dict[str, Any]]:
    """Returns what lives after a few steps, after half and after all of them."""
    model = shard_model(case, "cpu")
    found = {}
    times = {WARM_UP: "few", steps // 2: "half", steps: "all"}
    for step in range(1, steps + 1):
        for i in range(len(case.schedule)):
            run_microbatch(case, model, 0, i, rank=0)
        model.zero_grad()
        if step in times:
            found[times[step]] = living()
    refs = references(model)
    del model
    gc.collect()
    found["left"] = {"objects": sum(ref() is not None for ref in refs)}
    return found


def references(model: nn.Module) -> list[weakref.ref]:
    """Returns weak references to a model's units and all of their tensors."""
    found: list[object] = []
    for module in model.modules():
        found += [module, *module.parameters()]
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                found += [group, group.comm_ctx]
                for fsdp_param in group.fsdp_params:
                    found += [fsdp_param, fsdp_param._unsharded_param]
                    found += [fsdp_param._sharded_param_data]
                    found += fsdp_param.all_gather_outputs
    return [*map(weakref.ref, found)]


def main(steps: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    run_mode(MODES["hybrid"], steps)  # what is made once for a process
    results = {name: run_mode(mode, steps) for name, mode in MODES.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]))
