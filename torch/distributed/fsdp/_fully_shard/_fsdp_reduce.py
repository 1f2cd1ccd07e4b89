"""
How gradients are reduced, from a bucket's unsharded gradients to sharded gradients.

:func:`reduce_buckets` takes buckets through three phases:

1. Copy-in: gradients are cast into a bucket's input, or sent as they are if direct.
2. Over the shard group: each bucket is reduce-scattered. Buckets with a comm dtype share
   one all-to-all, and each rank adds the rows that it receives. A partial reduce, the
   sum of earlier microbatches whose all-reduce was deferred, is added.
3. Over replicas: an all-reduce. If it is deferred, the reduction stops here and returns
   a partial reduce. Otherwise the sum is divided: the sharded gradients.

[Note: Lifetimes in a reduction]
Phases 1, 2 and 3 run in the streams of compute, reduce-scatter and all-reduce. Without
an all-reduce or a hook the third runs in that of the reduce-scatter.

=================  ==============  =================  ==============================
tensor             allocated in    last used in       held by, until
=================  ==============  =================  ==============================
gradients          compute         compute            ``BucketGrads``, the copy-in
reduction's input  compute         reduce-scatter     ``ReduceScatterState``,
                                                      ``reduce_scatter_event``
received rows      reduce-scatter  reduce-scatter     ``BucketGrads``, their sum
reduced shard      reduce-scatter  all-reduce         ``HeldAllReduces``, its event
partial reduce     reduce-scatter  reduce-scatter     ``PartialReduces``, the next sum
cast gradients     all-reduce      the optimizer's    sharded parameters
=================  ==============  =================  ==============================

Sharded gradients are views of the reduced shard if none needs a cast. Over a single rank
the reduced shard may be the reduction's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.distributed_c10d import ReduceScatterOptions
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from . import _fsdp_layout as layouts
from ._fsdp_api import ReduceScatter
from ._fsdp_comms import allocate, allocates_anew, DefaultReduceScatter
from ._fsdp_direct import is_shared
from ._fsdp_errors import note_reduction
from ._fsdp_layout import GatherLayout, ReduceBucket
from ._fsdp_observers import gets_operators, NO_CONTEXT, without_grad
from ._fsdp_param import FSDPParam
from ._fsdp_releases import IS_2_15
from ._fsdp_scaling import (
    _div_if_needed,
    add_in_tree,
    all_reduce_in_tree,
    get_divide_factors,
    Scaling,
)


class ReduceResult(NamedTuple):
    """What a reduction in flight uses, and the events after which it does not."""

    reduce_scatter_input: Tensor | None  # None if it is not held any more
    reduce_scatter_event: torch.Event | None
    post_reduce_stream: torch.Stream
    post_reduce_event: torch.Event
    # The reduced buffer, if other streams than the one that allocated it use it
    all_reduce_input: Tensor | None = None
    all_reduce_event: torch.Event | None = None
    # To be added to the next microbatch's sum, if the all-reduce is deferred
    partial_reduce_output: Tensor | None = None


def _default_reduce_scatter_input_fn(
    fsdp_params: list[FSDPParam], unsharded_grads: list[Tensor], world_size: int
) -> tuple[torch.Size, ...]:
    """
    Replaces each gradient that is sharded on another dim than 0 by one whose chunks
    on dim 0 are the ranks' shards. Returns the sizes of all, with dim 0 padded to a
    multiple of ``world_size``.
    """
    sizes: list[torch.Size] = []
    for i, (fsdp_param, grad) in enumerate(zip(fsdp_params, unsharded_grads)):
        if (dim := fsdp_param.fsdp_placement.dim) != 0 and world_size > 1:
            by_rank = _view_by_rank(grad, dim, world_size)
            grad = unsharded_grads[i] = by_rank.flatten(0, 1)
        rows = -(-grad.size(0) // world_size) * world_size
        sizes.append(torch.Size([rows, *grad.size()[1:]]))
    return tuple(sizes)


class Reduction(NamedTuple):
    """What all buckets of a unit are reduced with."""

    reduce_scatter_group: dist.ProcessGroup | None
    reduce_scatter_stream: torch.Stream
    reduce_scatter_comm: ReduceScatter
    all_reduce_group: dist.ProcessGroup | None  # not None iff HSDP or replicate
    all_reduce_stream: torch.Stream
    all_reduce_grads: bool
    all_reduce_hook: Callable[[Tensor], None] | None
    gradient_divide_factor: float | None
    force_sum_reduction_for_comms: bool
    device: torch.device
    # Plugins may replace these two. Buckets that go by an all-to-all use no `copy_in`
    copy_in: Callable[[list[Tensor], Tensor, int], None]
    prepare_reduce_scatter_inputs: Callable = _default_reduce_scatter_input_fn
    # The comm may allocate the output's memory again while it is still needed
    clones_output: bool = False

    @property
    def defers_all_reduce(self) -> bool:
        return self.all_reduce_group is not None and not self.all_reduce_grads

    @property
    def shard_world_size(self) -> int:
        group = self.reduce_scatter_group
        return 1 if group is None else group.size()

    @property
    def no_plugin_prepares(self) -> bool:
        """Whether no plugin prepares gradients: our copy-in takes any sharded dim."""
        return self.prepare_reduce_scatter_inputs is _default_reduce_scatter_input_fn

    @property
    def scaling(self) -> Scaling:
        return Scaling(
            reduce_scatter_group=self.reduce_scatter_group,
            all_reduce_group=self.all_reduce_group,
            device_type=self.device.type,
            factor=self.gradient_divide_factor,
            is_sum=self.force_sum_reduction_for_comms,
        )

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate(self.reduce_scatter_comm, numel, dtype, self.device)


@dataclass(eq=False)
class BucketGrads:
    """A bucket to reduce, its parameters, their gradients and their partial reduce."""

    fsdp_params: list[FSDPParam]  # in slot order, as the gradients
    bucket: ReduceBucket
    unsharded_grads: list[Tensor]  # the copy-in drops them
    partial_reduce_output: Tensor | None = None
    # Buckets of an all-to-all share it. The first of `grouped_inputs`, if any
    reduce_scatter_input: Any = None
    # What one grouped call takes, see [Note: Direct reductions]
    grouped_inputs: list[Tensor] = field(default_factory=list)
    # This rank's shards of all ranks' gradients, after an all-to-all
    received: Tensor | None = None
    # Whether the sharded gradients are views of the reduced buffer
    is_viewed: bool = False

    @property
    def partial_dtype(self) -> torch.dtype:
        """The dtype that partial reduces are added in: the widest accumulation dtype."""
        dtype = self.bucket.dtype
        dtypes = [layouts.accumulation_dtype(p, dtype) for p in self.fsdp_params]
        return max(dtypes, key=lambda d: d.itemsize)


def prepare_inputs(
    reduction: Reduction,
    bucket: ReduceBucket,
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[Tensor],
) -> ReduceBucket:
    """Lets a plugin prepare the gradients. Returns the bucket with their new sizes."""
    if reduction.no_plugin_prepares:
        return bucket
    world_size = reduction.shard_world_size
    prepare = reduction.prepare_reduce_scatter_inputs
    sizes = prepare(fsdp_params, unsharded_grads, world_size)
    slots = [
        replace(
            slot, shard_numel=size.numel() // world_size, shard_dim=0, num_pieces=1
        )
        for slot, size in zip(bucket.slots, sizes, strict=True)
    ]
    return replace(bucket, slots=tuple(slots))


@without_grad
def reduce_buckets(
    reduction: Reduction, parts: Sequence[BucketGrads]
) -> list[ReduceResult]:
    """
    Reduces buckets, as a rule those of one post-backward. All copy-ins come first, so
    that the streams meet once: the first collective waits for the last copy-in.
    """
    handle = _get_device_handle(reduction.device.type)
    compute_stream, stream = handle.current_stream(), reduction.reduce_scatter_stream
    has_peers = reduction.shard_world_size > 1
    by_all_to_all = [p for p in parts if has_peers and p.bucket.comm_dtype is not None]
    results: list[ReduceResult] = []
    batch = parts  # an error gets a note about these buckets
    try:
        for part in parts:
            if part not in by_all_to_all:
                batch = [part]
                _copy_in(reduction, part)
        if by_all_to_all:
            batch = by_all_to_all
            _copy_in_all_to_all(reduction, by_all_to_all)
        stream.wait_stream(compute_stream)
        with handle.stream(stream):
            if by_all_to_all:
                _all_to_all(reduction, by_all_to_all)
            for batch in _all_reduced_together(reduction, parts):
                results += _reduce_batch(reduction, batch, compute_stream)
    except Exception as error:
        note_reduction(error, batch)
        raise
    return results


# Phase 1: copy-in #


def _copy_in(reduction: Reduction, part: BucketGrads) -> None:
    """Copies a bucket's gradients into the reduction's input, and drops them."""
    bucket, grads, numel = part.bucket, part.unsharded_grads, part.bucket.shard_numel
    comm, world_size = reduction.reduce_scatter_comm, reduction.shard_world_size
    is_own = reduction.copy_in is foreach_reduce_scatter_copy_in
    is_direct = bucket.has_direct and is_own and reduction.no_plugin_prepares
    if is_direct and world_size > 1 and type(comm) is DefaultReduceScatter:
        _stage_direct(reduction, part)
        return
    reduce_input = reduction.allocate(world_size * numel, bucket.wire_dtype)
    if is_own:
        copy_in_grads(bucket, grads, reduce_input.view(world_size, numel))
    else:  # a plugin's, which takes gradients of one dtype, to be chunked on dim 0
        if reduction.no_plugin_prepares:
            _default_reduce_scatter_input_fn(part.fsdp_params, grads, world_size)
        if any(grad.dtype != grads[0].dtype for grad in grads):
            grads[:] = [grad.to(reduce_input.dtype) for grad in grads]
        reduction.copy_in(grads, reduce_input, world_size)
    part.reduce_scatter_input = reduce_input
    grads.clear()  # only now: the copy-in has been issued


def _stage_direct(reduction: Reduction, part: BucketGrads) -> None:
    """Collects the inputs of one grouped call, and packs what is not direct."""
    bucket, grads = part.bucket, part.unsharded_grads
    pairs = zip(bucket.slots, grads)
    for is_direct, run in groupby(pairs, lambda pair: pair[0].is_direct):
        slots, run_grads = zip(*run)
        if is_direct:
            for slot, grad in zip(slots, run_grads):
                sent = grad.to(bucket.dtype).contiguous()
                if is_shared(sent):
                    sent = sent.clone()
                part.grouped_inputs += [piece.view(-1) for piece in slot.split(sent)]
            continue
        packed = replace(bucket, slots=slots)
        numel = reduction.shard_world_size * packed.shard_numel
        buffer = reduction.allocate(numel, bucket.dtype)
        rows = buffer.view(reduction.shard_world_size, -1)
        copy_in_grads(packed, [*run_grads], rows)
        part.grouped_inputs.append(buffer)
    part.reduce_scatter_input = part.grouped_inputs[0]
    grads.clear()


def _copy_in_all_to_all(reduction: Reduction, parts: Sequence[BucketGrads]) -> None:
    """
    Copies the gradients of buckets into one buffer to send, and drops them. One kernel
    copies all, viewed in the narrowest dtype, unless a gradient must be cast or
    cannot be chunked: then each bucket is copied by itself.
    """
    layout, world_size = _all_to_all_layout(parts), reduction.shard_world_size
    buffer = reduction.allocate(world_size * layout.segment_numel, layout.buffer_dtype)
    dtype, tensors, can_chunk = layout.regions[-1].dtype, [], True
    for i, numel in layout.slots:
        if i is None:
            padding_numel = numel * layout.buffer_dtype.itemsize // dtype.itemsize
            # The kernel pads it to one row for each rank
            tensors.append(buffer.new_zeros(1, padding_numel, dtype=dtype))
            continue
        bucket, grads = _in_pieces(parts[i].bucket, parts[i].unsharded_grads)
        can_chunk &= {*_dense_dtypes(bucket, grads)} == {bucket.wire_dtype}
        if can_chunk:
            is_wider = bucket.wire_dtype != dtype  # a view lengthens the last dim
            tensors += [g.unsqueeze(-1).view(dtype) if is_wider else g for g in grads]
    if can_chunk:
        foreach_reduce_scatter_copy_in(tensors, buffer.view(dtype), world_size)
    else:
        columns = _view_columns(buffer, layout, world_size)
        for part, rows in zip(parts, columns, strict=True):
            copy_in_grads(part.bucket, part.unsharded_grads, rows)
    for part in parts:
        part.reduce_scatter_input = buffer
        part.unsharded_grads.clear()


def _view_columns(
    buffer: Tensor, layout: GatherLayout, world_size: int
) -> list[Tensor]:
    """Views the inputs of ``layout`` in a buffer, each with one row for each rank."""
    rows = buffer.view(world_size, layout.segment_numel)
    slots = [(i, region.dtype) for region in layout.regions for i, _ in region.slots]
    pieces = zip(slots, rows.split(layout.split_sizes, dim=1), strict=True)
    columns = {i: piece.view(d) for (i, d), piece in pieces if i is not None}
    return [columns[i] for i in sorted(columns)]


def _in_pieces(
    bucket: ReduceBucket, grads: list[Tensor]
) -> tuple[ReduceBucket, list[Tensor]]:
    """Returns bucket and gradients by pieces, unless any gradient must be reordered."""
    if not bucket.has_pieces:
        return bucket, grads
    pieces: list[Tensor] = []
    for slot, grad in zip(bucket.slots, grads):
        if not (slot.shard_dim and slot.num_pieces):
            pieces.append(grad)
        elif grad.is_contiguous():
            pieces += slot.split(grad)
        else:
            return bucket, grads
    return bucket.in_pieces, pieces


def _dense_dtypes(
    bucket: ReduceBucket, grads: Sequence[Tensor]
) -> list[torch.dtype | None]:
    """Returns the gradients' dtypes, None for those that the kernel cannot chunk."""
    return [
        grad.dtype if slot.shard_dim == 0 and grad.is_contiguous() else None
        for slot, grad in zip(bucket.slots, grads)
    ]


