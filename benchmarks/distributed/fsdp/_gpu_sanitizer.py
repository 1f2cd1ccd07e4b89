"""Whether CUDA's stream sanitizer finds accesses that nothing orders, in steps of a mixed
and of a uniform model. The process group is fake."""

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
from _models import AS_IT_IS, language_model, PER_DTYPE, tokens, training_step


VARIABLE = "TORCH_CUDA_SANITIZER"


def measure(*, device: str, block: str, way: str) -> dict[str, Any]:
    """Returns whether it found something, and what."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    model = language_model(block, way, device)
    x = tokens(way, device)
    try:
        for _ in range(3):
            training_step(model, x)
    except CUDASanitizerErrors as errors:
        return {"found": len(errors.errors), "first": str(errors.errors[0])[:2000]}
    return {"found": 0, "first": ""}


def _figures(found: Found) -> list[Figure]:
    branch = found[BRANCH]
    detail = f"in the release {found[RELEASE]['found']}; " if RELEASE in found else ""
    return [Figure("unordered", branch["found"], detail + branch["first"])]


def part(where: Where) -> Part:
    cases = [
        Case(name, on_both({"block": block, "way": AS_IT_IS}, way=PER_DTYPE), _figures)
        for name, block in (("uniform", "Llama-like"), ("mixed", "Nemotron-H-like"))
    ]
    return Part(
        "sanitizer",
        "What torch's sanitizer of streams finds in three steps.",
        "sanitizer",
        cases,
        side={"backend": "fake", "world_size": FAKE_RANKS, "env": {VARIABLE: "1"}},
        not_run="" if where.is_cuda else "the sanitizer needs CUDA",
    )
