"""
What FSDP2 copies in a step of grouped experts sharded on dim 1, as where a shard group
has more ranks than local experts, beside an fp32 router; and the peak memory.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from _models import BF16, FP32, training_step
from _peak_memory import tracked_peak
from _ratios import alternate, Comparison, Group, Row, Subject
from _sides import Side
from _timeline import COPIES

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard


EXPERTS, HIDDEN, DIM = 8, 1024, 512
RELEASE, BRANCH = "router apart (release)", "branch"
COALESCED = "branch, set_coalesced_collectives"


class Experts(nn.Module):
    """Every expert sees every token: only parameters matter here."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False, dtype=FP32)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM, dtype=BF16) / 32)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN, dtype=BF16) / 32)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x.float()).softmax(-1).to(x.dtype)
        hidden = torch.einsum("td,efd->tef", x, self.up).relu()
        return x + torch.einsum("tef,edf,te->td", hidden, self.down, weights)


def make_model(*, per_dtype: bool, coalesced: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Experts(), Experts())
    shard = partial(
        fsdp.fully_shard,
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        shard_placement_fn=lambda param: Shard(int(param.ndim == 3)),
    )
    for block in model:
        if per_dtype:
            shard(block.router)
        shard(block)
    shard(model)
    if coalesced:
        fsdp.set_coalesced_collectives(model)
    return model


@contextlib.contextmanager
def copies_counted() -> Iterator[Counter[str]]:
    """Counts bytes, kernels and microseconds of copies, with those inside of others."""
    found: Counter[str] = Counter()
    inside: list[Any] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if inside:
                return original(tensors, *args, **kwargs)
            inside.append(original)
            begun = time.process_time()
            result = original(tensors, *args, **kwargs)
            found["us"] += int((time.process_time() - begun) * 1e6)
            copied = [tensors] if isinstance(tensors, Tensor) else tensors
            found["nbytes"] += 2 * sum(tensor.nbytes for tensor in copied)
            found["kernels"] += 1
            inside.clear()
            return result

        return call

    mixed = (torch.ops.fsdp, "chunk_cat_mixed_dtype"), (Tensor, "copy_")
    with contextlib.ExitStack() as stack:
        for owner, name in (*((torch, name) for name in COPIES), *mixed):
            if original := getattr(owner, name, None):
                patch = mock.patch.object(owner, name, counted(original))
                stack.enter_context(patch)
        yield found


def measure(*, device: str, per_dtype: bool, coalesced: bool) -> dict[str, Any]:
    model = make_model(per_dtype=per_dtype, coalesced=coalesced)
    x = torch.randn(2, DIM, dtype=BF16)
    training_step(model, x)
    with copies_counted() as found:
        training_step(model, x)
    matrix = EXPERTS * HIDDEN * DIM * BF16.itemsize
    return dict(found) | {"peak": tracked_peak(model, x), "matrix": matrix}


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> list[Row]:
    """Compares what copies take, and the peak, with the release's."""
    ways = [(RELEASE, "release", False), (BRANCH, "branch", False)]
    ways += [(COALESCED, "branch", True)]
    subjects = [
        Subject(name, side, {"per_dtype": side == "release", "coalesced": coalesced})
        for name, side, coalesced in ways
    ]
    rounds = rounds or (3 if quick else 9)
    samples = alternate(__name__, sides, [Group("experts", subjects)], rounds)
    exact = {key[1:]: min(values) for key, values in samples.values.items()}
    rows, peak = [], exact[RELEASE, "peak"]
    most = (peak - exact[BRANCH, "matrix"]) / peak
    for metric, quantity, bars in (
        ("nbytes", "bytes that copies move / step", (0.55, 0.10)),
        ("kernels", "copy kernels / step", (1.0, 1.0)),
        ("peak", "peak bytes of a rank", (most, most)),
    ):
        for subject, bar in zip((BRANCH, COALESCED), bars, strict=True):
            two = exact[subject, metric], RELEASE, exact[RELEASE, metric]
            rows.append(Row("experts", f"experts, {subject}", quantity, *two, bar))
    us = "experts", "processor time of copies", "us"
    return rows + samples.rows(*us, [Comparison("experts", BRANCH, RELEASE, 0.6)])
