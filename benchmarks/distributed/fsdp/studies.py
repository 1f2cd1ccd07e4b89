"""Studies of the collectives of a training step: what they are, send and take.

    python benchmarks/distributed/fsdp/studies.py counts|traffic|times|latency

- counts: how many there are and their KiB, in each way to train, over 8 ranks.
- traffic: the MiB that a rank sends inside of its node and to other nodes.
- times: hops * seconds a hop + bytes / bytes a second, as if nothing hid a collective.
- latency: measured steps whose collectives wait as a ring would.

But for the last, one of many ranks runs a step with a process group that sends nothing and
tensors that hold nothing, so sizes are those of real models.
"""

import argparse
import contextlib
import functools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple


# Where _half_products is
sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

import numpy as np
from _calls import Call, seen_by
from _models import BF16, Block, BLOCKS, FP32, LARGE, NemotronHBlock, training_step

import torch
import torch.distributed as dist
from _half_products import widen_half_products
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore


NODE = 8  # ranks, numbered node by node
DEFAULT, EXCHANGED = "default", "grad_comm_dtype"  # as wide as the gradient
JOINED, BOTH = "set_reduce_bucket_cap", "both"
UPCAST, PER_DTYPE = "all fp32", "one unit per dtype"
WAYS = (DEFAULT, EXCHANGED, JOINED, BOTH, UPCAST)
# Of gradients that are added in fp32: sent so, or in bf16
WIDE, NARROW = "sent in fp32", "sent in bf16"


