"""
Peaks of memory beside the release.

On a device they are those of the caching allocator, of blocks as large as in models of 8
billion parameters: what is allocated, and what is reserved. Elsewhere they are what
``FSDPMemTracker`` adds up of small blocks. The process group is fake, of 8 ranks, and
there is no optimizer.
"""

from typing import Any

from _gpu_part import (
    BRANCH,
    Case,
    FAKE_RANKS,
    Figure,
    Found,
    on_both,
    Part,
    RELEASE,
    Where,
)
from _gpu_ways import LARGE, WAYS
from _models import language_model, tokens, training_step

import torch


POSITIONS = {"Llama-like": 4096, "Nemotron-H-like": 512}
CASES = (
    "llama",
    "llama_reduced_in_fp32",
    "llama_grad_comm_dtype",
    "llama_backward_post",
    "nemotron_h",
    "nemotron_h_backward_post",
    "nemotron_h_beside_fp32",
)
MIB = 2**20
VARYING = (1, 0.75, 0.5, 0.875, 0.625)  # of the positions, step after step


def measure(*, device: str, block: str, way: str, steps: int) -> dict[str, Any]:
    """Returns MiB: peaks of a step, and what is left unused after ``steps``."""
    if device == "cpu":
        import _peak_memory

        found = _peak_memory.measure(device=device, block=block, way=way)
        return {"allocated_mib": found["peak_kib"] / 2**10}
    sizes, positions = LARGE[block], POSITIONS[block]
    model = language_model(block, way, device, **sizes)
    batches = [
        tokens(way, device, (1, int(positions * share), sizes["dim"]))
        for share in VARYING
    ]
    for _ in range(2):
        training_step(model, batches[0])
    torch.cuda.reset_peak_memory_stats()
    training_step(model, batches[0])
    allocated, reserved = (
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
    )
    for step in range(steps):
        training_step(model, batches[step % len(batches)])
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    unused = torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()
    return {
        "allocated_mib": allocated / MIB,
        "reserved_mib": reserved / MIB,
        "unused_mib": unused / MIB,
        "retries": stats["num_alloc_retries"],
    }


def _figures(found: Found) -> list[Figure]:
    if RELEASE not in found:
        return []
    branch, release = found[BRANCH], found[RELEASE]
    figures = []
    for name in ("allocated", "reserved", "unused"):
        ours, theirs = (side.get(f"{name}_mib") for side in (branch, release))
        if ours is None or theirs is None:
            continue
        detail = f"branch {ours:,.1f} MiB, release {theirs:,.1f} MiB"
        # What is unused is compared with all memory: of itself it may be nothing
        whole = release["reserved_mib"] if name == "unused" else theirs
        value = (ours - theirs) / whole if name == "unused" else ours / whole
        figures.append(Figure(name, value, detail))
    if "retries" in branch:
        detail = f"release {release['retries']}, in all steps"
        figures.append(Figure("retries", branch["retries"], detail))
    return figures


def part(where: Where) -> Part:
    cases = []
    for name in CASES:
        block, ours, theirs = WAYS[name]
        steps = 200 if name in ("llama", "nemotron_h") else 10
        request = {"block": block, "way": ours, "steps": steps}
        cases.append(Case(name, on_both(request, way=theirs), _figures))
    about = (
        "Peaks of one rank of 8 in a step as a share of the release's, and what is "
        "reserved and unused after more steps."
    )
    return Part(
        "memory",
        about,
        "peaks",
        cases,
        seconds=150,
        starts_anew=where.is_cuda,  # with an allocator that has nothing
        side={"backend": "fake", "world_size": FAKE_RANKS},
    )
