"""
Prints, as tables, how long the collectives of one training step take: as it is by
default, and, over that, with ``grad_comm_dtype``, with ``set_reduce_bucket_cap``, with
both and upcast to fp32.

    python benchmarks/distributed/fsdp/collective_times.py

Nothing is sent. A collective takes ``hops * seconds a hop + bytes / bytes a second``, on
the plans of the buffers, one collective after the other, as if no computation hid any.
Nodes have 8 ranks, and ranks are numbered node by node.
"""

import argparse
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from _calls import BOTH, Call, EXCHANGED, EXCHANGES, JOINED, JOINS, TODAY, UPCAST
from _models import NemotronHBlock

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_layout import (
    by_collective,
    padded_shard_numel,
    plan_all_to_all,
    plan_buckets,
    plan_gather,
    ReduceBucket,
    ReduceBucketCap,
    ReduceSlot,
)
from torch.distributed.fsdp._fully_shard._fsdp_scaling import _MAX_PIECE_NBYTES


WAYS = (TODAY, EXCHANGED, JOINED, BOTH, UPCAST)
CAP = ReduceBucketCap(64 * 2**10, 2**20)  # the default sizes
RANKS = (8, 64, 512, 4096)


# What a step calls #


@dataclass(frozen=True)
class Mesh:
    replicas: int
    shards: int

    def over_shards(self, kind: str, nbytes: int) -> Call:
        return Call(kind, nbytes, self.shards, 1)

    def over_replicas(self, kind: str, nbytes: int) -> Call:
        return Call(kind, nbytes, self.replicas, self.shards)


def buckets_of(
    params: Sequence[nn.Parameter], way: str, shards: int
) -> tuple[ReduceBucket, ...]:
    """Plans what a unit reduces. With a comm dtype, all is added in fp32."""
    slots = [
        ReduceSlot(i, p.dtype, padded_shard_numel(p.shape, shards, 0))
        for i, p in enumerate(params)
    ]
    exchanges = way in EXCHANGES
    keys = [(torch.float32, p.dtype) if exchanges else (p.dtype, None) for p in params]
    return plan_buckets(slots, keys)


def nbytes_of(bucket: ReduceBucket) -> int:
    """Returns the bytes of a rank's shard of a bucket, as they are sent."""
    return bucket.shard_numel * bucket.wire_dtype.itemsize


def join(buckets: Iterable[ReduceBucket]) -> ReduceBucket:
    first, *others = buckets
    slots = first.slots + tuple(slot for other in others for slot in other.slots)
    return ReduceBucket(first.dtype, slots, first.comm_dtype)


