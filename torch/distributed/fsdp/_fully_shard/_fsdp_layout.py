"""
Where each parameter of a unit lies in the unit's flat communication buffers.

This module only plans. It issues no operator, knows no stream and no process
group, and its results are frozen: they are computed once and used for as many
steps as they stay true. :mod:`_fsdp_collectives` moves data according to them
and :mod:`_fsdp_param_group` decides when.

[Note: Order of dtypes]
Every rank must lay its bytes out alike, and must issue the collectives of its
reduce dtypes in the same order. Both orders come from :func:`dtype_rank`, a
fixed ranking that no process can disagree on. A set of dtypes must not be
iterated for this: ``torch.dtype`` hashes by address, so two processes may
iterate equal sets differently.

[Note: Aligned without gaps]
One rank's segment of the gather buffer holds its shards by dtype, widest
element first. Every element size is a power of two, so what precedes a slot is
a multiple of the slot's own element size, and no gap is needed inside. Only
the segment's end is padded, to the widest element size, so that the next
rank's segment starts aligned as well. Uniform dtypes need no padding at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import TypeAlias

import torch


def dtype_rank(dtype: torch.dtype) -> tuple[int, str]:
    """
    Returns a sort key that puts wider dtypes first and is the same in every
    process. See [Note: Order of dtypes].
    """
    return (-dtype.itemsize, str(dtype))


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """
    Returns the dtype under which elements of ``dtype`` are moved unchanged:
    uint8 for the 1-byte dtypes, for which not every copy kernel and not every
    communication backend has a name of its own, else ``dtype`` itself.
    """
    return torch.uint8 if dtype.itemsize == 1 else dtype


def _starts(lengths: Iterable[int]) -> tuple[int, ...]:
    """Returns the offset at which each of several adjacent pieces starts."""
    return tuple(accumulate(lengths, initial=0))[:-1]


# Gather: one buffer, one collective #


@dataclass(frozen=True)
class GatherRegion:
    """A run of one rank's shards that have the same dtype."""

    dtype: torch.dtype
    # From the start of the rank's segment
    start_nbytes: int
    # Positions in the list of all inputs, in the order in which they lie here
    inputs: tuple[int, ...]
    # Elements of each input, as long as ``inputs``
    numels: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(self.numels) * self.dtype.itemsize

    @cached_property
    def end_nbytes(self) -> int:
        return self.start_nbytes + self.nbytes

    def view(self, segment: torch.Tensor) -> torch.Tensor:
        """Returns this region of a rank's 1D ``segment`` in the region's dtype."""
        if self.dtype == segment.dtype:
            if self.start_nbytes == 0 and self.nbytes == segment.nbytes:
                return segment
            start = self.start_nbytes // self.dtype.itemsize
            return segment[start : start + sum(self.numels)]
        as_bytes = segment
        if segment.dtype != torch.uint8:
            as_bytes = segment.view(torch.uint8)
        return as_bytes[self.start_nbytes : self.end_nbytes].view(self.dtype)


