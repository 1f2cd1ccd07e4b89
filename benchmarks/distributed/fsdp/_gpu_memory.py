"""
Peaks of memory beside the release.

On a device they are those of the caching allocator, of blocks as large as in models of 8
billion parameters: what is allocated, and what is reserved. Elsewhere they are what
``FSDPMemTracker`` adds up of small blocks. The process group is fake, of 8 ranks, and
there is no optimizer.
"""

from typing import Any

from _gpu_part import Ask, BRANCH, Case, FAKE_RANKS, Figure, Found, Part, RELEASE, Where
from _models import (
    ALL_FP32,
    AS_IT_IS,
    language_model,
    LATE,
    NARROW,
    PER_DTYPE,
    tokens,
    training_step,
    WIDE,
)

import torch


# Arguments of a block, and positions. A Llama-like one has 218 million parameters
REAL = {
    "Llama-like": ({"dim": 4096, "heads": 32, "hidden": 12288}, 4096),
    "Nemotron-H-like": ({"dim": 4096, "heads": 128, "state": 128}, 512),
}
# Case: block, the branch's way, the release's
CASES = {
    "llama": ("Llama-like", AS_IT_IS, PER_DTYPE),
    "llama_reduced_in_fp32": ("Llama-like", WIDE, WIDE),
    "llama_grad_comm_dtype": ("Llama-like", NARROW, WIDE),
    "llama_backward_post": ("Llama-like", LATE, PER_DTYPE),
    "nemotron_h": ("Nemotron-H-like", AS_IT_IS, PER_DTYPE),
    "nemotron_h_backward_post": ("Nemotron-H-like", LATE, PER_DTYPE),
    "nemotron_h_beside_fp32": ("Nemotron-H-like", AS_IT_IS, ALL_FP32),
}
MIB = 2**20
VARYING = (1, 0.75, 0.5, 0.875, 0.625)  # of the positions, step after step


def measure(*, device: str, block: str, way: str, steps: int) -> dict[str, Any]:
    """Returns MiB: peaks of a step, and what is left unused after ``steps``."""
    if device == "cpu":
        try:
            import _peak_memory
        except ModuleNotFoundError as missing:
            return {"not_run": f"there is no package {missing.name}: pip install it"}
        found = _peak_memory.measure(device=device, block=block, way=way)
        return {"allocated_mib": found["peak_kib"] / 2**10}
    sizes, positions = REAL[block]
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
        base = release["reserved_mib"] if name == "unused" else theirs
        value = (ours - theirs) / base if name == "unused" else ours / base
        figures.append(Figure(name, value, detail))
    if "retries" in branch:
        detail = f"release {release['retries']}, in all steps"
        figures.append(Figure("retries", branch["retries"], detail))
    return figures


def part(where: Where) -> Part:
    cases = []
    for name, (block, ours, theirs) in CASES.items():
        steps = 200 if name in ("llama", "nemotron_h") else 10
        request = {"block": block, "way": ours, "steps": steps}
        asks = {
            BRANCH: Ask(BRANCH, request),
            RELEASE: Ask(RELEASE, request | {"way": theirs}),
        }
        cases.append(Case(name, asks, _figures))
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
