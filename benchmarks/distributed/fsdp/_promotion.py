"""
What it costs to promote the gradients of a mixed unit to one dtype, and what it brings.

2.15.0 with the first commit of the series gathers a unit as the branch does, and reduces
all of its gradients in fp32; with the whole series, each in its own dtype. Steps are
simulated, see [Note: Simulated clocks], but of blocks as large as in models of 8 billion
parameters, whose tensors hold nothing: a rank computes 4,096 tokens at 400 TFLOP/s. The
errors are those of sums of random numbers, in percent of the sums' root mean square.
"""

import functools
from typing import Any
from unittest import mock

import _timeline
from _calls import Call, seen_by
from _ratios import Row
from _sides import Side, SideError

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore


RANKS, NUM_BLOCKS, TOKENS, FLOP_PER_US = (8, 512), 6, 4096, 400e6
# GB/s of the link, and the latency of a collective in us
NETWORKS = [(link, latency) for link in (200, 40) for latency in (10, 20, 50)]


def spend_compute(block: nn.Module, args: Any, out: Tensor) -> Tensor:
    us = 2 * TOKENS * sum(p.numel() for p in block.parameters()) / FLOP_PER_US
    return _timeline.Compute.apply(out, us)


def measure(
    *, device: str, block: str, way: str, ranks: int, is_large: bool
) -> dict[str, Any]:
    """Returns what a step sends, and its simulated milliseconds over each network."""
    _timeline.use_simulated_streams()
    from _models import LARGE, MIXED, shard, training_step  # which import FSDP
    from _peak_memory import tracked_peak

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = dist.init_device_mesh(device, (ranks,))
    calls: list[Call] = []
    found, sizes = {}, LARGE[block] if is_large else {}
    with FakeTensorMode(), _timeline.simulated(), seen_by(calls.append):
        model = nn.Sequential(*(MIXED[block](**sizes) for _ in range(NUM_BLOCKS)))
        for each in model:
            each.register_forward_hook(spend_compute)
        shard(model, way, mesh)
        x = torch.zeros(
            1, 4, sizes.get("dim", 512), dtype=torch.bfloat16, requires_grad=True
        )
        training_step(model, x)
        for link, latency in NETWORKS:
            calls.clear()
            rates = {"SCALE": 1.0, "LINK": link * 1e3, "LATENCY": latency}
            begun = _timeline.Handle.current.clock
            with mock.patch.multiple(_timeline, **rates):
                training_step(model, x)
            ms = (_timeline.Handle.current.clock - begun) / 1e3
            found[f"ms / step at {link} GB/s, {latency} us"] = ms
        nbytes = sum(call.nbytes for call in calls if call.kind != "all-gather")
        found |= {"MB reduced": nbytes / 1e6, "collectives": len(calls)}
        found["peak MB of a rank"] = tracked_peak(model, x) / 1e6
    return found


def errors_of_sums(ranks: int) -> tuple[float, float]:
    """Returns the errors of a mean of bf16 gradients that is added in bf16, or in fp32."""
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(ranks, 2**16, generator=generator).bfloat16()
    mean = grads.double().mean(0)

    def error(dtype: torch.dtype) -> float:
        total = functools.reduce(torch.add, grads.to(dtype))  # as along a ring
        difference = (total / ranks).bfloat16().double() - mean
        return float(100 * difference.norm() / mean.norm())

    return error(torch.bfloat16), error(torch.float32)


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> list[Row]:
    """Compares the branch with each other way."""
    from _models import AS_IT_IS, EXCHANGED, JOINED, MIXED, PER_DTYPE
    from _step_time import BRANCH, PER_DTYPE_RELEASE, PROMOTED, RELEASE, SERIES

    if PROMOTED not in sides:
        raise SideError("promotion is measured over 2.15.0 alone: RELEASE=2.15.0")
    ways = {
        BRANCH: (BRANCH, AS_IT_IS),
        PROMOTED: (PROMOTED, AS_IT_IS),
        SERIES: (SERIES, AS_IT_IS),
        PER_DTYPE_RELEASE: (RELEASE, PER_DTYPE),
        f"{JOINED} (by the branch)": (BRANCH, JOINED),
        f"{EXCHANGED} (by the branch)": (BRANCH, EXCHANGED),
    }
    rows = []
    for side in sides.values():
        side.start()
    names = [(name, True) for name in MIXED] + [("Nemotron-H-like", False)]
    for block, is_large in names[-1:] if quick else names:
        for ranks in RANKS[:1] if quick else RANKS:
            request = {"block": block, "ranks": ranks, "is_large": is_large}
            found = {
                name: sides[side].ask(__name__, {**request, "way": way})
                for name, (side, way) in ways.items()
            }
            case = f"{block}, {'large' if is_large else 'small'}, {ranks} ranks"
            for name in list(ways)[1:]:
                for quantity, ours in found[BRANCH].items():
                    row = case, quantity, ours, name, found[name][quantity]
                    rows.append(Row("promotion", *row))
    for ranks in (8, 64, 512):
        what = f"sum of bf16 gradients, {ranks} ranks", "% error"
        ours, theirs = errors_of_sums(ranks)
        rows.append(Row("promotion", *what, ours, PROMOTED, theirs))
    return rows
