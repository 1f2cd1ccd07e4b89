"""
Measures training steps whose collectives wait as a ring would: ``ranks - 1`` hops, and
twice that for an all-reduce, before each, the same in all ways to train.

    python benchmarks/distributed/fsdp/collective_latency.py [--quick] [--picture PATH]

Wall-clock time of gloo processes on this machine, which share its cores. A wait sleeps,
so that others compute meanwhile. On a CPU collectives hide behind no computation, as
most do on a device: what is here is all of their latency.

The blocks are small ones of the step benchmark's Nemotron-H-like kind, whose fp32
gradients are a few KiB. Each round takes all ways in turns.
"""

import argparse
import ctypes
import functools
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple


# Where _half_products is
sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

import numpy as np
from _calls import (
    Call,
    EXCHANGED,
    JOINED,
    seen_by,
    sharded,
    TODAY,
    UPCAST,
)
from _models import BF16, FP32, NemotronHBlock, training_step
from _ratios import Samples
from tqdm import tqdm

import torch
import torch._dynamo  # for processes to come: a unit's first hook asks for it
import torch.distributed as dist
from _half_products import widen_half_products
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh


WAYS = (TODAY, EXCHANGED, JOINED, UPCAST)
RANKS = (4, 8)
HOPS_US = (0, 20, 100, 500)
BLOCKS, DIM = 6, 128


# In each process #


class Run(NamedTuple):
    model: nn.Module
    x: Tensor


@functools.cache
def _build(way: str) -> Run:
    torch.manual_seed(0)
    blocks = [NemotronHBlock(dim=DIM, heads=4, state=16) for _ in range(BLOCKS)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(1, 8, DIM, dtype=FP32 if way == UPCAST else BF16)
    run = Run(sharded(blocks, way, mesh), x)
    for _ in range(2):
        training_step(*run)
    return run


def sleep_exactly() -> None:
    """Linux lets a thread sleep 50 us longer than asked for, unless told not to."""
    set_timer_slack = 29
    ctypes.CDLL(None).prctl(set_timer_slack, 1)


def measure(way: str, *, hop_us: float, steps: int) -> dict[str, float]:
    """Returns the median step of several, in milliseconds, and its collectives."""
    run = _build(way)
    calls: list[Call] = []

    def wait(call: Call) -> None:
        calls.append(call)
        hops = (call.ranks - 1) * (2 if call.kind == "all-reduce" else 1)
        if hop_us:
            time.sleep(hops * hop_us / 1e6)

    with seen_by(wait):
        training_step(*run)  # not counted: another model has used the caches since
        calls.clear()
        dist.barrier()
        ends = [time.perf_counter()]
        for _ in range(steps):
            training_step(*run)
            ends.append(time.perf_counter())
    wall_ms = float(np.median(np.diff(ends))) * 1e3
    return {"wall_ms": wall_ms, "collectives": len(calls) // steps}


def rank_main(
    rank: int, ranks: int, store: str, rounds: int, steps: int, answer: Connection
) -> None:
    """Measures all ways in turns, as all ranks do. The first one answers."""
    torch.set_num_threads(1)
    sleep_exactly()
    widen_half_products()
    dist.init_process_group(
        "gloo", rank=rank, world_size=ranks, store=dist.FileStore(store, ranks)
    )
    samples = Samples()
    turns = [(hop_us, way) for _ in range(rounds) for hop_us in HOPS_US for way in WAYS]
    for hop_us, way in tqdm(
        turns, desc=f"{ranks} ranks", disable=rank > 0, mininterval=5
    ):
        found = measure(way, hop_us=hop_us, steps=steps)
        samples.add(group_of(ranks, hop_us), way, found)
    if rank == 0:
        answer.send(samples)
    dist.destroy_process_group()


# What is compared #


def group_of(ranks: int, hop_us: int) -> str:
    return f"{ranks} ranks, {hop_us} us"


def measured(ranks: int, rounds: int, steps: int) -> Samples:
    """Starts the processes, which have imported all that they need."""
    forked = multiprocessing.get_context("fork")
    received, answer = forked.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, os.path.join(folder, "store"), rounds, steps, answer)
        processes = [
            forked.Process(target=rank_main, args=(rank, *args), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        answer.close()
        try:
            return received.recv()
        except EOFError:
            sys.exit("error: a process ended early: see what it says above")
        finally:
            for process in processes:
                process.join()


def table(samples: Samples) -> list[str]:
    """One row for each group: milliseconds of the first way, and ratios to it."""
    groups = [group_of(ranks, hop_us) for ranks in RANKS for hop_us in HOPS_US]
    counts = [int(samples.of(groups[0], way, "collectives")[0]) for way in WAYS]
    heads = [f"{way}: {count}" for way, count in zip(WAYS, counts)]
    lines = [
        f"| ranks, a hop | {TODAY}: ms | {' | '.join(heads[1:])} |",
        "|---" * (1 + len(WAYS)) + "|",
    ]
    for group in groups:
        first = samples.spread(group, TODAY, "wall_ms")
        cells = [f"{first.median:.0f} ({first.low:.0f} to {first.high:.0f})"]
        for way in WAYS[1:]:
            ratio = samples.ratio(group, way, TODAY, "wall_ms")
            cells.append(f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
        lines.append(f"| {group} | {' | '.join(cells)} |")
    return [f"Collectives of a step by default: {counts[0]}\n", *lines]


def draw(samples: Samples, path: Path) -> None:
    """A line for each way: the time of a step over that of a hop."""
    from matplotlib import pyplot as plt

    plt.switch_backend("Agg")
    figure, both = plt.subplots(1, len(RANKS), figsize=(10, 4), layout="constrained")
    for axes, ranks in zip(both, RANKS):
        for way in WAYS:
            spreads = [
                samples.spread(group_of(ranks, hop_us), way, "wall_ms")
                for hop_us in HOPS_US
            ]
            medians = [spread.median for spread in spreads]
            (line,) = axes.plot(HOPS_US, medians, "-o", markersize=3, label=way)
            low, high = ([getattr(s, end) for s in spreads] for end in ("low", "high"))
            axes.fill_between(HOPS_US, low, high, color=line.get_color(), alpha=0.12)
        axes.set(
            title=f"{ranks} gloo processes",
            xlabel="us that a hop waits",
            ylabel="ms / step",
            ylim=(0, None),
        )
        axes.grid(alpha=0.3)
    both[0].legend(fontsize=8)
    figure.suptitle(f"A step of {BLOCKS} blocks: median and quartiles")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 6")
    parser.add_argument("--picture", type=Path, metavar="PATH", help="draw it too")
    args = parser.parse_args()
    rounds, steps = args.rounds or (1 if args.quick else 6), 1 if args.quick else 2
    samples = Samples()
    for ranks in RANKS:
        samples.values |= measured(ranks, rounds, steps).values
    print("\n".join(table(samples)))
    if args.picture:
        draw(samples, args.picture)


if __name__ == "__main__":
    main()
