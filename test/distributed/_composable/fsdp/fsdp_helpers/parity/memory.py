"""A step's peak of memory, by the profiler, on the first of four ranks."""

import gc
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from fsdp_helpers.common.doubles import copying_unobserved

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
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


def by_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() > 1 else None


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_reshard": {"reshard_after_forward": False},
    "reshard_to_two": {"reshard_after_forward": 2},
    "hsdp": {"is_hybrid": True},
    "accumulate": {"accumulates": True},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "two_buffers": {"buffers": 2},
    "param_bf16": {"mp_policy": MixedPrecisionPolicy(BF16)},
    "columns": {"shard_placement_fn": by_columns},
    "reduce_fp32": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=FP32)},
    "param_bf16_reduce_fp32": {"mp_policy": MixedPrecisionPolicy(BF16, FP32)},
}

# One unit, whose peak is that of its post-backward: its parameters, and its mode
FOUR: dict[torch.dtype, Specs] = {d: [((64, 32), d)] * 4 for d in (FP32, BF16)}
ODD_NUMEL = 64
ONE_UNIT: dict[str, tuple[Specs, dict[str, Any]]] = {
    "bf16": (FOUR[BF16], MODES["reduce_fp32"]),
    "fp32": (FOUR[FP32], MODES["reduce_fp32"]),
    "one rank": (FOUR[FP32], {"is_alone": True}),
    "one rank, divided": (FOUR[FP32], {"is_alone": True, "divide_factor": 2.0}),
}
ONE_MIXED_UNIT: dict[str, tuple[Specs, dict[str, Any]]] = {
    "bf16 and one fp32": ([*FOUR[BF16], ((ODD_NUMEL,), FP32)], MODES["reduce_fp32"]),
    "fp32 and one bf16": ([*FOUR[FP32], ((ODD_NUMEL,), BF16)], MODES["reduce_fp32"]),
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


def peak_nbytes(specs: Specs, mode: dict[str, Any], blocks: int = BLOCKS) -> int:
    """Returns the peak of the third step, above what is there before it."""
    kwargs = dict(mode)
    buffers, factor = kwargs.pop("buffers", 1), kwargs.pop("divide_factor", None)
    accumulates = kwargs.pop("accumulates", False)
    is_hybrid, is_alone = (kwargs.pop(f"is_{n}", False) for n in ("hybrid", "alone"))
    shape = (2, RANKS // 2) if is_hybrid else (RANKS, 1) if is_alone else (1, RANKS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    kwargs["mesh"] = mesh if is_hybrid else mesh["shard"]
    model = nn.Sequential(*(Block(specs) for _ in range(blocks)))
    for block in model:
        fully_shard(block, **kwargs)
        if factor is not None:
            block.set_gradient_divide_factor(factor)
    fully_shard(model, **kwargs)
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
    gc.collect()  # what was there earlier, which would be freed in between
    cpu = torch.profiler.ProfilerActivity.CPU
    profiler = torch.profiler.profile(activities=[cpu], profile_memory=True)
    with copying_unobserved(), profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes))


def measure(*, has_mixed: bool) -> dict[str, dict[str, Any]]:
    """Returns the peaks of each mode, by block, and those of one unit."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    blocks = UNIFORM | MIXED if has_mixed else UNIFORM
    peaks = {
        name: {mode: peak_nbytes(specs, kwargs) for mode, kwargs in MODES.items()}
        for name, specs in blocks.items()
    }
    units = ONE_UNIT | ONE_MIXED_UNIT if has_mixed else ONE_UNIT
    peaks["one unit"] = {n: peak_nbytes(*unit, blocks=1) for n, unit in units.items()}
    return {"peaks": peaks}
