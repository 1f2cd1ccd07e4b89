"""
Where each parameter of a unit lies in the unit's flat communication buffers.

This module only plans: no operator, no stream, no process group. Its results are
frozen, and cached for as long as they hold. :mod:`_fsdp_collectives` moves data
accordingly, and :mod:`_fsdp_param_group` decides when.

[Note: Order of dtypes]
All ranks must lay out their bytes alike and issue the collectives of their reduce
dtypes in the same order. Both orders come from :func:`dtype_rank`, which is the same in
every process. Iterating a set of dtypes is not: ``torch.dtype`` hashes by address.

[Note: Aligned without gaps]
One rank's segment of the gather buffer holds its shards by dtype, widest element first.
Element sizes are powers of two, so what precedes a slot is a multiple of the slot's own
element size, and slots need no gaps between them. Only the segment's end is padded, to
the widest element size, so that the next rank's segment is aligned as well. A uniform
unit needs no padding.
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
    """Returns a sort key that puts wider dtypes first, see [Note: Order of dtypes]."""
    return (-dtype.itemsize, str(dtype))


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """
    Returns the dtype to move elements of ``dtype`` in: uint8 for 1-byte dtypes, not all
    of which every kernel and every backend supports, else ``dtype`` itself.
    """
    return torch.uint8 if dtype.itemsize == 1 else dtype


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
    def numel(self) -> int:
        return sum(self.numels)

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def view(self, segment: torch.Tensor) -> torch.Tensor:
        """
        Returns this region of a rank's 1D ``segment`` in the region's dtype. Segments
        of several regions are bytes.
        """
        if self.dtype == segment.dtype and self.nbytes == segment.nbytes:
            return segment
        end_nbytes = self.start_nbytes + self.nbytes
        return segment[self.start_nbytes : end_nbytes].view(self.dtype)


@dataclass(frozen=True)
class GatherLayout:
    """
    The all-gather buffer of a unit: the segments of all ranks one after the
    other, each laid out as ``regions`` and then padding.
    """

    regions: tuple[GatherRegion, ...]
    # In bytes, of a segment's start and of its length
    alignment: int

    @cached_property
    def buffer_dtype(self) -> torch.dtype:
        """Of the buffer that is gathered: uint8 if the inputs have several dtypes."""
        is_uniform = len(self.regions) == 1
        return storage_dtype(self.regions[0].dtype) if is_uniform else torch.uint8

    @cached_property
    def padding_nbytes(self) -> int:
        return -sum(region.nbytes for region in self.regions) % self.alignment

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
        sizes = _numels_in(self.buffer_dtype, self.regions)
        padding = self.padding_nbytes // itemsize
        return (*sizes, padding) if padding else sizes


def _numels_in(dtype: torch.dtype, regions: Iterable[GatherRegion]) -> tuple[int, ...]:
    """Returns the size of each input in elements of ``dtype``."""
    return tuple(
        numel * region.dtype.itemsize // dtype.itemsize
        for region in regions
        for numel in region.numels
    )


def plan_gather(
    dtypes: Sequence[torch.dtype], numels: Sequence[int], *, by_dtype: bool = True
) -> GatherLayout:
    """
    Lays out the inputs of one rank's segment, given in what dtype each is gathered and
    how many elements it has on every rank. ``by_dtype=False`` keeps them in their order
    as others' gathers do, unaligned and unpadded, to be copied out as bytes.
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
        region_numels = tuple(numels[i] for i in inputs)
        regions.append(GatherRegion(dtype, start_nbytes, inputs, region_numels))
        start_nbytes += regions[-1].nbytes
    widest = max((dtype.itemsize for dtype in dtypes), default=1)
    return GatherLayout(tuple(regions), alignment=widest if by_dtype else 1)


# What one copy costs the host, in views
_VIEWS_PER_COPY = 8


@dataclass(frozen=True)
class RegionCopy:
    """
    How a region of this rank's segment is filled from the shards as they are stored. If
    none of them is cast, they are concatenated into it. Otherwise there is a fused copy
    for each dtype that they are stored in.
    """

    # If nothing is cast: the dtype to view all inputs in
    region: GatherRegion
    # For each stored dtype, positions in the region; empty if nothing is cast
    casts: tuple[tuple[int, ...], ...]


def plan_copy_in(
    layout: GatherLayout, stored_dtypes: Sequence[torch.dtype]
) -> tuple[RegionCopy, ...]:
    """
    Plans the copies that fill a segment of ``layout`` from inputs stored in other
    dtypes. Adjacent regions into which nothing is cast share one copy. That saves a
    kernel for each but the first, and costs a view of each shard not in the narrowest
    dtype, so it is not done where there are many of these.
    """

    def is_cast(region: GatherRegion) -> bool:
        return any(stored_dtypes[i] != region.dtype for i in region.inputs)

    copies: list[RegionCopy] = []
    for has_casts, run in groupby(layout.regions, is_cast):
        regions = [*run]
        if has_casts:
            for region in regions:
                casts: dict[torch.dtype, list[int]] = {}
                for position, i in enumerate(region.inputs):
                    casts.setdefault(stored_dtypes[i], []).append(position)
                copies.append(RegionCopy(region, tuple(map(tuple, casts.values()))))
            continue
        joined = _join(regions)
        views = sum(stored_dtypes[i] != joined.dtype for i in joined.inputs)
        if len(regions) == 1 or views <= _VIEWS_PER_COPY * (len(regions) - 1):
            copies.append(RegionCopy(joined, ()))
        else:
            copies += [RegionCopy(_join([region]), ()) for region in regions]
    return tuple(copies)


