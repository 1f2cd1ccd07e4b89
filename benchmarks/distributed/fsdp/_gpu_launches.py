"""
What a unit launches in one step, as a profiler sees it, and how fast that runs.

[Note: What a launch is]
On a device it is a kernel, or a copy by the driver. Elsewhere it is an operator that
neither returns a view nor only allocates, each of which would be one kernel there; one
that takes a list of tensors counts as one. A launch belongs to the innermost of the
ranges that ``fully_shard`` and :data:`POINTS` open around it; what autograd and the model
do is in none of them, and is not counted.

The process group is fake; what its collectives launch is not counted.
"""

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

from _calls import Call, seen_by
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
from _models import language_model, NUM_BLOCKS, tokens, training_step

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, ProfilerActivity, record_function


COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
# Functions that get a range of their own, of either side
POINTS = {
    "_reduce_copy_in": "reduction copy-in",
    "_all_to_all_copy_in": "reduction copy-in",
    "add_in_tree": "tree",
}
POINTS_OF_RELEASE = {"foreach_reduce_scatter_copy_in": "reduction copy-in"}
# How ranges of `fully_shard` begin, outer ones last
RANGES = {
    "gpu: reduction copy-in": "reduction copy-in",
    "gpu: tree": "tree",
    "FSDP::all_gather_copy_out": "copy-out",
    "FSDP::all_gather": "copy-in",
    "FSDP::post_backward_reduce": "reduction, the rest",
    "FSDP::post_backward_accumulate": "accumulation",
}
REST = "the rest"
LISTS = ("aten::_foreach", "aten::split_with_sizes_copy", "aten::_chunk_cat")
LISTS_OF_FSDP = ("fsdp::split_with_sizes_copy", "fsdp::chunk_cat")
ALLOCATES = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_")


class Launched(NamedTuple):
    count: int
    us: float


def _range_of(event: Any) -> str | None:
    while event is not None:
        if event.name.startswith("c10d::"):  # a fake group copies, too
            return None
        for start, name in RANGES.items():
            if event.name.startswith(start):
                return name
        if event.name.startswith("FSDP::"):
            return REST
        event = event.cpu_parent
    return None


def _is_view(name: str) -> bool:
    for schema in torch._C._jit_get_schemas_for_operator(name):
        infos = [a.alias_info for a in schema.arguments if a.alias_info is not None]
        if not infos or any(info.is_write for info in infos):
            return False
    return True


def _would_launch(event: Any) -> bool | None:
    """Whether an operator is a kernel; None if what it calls tells."""
    name = event.name
    if name.startswith(LISTS) or name.startswith(LISTS_OF_FSDP):
        return True
    if not name.startswith("aten::") or event.cpu_children:
        return None
    return not name.startswith(ALLOCATES) and not _is_view(name)


def _launched_on_host(events: Any) -> Iterator[tuple[str, str, float]]:
    pending = [event for event in events if event.cpu_parent is None]
    while pending:
        event = pending.pop()
        launches = _would_launch(event)
        if launches is None:
            pending += event.cpu_children
        elif launches and (where := _range_of(event)) is not None:
            yield where, event.name, 0.0


def _launched_on_device(events: Any) -> Iterator[tuple[str, str, float]]:
    for event in events:
        if event.device_type == DeviceType.CPU and event.kernels:
            if (where := _range_of(event)) is not None:
                for kernel in event.kernels:
                    yield where, kernel.name, kernel.duration


def _with_ranges(at_end: ExitStack) -> None:
    """Gives the functions of :data:`POINTS` ranges."""
    module = importlib.import_module(COLLECTIVES)
    points = POINTS if hasattr(module, "_reduce_copy_in") else POINTS_OF_RELEASE

    def ranged(function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"gpu: {label}"):
                return function(*args, **kwargs)

        return call

    for name, label in points.items():
        function = ranged(getattr(module, name), label)
        at_end.enter_context(mock.patch.object(module, name, function))


