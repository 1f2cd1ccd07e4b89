"""
What a unit launches in one step, as a profiler sees it, and for how long it runs.

[Note: What a launch is]
On a device it is a kernel, or a copy by the driver. Elsewhere it is an operator that
neither returns a view nor only allocates, each of which would be one kernel there; one
that takes a list of tensors counts as one. Counted is what runs inside of the ranges that
``fully_shard`` opens, but for its collectives: the process group is fake.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import _models
from _models import NARROW, PER_DTYPE, training_step, UNIFORM_BLOCK, WIDE
from _ratios import Row
from _sides import Side

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, ProfilerActivity


LISTS = ("aten::_foreach", "aten::split_with_sizes_copy", "aten::_chunk_cat", "fsdp::")
ALLOCATES = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_")
COPY_OUT, COPY = "FSDP::all_gather_copy_out", "a copy of as many bytes"


def _range_of(event: Any) -> str | None:
    """Returns the innermost range of ``fully_shard`` around a launch."""
    while event is not None:
        if event.name.startswith("c10d::"):  # a fake group copies, too
            return None
        if event.name.startswith("FSDP::"):
            return event.name.partition(" ")[0]
        event = event.cpu_parent
    return None


@cache
def _is_view(name: str) -> bool:
    for schema in torch._C._jit_get_schemas_for_operator(name):
        infos = [a.alias_info for a in schema.arguments if a.alias_info is not None]
        if not infos or any(info.is_write for info in infos):
            return False
    return True


def _would_launch(event: Any) -> bool | None:
    """Whether an operator is a kernel; None if what it calls tells."""
    name = event.name
    if name.startswith(LISTS):
        return True
    if not name.startswith("aten::") or event.cpu_children:
        return None
    return not name.startswith(ALLOCATES) and not _is_view(name)


def _launched(events: Any, is_cuda: bool) -> Iterator[tuple[Any, float]]:
    """Yields operators that launch, and the microseconds of each kernel."""
    if is_cuda:
        for event in events:
            if event.device_type == DeviceType.CPU:
                yield from ((event, kernel.duration) for kernel in event.kernels)
        return
    pending = [event for event in events if event.cpu_parent is None]
    while pending:
        event = pending.pop()
        if (launches := _would_launch(event)) is None:
            pending += event.cpu_children
        elif launches:
            yield event, 0.0


def measure(*, device: str, block: str, way: str) -> dict[str, Any]:
    """Returns launches and us by range, and on a device those of copies and sums."""
    is_cuda = device == "cuda"
    model, x = _models.language_model(block, way, device)
    for _ in range(3):
        training_step(model, x)
    nbytes = 2 * sum(p.numel() * p.itemsize for p in model.parameters())
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
    with profile(activities=activities) as profiler:
        training_step(model, x)
        if is_cuda:
            torch.cuda.synchronize()
    counts: dict[str, int] = defaultdict(int)
    us: dict[str, float] = defaultdict(float)
    for event, duration in _launched(profiler.events(), is_cuda):
        if (where := _range_of(event)) is not None:
            counts[where] += 1
            us[where] += duration
    plain = _copy_us(nbytes) if is_cuda else 0.0
    sums = _sum_us() if is_cuda and way == NARROW else None
    return {"counts": counts, "us": us, "copy_us": plain, "sum_us": sums}


def _copy_us(nbytes: int) -> float:
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return shortest_us(lambda: target.copy_(source))


def _sum_us(numel: int = 2**24) -> tuple[float, float]:
    """Returns how long 8 bf16 rows are added in fp32, and as many bytes copied."""
    from torch.distributed.fsdp._fully_shard import _fsdp_scaling as scaling

    rows = torch.zeros(8, numel, dtype=torch.bfloat16, device="cuda")
    output = torch.empty(numel, device="cuda")
    us = shortest_us(lambda: scaling.add_in_tree(rows, output, 8.0))
    # A copy moves each of its bytes twice
    return us, _copy_us((rows.nbytes + output.nbytes) // 2)


def shortest_us(launch: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return min(times)


# Block, the branch's way, the release's; the ratio of launches is at most so. Norms have
# gradients in fp32 since 2.15: narrowed off CUDA by two launches more
NARROW_BAR = 2.4 if hasattr(torch.Tensor, "_has_grad_dtype_override") else 2.0
CASES = [(UNIFORM_BLOCK, NARROW, WIDE, NARROW_BAR), (UNIFORM_BLOCK, WIDE, WIDE, 1.0)]
CASES += [(UNIFORM_BLOCK, _models.COALESCED, PER_DTYPE, 0.4)]
CASES += [
    (block, _models.AS_IT_IS, PER_DTYPE, 1.0 if block == UNIFORM_BLOCK else 0.8)
    for block in _models.BLOCKS
]


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> list[Row]:
    """Compares how many there are, and on a device how long they take."""
    rows = []
    for block, ours, theirs, bar in CASES:
        found = _models.ask_both(sides, __name__, ours, theirs, block=block)
        case = f"{block}, {ours}"
        counts, us = (
            [sum(found[side][of].values()) / _models.NUM_BLOCKS for side in found]
            for of in ("counts", "us")
        )
        told = [("launches / unit and step", counts[0], theirs, counts[1], bar)]
        if plain := found["branch"]["copy_us"]:
            told += [("us of kernels / unit and step", us[0], theirs, us[1], 1.1)]
            copy_out = found["branch"]["us"].get(COPY_OUT, 0.0)
            told += [("us of copy-out / step", copy_out, COPY, plain, 1.25)]
        if sums := found["branch"]["sum_us"]:
            told += [("us of a sum", sums[0], COPY, sums[1], 1.25)]
        rows += [Row("kernels", case, *each) for each in told]
    return rows
