"""
On a CUDA device: how fast a unit's copies are, and host time there.

Copy-in casts a rank's shards into its part of the gather buffer, copy-out writes the
unsharded parameters from that buffer. Both only move memory, so their bandwidth, in
bytes written, is compared with a device-to-device copy of as many bytes. The process
group is fake, of 8 and of 64 ranks; nothing is gathered.

[Note: Replayed copies]
The calls that FSDP2 makes of ``foreach_all_gather`` and ``foreach_all_gather_copy_out``
in one unshard are recorded, and repeated with all streams made one, behind a kernel
that keeps the device busy while they are issued: so it is the device that is timed, and
not the host.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from _host_time import COMPARISONS, groups_of_host
from _models import BF16, FP16, FP32
from _ratios import alternate, Group, Samples, stop, Subject
from _rows import PartResult, Row, Timed, timed_rows
from _sides import Side

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather


REPEATS = 10
BUSY_CYCLES = 60_000_000  # some 30 ms, in which the host issues all repeats
# Of a transformer layer of 8 billion parameters, and of a small one elsewhere
WIDTHS = {"cuda": 4096, "cpu": 128}

# Dtypes of the matrices in turn, of the vectors, MixedPrecisionPolicy's arguments
MIXES: dict[str, tuple[tuple[torch.dtype, ...], torch.dtype, dict[str, Any]]] = {
    "bf16": ((BF16,), BF16, {}),
    "fp32": ((FP32,), FP32, {}),
    "fp32, bf16 compute": ((FP32,), FP32, {"param_dtype": BF16}),
    "bf16, fp32 vectors": ((BF16,), FP32, {}),
    "fp32, bf16 and fp16": ((FP32, BF16, FP16), FP32, {}),
}
UNIFORM_MIXES = ("bf16", "fp32", "fp32, bf16 compute")


class NoTransport(DefaultAllGather):
    """Allocates the buffer of a gather and leaves it at that."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        return None


def _layer(mix: str, device: str) -> list[nn.Module]:
    """Returns a layer's parameters, a module for each of their dtypes."""
    matrices, vectors, _ = MIXES[mix]
    width = WIDTHS[device]
    sizes = [(width, width)] * 4 + [(7 * width // 2, width)] * 3 + [(width,)] * 2
    by_dtype: dict[torch.dtype, nn.ParameterList] = {}
    for i, size in enumerate(sizes):
        dtype = vectors if len(size) == 1 else matrices[i % len(matrices)]
        parameter = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))
        by_dtype.setdefault(dtype, nn.ParameterList()).append(parameter)
    return [*by_dtype.values()]


Call = Callable[[], Any]


@contextmanager
def _recorded(name: str, calls: list[Call]) -> Iterator[None]:
    """Records calls of the function ``name``. See [Note: Replayed copies]."""
    original = getattr(_fsdp_param_group, name)

    def on_one_stream(value: Any) -> Any:
        if isinstance(value, torch.cuda.Stream):
            return torch.cuda.current_stream()
        return value

    def record(*args: Any, **kwargs: Any) -> Any:
        same_args = [on_one_stream(value) for value in args]
        same_kwargs = {key: on_one_stream(value) for key, value in kwargs.items()}
        calls.append(lambda: original(*same_args, **same_kwargs))
        return original(*args, **kwargs)

    setattr(_fsdp_param_group, name, record)
    try:
        yield
    finally:
        setattr(_fsdp_param_group, name, original)


