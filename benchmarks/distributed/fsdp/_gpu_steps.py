"""
The time of a step beside the release, on a device: of units so small that the host is
what takes time, and of large ones; eager, with compiled blocks, and as one CUDA graph.
Over NCCL also how much of the communication something else overlaps.
"""

from collections.abc import Callable
from typing import Any

from _gpu_part import (
    Ask,
    BRANCH,
    Case,
    FAKE_RANKS,
    Figure,
    Figures,
    Found,
    Part,
    RELEASE,
    Where,
)
from _gpu_ways import LARGE, WAYS
from _models import language_model, PROMOTED, tokens, training_step

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import profile, ProfilerActivity


WARM_UP, STEPS, TIMES = 4, 10, 5
EAGER, COMPILED, GRAPH = "eager", "compiled", "graph"
SMALL = {"dim": 256, "heads": 8}


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """Returns a replay of the step as one CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _milliseconds(step: Callable[[], None]) -> float:
    """Returns the least of several means."""
    found = []
    for _ in range(TIMES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(STEPS):
            step()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / STEPS)
    return min(found)


def _overlap(step: Callable[[], None]) -> float | None:
    """Returns the share of NCCL's time in which another kernel runs as well."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    sent, computed = [], []
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            span = (event.time_range.start, event.time_range.end)
            (sent if "nccl" in event.name.lower() else computed).append(span)
    return overlapped_share(sent, computed) if sent else None


Spans = list[tuple[float, float]]


def overlapped_share(sent: Spans, computed: Spans) -> float:
    """Returns how much of the spans in ``sent`` those in ``computed`` cover."""
    covered, joined = 0.0, _joined(computed)
    for start, end in _joined(sent):
        covered += sum(max(0, min(end, e) - max(start, s)) for s, e in joined)
    return covered / sum(end - start for start, end in _joined(sent))


def _joined(spans: Spans) -> Spans:
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _prepared(model: nn.Sequential, how: str) -> None:
    if how == COMPILED:
        for block in model:
            block.forward = torch.compile(block.forward)


def measure(
    *,
    device: str,
    block: str,
    way: str,
    how: str,
    sizes: dict[str, int],
    positions: int,
) -> dict[str, Any]:
    """Returns milliseconds of a step, or why a side cannot run it so."""
    model = language_model(block, way, device, **sizes)
    _prepared(model, how)
    x = tokens(way, device, (1, positions, sizes["dim"]))

    def step() -> None:
        training_step(model, x)

    for _ in range(WARM_UP):
        step()
    if how == GRAPH:
        try:
            step = _captured(step)
        except RuntimeError as error:
            return {"not_run": f"no CUDA graph: {str(error).splitlines()[0]}"}
    found: dict[str, Any] = {"ms": _milliseconds(step)}
    if dist.get_backend() == "nccl":
        found["overlap"] = _overlap(step)
    return found


# What is compared #


def in_turns(request: dict[str, Any], **of_other: Any) -> dict[str, Ask]:
    """Asks both sides twice, one after the other."""
    side = of_other.pop("side", RELEASE)
    other = Ask(side, request | of_other)
    return {
        BRANCH: Ask(BRANCH, request),
        RELEASE: other,
        f"{BRANCH} again": Ask(BRANCH, request),
        f"{RELEASE} again": other,
    }


def least_ratio(name: str, metric: str, unit: str) -> Figures:
    """Returns what compares the smaller one of both times."""

    def figures(found: Found) -> list[Figure]:
        if RELEASE not in found:
            return []
        least = {
            side: min(found[who][metric] for who in found if who.startswith(side))
            for side in (BRANCH, RELEASE)
        }
        ours, theirs = least[BRANCH], least[RELEASE]
        detail = f"branch {ours:,.4g} {unit}, release {theirs:,.4g} {unit}"
        return [Figure(name, ours / theirs, detail)]

    return figures


def _step_figures(found: Found) -> list[Figure]:
    figures = least_ratio("step_ratio", "ms", "ms")(found)
    ours, theirs = (found.get(s, {}).get("overlap") for s in (BRANCH, RELEASE))
    if ours is not None and theirs is not None:
        detail = f"branch {ours:.3f}, release {theirs:.3f}"
        figures.append(Figure("overlap_gain", ours - theirs, detail))
    return figures


ALONE = ("llama", "nemotron_h")
OVER_NCCL = (
    *ALONE,
    "llama_grad_comm_dtype",
    "llama_backward_post",
    "nemotron_h_beside_fp32",
    "nemotron_h_promoted",
)


def _case(name: str, size: str, how: str) -> Case:
    block, ours, theirs = WAYS[name]
    sizes = SMALL if size == "small" else LARGE[block]
    positions = 64 if size == "small" or "Nemotron" in block else 2048
    request = {"block": block, "way": ours, "how": how, "sizes": sizes}
    # The release cannot promote by itself before 2.15: the branch does it there
    side = BRANCH if theirs == PROMOTED else RELEASE
    asks = in_turns(request | {"positions": positions}, way=theirs, side=side)
    return Case(f"{name}_{size}_{how}", asks, _step_figures)


def part(where: Where) -> Part:
    cases = [
        _case(name, size, how)
        for name in ALONE
        for size in ("small", "large")
        for how in (EAGER, COMPILED, GRAPH)
    ]
    return Part(
        "step",
        "The time of a step as a share of the release's, nothing being sent.",
        "steps",
        cases,
        seconds=100,
        side={"backend": "fake", "world_size": FAKE_RANKS},
        not_run="" if where.is_cuda else "times of a device need CUDA",
    )


def part_of_several(where: Where) -> Part:
    cases = [
        _case(name, size, EAGER) for name in OVER_NCCL for size in ("small", "large")
    ]
    return Part(
        "step_nccl",
        "The time of a step over NCCL as a share of the release's, and the share of "
        "NCCL's time that other kernels overlap.",
        "steps",
        cases,
        seconds=100,
        side={"backend": "nccl", "world_size": max(where.devices, 2)},
        not_run="" if where.devices > 1 else "needs two CUDA devices or more",
    )