def reductions(buckets: Sequence[ReduceBucket], mesh: Mesh) -> Iterator[Call]:
    """Yields what reduces some buckets at once."""
    for batch in by_collective(buckets):
        if batch[0].comm_dtype is None:
            nbytes, kind = nbytes_of(batch[0]), "reduce-scatter"
        else:
            dtypes = tuple(bucket.wire_dtype for bucket in batch)
            layout = plan_all_to_all(dtypes, tuple(b.shard_numel for b in batch))
            nbytes, kind = layout.segment_nbytes, "all-to-all"
        if mesh.shards > 1:
            yield mesh.over_shards(kind, mesh.shards * nbytes)
    if mesh.replicas == 1:
        return
    for (dtype, is_exact), run in groupby(
        buckets, lambda b: (b.dtype, b.comm_dtype is None)
    ):
        numel = sum(bucket.shard_numel for bucket in run)
        if is_exact:
            yield mesh.over_replicas("all-reduce", numel * dtype.itemsize)
            continue
        while numel > 0:  # in pieces, each padded
            piece = min(numel, _MAX_PIECE_NBYTES // dtype.itemsize)
            parts = -(-piece // mesh.replicas)
            for kind in ("all-to-all", "all-gather"):
                nbytes = mesh.replicas * parts * dtype.itemsize
                yield mesh.over_replicas(kind, nbytes)
            numel -= piece


def calls_of(
    blocks: Sequence[nn.Module], way: str, mesh: Mesh, cap: ReduceBucketCap = CAP
) -> Iterator[Call]:
    """Yields the collectives of a step. Each block is a unit, gathered twice."""
    waiting: list[ReduceBucket] = []

    def reduce_waiting() -> Iterator[Call]:
        by_key: dict[str, list[ReduceBucket]] = {}
        for bucket in waiting:
            by_key.setdefault(str(bucket.key), []).append(bucket)
        yield from reductions([join(run) for run in by_key.values()], mesh)
        waiting.clear()

    for block in blocks:
        params = [*block.parameters()]
        numels = [padded_shard_numel(p.shape, mesh.shards, 0) for p in params]
        layout = plan_gather([p.dtype for p in params], numels)
        gather = mesh.over_shards("all-gather", mesh.shards * layout.segment_nbytes)
        yield from (gather, gather)
        buckets = buckets_of(params, way, mesh.shards)
        if way in JOINS:
            large: list[ReduceBucket] = []
            for batch in by_collective(buckets):
                if mesh.shards * sum(map(nbytes_of, batch)) > cap.small_nbytes:
                    large += batch
                    continue
                waiting += batch
                if mesh.shards * sum(map(nbytes_of, waiting)) >= cap.nbytes:
                    yield from reduce_waiting()
            buckets = large
        yield from reductions(buckets, mesh)
    yield from reduce_waiting()


# How long it takes #


@dataclass(frozen=True)
class Network:
    """What a hop takes, and what each rank sends at once, in a node and between nodes."""

    hop_us: float = 1.0
    hop_between_us: float = 5.0
    gb_per_s: float = 300.0
    gb_per_s_between: float = 50.0
    node: int = 8


def seconds(call: Call, network: Network, *, trees: bool) -> float:
    """
    In a ring, what is sent last passes all ranks but one, and all links are busy
    throughout; an all-to-all's messages leave one after another. In trees, hops are the
    tree's levels, and an all-to-all's messages leave at once. An all-reduce passes
    twice.
    """
    ranks, per_node = call.ranks, max(network.node // call.stride, 1)
    inside = min(ranks, per_node)  # ranks of the group in one node
    nodes = ranks // inside
    of_bytes = call.nbytes / ranks / 1e9
    if call.kind == "all-to-all":
        hops, hops_between = inside - 1, ranks - inside
        if trees:
            hops, hops_between = min(hops, 1), min(hops_between, 1)
        sending = of_bytes * (inside - 1) / network.gb_per_s
        sending += of_bytes * (ranks - inside) / network.gb_per_s_between
    else:
        hops, hops_between = ranks - nodes, nodes - 1
        if trees:
            hops, hops_between = (
                math.ceil(math.log2(inside)),
                math.ceil(math.log2(nodes)),
            )
        # A node's ranks all have a link to the next node, and share what crosses
        slowest = network.gb_per_s
        if nodes > 1:
            slowest = min(slowest, inside * network.gb_per_s_between)
        sending = of_bytes * (ranks - 1) / slowest
    latency = (hops * network.hop_us + hops_between * network.hop_between_us) / 1e6
    return (latency + sending) * (2 if call.kind == "all-reduce" else 1)


# Tables #


@functools.cache
def blocks_of(way: str, dim: int, heads: int, count: int) -> tuple[nn.Module, ...]:
    with torch.device("meta"):
        block = NemotronHBlock(dim=dim, heads=heads, state=128)
    return (block.float() if way == UPCAST else block,) * count


# Dimension, heads and blocks, as in Mamba-2 of 130M parameters, and in the Mamba layers
# of Nemotron-H of 8B
SIZES = {"small": (768, 24, 24), "large": (4096, 128, 24)}


def describe(size: str) -> str:
    *of_block, count = SIZES[size]
    params = [*blocks_of(TODAY, *of_block, count)[0].parameters()]
    kib = {
        dtype: sum(p.nbytes for p in params if p.dtype == dtype) / 2**10
        for dtype in (torch.bfloat16, torch.float32)
    }
    return (
        f"{count} {size} blocks, each of {kib[torch.bfloat16] / 2**10:,.1f} MiB in bf16 "
        f"and {kib[torch.float32]:.1f} KiB in fp32"
    )


def meshes(ranks: int, node: int) -> Iterator[Mesh]:
    yield Mesh(1, ranks)
    if ranks > node:
        yield Mesh(ranks // node, node)


def table(network: Network, cap: ReduceBucketCap, *, trees: bool) -> list[str]:
    lines = [
        f"| blocks | mesh | {TODAY}: ms | {' | '.join(WAYS[1:])} |",
        "|---" * (2 + len(WAYS)) + "|",
    ]
    for size, of in SIZES.items():
        for mesh in [m for ranks in RANKS for m in meshes(ranks, network.node)]:
            times = [
                sum(
                    seconds(call, network, trees=trees)
                    for call in calls_of(blocks_of(way, *of), way, mesh, cap)
                )
                for way in WAYS
            ]
            cells = [size, f"{mesh.replicas} x {mesh.shards}", f"{times[0] * 1e3:,.1f}"]
            cells += [f"{time / times[0]:.2f}" for time in times[1:]]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    for name, default in asdict(Network()).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, metavar="N")
    parser.add_argument("--small-kb", type=int, default=64, metavar="N")
    parser.add_argument("--bucket-cap-mb", type=int, default=1, metavar="N")
    args = vars(parser.parse_args())
    sizes = args.pop("small_kb") * 2**10, args.pop("bucket_cap_mb") * 2**20
    network, cap = Network(**args), ReduceBucketCap(*sizes)
    print(*map(describe, SIZES), sep="\n")
    for trees, title in ((False, "Rings"), (True, "Trees")):
        print(f"\n{title}:\n", *table(network, cap, trees=trees), sep="\n")


if __name__ == "__main__":
    main()
