"""
Prints, as JSON, how much memory a step takes at its peak with whatever torch is
imported, from what the allocator reports to the profiler. One process plays the
first of four ranks: collectives are issued and move nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    fully_shard,
    MixedPrecisionPolicy,
)
from torch.testing._internal.distributed.fake_pg import FakeStore


RANKS = 4
BLOCKS = 3
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# Each is as many bytes as the other: shape and dtype of a block's parameters
Specs = Sequence[tuple[tuple[int, ...], torch.dtype]]
UNIFORM: dict[str, Specs] = {
    "fp32": [((64, 32), FP32), ((64, 32), FP32), ((32, 16), FP32)],
    "bf16": [((128, 32), BF16), ((128, 32), BF16), ((64, 16), BF16)],
    "fp16": [((128, 32), FP16), ((128, 32), FP16), ((64, 16), FP16)],
}
MIXED: dict[str, Specs] = {
    "three dtypes": [((64, 32), FP32), ((128, 32), BF16), ((64, 16), FP16)],
    "fp32 last": [((128, 32), BF16), ((64, 16), FP16), ((64, 32), FP32)],
}
# One element of fp32 lies behind an odd number of bf16: the segment is padded
UNALIGNED: Specs = [((128, 32), BF16), ((12,), BF16), ((64, 32), FP32), ((4,), FP32)]

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_reshard": {"reshard_after_forward": False},
    "resharded": {"reshard_after_forward": True},
    "reshard_to_two": {"reshard_after_forward": 2},
    "hybrid": {"is_hybrid": True},
    "accumulate": {"accumulates": True},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "two_buffers": {"buffers": 2},
    "param_bf16": {"mp_policy": MixedPrecisionPolicy(BF16)},
    "reduce_fp32": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=FP32)},
    "param_bf16_reduce_fp32": {"mp_policy": MixedPrecisionPolicy(BF16, FP32)},
}


class Touch(torch.autograd.Function):
    """Uses parameters at no cost, and gives each a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.metas = [(param.shape, param.dtype) for param in params]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad, *(torch.ones(size, dtype=dtype) for size, dtype in ctx.metas))


class Block(nn.Module):
    def __init__(self, specs: Specs):
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(s, dtype=d) for s, d in specs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Touch.apply(x, *self.params)


def peak_nbytes(specs: Specs, mode: dict[str, Any]) -> int:
    """Returns the peak of the third step, above what is there before it."""
    kwargs = dict(mode)
    is_hybrid, buffers = kwargs.pop("is_hybrid", False), kwargs.pop("buffers", 1)
    accumulates = kwargs.pop("accumulates", False)
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=names)
    if not is_hybrid:
        mesh = init_device_mesh("cpu", (RANKS,))
    model = nn.Sequential(*(Block(specs) for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    model.set_reduce_scatter_max_input_buffers(buffers)

    def step() -> None:
        for i in range(2 if accumulates else 1):
            model.set_requires_gradient_sync(i == 1 or not accumulates)
            model(torch.ones(1, requires_grad=True)).sum().backward()
        for param in model.parameters():
            param.grad = None

    step()
    step()
    return peak_nbytes_of(step)


def peak_nbytes_of(run: Callable[[], None]) -> int:
    """Returns the peak of a call, above what is there before it."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    held = peak = 0
    for event in memory:
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixed", action="store_true", help="units of several dtypes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    blocks = UNIFORM | MIXED | {"unaligned": UNALIGNED} if args.mixed else UNIFORM
    peaks = {
        name: {mode: peak_nbytes(specs, kwargs) for mode, kwargs in MODES.items()}
        for name, specs in blocks.items()
    }
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