@dataclass(frozen=True)
class GatherLayout:
    """
    The all-gather buffer of a unit: the segments of all ranks one after the
    other, each laid out as ``regions`` and then padding.
    """

    regions: tuple[GatherRegion, ...]
    # Element type of the buffer that the collective sees: the inputs' own
    # dtype where they have one, else uint8
    buffer_dtype: torch.dtype
    padding_nbytes: int
    # Of a segment's start, in bytes, for the views of its regions
    alignment: int

    @cached_property
    def segment_nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions) + self.padding_nbytes

    @cached_property
    def segment_numel(self) -> int:
        """Elements of ``buffer_dtype`` in one rank's segment."""
        return self.segment_nbytes // self.buffer_dtype.itemsize

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Positions of the inputs in the order in which a segment holds them."""
        return tuple(i for region in self.regions for i in region.inputs)

    @cached_property
    def split_sizes(self) -> tuple[int, ...]:
        """
        Elements of ``buffer_dtype`` of each input in segment order, and of the
        padding at the end where there is any.
        """
        itemsize = self.buffer_dtype.itemsize
        sizes = tuple(
            numel * region.dtype.itemsize // itemsize
            for region in self.regions
            for numel in region.numels
        )
        padding = self.padding_nbytes // itemsize
        return (*sizes, padding) if padding else sizes


def plan_gather(
    dtypes: Sequence[torch.dtype], numels: Sequence[int], *, by_dtype: bool = True
) -> GatherLayout:
    """
    Lays out what one rank contributes to its unit's all-gather.

    Args:
        dtypes: What each input is gathered in.
        numels: Elements of each input on one rank, the same on every rank.
        by_dtype: Whether to sort by dtype, see [Note: Aligned without gaps].
            False keeps the inputs in their order, unaligned and unpadded,
            which only whole bytes can be copied out of.

    Returns:
        A layout that holds every input exactly once.
    """
    if len(dtypes) != len(numels):
        raise ValueError(f"Got {len(dtypes)} dtypes for {len(numels)} sizes")
    order = list(range(len(dtypes)))
    if by_dtype:
        order.sort(key=lambda i: dtype_rank(dtypes[i]))  # stable
    regions: list[GatherRegion] = []
    start_nbytes = 0
    for dtype, run in groupby(order, key=lambda i: dtypes[i]):
        inputs = tuple(run)
        region = GatherRegion(
            dtype, start_nbytes, inputs, tuple(numels[i] for i in inputs)
        )
        regions.append(region)
        start_nbytes += region.nbytes
    widest = max((dtype.itemsize for dtype in dtypes), default=1)
    is_uniform = len(regions) <= 1
    return GatherLayout(
        regions=tuple(regions),
        buffer_dtype=storage_dtype(dtypes[0]) if dtypes and is_uniform else torch.uint8,
        padding_nbytes=-start_nbytes % widest if by_dtype else 0,
        alignment=widest if by_dtype else 1,
    )


# On the host a view costs about an eighth of a copy
_VIEWS_PER_COPY = 8


@dataclass(frozen=True)
class RegionCopy:
    """
    How a region of this rank's segment is filled from the shards as they are
    stored: by concatenating all of them, if none is cast on the way, else by
    one copy of several at a time for each dtype that they are stored in, since
    a fused copy takes one pair of dtypes.
    """

    # What is not cast may be of several dtypes, and is viewed in this one's
    region: GatherRegion
    # For each stored dtype, positions in the region; empty if nothing is cast
    casts: tuple[tuple[int, ...], ...]


def plan_copy_in(
    layout: GatherLayout, stored_dtypes: Sequence[torch.dtype]
) -> tuple[RegionCopy, ...]:
    """
    Plans the copies that fill a segment of ``layout``. Adjacent regions that nothing is
    cast into are one copy, unless more views have to be made for it than it saves.

    Args:
        stored_dtypes: Of each input, before it is cast to its region's dtype.
    """
    copies = []
    for is_cast, run in groupby(layout.regions, lambda r: _is_cast(r, stored_dtypes)):
        regions = [*run]
        if not is_cast:
            whole = _join(regions)
            views = sum(stored_dtypes[i] != whole.dtype for i in whole.inputs)
            is_one = views <= _VIEWS_PER_COPY * (len(regions) - 1)
            wholes = [whole] if is_one else [_join([region]) for region in regions]
            copies += [RegionCopy(region, ()) for region in wholes]
            continue
        for region in regions:
            by_dtype: dict[torch.dtype, list[int]] = {}
            for position, i in enumerate(region.inputs):
                by_dtype.setdefault(stored_dtypes[i], []).append(position)
            copies.append(RegionCopy(region, tuple(map(tuple, by_dtype.values()))))
    return tuple(copies)


def _is_cast(region: GatherRegion, stored_dtypes: Sequence[torch.dtype]) -> bool:
    return any(stored_dtypes[i] != region.dtype for i in region.inputs)


def _join(regions: Sequence[GatherRegion]) -> GatherRegion:
    """
    Returns adjacent regions as one of the last and narrowest dtype, in which every
    input can be viewed, wherever it starts in its storage.
    """
    dtype = storage_dtype(regions[-1].dtype)
    numels = [
        numel * region.dtype.itemsize // dtype.itemsize
        for region in regions
        for numel in region.numels
    ]
    inputs = tuple(i for region in regions for i in region.inputs)
    return GatherRegion(dtype, regions[0].start_nbytes, inputs, tuple(numels))


# Reduce: one buffer and one collective for each reduce dtype #

# What a gradient is reduced in, and what it is sent in if not in that by a collective
# that adds, see `ReduceBucket`
BucketKey: TypeAlias = tuple[torch.dtype, torch.dtype | None]


def reduce_dtype_of(
    grad_dtype: torch.dtype, policy_dtype: torch.dtype | None
) -> torch.dtype:
    """
    Returns the dtype in which a gradient is reduced: the policy's where it
    sets one, else the gradient's own. The policy speaks of floating-point
    gradients only: a complex one would lose its imaginary part.
    """
    if policy_dtype is not None and grad_dtype.is_floating_point:
        return policy_dtype
    return grad_dtype


def padded_shard_numel(size: torch.Size, world_size: int, shard_dim: int) -> int:
    """
    Returns the elements of one rank's shard of a tensor of ``size``, with the
    padding that makes all ranks' shards equal: dim 0 is rounded up to a
    multiple of ``world_size``, the other dims are sharded evenly or not at all.
    """
    if shard_dim != 0:
        return size.numel() // world_size
    return -(-size[0] // world_size) * math.prod(size[1:])


@dataclass(frozen=True)
class ReduceSlot:
    """A parameter's place in a bucket."""

    # Position in the unit's list of parameters
    param: int
    # Of the sharded gradient, which the reduced one is cast to: that of the
    # parameter's storage unless `grad_dtype` was set. None: it is not cast.
    grad_dtype: torch.dtype | None
    # Elements of one rank's padded shard
    shard_numel: int


