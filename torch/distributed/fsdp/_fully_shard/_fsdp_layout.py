"""
Where each parameter of a unit lies in the unit's flat communication buffers.

Only plans: no operator, no stream, no process group.

[Note: Order of dtypes]
All ranks must lay out bytes and order the collectives of reduce dtypes alike. Both
orders come from :func:`dtype_sort_key`. Iterating a set of dtypes would not do:
``torch.dtype`` hashes by address.

[Note: Aligned to 16 bytes]
Where a buffer mixes dtypes, each dtype's region and each rank's segment start at a
multiple of 16 bytes, the widest that copy kernels load at once and that NCCL packs. A
region holds shards in descending order of the power of two, up to 16, that divides
their bytes: all whose size allows it are aligned, and padding comes at the end of
regions only, at most 15 bytes for each. The same holds for what one all-to-all sends of
several buckets, and for buckets of several units that are joined. Other buckets are not
padded: elements that lie elsewhere in a reduce-scatter may be added in another order,
with other bits. Uniform units have the release's layout: parameter order, unpadded.
"""

# Tests: layout, overrides
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from math import gcd, prod
from typing import NamedTuple, TypeAlias

import torch

from ._fsdp_param import FSDPParam
from ._fsdp_releases import FOLLOWS_GRAD_DTYPE


_ALIGNMENT = 16  # in bytes, see [Note: Aligned to 16 bytes]
# One kernel launch costs the host about as much as 8 calls of `view()`
_VIEWS_PER_COPY = 8
# What gradients are added in, and sent in if FSDP adds (None: the collective does)
BucketKey: TypeAlias = tuple[torch.dtype, torch.dtype | None]


def dtype_sort_key(dtype: torch.dtype) -> tuple[int, str]:
    """Returns a sort key that puts wider dtypes first, see [Note: Order of dtypes]."""
    return (-dtype.itemsize, str(dtype))


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns uint8 for 1-byte dtypes, some of which some kernels and backends lack."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


@dataclass(frozen=True)
class GatherRegion:
    """One rank's shards that have the same dtype, or are copied in together."""

    dtype: torch.dtype
    start_nbytes: int  # in the rank's segment
    nbytes: int
    # Position among all inputs, None for padding, and elements
    slots: tuple[tuple[int | None, int], ...]
    sizes: tuple[int, ...]  # of the slots, in elements
    inputs: tuple[int, ...]
    gaps: tuple[tuple[int, int], ...]  # position among the slots, and elements
    # By stored dtype, positions in `inputs` that are cast and copied together; if there
    # are none, all inputs are concatenated, of which the first `viewed` need a view
    casts: tuple[tuple[int, ...], ...] = ()
    viewed: int = 0

    @classmethod
    def of(cls, dtype: torch.dtype, start_nbytes: int, slots: list) -> GatherRegion:
        sizes = tuple(numel for _, numel in slots)
        inputs = tuple(i for i, _ in slots if i is not None)
        gaps = tuple((k, numel) for k, (i, numel) in enumerate(slots) if i is None)
        nbytes = sum(sizes) * dtype.itemsize
        return cls(dtype, start_nbytes, nbytes, tuple(slots), sizes, inputs, gaps)

    def view(self, segment: torch.Tensor) -> torch.Tensor:
        """Returns this region of a rank's 1D ``segment`` in the region's dtype."""
        if self.dtype == segment.dtype and self.nbytes == segment.nbytes:
            return segment
        end_nbytes = self.start_nbytes + self.nbytes
        return segment[self.start_nbytes : end_nbytes].view(self.dtype)

    def slots_in(self, dtype: torch.dtype) -> list[tuple[int | None, int]]:
        """Returns the slots in elements of a dtype that is no wider."""
        ratio = self.dtype.itemsize // dtype.itemsize
        return [(i, numel * ratio) for i, numel in self.slots]


@dataclass(frozen=True)
class GatherLayout:
    """The segment of each rank in the gather buffer: regions padded at their ends."""

    regions: tuple[GatherRegion, ...]
    buffer_dtype: torch.dtype  # uint8 if the inputs have several dtypes
    segment_nbytes: int
    # In elements of `buffer_dtype`. Slots are those of all regions
    segment_numel: int
    slots: tuple[tuple[int | None, int], ...]
    split_sizes: tuple[int, ...]


