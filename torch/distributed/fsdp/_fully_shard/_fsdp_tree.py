"""
Sums over ranks in a fixed order, for gradients that are sent in one dtype and added in
another.

[Note: One tree for every mesh]
The order in which a library's reduce-scatter adds depends on the ranks and on how the
mesh shards and replicates. Here each rank receives its shard of all ranks' gradients,
and adds them along a binary tree over the ranks: neighbours, then neighbouring sums,
and so on, where the last of an odd number waits.

An HSDP mesh numbers its ranks replica by replica, so a shard group of a power of two
ranks is a subtree, which the tree over the replicas continues. Hence each element is
the same sum in the same order, with the same bits, on each such mesh. (With shard
groups of other sizes the order is fixed too, but differs.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist


# That replicas send at once
_MAX_PIECE_NBYTES = 16 * 2**20


def add_in_tree(
    rows: torch.Tensor, output: torch.Tensor, scratch: torch.Tensor
) -> None:
    """
    Writes the sum of ``rows``, see [Note: One tree for every mesh], to ``output`` (1D).
    Overwrites ``rows`` if in its dtype, else ``scratch`` (1D), which if as large is all
    the memory needed.
    """
    if rows.dtype == output.dtype:
        _add_up(rows)
        output.copy_(rows[0])
        return
    # Every other row is cast and its neighbour added uncast, which halves the memory
    pairs = (rows.size(0) + 1) // 2
    memory = _view_as(scratch, output.dtype)
    numel = memory.numel() // pairs
    if numel == 0:  # a few elements, or none
        numel = max(output.numel(), 1)
        memory = output.new_empty(pairs * numel)
    for start in range(0, output.numel(), numel):
        piece = rows[:, start : start + numel]
        sums = memory[: pairs * piece.size(1)].view(pairs, -1)
        sums.copy_(piece[0::2])
        neighbours = piece[1::2]
        sums[: neighbours.size(0)].add_(neighbours)
        _add_up(sums)
        output[start : start + numel].copy_(sums[0])


def _add_up(rows: torch.Tensor) -> None:
    """Adds all rows to the first one, in place."""
    count, step = rows.size(0), 1
    while step < count:
        rows[0 : count - step : 2 * step].add_(rows[step :: 2 * step])
        step *= 2


def _view_as(scratch: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Views the part of ``scratch`` that is aligned for another dtype in that."""
    as_bytes = scratch.view(torch.uint8)
    start = -as_bytes.storage_offset() % dtype.itemsize
    nbytes = max(as_bytes.numel() - start, 0) // dtype.itemsize * dtype.itemsize
    if nbytes == 0:
        return scratch.new_empty(0, dtype=dtype)
    return as_bytes.narrow(0, start, nbytes).view(dtype)


def all_reduce_in_tree(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sums ``tensor`` (1D) in place: each rank sums one part, which all gather."""
    world_size = group.size()
    if world_size == 1:
        return
    for piece in tensor.split(_MAX_PIECE_NBYTES // tensor.itemsize):
        part_numel = -(-piece.numel() // world_size)
        padded = piece
        if piece.numel() % world_size != 0:
            padded = piece.new_zeros(world_size * part_numel)
            padded[: piece.numel()].copy_(piece)
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=group)
        rows = received.view(world_size, part_numel)
        _add_up(rows)
        dist.all_gather_single(padded, rows[0], group=group)
        if padded is not piece:
            piece.copy_(padded[: piece.numel()])