def measure(
    *, device: str, block: str, way: str, sizes: dict[str, int], positions: int
) -> dict[str, Any]:
    """
    Returns launches by range and by kernel, per unit and step; on a device with their
    microseconds, the bytes that go to collectives and bandwidths in GB/s.
    """
    is_cuda = device == "cuda"
    model = language_model(block, way, device, **sizes)
    dim = sizes.get("dim", 512)
    x = tokens(way, device, (1, positions, dim))
    for _ in range(2):
        training_step(model, x)
    calls: list[Call] = []
    with seen_by(calls.append):
        training_step(model, x)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
    with ExitStack() as at_end:
        _with_ranges(at_end)
        with profile(activities=activities) as profiler:
            training_step(model, x)
            if is_cuda:
                torch.cuda.synchronize()
    launched = _launched_on_device if is_cuda else _launched_on_host
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for where, kernel, us in launched(profiler.events()):
        total = found[where].setdefault(kernel, [0, 0.0])
        total[0] += 1
        total[1] += us
    nbytes = {
        kind: sum(call.nbytes for call in calls if call.kind == kind)
        for kind in {call.kind for call in calls}
    }
    return {
        "launched": found,
        "units": NUM_BLOCKS,
        "nbytes": nbytes,
        "copy_gbps": _copy_gbps(nbytes) if is_cuda else None,
    }


def _copy_gbps(nbytes: dict[str, int]) -> float:
    """Returns bytes written per second by a copy of a unit's bytes."""
    from _cuda_copies import _copy_seconds

    size = max(nbytes.values()) // NUM_BLOCKS // 2
    return size / _copy_seconds(size, "cuda") / 1e9


# What is compared #


def _totals(found: dict[str, Any]) -> dict[str, Launched]:
    return {
        where: Launched(
            sum(int(count) for count, _ in kernels.values()),
            sum(us for _, us in kernels.values()),
        )
        for where, kernels in found["launched"].items()
    }


def _figures(found: Found) -> list[Figure]:
    branch = found[BRANCH]
    ours, units = _totals(branch), branch["units"]
    theirs = _totals(found[RELEASE]) if RELEASE in found else {}
    figures = []
    count = sum(each.count for each in ours.values()) / units
    by_range = ", ".join(f"{w} {each.count / units:g}" for w, each in ours.items())
    name = "operators" if branch["copy_gbps"] is None else "kernels"
    figures.append(Figure(name, count, f"per unit and step: {by_range}"))
    if theirs:
        other = sum(each.count for each in theirs.values()) / units
        by_range = ", ".join(f"{w} {n.count / units:g}" for w, n in theirs.items())
        detail = f"release {other:g}: {by_range}"
        figures.append(Figure("launches_ratio", count / other, detail))
    return figures + _speeds(branch, ours, theirs)


def _speeds(
    branch: dict[str, Any], ours: dict[str, Launched], theirs: dict[str, Launched]
) -> list[Figure]:
    """Returns bandwidths as shares of a plain copy's, where kernels were timed."""
    plain, nbytes = branch["copy_gbps"], branch["nbytes"]
    if plain is None:
        return []
    # The input of what sends is written once
    written = {
        "copy-in": nbytes["all-gather"] / FAKE_RANKS,
        "copy-out": nbytes["all-gather"],
        "reduction copy-in": sum(nbytes.values()) - nbytes["all-gather"],
    }
    figures = []
    for where, each in ours.items():
        if not each.us:
            continue
        name = where.replace(" ", "_").replace("-", "_").replace(",", "")
        detail = f"{each.count} kernels, {each.us:.0f} us"
        if where in theirs:
            other = theirs[where]
            detail += f"; release {other.count} kernels, {other.us:.0f} us"
            figures.append(Figure(f"{name}_time", each.us / other.us, detail))
        if where in written:
            gbps = written[where] / each.us / 1e3
            detail = f"{gbps:.0f} GB/s of {plain:.0f} GB/s; {detail}"
            figures.append(Figure(f"{name}_share", gbps / plain, detail))
    return figures


SMALL: dict[str, int] = {}
CASES = (
    "llama",
    "llama_reduced_in_fp32",
    "llama_grad_comm_dtype",
    "nemotron_h",
    "adapters",
)


def part(where: Where) -> Part:
    cases = []
    for name in CASES:
        block, ours, theirs = WAYS[name]
        sizes = LARGE[block] if where.is_cuda else SMALL
        request = {"block": block, "way": ours, "sizes": sizes, "positions": 64}
        asks = on_both(request, way=theirs)
        cases.append(Case(name, asks, _figures))
    about = (
        "Kernels of a unit's forward and backward by the range of `fully_shard` that "
        "launches them, and their bytes written per second as a share of a "
        "device-to-device copy's. On a CPU: operators that would be kernels."
    )
    return Part("launches", about, "launches", cases, side={"backend": "fake"})
