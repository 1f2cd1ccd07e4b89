"""Host time, and the bandwidth of a unit's copies, as ``make bench`` measures them."""

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
from _gpu_steps import in_turns, least_ratio


# Case: precision of the branch, of the release, whether that has a unit for each dtype
HOST = {
    "uniform": ("fp32", "fp32", False),
    "bf16_compute": ("fp32, bf16 compute", "fp32, bf16 compute", False),
    "mixed_beside_uniform": ("mixed", "fp32", False),
    "mixed": ("mixed", "mixed", True),
}
COPIES = {
    "bf16": "bf16",
    "fp32": "fp32",
    "bf16_compute": "fp32, bf16 compute",
    "mixed": "fp32, bf16 and fp16",
    "fp32_vectors": "bf16, fp32 vectors",
}
UNIFORM = ("bf16", "fp32", "bf16_compute")


def host_part(where: Where) -> Part:
    cases = []
    for name, (ours, theirs, per_dtype) in HOST.items():
        # As many as the benchmark has
        request = {"precision": ours, "units": 8, "params": 16, "seconds": 0.1}
        asks = in_turns(request, precision=theirs, per_dtype=per_dtype)
        cases.append(Case(name, asks, least_ratio("host_ratio", "cpu_us", "us")))
    return Part(
        "host",
        "Host time of a unit of 16 parameters and a step, as a share of the release's.",
        "host",
        cases,
        side={"backend": "fake", "world_size": FAKE_RANKS},
    )


def _copy_figures(found: Found) -> list[Figure]:
    branch, figures = found[BRANCH], []
    for copy in ("in", "out"):
        ours, plain = branch[f"copy_{copy}_gbps"], branch[f"copy_of_{copy}_gbps"]
        detail = f"{ours:.0f} GB/s, a plain copy {plain:.0f} GB/s"
        figures.append(Figure(f"copy_{copy}_share", ours / plain, detail))
        if RELEASE in found:
            theirs = found[RELEASE][f"copy_{copy}_gbps"]
            detail = f"branch {ours:.0f} GB/s, release {theirs:.0f} GB/s"
            figures.append(Figure(f"copy_{copy}_speed", ours / theirs, detail))
    return figures


def copies_part(where: Where) -> Part:
    cases = []
    for name, mix in COPIES.items():
        request = {"mix": mix, "per_dtype": False}
        asks = on_both(request, per_dtype=name not in UNIFORM)
        cases.append(Case(name, asks, _copy_figures))
    return Part(
        "copies",
        "Bytes written per second by a unit's copy-in and copy-out of 243 million "
        "parameters, as a share of a device-to-device copy's and of the release's.",
        "cuda",
        cases,
        side={"backend": "fake", "world_size": FAKE_RANKS},
        not_run="" if where.is_cuda else "times of a device need CUDA",
    )