@dataclass(frozen=True)
class CastRun:
    """Adjacent slots of a bucket whose sharded gradients have the same dtype."""

    grad_dtype: torch.dtype
    start_numel: int
    numel: int
    # Positions of the slots: ``slots[first:last]``
    first: int
    last: int


@dataclass(frozen=True)
class ReduceBucket:
    """
    The parameters whose gradients share one reduction, and where each lies in
    a rank's shard of it. The reduction's input holds one such shard per rank.
    """

    dtype: torch.dtype
    slots: tuple[ReduceSlot, ...]
    # What gradients are sent in, to be added in ``dtype`` by who gets them. None: they
    # are sent in ``dtype``, and the collective adds.
    comm_dtype: torch.dtype | None = None

    @property
    def key(self) -> BucketKey:
        return self.dtype, self.comm_dtype

    @property
    def wire_dtype(self) -> torch.dtype:
        """Of the reduction's input."""
        return self.comm_dtype or self.dtype

    @cached_property
    def shard_numel(self) -> int:
        return sum(slot.shard_numel for slot in self.slots)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First element of each slot in a rank's shard."""
        return _starts(slot.shard_numel for slot in self.slots)

    @cached_property
    def runs(self) -> tuple[CastRun, ...]:
        """What is cast to one dtype each, in slot order."""
        runs: list[CastRun] = []
        for grad_dtype, group in groupby(
            range(len(self.slots)),
            key=lambda i: self.slots[i].grad_dtype or self.dtype,
        ):
            members = tuple(group)
            numel = sum(self.slots[i].shard_numel for i in members)
            start = self.starts[members[0]]
            runs.append(CastRun(grad_dtype, start, numel, members[0], members[-1] + 1))
        return tuple(runs)


def bucket_rank(key: BucketKey) -> tuple[tuple[int, str], ...]:
    """
    Returns a sort key for what tells buckets apart, by :func:`dtype_rank`: by reduce
    dtype, and first those that the collective adds.
    """
    return tuple(dtype_rank(dtype) for dtype in key if dtype is not None)


def describe_key(key: BucketKey) -> str:
    """Returns a bucket's dtypes as text."""
    dtype, comm_dtype = key
    return str(dtype) if comm_dtype is None else f"{dtype}, sent in {comm_dtype}"


def plan_buckets(
    slots: Sequence[ReduceSlot],
    reduce_dtypes: Sequence[torch.dtype],
    comm_dtypes: Sequence[torch.dtype | None] | None = None,
) -> tuple[ReduceBucket, ...]:
    """
    Sorts parameters into one bucket for each reduce dtype and dtype to send it in,
    widest first. In a bucket they lie by gradient dtype and then in parameter order,
    so that each gradient dtype is one run and is cast at once. (Slots appended later,
    see :func:`extend_bucket`, make runs of their own.)

    Args:
        slots: The parameters that have a gradient.
        reduce_dtypes: The dtype in which each is reduced.
        comm_dtypes: The dtype in which each is sent, None for its reduce dtype.
    """
    members: dict[BucketKey, list[ReduceSlot]] = {}
    comm_dtypes = [None] * len(slots) if comm_dtypes is None else comm_dtypes
    for slot, dtype, comm_dtype in zip(slots, reduce_dtypes, comm_dtypes, strict=True):
        members.setdefault((dtype, comm_dtype), []).append(slot)
    return tuple(
        ReduceBucket(dtype, tuple(_in_runs(members[dtype, comm], dtype)), comm)
        for dtype, comm in sorted(members, key=bucket_rank)
    )


def _in_runs(slots: list[ReduceSlot], bucket_dtype: torch.dtype) -> list[ReduceSlot]:
    def rank(slot: ReduceSlot) -> tuple[tuple[int, str], int]:
        return (dtype_rank(slot.grad_dtype or bucket_dtype), slot.param)

    return sorted(slots, key=rank)


def extend_bucket(bucket: ReduceBucket, kept: ReduceBucket) -> ReduceBucket:
    """
    Returns ``bucket`` with those slots of ``kept`` appended whose parameters
    it lacks: the layout of a partial result in which an earlier microbatch
    reduced parameters that this one gives no gradient to.
    """
    present = {slot.param for slot in bucket.slots}
    missing = tuple(slot for slot in kept.slots if slot.param not in present)
    return replace(bucket, slots=bucket.slots + missing) if missing else bucket


def in_plan_order(bucket: ReduceBucket) -> ReduceBucket:
    """
    Returns the bucket with its slots as :func:`plan_buckets` would lay them,
    whatever it was extended by, and in which order.
    """
    slots = tuple(_in_runs([*bucket.slots], bucket.dtype))
    return bucket if slots == bucket.slots else replace(bucket, slots=slots)


def moves_between(
    source: ReduceBucket, target: ReduceBucket
) -> tuple[tuple[int, int, int], ...]:
    """
    Returns (start in source, start in target, elements) for each parameter
    that both buckets hold.
    """
    starts = {slot.param: start for slot, start in zip(target.slots, target.starts)}
    return tuple(
        (start, starts[slot.param], slot.shard_numel)
        for slot, start in zip(source.slots, source.starts)
        if slot.param in starts
    )