@cache
def _copies(mix: str, per_dtype: bool, device: str) -> tuple[list[Call], list[Call]]:
    """Returns copy-in and copy-out of a layer, a call for each of its units."""
    modules = _layer(mix, device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(**MIXES[mix][2])
    copy_in: list[Call] = []
    copy_out: list[Call] = []
    for module in modules if per_dtype else [nn.Sequential(*modules)]:
        unit = fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(unit, FSDPModule)
        unit.set_custom_all_gather(NoTransport())
        with (
            _recorded("foreach_all_gather", copy_in),
            _recorded("foreach_all_gather_copy_out", copy_out),
        ):
            unit.unshard()
        unit.reshard()
    return copy_in, copy_out


def _seconds(calls: list[Call], device: str) -> float:
    """Returns what the calls take on the device, all of them once."""
    for call in calls:
        call()  # the allocator has what it needs now
    if device == "cpu":  # for a look at the code where there is no device
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    for _ in range(REPEATS):
        for call in calls:
            call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / REPEATS


def _written_nbytes(copy_in: list[Call]) -> int:
    """Returns the bytes that copy-out writes: those of all ranks' segments."""
    return sum(call().all_gather_output.nbytes for call in copy_in)


def _copy_seconds(nbytes: int, device: str) -> float:
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _seconds([lambda: target.copy_(source)], device)


def measure(*, device: str, mix: str, per_dtype: bool) -> dict[str, float]:
    """Returns bandwidths in GB/s of bytes written, and of a plain copy of as many."""
    copy_in, copy_out = _copies(mix, per_dtype, device)
    written = _written_nbytes(copy_in)
    segment = written // dist.get_world_size()
    seconds = {
        "copy_in": (segment, _seconds(copy_in, device)),
        "copy_out": (written, _seconds(copy_out, device)),
        "copy_of_in": (segment, _copy_seconds(segment, device)),
        "copy_of_out": (written, _copy_seconds(written, device)),
    }
    return {f"{k}_gbps": nbytes / s / 1e9 for k, (nbytes, s) in seconds.items()}


# What is compared #

BRANCH = "branch"
COPY = "device-to-device copy"
WORLD_SIZES = (8, 64)


def _release_name(mix: str) -> str:
    return "release" if mix in UNIFORM_MIXES else "release, one unit per dtype"


def _groups() -> list[Group]:
    groups = []
    for mix in MIXES:
        subjects = (
            Subject(_release_name(mix), "release", {"mix": mix, "per_dtype": True}),
            Subject(BRANCH, "branch", {"mix": mix, "per_dtype": False}),
        )
        groups.append(Group(mix, subjects))
    return groups


def _copy_rows(samples: Samples, world_size: int) -> list[Row]:
    rows = []
    for mix in MIXES:
        case = f"{mix}, {world_size} ranks"
        for copy, quantity in (("in", "copy-in GB/s"), ("out", "copy-out GB/s")):
            # A plain copy of as many bytes was timed by the branch itself
            plain, metric = f"copy_of_{copy}_gbps", f"copy_{copy}_gbps"
            samples.values[mix, COPY] = {metric: samples.of(mix, BRANCH, plain)}
            timed = [
                Timed(mix, case, BRANCH, name) for name in (COPY, _release_name(mix))
            ]
            rows += timed_rows("cuda", quantity, metric, samples, timed)
    return rows


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> PartResult:
    """Compares copies and host time, if there is a device."""
    if not torch.cuda.is_available():
        return PartResult(skipped="cuda: skipped, there is no CUDA device")
    result = PartResult()
    rounds = rounds or (2 if quick else 7)
    for world_size in WORLD_SIZES:
        there = {
            name: Side(name, side.root, world_size=world_size, device="cuda")
            for name, side in sides.items()
        }
        samples = alternate("cuda", there, _groups(), rounds=rounds)
        stop(there)
        result.rows += _copy_rows(samples, world_size)
        result.data[f"{world_size} ranks"] = samples.as_json()
    there = {name: Side(name, s.root, device="cuda") for name, s in sides.items()}
    groups = groups_of_host((16,), 0.1)
    samples = alternate("host", there, groups, rounds=rounds)
    stop(there)
    timed = [
        Timed(groups[0].name, f"host time, {case}, {groups[0].name}", branch, versus)
        for case, branch, versus, _ in COMPARISONS
    ]
    result.rows += timed_rows("cuda", "us / unit and step", "cpu_us", samples, timed)
    result.data["host"] = samples.as_json()
    return result