# If a step is observed, this operator is called in place of `torch._chunk_cat`.
# That of 2.15 also casts within `_MIXED_ON_CUDA` on CUDA
_CHUNK_CAT = "chunk_cat_mixed_dtype" if IS_2_15 else "chunk_cat"
_MIXED_ON_CUDA = {torch.bfloat16, torch.float32}
# Gradients are copied together through a temporary up to this many elements: to copy them
# once more takes a GPU no longer than a kernel launch
_MAX_RUN_NUMEL = 2**20


def _kernel_takes(source: torch.dtype | None, target: torch.dtype) -> bool:
    """Whether ``_chunk_cat`` takes this pair in one kernel on CUDA."""
    return source == target or (source, target) == (torch.bfloat16, torch.float32)


def copy_in_grads(bucket: ReduceBucket, grads: list[Tensor], rows: Tensor) -> None:
    """
    Copies gradients of any dtypes to their columns of the ranks' ``rows``.

    [Note: One kernel for most gradients]
    The fused kernel needs dense tensors of one dtype and fills all columns. It casts
    bf16 to fp32 only; another cast, or one mismatched tensor, would send all down its
    slow path. So of the gradients that it takes at all, it gets the largest and those of
    the same dtype. Slices of the largest, if that is long enough, stand in for the rest,
    which is then copied over these columns. (Since 2.15 an operator takes bf16 and fp32
    together on CUDA.) Rows that are parts of longer ones are not dense: there each
    gradient is copied apart.
    """
    bucket, grads = _in_pieces(bucket, grads)
    world_size, dtypes = rows.size(0), _dense_dtypes(bucket, grads)
    is_dense, first, device = rows.is_contiguous(), dtypes[0], rows.device
    # A uniform unit uses the release's memory and launches
    is_uniform = not bucket.is_mixed and bucket.comm_dtype is None
    has_one_dtype = first is not None and dtypes.count(first) == len(dtypes)
    # Observed steps call the operator, even on its slow path
    use_kernel = has_one_dtype and (
        is_uniform or _kernel_takes(first, rows.dtype) or gets_operators(device)
    )
    # As the release does in uniform units. On CUDA it also saves a temporary
    use_mixed_operator = (not use_kernel and IS_2_15) and (
        (is_uniform and None not in dtypes)
        or (device.type == "cuda" and {*dtypes, rows.dtype} <= _MIXED_ON_CUDA)
    )
    if is_dense and (use_kernel or use_mixed_operator):
        _chunk_cat(grads, rows, by_operator=not use_kernel)
        return
    castable = [g for g, d in zip(grads, dtypes) if _kernel_takes(d, rows.dtype)]
    largest = max(castable if is_dense else (), key=Tensor.numel, default=None)
    # Lengths of stand-in slices: the least n for which the kernel's chunks, of
    # ceil(n / world_size) elements, fill the columns
    stand_in_numels = {
        i: max(world_size * (bucket.slots[i].shard_numel - 1) + 1, 0)
        for i, dtype in enumerate(dtypes)
        if largest is None or dtype != largest.dtype
    }
    to_copy_apart: Iterable[int] = stand_in_numels.keys()
    if largest is not None and max(stand_in_numels.values()) <= largest.numel():
        placed, flat = [*grads], largest.view(-1)
        for i, numel in stand_in_numels.items():
            placed[i] = flat[:numel]
        _chunk_cat(placed, rows)
    else:
        to_copy_apart = range(len(grads))
    _copy_in_apart(bucket, grads, dtypes, rows, to_copy_apart)


