"""
Prints, as JSON, the peak of memory of one rank of two in a step, which is one of its
post-backward, with whatever torch is imported. The group sends nothing.
"""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from itertools import accumulate
from typing import Any
from unittest import mock

from fsdp_common.scenarios import COPIES, IS_BRANCH
from fsdp_parity.memory import Touch

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


RANKS = 2
ROWS, COLUMNS, COUNT = 64, 32, 4
ELEMENTS = ROWS * COLUMNS * COUNT
FP32, BF16 = torch.float32, torch.bfloat16


class Weights(nn.Module):
    def __init__(self, dtype: torch.dtype, odd: torch.dtype | None = None):
        super().__init__()
        params = [torch.zeros(ROWS, COLUMNS, dtype=dtype) for _ in range(COUNT)]
        if odd is not None:
            params.insert(1, torch.zeros(64, dtype=odd))
        self.params = nn.ParameterList(params)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Touch.apply(x, *self.params)


def by_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() > 1 else None


# Storage dtype, dtype of one more parameter, and arguments of `fully_shard`
Case = tuple["torch.dtype", "torch.dtype | None", dict[str, Any]]
REDUCE_FP32 = {"mp_policy": MixedPrecisionPolicy(None, FP32)}
BF16_REDUCE_FP32 = {"mp_policy": MixedPrecisionPolicy(BF16, FP32)}
CASES: dict[str, Case] = {
    "bf16": (BF16, None, {}),
    "fp32": (FP32, None, {}),
    "bf16, reduce fp32": (BF16, None, REDUCE_FP32),
    "fp32, reduce bf16": (FP32, None, {"mp_policy": MixedPrecisionPolicy(None, BF16)}),
    "fp32 as bf16, reduce fp32, Shard(1)": (
        FP32,
        None,
        BF16_REDUCE_FP32 | {"shard_placement_fn": by_columns},
    ),
}
MIXED: dict[str, Case] = {
    "bf16 and one fp32, reduce fp32": (BF16, FP32, REDUCE_FP32),
    "fp32 and one bf16, reduce fp32": (FP32, BF16, REDUCE_FP32),
}


def unit_of(case: Case) -> nn.Module:
    dtype, odd, kwargs = case
    mesh = init_device_mesh("cpu", (RANKS,))
    return fully_shard(Weights(dtype, odd), mesh=mesh, **kwargs)


# Divide factors over a single rank
ALONE: dict[str, float | None] = {"one rank": None, "one rank, divided": 2.0}


def unit_alone(factor: float | None) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("other", "shard"))
    model = fully_shard(Weights(FP32), mesh=mesh["shard"])
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    return model


def step(model: nn.Module) -> None:
    model(torch.ones(1, requires_grad=True)).sum().backward()
    for param in model.parameters():
        param.grad = None


def peak_nbytes(model: nn.Module) -> int:
    """Returns the peak of a step, above what is there before it."""
    gc.collect()  # of the case before, which would be freed in between
    cpu = torch.profiler.ProfilerActivity.CPU
    # The branch is to copy as it does while no profiler looks at it
    directly = mock.patch(f"{COPIES}.gets_operators", lambda _: False)
    with directly if IS_BRANCH else nullcontext():
        for _ in range(3):
            step(model)
        with torch.profiler.profile(activities=[cpu], profile_memory=True) as profiler:
            step(model)
    events = profiler.profiler.kineto_results.events()
    changes = [e for e in events if e.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    cases = CASES | MIXED if IS_BRANCH else CASES
    peaks = {name: peak_nbytes(unit_of(case)) for name, case in cases.items()}
    for name, factor in ALONE.items():
        peaks[name] = peak_nbytes(unit_alone(factor))
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
