"""
Reductions of one unit in one NCCL group, each with its own operation and dtype, beside
one after the other. The branch does not do so yet: this tells whether it should.

They are joined by the process group's own start and end. ``_coalescing_manager`` would
apply the first reduction's operation to all.
"""

from collections.abc import Callable
from typing import Any

from _gpu_part import Ask, BRANCH, Case, Figure, Found, Part, Where
from _gpu_steps import _milliseconds

import torch
import torch.distributed as dist
from torch import Tensor


# Elements a rank: those of a Nemotron-H-like unit, and of two as small ones
SIZES = {"large_and_small": (16 << 20, 8 << 10), "small": (8 << 10, 1 << 10)}
OPERATIONS = (
    (torch.bfloat16, dist.ReduceOp.AVG),
    (torch.float32, dist.ReduceOp.AVG),
    (torch.float16, dist.ReduceOp.SUM),
)


def measure(*, device: str, sizes: list[int]) -> dict[str, Any]:
    """Returns milliseconds of both ways, and how many results differ."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    numels = [sizes[0], sizes[1], sizes[1]]
    inputs = [
        torch.randn(numel * ranks, device=device).to(dtype)
        for numel, (dtype, _) in zip(numels, OPERATIONS)
    ]

    def reduce_into(outputs: list[Tensor]) -> None:
        for output, given, (_, op) in zip(outputs, inputs, OPERATIONS):
            dist.reduce_scatter_tensor(output, given, op=op)

    def reduce_in_one(outputs: list[Tensor]) -> None:
        group._start_coalescing(torch.device(device))
        reduce_into(outputs)
        work = group._end_coalescing(torch.device(device))
        if work is not None:
            work.wait()

    apart, joined = (
        [given.new_empty(numel) for numel, given in zip(numels, inputs)]
        for _ in range(2)
    )
    ways: list[tuple[Callable[[list[Tensor]], None], list[Tensor]]] = [
        (reduce_into, apart),
        (reduce_in_one, joined),
    ]
    for way, outputs in ways:
        way(outputs)
    torch.cuda.synchronize()
    differ = sum(not torch.equal(a, b) for a, b in zip(apart, joined))
    times = [_milliseconds(lambda w=way, o=o: w(o)) for way, o in ways]
    return {"differ": differ, "apart_ms": times[0], "joined_ms": times[1]}


def _figures(found: Found) -> list[Figure]:
    branch = found[BRANCH]
    apart, joined = branch["apart_ms"], branch["joined_ms"]
    detail = f"joined {joined:.4g} ms, one after the other {apart:.4g} ms"
    return [
        Figure("joined_ratio", joined / apart, detail),
        Figure("differ", branch["differ"], f"of {len(OPERATIONS)} results"),
    ]


def part(where: Where) -> Part:
    cases = [
        Case(name, {BRANCH: Ask(BRANCH, {"sizes": [*sizes]})}, _figures)
        for name, sizes in SIZES.items()
    ]
    return Part(
        "coalesced",
        "Reductions in three dtypes in one NCCL group beside one after the other.",
        "coalesced",
        cases,
        side={"backend": "nccl", "world_size": max(where.devices, 2)},
        not_run="" if where.devices > 1 else "needs two CUDA devices or more",
    )
