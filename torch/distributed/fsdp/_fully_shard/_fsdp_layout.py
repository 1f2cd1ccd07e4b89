"""
Where each parameter of a unit lies in the unit's flat communication buffers.

A gather's buffer has a segment for each rank, a region in it for each dtype, and a slot
in that for each parameter. In bytes, with 8 bf16 elements of ``a``, 3 fp32 of ``b`` and 2
bf16 of ``c`` on each rank::

    |------------- rank 0 -------------|------------- rank 1 -------------|
    |--- fp32 ----|------ bf16 --------|--- fp32 ----|------ bf16 --------|
    | b 12, pad 4 | a 16, c 4, pad 12  | b 12, pad 4 | a 16, c 4, pad 12  |

The buffer of a reduction, a bucket, has a row for each rank, with a slot for each
parameter. One all-to-all sends the rows of several buckets as regions of segments.

[Note: Pieces]
A parameter of size [n, F, D] that is sharded on dim 1 is n parameters [F, D] that are
sharded on dim 0, its pieces, which follow one another in the slot of its shard. So copies
treat each piece as a parameter and reorder nothing, unless pieces are too small.

[Note: Order of dtypes]
All ranks lay out bytes and order collectives by :func:`dtype_sort_key`. A set of dtypes
has another order on each rank, as ``torch.dtype`` hashes by address.

[Note: Aligned to 16 bytes]
Copy kernels and NCCL move at most 16 bytes at once, if these are aligned. So where a
buffer mixes dtypes, each region starts at a multiple of 16 bytes. Its slots are sorted by
the largest power of two, up to 16, that divides their bytes, and padding comes last. Rows
of buckets are not padded, as that could change the order of a reduce-scatter's additions.
Uniform units have the release's layout: parameter order, unpadded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import gcd
from typing import Any, NamedTuple, TypeAlias

import torch

from ._fsdp_param import FSDPParam
from ._fsdp_releases import RELEASE


_ALIGNMENT = 16  # in bytes, see [Note: Aligned to 16 bytes]
# Of a rank's shard: to pass a piece of fewer bytes to a kernel costs the host as long as
# an H200 needs to copy it once more
_MIN_PIECE_NBYTES = 2**15
# An input's position among all inputs (None: padding) and its number of elements
Slot: TypeAlias = tuple[int | None, int]
# The dtypes that gradients are added in, and sent in (None: the collective adds them)
BucketKey: TypeAlias = tuple[torch.dtype, torch.dtype | None]


def dtype_sort_key(dtype: torch.dtype) -> tuple[int, str]:
    """Returns a sort key that puts wider dtypes first, see [Note: Order of dtypes]."""
    return (-dtype.itemsize, str(dtype))


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns uint8 for 1-byte dtypes, some of which some kernels and backends lack."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def count_pieces(fsdp_param: FSDPParam, dtype: torch.dtype) -> int:
    """Returns how many pieces a parameter is copied in, 0 if it must be reordered."""
    size, dim = fsdp_param.padded_sharded_param_size, fsdp_param.fsdp_placement.dim
    count = size[:dim].numel()
    is_large = size.numel() * dtype.itemsize >= count * _MIN_PIECE_NBYTES
    return count if count == 1 or is_large else 0


@dataclass(frozen=True)
class GatherRegion:
    """Adjacent slots of a rank's segment that are viewed in one dtype."""

    dtype: torch.dtype
    start_nbytes: int  # in the rank's segment
    nbytes: int
    slots: tuple[Slot, ...]

    def view(self, segment: torch.Tensor) -> torch.Tensor:
        """Returns this region of a rank's 1D ``segment`` in the region's dtype."""
        if self.nbytes != segment.nbytes:
            segment = segment[self.start_nbytes : self.start_nbytes + self.nbytes]
        return segment if self.dtype == segment.dtype else segment.view(self.dtype)

    def slots_in(self, dtype: torch.dtype) -> list[Slot]:
        """Returns the slots in elements of a dtype that is no wider."""
        ratio = self.dtype.itemsize // dtype.itemsize
        return [(i, numel * ratio) for i, numel in self.slots]


@dataclass(frozen=True)
class GatherLayout:
    """The segment of each rank in the buffer of a gather, or of an all-to-all."""

    regions: tuple[GatherRegion, ...]  # from the widest dtype to the narrowest
    buffer_dtype: torch.dtype  # uint8 if the inputs have several dtypes
    slots: tuple[Slot, ...]  # of all regions, in elements of `buffer_dtype`
    segment_numel: int