def _join(regions: Sequence[GatherRegion]) -> GatherRegion:
    """
    Returns adjacent regions as one of the last and narrowest dtype, in which every
    input can be viewed, wherever it starts in its storage.
    """
    dtype = storage_dtype(regions[-1].dtype)
    inputs = tuple(i for region in regions for i in region.inputs)
    return GatherRegion(
        dtype, regions[0].start_nbytes, inputs, _numels_in(dtype, regions)
    )


# Reduce: one buffer and one collective for each reduce dtype #

# The dtype in which gradients are added, and the one in which they are sent to be added
# by FSDP, None if the collective adds
BucketKey: TypeAlias = tuple[torch.dtype, torch.dtype | None]


def reduce_dtype_of(
    grad_dtype: torch.dtype, policy_dtype: torch.dtype | None
) -> torch.dtype:
    """
    Returns the dtype in which a gradient is reduced: the policy's where it sets one,
    else its own. Complex gradients keep theirs, and so their imaginary parts.
    """
    if policy_dtype is not None and grad_dtype.is_floating_point:
        return policy_dtype
    return grad_dtype


def padded_shard_numel(size: torch.Size, world_size: int, shard_dim: int) -> int:
    """
    Returns how many elements one rank's shard of a tensor of ``size`` has with padding:
    dim 0 is rounded up to a multiple of ``world_size``, other dims are sharded evenly.
    """
    if shard_dim != 0:
        return size.numel() // world_size
    return -(-size[0] // world_size) * math.prod(size[1:])


@dataclass(frozen=True)
class ReduceSlot:
    """A parameter's place in a bucket."""

    # Position in the unit's list of parameters
    param: int
    # What the reduced gradient is cast to, None if it is not cast
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
    comm_dtype: torch.dtype | None = None  # see `BucketKey`

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
        numels = [slot.shard_numel for slot in self.slots]
        return tuple(accumulate(numels, initial=0))[:-1]

    @cached_property
    def runs(self) -> tuple[CastRun, ...]:
        """What is cast to one dtype each, in slot order."""
        runs: list[CastRun] = []
        first = 0
        for dtype, run in groupby(self.slots, lambda s: s.grad_dtype or self.dtype):
            numels = [slot.shard_numel for slot in run]
            last = first + len(numels)
            start = self.starts[first]
            runs.append(CastRun(dtype, start, sum(numels), first, last))
            first = last
        return tuple(runs)


def bucket_rank(key: BucketKey) -> tuple[tuple[int, str], ...]:
    """
    Returns a sort key: widest reduce dtype first, and of one reduce dtype first the
    bucket that the collective adds.
    """
    return tuple(dtype_rank(dtype) for dtype in key if dtype is not None)


def describe_key(key: BucketKey) -> str:
    dtype, comm_dtype = key
    return str(dtype) if comm_dtype is None else f"{dtype}, sent in {comm_dtype}"


def plan_buckets(
    slots: Sequence[ReduceSlot],
    reduce_dtypes: Sequence[torch.dtype],
    comm_dtypes: Sequence[torch.dtype | None] | None = None,
) -> tuple[ReduceBucket, ...]:
    """
    Sorts the parameters that have a gradient into buckets by the dtypes in which each
    is reduced and sent (None: in its reduce dtype), ordered by :func:`bucket_rank`.
    """
    members: dict[BucketKey, list[ReduceSlot]] = {}
    comm_dtypes = [None] * len(slots) if comm_dtypes is None else comm_dtypes
    for slot, dtype, comm_dtype in zip(slots, reduce_dtypes, comm_dtypes, strict=True):
        members.setdefault((dtype, comm_dtype), []).append(slot)
    return tuple(
        in_plan_order(
            ReduceBucket(dtype, tuple(members[dtype, comm_dtype]), comm_dtype)
        )
        for dtype, comm_dtype in sorted(members, key=bucket_rank)
    )


def in_plan_order(bucket: ReduceBucket) -> ReduceBucket:
    """
    Returns the bucket with its slots sorted by gradient dtype, so that each is one run
    and cast at once, and then by parameter.
    """

    def rank(slot: ReduceSlot) -> tuple[tuple[int, str], int]:
        return dtype_rank(slot.grad_dtype or bucket.dtype), slot.param

    slots = tuple(sorted(bucket.slots, key=rank))
    return bucket if slots == bucket.slots else replace(bucket, slots=slots)


def extend_bucket(bucket: ReduceBucket, partial: ReduceBucket) -> ReduceBucket:
    """
    Returns ``bucket`` with those slots of a partial reduce appended whose parameters it
    lacks: those without a gradient in this microbatch.
    """
    present = {slot.param for slot in bucket.slots}
    missing = tuple(slot for slot in partial.slots if slot.param not in present)
    return replace(bucket, slots=bucket.slots + missing) if missing else bucket


def moves_between(
    source: ReduceBucket, target: ReduceBucket
) -> tuple[tuple[int, int, int], ...]:
    """Returns (start in source, start in target, elements) of each common parameter."""
    starts = {slot.param: start for slot, start in zip(target.slots, target.starts)}
    return tuple(
        (start, starts[slot.param], slot.shard_numel)
        for slot, start in zip(source.slots, source.starts)
        if slot.param in starts
    )