def _copy_in_apart(
    bucket: ReduceBucket,
    grads: list[Tensor],
    dtypes: Sequence[torch.dtype | None],
    rows: Tensor,
    indices: Iterable[int],
) -> None:
    """
    Copies some gradients to their columns: adjacent dense ones of one dtype are fused
    to a temporary, and cast from there by one copy, up to ``_MAX_RUN_NUMEL`` at once.
    """
    world_size, starts = rows.size(0), bucket.starts
    runs: list[list[int]] = []
    run_numel = 0
    for i in indices:
        run_numel += grads[i].numel()
        is_next = runs and runs[-1][-1] == i - 1 and dtypes[i] == dtypes[i - 1]
        if not is_next or dtypes[i] is None or run_numel > _MAX_RUN_NUMEL:
            runs.append([])
            run_numel = grads[i].numel()
        runs[-1].append(i)
    for run in runs:
        first, dim = run[0], bucket.slots[run[0]].shard_dim
        columns = rows[:, starts[first] : starts[run[-1] + 1]]
        if len(run) == 1 and (dim != 0 or grads[first].size(0) % world_size == 0):
            by_rank = _view_by_rank(grads[first], dim, world_size)
            columns.unflatten(1, by_rank.size()[1:]).copy_(by_rank)
        else:
            temporary = grads[first].new_empty(columns.size())
            _chunk_cat([grads[i].contiguous() for i in run], temporary)
            columns.copy_(temporary)