def plan_gather(
    dtypes: Sequence[torch.dtype],
    numels: Sequence[int],
    *,
    by_dtype: bool = True,
    is_mixed: bool = True,
) -> GatherLayout:
    """
    Lays out the inputs of one rank's segment from what each is gathered in and its
    elements on every rank. ``by_dtype=False`` keeps their order as plugins' gathers do,
    unaligned and unpadded, to be copied out as bytes. If not ``is_mixed``, each
    parameter has the same dtypes, which are aligned to the widest of them.
    """
    if len(dtypes) != len(numels):
        raise ValueError(f"Got {len(dtypes)} dtypes for {len(numels)} sizes")
    order = list(range(len(dtypes)))
    alignment = 1
    if by_dtype and any(dtype != dtypes[0] for dtype in dtypes):
        alignment = _ALIGNMENT if is_mixed else max(d.itemsize for d in dtypes)
        sizes = [n * d.itemsize for d, n in zip(dtypes, numels)]  # in bytes
        order.sort(key=lambda i: (dtype_sort_key(dtypes[i]), -gcd(sizes[i], alignment)))
    regions: list[GatherRegion] = []
    start_nbytes = 0
    for dtype, run in groupby(order, key=lambda i: dtypes[i]):
        slots: list[tuple[int | None, int]] = [(i, numels[i]) for i in run]
        nbytes = sum(numel for _, numel in slots) * dtype.itemsize
        if padding := -nbytes % alignment:
            slots.append((None, padding // dtype.itemsize))
        regions.append(GatherRegion.of(dtype, start_nbytes, slots))
        start_nbytes += nbytes + padding
    dtype = storage_dtype(regions[0].dtype) if len(regions) == 1 else torch.uint8
    all_slots = tuple(chain.from_iterable(r.slots_in(dtype) for r in regions))
    split, numel = tuple(size for _, size in all_slots), start_nbytes // dtype.itemsize
    return GatherLayout((*regions,), dtype, start_nbytes, numel, all_slots, split)


# Of what one rank is sent for each of several buckets, at every reduction
plan_all_to_all = functools.lru_cache(maxsize=1024)(plan_gather)


def plan_copy_in(
    layout: GatherLayout, stored_dtypes: Sequence[torch.dtype]
) -> tuple[GatherRegion, ...]:
    """
    Plans the copies that fill a segment. Adjacent regions into which nothing is cast
    are concatenated at once, in the narrowest dtype, unless that takes more views than
    the kernels that it saves are worth.
    """

    def is_cast(region: GatherRegion) -> bool:
        return any(stored_dtypes[i] != region.dtype for i in region.inputs)

    def joined(regions: Sequence[GatherRegion]) -> GatherRegion:
        """Joins regions in the last, narrowest dtype, without padding at the end."""
        dtype, start_nbytes = storage_dtype(regions[-1].dtype), regions[0].start_nbytes
        slots = [slot for region in regions for slot in region.slots_in(dtype)]
        if slots[-1][0] is None:
            slots.pop()
        # Wider ones come first
        viewed = sum(i is not None and stored_dtypes[i] != dtype for i, _ in slots)
        return replace(GatherRegion.of(dtype, start_nbytes, slots), viewed=viewed)

    copies: list[GatherRegion] = []
    for has_casts, run in groupby(layout.regions, is_cast):
        regions = [*run]
        if has_casts:
            for region in regions:
                casts: dict[torch.dtype, list[int]] = {}
                for k, i in enumerate(region.inputs):
                    casts.setdefault(stored_dtypes[i], []).append(k)
                copies.append(replace(region, casts=tuple(map(tuple, casts.values()))))
            continue
        whole = joined(regions)
        views = whole.viewed + len(whole.gaps)  # padding needs a tensor, too
        is_cheap = views <= _VIEWS_PER_COPY * (len(regions) - 1)
        copies += [whole] if is_cheap else [joined([region]) for region in regions]
    return tuple(copies)


def reduce_dtype_of(
    grad_dtype: torch.dtype, policy_dtype: torch.dtype | None
) -> torch.dtype:
    """Returns the policy's dtype for floating-point gradients, else their own."""
    return policy_dtype if policy_dtype and grad_dtype.is_floating_point else grad_dtype


def padded_shard_numel(size: torch.Size, world_size: int, shard_dim: int) -> int:
    """Returns the elements of one rank's shard: padded on dim 0, even on others."""
    if shard_dim != 0:
        return size.numel() // world_size
    return -(-size[0] // world_size) * prod(size[1:])


@dataclass(frozen=True)
class ReduceSlot:
    """A parameter's place in a bucket."""

    param: int  # position in the unit's list of parameters
    grad_dtype: torch.dtype | None  # of the sharded gradient, None: as reduced
    shard_numel: int  # of one rank's padded shard
    shard_dim: int = 0  # of the gradient that is copied in


@dataclass(frozen=True)
class CastRun:
    """Adjacent slots of a bucket whose sharded gradients have the same dtype."""

    grad_dtype: torch.dtype
    start_numel: int
    numel: int
    first: int  # the slots are `slots[first:last]`
    last: int
    padding: int  # elements that follow


@dataclass
class ReduceBucket:
    """Where parameters that share a reduction lie in a rank's shard of it."""

    dtype: torch.dtype
    slots: tuple[ReduceSlot, ...]
    comm_dtype: torch.dtype | None = None  # see `BucketKey`
    is_aligned: bool = False  # see [Note: Aligned to 16 bytes]
    is_mixed: bool = False  # of a unit whose trained parameters differ in dtypes

    def __post_init__(self) -> None:
        self.key: BucketKey = (self.dtype, self.comm_dtype)
        self.wire_dtype = self.comm_dtype or self.dtype  # of the reduction's input
        # To begin aligned in the input and in the output
        itemsize = min(self.dtype.itemsize, self.wire_dtype.itemsize)
        alignment = _ALIGNMENT // itemsize if self.is_aligned else 1
        self.runs: list[CastRun] = []
        self.starts: tuple[int, ...] = ()  # of the slots, in a rank's shard
        first = end = 0
        for dtype, run in groupby(self.slots, lambda s: s.grad_dtype or self.dtype):
            start, numels = end, [slot.shard_numel for slot in run]
            *starts, end = accumulate(numels, initial=start)
            self.starts += (*starts,)
            last, numel, padding = first + len(numels), end - start, -end % alignment
            self.runs.append(CastRun(dtype, start, numel, first, last, padding))
            first, end = last, end + padding
        self.shard_numel = end
        # Whether any sharded gradient has another dtype than what is reduced
        self.needs_casts = any(run.grad_dtype != self.dtype for run in self.runs)


def bucket_sort_key(key: BucketKey) -> tuple[tuple[int, str], ...]:
    """Returns a sort key: widest reduce dtype first, then what the collective adds."""
    return tuple(dtype_sort_key(dtype) for dtype in key if dtype is not None)


def describe_key(key: BucketKey, verb: str = "sent in") -> str:
    dtype, comm_dtype = key
    return str(dtype) if comm_dtype is None else f"{dtype}, {verb} {comm_dtype}"


def plan_buckets(
    slots: Sequence[ReduceSlot], keys: Sequence[BucketKey], is_mixed: bool = False
) -> tuple[ReduceBucket, ...]:
    """Groups slots into buckets by their keys, ordered by :func:`bucket_sort_key`."""
    members: dict[BucketKey, list[ReduceSlot]] = {}
    for slot, key in zip(slots, keys, strict=True):
        members.setdefault(key, []).append(slot)
    buckets = (
        ReduceBucket(key[0], tuple(members[key]), key[1], is_mixed=is_mixed)
        for key in sorted(members, key=bucket_sort_key)
    )
    return tuple(map(in_plan_order, buckets))


class ReduceBucketCap(NamedTuple):
    """Sizes of reductions' inputs, set by ``set_reduce_bucket_cap``."""

    small_nbytes: int  # up to which a bucket waits for others
    nbytes: int  # at which those that wait are reduced

    def __str__(self) -> str:
        mb, kb = self.nbytes / 2**20, self.small_nbytes / 2**10
        return f"bucket_cap_mb={mb:g} and small_kb={kb:g}"


def by_collective(buckets: Sequence[ReduceBucket]) -> list[Sequence[ReduceBucket]]:
    """Groups what one collective takes: all that are sent by an all-to-all, or one."""
    sent = [bucket for bucket in buckets if bucket.comm_dtype is not None]
    others = ([bucket] for bucket in buckets if bucket.comm_dtype is None)
    return [sent, *others] if sent else [*others]


def slot_sort_key(slot: ReduceSlot, bucket: ReduceBucket) -> tuple:
    """Returns a sort key that makes each gradient dtype one run of the bucket."""
    grad_dtype, alignment = slot.grad_dtype or bucket.dtype, 0
    # See [Note: Aligned to 16 bytes]
    if bucket.is_aligned or bucket.comm_dtype is not None:
        dtypes = bucket.dtype, bucket.wire_dtype, grad_dtype
        itemsize = min(dtype.itemsize for dtype in dtypes)
        alignment = gcd(slot.shard_numel * itemsize, _ALIGNMENT)
    return dtype_sort_key(grad_dtype), -alignment


def in_plan_order(bucket: ReduceBucket) -> ReduceBucket:
    """Sorts slots by :func:`slot_sort_key` and then by parameter."""
    slots = sorted(bucket.slots, key=lambda s: (slot_sort_key(s, bucket), s.param))
    return replace(bucket, slots=tuple(slots))


def extend_bucket(bucket: ReduceBucket, partial: ReduceBucket) -> ReduceBucket:
    """Appends slots of a partial reduce without a gradient in this microbatch."""
    present = {slot.param for slot in bucket.slots}
    missing = tuple(slot for slot in partial.slots if slot.param not in present)
    return replace(bucket, slots=bucket.slots + missing) if missing else bucket


class ParamDtypes(NamedTuple):
    """The dtypes of one parameter, those that a policy does not touch included."""

    stored: torch.dtype
    compute: torch.dtype
    # Of a gradient in the compute dtype, as autograd makes it
    reduce: torch.dtype
    grad: torch.dtype
    # What is sent to be reduced, None if what it is reduced in
    comm: torch.dtype | None


def dtypes_of(fsdp_param: FSDPParam) -> ParamDtypes:
    """Returns a parameter's dtypes as they are now, before lazy init as well."""
    policy, param = fsdp_param.mp_policy, fsdp_param.sharded_param
    compute = param.dtype
    if policy.param_dtype is not None and compute.is_floating_point:
        compute = policy.param_dtype
    reduce = reduce_dtype_of(compute, default_reduce_dtype(fsdp_param))
    _, comm = bucket_key(fsdp_param, reduce)
    return ParamDtypes(param.dtype, compute, reduce, param.grad_dtype or reduce, comm)


def is_mixed(fsdp_params: Sequence[FSDPParam]) -> bool:
    """Whether the trained parameters of a unit differ in any of these."""
    described = [dtypes_of(p) for p in fsdp_params if p.sharded_param.requires_grad]
    return any(dtypes != described[0] for dtypes in described)


def default_reduce_dtype(fsdp_param: FSDPParam) -> torch.dtype | None:
    """Returns what a parameter's gradient is reduced in, None for its own dtype."""
    dtype, param = fsdp_param.mp_policy.reduce_dtype, fsdp_param.sharded_param
    return param.grad_dtype if dtype is None and FOLLOWS_GRAD_DTYPE else dtype


def bucket_key(fsdp_param: FSDPParam, reduce_dtype: torch.dtype) -> BucketKey:
    """Returns what a gradient is reduced and sent in."""
    if not reduce_dtype.is_floating_point:
        return reduce_dtype, None  # see `reduce_dtype_of`
    # Users may have a policy class of their own
    return reduce_dtype, getattr(fsdp_param.mp_policy, "grad_comm_dtype", None)


def accumulation_dtype(fsdp_param: FSDPParam, reduce_dtype: torch.dtype) -> torch.dtype:
    """Returns what gradients of microbatches are added in, see [Note: Microbatches]."""
    param = fsdp_param.sharded_param
    dtype = param.grad_dtype
    if dtype is None or dtype == param.dtype or not reduce_dtype.is_floating_point:
        return reduce_dtype
    return dtype if dtype.itemsize > reduce_dtype.itemsize else reduce_dtype