@functools.lru_cache(maxsize=1024)  # each reduction lays out its all-to-all
def plan_gather(
    dtypes: tuple[torch.dtype, ...],
    numels: tuple[int, ...],
    is_mixed: bool = True,
    direct: tuple[int, ...] = (),
) -> GatherLayout:
    """
    Lays out a segment from each input's dtype and number of elements on one rank.
    ``is_mixed=False``: the parameters are alike, so regions align to the widest dtype.
    ``direct``: inputs that have no slot, see [Note: Direct gathers].
    """
    order = [i for i in range(len(dtypes)) if i not in direct]
    alignment = 1
    if any(dtypes[i] != dtypes[order[0]] for i in order):
        alignment = _ALIGNMENT if is_mixed else max(d.itemsize for d in dtypes)
        sizes = [n * d.itemsize for d, n in zip(dtypes, numels)]  # in bytes
        order.sort(key=lambda i: (dtype_sort_key(dtypes[i]), -gcd(sizes[i], alignment)))
    regions: list[GatherRegion] = []
    start_nbytes = 0
    for dtype, run in groupby(order, key=lambda i: dtypes[i]):
        slots: list[Slot] = [(i, numels[i]) for i in run]
        nbytes = sum(numel for _, numel in slots) * dtype.itemsize
        if padding := -nbytes % alignment:
            slots.append((None, padding // dtype.itemsize))
            nbytes += padding
        regions.append(GatherRegion(dtype, start_nbytes, nbytes, tuple(slots)))
        start_nbytes += nbytes
    dtype = storage_dtype(regions[0].dtype) if len(regions) == 1 else torch.uint8
    all_slots = tuple(slot for region in regions for slot in region.slots_in(dtype))
    return GatherLayout((*regions,), dtype, all_slots, start_nbytes // dtype.itemsize)


class CopyPlan(NamedTuple):
    """One copy into a region, or into adjacent ones that are joined."""

    region: GatherRegion
    # If any slot is cast: the positions of all, by the dtype that they are stored in
    casts: Sequence[Sequence[int]] = ()
    # Else: how many of the slots, the first, are viewed in the region's dtype
    num_viewed: int = 0


def plan_copy_in(
    layout: GatherLayout, stored_dtypes: Sequence[torch.dtype]
) -> tuple[CopyPlan, ...]:
    """
    Plans the copies that fill a segment: one for each region, or without casts one for
    all in the narrowest dtype. Steps share the views of the inputs.
    """

    def join(*regions: GatherRegion) -> CopyPlan:
        dtype = storage_dtype(regions[-1].dtype)
        slots = [slot for region in regions for slot in region.slots_in(dtype)]
        if slots[-1][0] is None:
            slots.pop()
        nbytes = sum(numel for _, numel in slots) * dtype.itemsize
        # The slots that are viewed come first: they have wider dtypes
        num_viewed = sum(i is None or stored_dtypes[i] != dtype for i, _ in slots)
        region = GatherRegion(dtype, regions[0].start_nbytes, nbytes, tuple(slots))
        return CopyPlan(region, num_viewed=num_viewed)

    copies: list[CopyPlan] = []
    for region in layout.regions:
        casts: dict[torch.dtype, list[int]] = {}
        for k, (i, _) in enumerate(region.slots):
            if i is not None:
                casts.setdefault(stored_dtypes[i], []).append(k)
        is_cast = [*casts] != [region.dtype]
        copies.append(CopyPlan(region, [*casts.values()]) if is_cast else join(region))
    if len(copies) > 1 and not any(copy.casts for copy in copies):
        return (join(*layout.regions),)
    return tuple(copies)


def reduce_dtype_of(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Returns the dtype that a policy wants for floating-point gradients, else theirs."""
    return wanted if wanted and dtype.is_floating_point else dtype


@dataclass(frozen=True)
class ReduceSlot:
    """A parameter's place in a bucket."""

    param: int  # position in the unit's list of parameters
    grad_dtype: torch.dtype | None  # of the sharded gradient, None: the reduce dtype
    shard_numel: int  # of one rank's padded shard
    shard_dim: int = 0  # of the gradient that is copied in
    is_direct: bool = False  # see [Note: Direct reductions]
    num_pieces: int = 1  # see `count_pieces`

    def split(self, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the pieces of a gradient, none if it would have to be reordered."""
        if not (self.shard_dim and self.num_pieces):
            return (grad,)
        if not grad.is_contiguous():
            return ()
        return grad.view(self.num_pieces, *grad.size()[self.shard_dim :]).unbind()


@dataclass
class ReduceBucket:
    """The parameters that share a reduction, as they lie in each rank's row of it."""

    key: BucketKey
    slots: tuple[ReduceSlot, ...]
    is_mixed: bool = False  # whether the unit's trained parameters differ in dtypes

    def __post_init__(self) -> None:
        self.dtype, self.comm_dtype = self.key
        self.wire_dtype = self.comm_dtype or self.dtype  # of the reduction's input
        # Buckets are sorted by it. A tree sums those with a comm dtype
        self.all_reduce_key = self.dtype, self.comm_dtype is None
        self.params = [slot.param for slot in self.slots]
        self.has_direct = any(slot.is_direct for slot in self.slots)
        self.has_pieces = any(slot.shard_dim and slot.num_pieces for slot in self.slots)
        # The last reduction's plan and factors, each after all that it depends on
        self.copy_in: tuple[Any, Any] = None, None
        self.factors: tuple[Any, Any] = None, None
        # Where the slots start in a row, and where the row ends
        self.starts = [*accumulate((s.shard_numel for s in self.slots), initial=0)]
        self.shard_numel = self.starts[-1]
        # The dtypes of sharded gradients, each with the indices of adjacent slots
        dtypes = [slot.grad_dtype or self.dtype for slot in self.slots]
        runs = groupby(range(len(dtypes)), key=dtypes.__getitem__)
        self.runs = [(dtype, [*indices]) for dtype, indices in runs]
        self.needs_casts = any(dtype != self.dtype for dtype in dtypes)

    @functools.cached_property
    def in_pieces(self) -> ReduceBucket:
        """The same columns, with a slot for each piece."""
        slots: list[ReduceSlot] = []
        for slot in self.slots:
            if (count := slot.num_pieces) > 0:
                numel = slot.shard_numel // count
                slot = replace(slot, shard_numel=numel, shard_dim=0, num_pieces=1)
            slots += [slot] * max(count, 1)
        return replace(self, slots=tuple(slots))


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

    def sort_key(pair: tuple[BucketKey, ReduceSlot]) -> tuple:
        (dtype, comm_dtype), slot = pair
        alignment = 0
        if comm_dtype is not None:  # see [Note: Aligned to 16 bytes]
            alignment = gcd(slot.shard_numel * comm_dtype.itemsize, _ALIGNMENT)
        # Slots of one gradient dtype are a run
        grad_key = dtype_sort_key(slot.grad_dtype or dtype), not slot.is_direct
        return bucket_sort_key(pair[0]), *grad_key, -alignment, slot.param

    pairs = sorted(zip(keys, slots, strict=True), key=sort_key)
    by_key = groupby(pairs, key=lambda pair: pair[0])
    members = [(key, tuple(slot for _, slot in run)) for key, run in by_key]
    return tuple(ReduceBucket(*each, is_mixed) for each in members)


def by_collective(parts: Sequence[Any]) -> list[Sequence[Any]]:
    """Groups ``BucketGrads`` by collective: one all-to-all, a reduce-scatter for each."""
    exchanged = [part for part in parts if part.bucket.comm_dtype is not None]
    scattered = [[part] for part in parts if part.bucket.comm_dtype is None]
    return [exchanged, *scattered] if exchanged else [*scattered]


class ParamDtypes(NamedTuple):
    """The dtypes of one parameter, whether or not its policy sets them."""

    stored: torch.dtype
    compute: torch.dtype  # of unsharded gradients as well
    reduce: torch.dtype
    grad: torch.dtype  # of the sharded gradient
    comm: torch.dtype | None  # see `BucketKey`


def dtypes_of(fsdp_param: FSDPParam) -> ParamDtypes:
    """Returns a parameter's dtypes as they are now, before lazy init as well."""
    param = fsdp_param.sharded_param
    compute = reduce_dtype_of(param.dtype, fsdp_param.mp_policy.param_dtype)
    reduce = reduce_dtype_of(compute, default_reduce_dtype(fsdp_param))
    _, comm = bucket_key(fsdp_param, reduce)
    return ParamDtypes(param.dtype, compute, reduce, param.grad_dtype or reduce, comm)


def default_reduce_dtype(fsdp_param: FSDPParam) -> torch.dtype | None:
    """Returns the dtype to reduce a gradient in, None for that of the gradient."""
    dtype = fsdp_param.mp_policy.reduce_dtype
    return dtype or RELEASE.default_reduce_dtype(fsdp_param.sharded_param)


def bucket_key(fsdp_param: FSDPParam, reduce_dtype: torch.dtype) -> BucketKey:
    """Returns the dtypes that a gradient is reduced and sent in."""
    if not reduce_dtype.is_floating_point:
        return reduce_dtype, None
    # Users may define a policy class
    return reduce_dtype, getattr(fsdp_param.mp_policy, "grad_comm_dtype", None)


def accumulation_dtype(fsdp_param: FSDPParam, reduce_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to add microbatches' gradients in: [Note: Microbatches]."""
    param = fsdp_param.sharded_param
    dtype = param.grad_dtype
    if dtype is None or dtype == param.dtype or not reduce_dtype.is_floating_point:
        return reduce_dtype
    return dtype if dtype.itemsize > reduce_dtype.itemsize else reduce_dtype