def _view_by_rank(grad: Tensor, dim: int, world_size: int) -> Tensor:
    """Views a gradient sharded on ``dim`` with the rank as its leading dim."""
    if grad.size(dim) % world_size != 0:
        raise AssertionError(f"Shard({dim}) requires even sharding")
    return grad.unflatten(dim, (world_size, -1)).movedim(dim, 0)


def foreach_reduce_scatter_copy_in(
    unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int
) -> None:
    """Fills the rows of ``reduce_scatter_input`` (1D), one for each rank."""
    row_numel = reduce_scatter_input.numel() // world_size
    _chunk_cat(unsharded_grads, reduce_scatter_input.view(world_size, row_numel))


def _chunk_cat(tensors: list[Tensor], rows: Tensor, by_operator: bool = False) -> None:
    """Fills ``rows``, which are dense, with the chunks of ``tensors`` on dim 0."""
    world_size, row_numel = rows.size()
    if by_operator or gets_operators(rows.device):
        getattr(torch.ops.fsdp, _CHUNK_CAT)(tensors, 0, world_size, out=rows)
    else:
        torch._chunk_cat(tensors, 0, world_size, out=rows)
    if rows.size(1) != row_numel:  # the kernel has resized them
        raise RuntimeError(
            f"a rank's gradients have {rows.size(1)} padded elements, not {row_numel}"
        )