def shard(blocks: Sequence[Block], way: str, mesh: DeviceMesh) -> nn.Module:
    """Makes each block a unit, or one for each of its dtypes."""
    model, policy = nn.Sequential(*blocks), MixedPrecisionPolicy()
    if way == UPCAST:
        for module in model.modules():  # which hold nothing: `float` would swap them
            for name, param in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(param.float()))
    if way in (EXCHANGED, BOTH):
        policy = replace(policy, grad_comm_dtype_override_fn=lambda p: p.dtype)
    if way in (WIDE, NARROW):
        policy = replace(policy, reduce_dtype=FP32)
    if way == NARROW:
        policy = replace(policy, grad_comm_dtype=BF16)
    for block in blocks:
        if way == PER_DTYPE and (second := block.second_unit()):
            fully_shard(second, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if way in (JOINED, BOTH):
        from torch.distributed.fsdp import set_reduce_bucket_cap

        set_reduce_bucket_cap(model)
    return model


class Mesh(NamedTuple):
    replicas: int
    shards: int

    @contextlib.contextmanager
    def faked(self) -> Iterator[DeviceMesh]:
        size = self.replicas * self.shards
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        shape, names = (self.replicas, self.shards), ("replicate", "shard")
        if self.replicas == 1:
            shape, names = (self.shards,), ("shard",)
        try:
            yield init_device_mesh("cpu", shape, mesh_dim_names=names)
        finally:
            dist.destroy_process_group()


def calls_of(
    block: type[Block], count: int, way: str, mesh: Mesh, **sizes: int
) -> list[Call]:
    """Returns the collectives of one step of some blocks, each gathered twice."""
    calls: list[Call] = []
    with mesh.faked() as device_mesh, FakeTensorMode():
        model = shard([block(**sizes) for _ in range(count)], way, device_mesh)
        dtype = FP32 if way == UPCAST else BF16
        with seen_by(calls.append):
            training_step(model, torch.randn(1, 4, sizes.get("dim", 512), dtype=dtype))
    return calls


def line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def header(*cells: Any) -> None:
    print(line(*cells), "|---" * len(cells) + "|", sep="\n")


def print_counts() -> None:
    """Gathers and reductions of a step of three blocks, and the KiB of both."""
    ways = (*WAYS, PER_DTYPE)
    header("blocks", *ways)
    for name, block in BLOCKS.items():
        cells = []
        for way in ways:
            calls = calls_of(block, 3, way, Mesh(1, 8))
            gathers = sum(call.kind == "all-gather" for call in calls)
            kib = sum(call.nbytes for call in calls) / 2**10
            cells.append(f"{gathers} + {len(calls) - gathers}; {kib:,.0f}")
        print(line(name, *cells))


def sent(call: Call) -> tuple[float, float]:
    """
    Returns the bytes that a rank sends inside of its node and to others, on average: in
    an all-to-all to every other rank, in a ring to the next.
    """
    inside = min(
        call.ranks, max(NODE // call.stride, 1)
    )  # ranks of the group in a node
    part = call.nbytes / call.ranks
    if call.kind == "all-to-all":
        return part * (inside - 1), part * (call.ranks - inside)
    passes = 2 if call.kind == "all-reduce" else 1
    nbytes = passes * part * (call.ranks - 1)
    crossing = 0.0 if call.ranks == inside else 1 / inside  # the last rank of each node
    return nbytes * (1 - crossing), nbytes * crossing


def meshes(ranks: Sequence[int]) -> Iterator[Mesh]:
    for count in ranks:
        yield Mesh(1, count)
        if count > NODE:
            yield Mesh(count // NODE, NODE)


def print_traffic(ranks: Sequence[int]) -> None:
    """MiB of the reductions of one bf16 block, whose gradients are added in fp32."""
    columns = [
        f"{way}: {w}" for way in (WIDE, NARROW) for w in ("in a node", "between")
    ]
    header("mesh", *columns)
    for mesh in meshes(ranks):
        cells = []
        for way in (WIDE, NARROW):
            calls = calls_of(BLOCKS["Llama-like"], 1, way, mesh, **LARGE["Llama-like"])
            # The gathers of parameters come first
            first = next(i for i, call in enumerate(calls) if call.kind != "all-gather")
            totals = (sum(way) / 2**20 for way in zip(*map(sent, calls[first:])))
            cells += [f"{total:.1f}" for total in totals]
        print(line(f"{mesh.replicas} x {mesh.shards}", *cells))


class Network(NamedTuple):
    """What a hop takes, and what each rank sends at once, in a node and between nodes."""

    hop_us: float = 1.0
    hop_between_us: float = 5.0
    gb_per_s: float = 300.0
    gb_per_s_between: float = 50.0


def seconds(call: Call, network: Network, *, trees: bool) -> float:
    """
    In a ring, what is sent last passes all ranks but one; in trees, hops are the tree's
    levels, and messages of an all-to-all leave at once. An all-reduce passes twice.
    """
    inside = min(call.ranks, max(NODE // call.stride, 1))
    nodes, part = call.ranks // inside, call.nbytes / call.ranks / 1e9
    if call.kind == "all-to-all":
        hops, between = inside - 1, call.ranks - inside
        if trees:
            hops, between = min(hops, 1), min(between, 1)
        sending = part * (inside - 1) / network.gb_per_s
        sending += part * (call.ranks - inside) / network.gb_per_s_between
    else:
        hops, between = call.ranks - nodes, nodes - 1
        if trees:
            hops, between = math.ceil(math.log2(inside)), math.ceil(math.log2(nodes))
        # A node's ranks all have a link to the next node, and share what crosses
        slowest = network.gb_per_s
        if nodes > 1:
            slowest = min(slowest, inside * network.gb_per_s_between)
        sending = part * (call.ranks - 1) / slowest
    latency = (hops * network.hop_us + between * network.hop_between_us) / 1e6
    return (latency + sending) * (2 if call.kind == "all-reduce" else 1)


# As in Mamba-2 of 130M parameters, and in the Mamba layers of Nemotron-H of 8B
SIZES = {
    "small": {"dim": 768, "heads": 24, "state": 128},
    "large": {"dim": 4096, "heads": 128, "state": 128},
}


def print_times(ranks: Sequence[int], blocks: int) -> None:
    """Milliseconds of all collectives of a step by default, and ratios to that."""
    header("blocks", "mesh", "network", f"{DEFAULT}: ms", *WAYS[1:])
    for (size, sizes), mesh in ((s, m) for s in SIZES.items() for m in meshes(ranks)):
        calls = [calls_of(NemotronHBlock, blocks, way, mesh, **sizes) for way in WAYS]
        for trees in (False, True):
            first, *others = (
                sum(seconds(call, Network(), trees=trees) for call in of_way)
                for of_way in calls
            )
            ratios = [f"{each / first:.2f}" for each in others]
            where = f"{mesh.replicas} x {mesh.shards}", "trees" if trees else "rings"
            print(line(f"{blocks} {size}", *where, f"{first * 1e3:,.1f}", *ratios))


def step_ms(model: nn.Module, x: torch.Tensor, hop_us: float) -> float:
    """Returns the time of a step whose collectives wait for each hop of a ring."""

    def wait(call: Call) -> None:
        passes = 2 if call.kind == "all-reduce" else 1
        time.sleep(passes * (call.ranks - 1) * hop_us / 1e6)

    dist.barrier()
    begun = time.perf_counter()
    with seen_by(wait):
        training_step(model, x)
    return (time.perf_counter() - begun) * 1e3


def latency_on_rank(rank: int, ranks: int, port: int, rounds: int) -> None:
    torch.set_num_threads(1)
    widen_half_products()
    store = dist.TCPStore("localhost", port, ranks, rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    mesh = init_device_mesh("cpu", (ranks,))
    runs: dict[str, tuple[nn.Module, torch.Tensor]] = {}
    for way in (DEFAULT, EXCHANGED, JOINED, UPCAST):
        blocks = [NemotronHBlock(dim=128, heads=4, state=16) for _ in range(6)]
        x = torch.randn(1, 8, 128, dtype=FP32 if way == UPCAST else BF16)
        runs[way] = shard(blocks, way, mesh), x
        training_step(*runs[way])
    if rank == 0:
        header("ranks", "us a hop", f"{DEFAULT}: ms", *[*runs][1:])
    for hop_us in (0, 20, 100, 500):
        turns = [
            [step_ms(*run, hop_us) for run in runs.values()] for _ in range(rounds)
        ]
        first = np.array(turns)[:, :1]
        ratios = [f"{ratio:.2f}" for ratio in np.median(turns / first, axis=0)[1:]]
        if rank == 0:
            print(line(ranks, hop_us, f"{np.median(first):.0f}", *ratios), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def print_latency(ranks: int, rounds: int) -> None:
    """Median milliseconds of a step by default, and median ratios to it."""
    port = dist.TCPStore("localhost", 0, is_master=True).port + 1
    work = functools.partial(latency_on_rank, ranks=ranks, port=port, rounds=rounds)
    torch.multiprocessing.spawn(work, nprocs=ranks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=("counts", "traffic", "times", "latency"))
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N")
    parser.add_argument("--blocks", type=int, default=6, help="of times")
    parser.add_argument("--rounds", type=int, default=10, help="of latency")
    args = parser.parse_args()
    if args.study == "counts":
        print_counts()
    elif args.study == "traffic":
        print_traffic(args.ranks or (8, 16, 64, 256, 1024))
    elif args.study == "times":
        print_times(args.ranks or (8, 64, 512), args.blocks)
    else:
        for ranks in args.ranks or (4, 8):
            print_latency(ranks, args.rounds)


if __name__ == "__main__":
    main()
