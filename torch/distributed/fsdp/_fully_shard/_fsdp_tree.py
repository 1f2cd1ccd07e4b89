"""
Sums over ranks in one fixed order: what ranks send in one dtype is added in another.

[Note: One tree for every mesh]
A library's reduce-scatter adds in an order of its own, which depends on how many ranks
there are and on how they are split into shard groups and replicas. Here each rank gets
all that the others have for it, and adds it in the order of a binary tree over the
ranks: the left subtree of n ranks has the largest power of two below n of them. From the
leaves up that is to add neighbours, then neighbouring sums, and so on, where the last of
an odd number waits.

The data-parallel ranks of an HSDP mesh are numbered replica by replica. A shard group
of a power of two of them is a subtree, so the tree over the replicas goes on where that
of the shard groups ends. Sharded, replicated or both: each element is the sum of the
same numbers in the same order, and its bits are the same. (A shard group of another
size is no subtree. Then the order is fixed, but is another one.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist


# Of what is exchanged between replicas at once
_MAX_PIECE_NBYTES = 16 * 2**20


def add_in_tree(
    rows: torch.Tensor, output: torch.Tensor, scratch: torch.Tensor
) -> None:
    """
    Adds what the ranks have sent, in the order of [Note: One tree for every mesh].

    Args:
        rows: Of all ranks in their order, (ranks, elements). Overwritten if they are
            in the dtype of ``output``.
        output: The sum, 1D, in a dtype that holds each value of that of ``rows``.
        scratch: 1D, overwritten. Made of what was sent, which is as large as
            ``rows``, no other memory is needed.
    """
    if rows.dtype == output.dtype:
        _add_up(rows)
        output.copy_(rows[0])
        return
    # Half of the ranks are widened, and the others added to them as they are, which
    # gives the same as to widen them before
    pairs = (rows.size(0) + 1) // 2
    wide = _view_as(scratch, output.dtype)
    numel = wide.numel() // pairs
    if numel == 0:  # of a few elements, or of none
        numel = max(output.numel(), 1)
        wide = output.new_empty(pairs * numel)
    for start in range(0, output.numel(), numel):
        piece = rows[:, start : start + numel]
        sums = wide[: pairs * piece.size(1)].view(pairs, -1)
        sums.copy_(piece[0::2])
        odd = piece[1::2]
        sums[: odd.size(0)].add_(odd)
        _add_up(sums)
        output[start : start + numel].copy_(sums[0])


def _add_up(rows: torch.Tensor) -> None:
    """Adds all rows to the first one, in place."""
    count, step = rows.size(0), 1
    while step < count:
        rows[0 : count - step : 2 * step].add_(rows[step :: 2 * step])
        step *= 2


def _view_as(scratch: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Views as much of ``scratch`` in another dtype as is aligned for it."""
    as_bytes = scratch.view(torch.uint8)
    start = -as_bytes.storage_offset() % dtype.itemsize
    nbytes = max(as_bytes.numel() - start, 0) // dtype.itemsize * dtype.itemsize
    if nbytes == 0:
        return scratch.new_empty(0, dtype=dtype)
    return as_bytes.narrow(0, start, nbytes).view(dtype)


def all_reduce_in_tree(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """
    Sums ``tensor`` (1D) over ``group`` in place, in the order of
    [Note: One tree for every mesh]: each rank adds one part of it and gets the others'.
    """
    world_size = group.size()
    if world_size == 1:
        return
    piece_numel = _MAX_PIECE_NBYTES // tensor.itemsize
    for piece in tensor.split(piece_numel):
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