# Phase 2: over the shard group #


def _all_to_all_layout(parts: Sequence[BucketGrads]) -> GatherLayout:
    """Lays out what each rank is sent: a region for each dtype, as in a gather."""
    sizes = [(part.bucket.wire_dtype, part.bucket.shard_numel) for part in parts]
    return layouts.plan_all_to_all(*zip(*sizes))


def _all_to_all(reduction: Reduction, parts: Sequence[BucketGrads]) -> None:
    """Exchanges the gradients of all ``parts`` in one collective."""
    comm: Any = reduction.reduce_scatter_comm
    sent: Tensor = parts[0].reduce_scatter_input
    if allocates_anew(comm):
        received = reduction.allocate(sent.numel(), sent.dtype)
    else:  # the comm may return the memory that is being sent
        received = torch.empty_like(sent)
    group, layout = reduction.reduce_scatter_group, _all_to_all_layout(parts)
    comm.exchange(output_tensor=received, input_tensor=sent, group=group)
    columns = _view_columns(received, layout, reduction.shard_world_size)
    for part, rows in zip(parts, columns, strict=True):
        part.received = rows


def _reduce_over_shards(
    reduction: Reduction,
    part: BucketGrads,
    *,
    before: float | None,
    op: Any,
    tree_divisor: float | None,
) -> Tensor:
    """
    Returns this rank's 1D sum over the shard group plus the partial reduce. That is added
    before the all-reduce, which must sum the partial reduces of all replicas.
    Where nothing needs to be computed, it is the input itself.
    """
    bucket, partial = part.bucket, part.partial_reduce_output
    world_size, reduce_input = reduction.shard_world_size, part.reduce_scatter_input
    group: Any = reduction.reduce_scatter_group
    if not part.grouped_inputs:
        to_divide = reduce_input if part.received is None else part.received
        _div_if_needed(to_divide, before)
    if (
        world_size == 1
        and partial is None
        and not reduction.defers_all_reduce
        and reduce_input.dtype == bucket.dtype
        and allocates_anew(reduction.reduce_scatter_comm)
    ):
        return reduce_input
    output = reduction.allocate(bucket.shard_numel, bucket.dtype)
    if world_size == 1:
        output.copy_(reduce_input)
    elif part.grouped_inputs:
        inputs: Any = part.grouped_inputs
        if before not in (None, 1):  # not in place: users may hold gradients
            inputs = torch._foreach_div(inputs, before)
        outputs = output.split([tensor.numel() // world_size for tensor in inputs])
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, False
        # One call, which takes inputs of one dtype
        work = group.reduce_scatter_tensor_coalesced([*outputs], [*inputs], options)
        if work is not None:
            work.wait()
    elif part.received is None:
        reduction.reduce_scatter_comm(
            output_tensor=output, input_tensor=reduce_input, group=group, op=op
        )
    else:
        add_in_tree(part.received, output, tree_divisor)
        part.received = None
    if reduction.defers_all_reduce:
        output = output.to(part.partial_dtype)
    if partial is not None:
        output += partial
    return output.clone() if reduction.clones_output else output


@without_grad
def relayout(
    bucket: ReduceBucket, shard: Tensor, target_bucket: ReduceBucket
) -> Tensor:
    """Lays a rank's 1D shard out as another bucket, with zeros in new slots."""
    target = shard.new_zeros(target_bucket.shard_numel)
    starts = dict(zip(bucket.params, bucket.starts))
    for slot, target_start in zip(target_bucket.slots, target_bucket.starts):
        if (start := starts.get(slot.param)) is not None:
            piece = shard.narrow(0, start, slot.shard_numel)
            target.narrow(0, target_start, slot.shard_numel).copy_(piece)
    return target


# Phase 3: over replicas, and into sharded gradients #


def _all_reduced_together(
    reduction: Reduction, parts: Sequence[BucketGrads]
) -> Sequence[Sequence[BucketGrads]]:
    """Groups sorted buckets by all-reduce: dtype and whether a tree sums them."""
    if reduction.all_reduce_group is None or reduction.defers_all_reduce:
        return [[part] for part in parts]
    grouped = groupby(parts, lambda p: (p.bucket.dtype, p.bucket.comm_dtype is None))
    return [[*batch] for _, batch in grouped]


def _reduce_batch(
    reduction: Reduction, parts: Sequence[BucketGrads], consumer_stream: torch.Stream
) -> list[ReduceResult]:
    """
    Reduces buckets that share an all-reduce, and so have the same factors. The sharded
    gradients are read in ``consumer_stream``.
    """
    first, bucket = parts[0], parts[0].bucket
    group, hook = reduction.all_reduce_group, reduction.all_reduce_hook
    uses_stream = group is not None or hook is not None
    before, after, op, replica_op = get_divide_factors(bucket.key, reduction.scaling)
    tree_divisor = None
    is_last = not uses_stream and first.partial_reduce_output is None
    if is_last and first.received is not None:
        tree_divisor, after = after, None  # no sum follows the tree
    shards: Sequence[Tensor]
    shards = [
        _reduce_over_shards(
            reduction, part, before=before, op=op, tree_divisor=tree_divisor
        )
        for part in parts
    ]
    buffer = shards[0]
    if len(shards) > 1:
        buffer = torch.cat(shards)
        shards = buffer.split([shard.numel() for shard in shards])
    inputs = [part.reduce_scatter_input for part in parts]
    stream = reduction.reduce_scatter_stream
    scattered = stream.record_event()
    if reduction.defers_all_reduce:
        result = ReduceResult(inputs[0], scattered, stream, scattered)  # one bucket
        return [result._replace(partial_reduce_output=buffer)]
    # A view keeps the whole buffer alive. If any gradient is cast, all are copied, so
    # that the buffer can be freed. A plugin's `allocate` may return another dtype
    needs_casts = any(part.bucket.needs_casts for part in parts)
    as_views = buffer.dtype == bucket.dtype and not needs_casts
    handle = _get_device_handle(reduction.device.type)
    if uses_stream:
        stream = reduction.all_reduce_stream
        stream.wait_stream(reduction.reduce_scatter_stream)
    with handle.stream(stream) if uses_stream else NO_CONTEXT:
        if group is not None and bucket.comm_dtype is None:
            dist.all_reduce(buffer, group=group, op=replica_op)
        elif group is not None:
            all_reduce_in_tree(buffer, group)
        if hook is not None:
            hook(buffer)
        _div_if_needed(buffer, after)
        for part, shard in zip(parts, shards, strict=True):
            accumulate_sharded_grads(
                part, shard, stream, consumer_stream, as_views=as_views
            )
        done = stream.record_event()
    held = (buffer, done) if uses_stream else (None, None)
    if buffer is inputs[0] and not uses_stream:
        scattered = done  # over a single rank the buffer is held as the input
    return [ReduceResult(x, scattered, stream, done, *held) for x in inputs]


def record_grad_output_stream(buffer: Tensor, stream: torch.Stream) -> None:
    """Tells a vendor's kernel (2.15) which stream reads sharded gradients."""
    if IS_2_15 and buffer.device.type != "cpu":
        args = stream.stream_id, stream.device_index, stream.device_type
        torch.ops.fsdp.record_grad_output_stream(buffer, *args)


def accumulate_sharded_grads(
    part: BucketGrads,
    shard: Tensor,
    stream: torch.Stream,
    consumer_stream: torch.Stream,
    *,
    as_views: bool,
) -> None:
    """
    Accumulates a rank's shard of the reduced bucket in the sharded gradients: views of
    ``shard``, or of one copy for each gradient dtype.
    """
    bucket, starts, fsdp_params = part.bucket, part.bucket.starts, part.fsdp_params
    part.is_viewed = as_views
    record_grad_output_stream(shard, consumer_stream)
    for dtype, indices in bucket.runs:
        flat, start = shard, starts[indices[0]]
        if len(bucket.runs) > 1:
            flat = shard[start : starts[indices[-1] + 1]]
        if not as_views:
            flat = flat.to(dtype, copy=True)
            record_grad_output_stream(flat, consumer_stream)
        base = flat.storage_offset() - start
        for i in indices:
            fsdp_param = fsdp_params[i]
            size, stride = fsdp_param.sharded_size, fsdp_param.contiguous_sharded_stride
            sharded_grad = flat.as_strided(size, stride, base + starts[i])
            part.is_viewed &= accumulate_sharded_grad(fsdp_param, sharded_grad, stream)


def _as_dtensor(fsdp_param: FSDPParam, sharded_grad: Tensor) -> DTensor:
    spec, dtype = fsdp_param._sharding_spec, sharded_grad.dtype
    if dtype != fsdp_param.orig_dtype:
        meta = cast(TensorMeta, spec.tensor_meta)._replace(dtype=dtype)
        spec = replace(spec, tensor_meta=meta)
    # No `__init__`: it only looks for Dynamo, 5 % of a unit's host time
    return DTensor.__new__(DTensor, sharded_grad, spec, requires_grad=False)


def accumulate_sharded_grad(
    fsdp_param: FSDPParam, sharded_grad: Tensor, stream: torch.Stream
) -> bool:
    """
    Accumulates a sharded gradient and runs its post-accumulate-grad hooks. Returns
    whether ``sharded_grad`` is the gradient, and remains it.
    """
    sharded_param, offloads = fsdp_param.sharded_param, fsdp_param.offload_to_cpu
    # Else each access looks for an override in DTensor: 2 % of a unit's host time
    with torch._C.DisableTorchFunctionSubclass():
        hooks, present = sharded_param._post_accumulate_grad_hooks, sharded_param.grad
        if offloads:
            # A CPU addition or a hook reads the gradient immediately, so its copy to the
            # host may be in flight only without either
            overlaps = fsdp_param.pin_memory and present is None and not hooks
            sharded_grad = sharded_grad.to(torch.device("cpu"), non_blocking=overlaps)
            if overlaps:
                fsdp_param.grad_offload_event = stream.record_event()
        if present is None:
            sharded_param.grad = _as_dtensor(fsdp_param, sharded_grad)
    if isinstance(present, DTensor):
        stored = cast(DTensor, sharded_param)._local_tensor.dtype
        if sharded_param.dtype != stored:  # only its `data` was cast
            raise RuntimeError(
                f"{fsdp_param._param_fqn} is {sharded_param.dtype} now, but its shard "
                f"is {stored}: cast a model before its first forward"
            )
        present._local_tensor += sharded_grad
    elif present is not None:
        raise AssertionError(
            f"The gradient of {fsdp_param._param_fqn} is a {type(present).__name__}: set "
            "the gradient of a sharded parameter to a DTensor like it, or to None"
        )
    for hook in [*hooks.values()] if hooks else ():
        hook(sharded_param)
    return present is None and not hooks and not offloads
