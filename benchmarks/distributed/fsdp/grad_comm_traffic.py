"""
Prints, as a table, where the bytes of one unit's gradients go, with and without
``grad_comm_dtype``: inside the nodes and between them.

    python benchmarks/distributed/fsdp/grad_comm_traffic.py

Nothing is sent. Messages between ranks are counted on the plans of the buckets: of a
ring, in which each rank sends to the next, and of an all-to-all, in which each rank
sends to every other. Nodes have 8 ranks, and ranks are numbered node by node.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import torch
from torch.distributed.fsdp._fully_shard._fsdp_layout import (
    padded_shard_numel,
    plan_buckets,
    ReduceBucket,
    ReduceSlot,
)


NODE = 8
BF16, FP32 = torch.bfloat16, torch.float32
# A matrix and a norm, whose gradients are bf16
SIZES = (torch.Size([4096, 4096]), torch.Size([4096]))
# Sending rank, receiving rank, bytes
Message = tuple[int, int, float]


def bucket_of(shards: int, comm_dtype: torch.dtype | None) -> ReduceBucket:
    slots = [
        ReduceSlot(i, FP32, padded_shard_numel(size, shards, 0))
        for i, size in enumerate(SIZES)
    ]
    (bucket,) = plan_buckets(slots, [(FP32, comm_dtype)] * 2)
    return bucket


def ring(ranks: Iterable[int], nbytes: float) -> Iterator[Message]:
    """One pass around: each rank sends all parts of ``nbytes`` but one to the next."""
    ranks = [*ranks]
    for i, rank in enumerate(ranks):
        sent = nbytes * (len(ranks) - 1) / len(ranks)
        yield rank, ranks[(i + 1) % len(ranks)], sent


def exchange(ranks: Iterable[int], nbytes: float) -> Iterator[Message]:
    """Each rank sends each other rank one part of ``nbytes``."""
    ranks = [*ranks]
    for rank in ranks:
        for other in ranks:
            if other != rank:
                yield rank, other, nbytes / len(ranks)


def messages(
    replicas: int, shards: int, comm_dtype: torch.dtype | None
) -> Iterator[Message]:
    """Yields what one reduction of the unit sends."""
    bucket = bucket_of(shards, comm_dtype)
    move = ring if comm_dtype is None else exchange
    nbytes = shards * bucket.shard_numel * bucket.wire_dtype.itemsize
    for replica in range(replicas):
        if shards > 1:
            yield from move(range(replica * shards, (replica + 1) * shards), nbytes)
    nbytes = bucket.shard_numel * bucket.dtype.itemsize
    for shard in range(shards):
        group = range(shard, replicas * shards, shards)
        if replicas > 1:
            yield from move(group, nbytes)  # reduce
            yield from ring(group, nbytes)  # gather


def per_rank(of: Iterable[Message], ranks: int) -> tuple[float, float]:
    """Returns MiB that a rank sends inside of its node and to others, on average."""
    inside = between = 0.0
    for sender, receiver, nbytes in of:
        if sender // NODE == receiver // NODE:
            inside += nbytes
        else:
            between += nbytes
    return inside / ranks / 2**20, between / ranks / 2**20


def table() -> list[str]:
    lines = [
        "| ranks | mesh | fp32 ring: in a node | between nodes "
        "| bf16 exchange: in a node | between nodes |",
        "|---|---|---|---|---|---|",
    ]
    for ranks in (8, 16, 64, 256, 1024):
        meshes = {"1 x": (1, ranks)}
        if ranks > NODE:
            meshes["nodes x"] = (ranks // NODE, NODE)
        for replicas, shards in meshes.values():
            cells = [f"{ranks:,}", f"{replicas} x {shards}"]
            for comm_dtype in (None, BF16):
                found = per_rank(messages(replicas, shards, comm_dtype), ranks)
                cells += [f"{mib:.1f}" for mib in found]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(print("\n".join(table())))
