"""
How gradients are reduced, from a bucket's unsharded gradients to sharded gradients.

:func:`reduce_buckets` copies gradients in, adds each bucket up over the shard group, with
the partial reduce of earlier microbatches whose all-reduce was deferred, and adds that up
over replicas. If this all-reduce is deferred, the sum is the next partial reduce.

[Note: Lifetimes in a reduction]
These three phases run in the streams of compute, reduce-scatter and all-reduce. Without
an all-reduce or a hook the third runs in that of the reduce-scatter.

=================  ==============  =================  ==============================
tensor             allocated in    last used in       referenced by, until
=================  ==============  =================  ==============================
gradients          compute         compute            ``BucketGrads``, the copy-in
reduction's input  compute         reduce-scatter     a ``Handoff``, its event
received rows      reduce-scatter  reduce-scatter     ``Exchanged``, their sum
reduced shard      reduce-scatter  all-reduce         a ``Handoff``, its event
partial reduce     reduce-scatter  reduce-scatter     ``PartialReduces``, the next sum
cast gradients     all-reduce      the optimizer's    sharded parameters
=================  ==============  =================  ==============================

Sharded gradients are views of the reduced shard if none needs a cast. That may be the
reduction's input over a single rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, cast, NamedTuple, TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.distributed_c10d import ReduceScatterOptions
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from . import _fsdp_layout as layouts
from . import _fsdp_scaling as scales
from ._fsdp_api import ReduceScatter
from ._fsdp_comms import allocate, allocates_anew, DefaultReduceScatter
from ._fsdp_direct import is_shared
from ._fsdp_errors import note_reduction
from ._fsdp_layout import BucketKey, GatherLayout, ReduceBucket
from ._fsdp_observers import gets_operators
from ._fsdp_param import FSDPParam
from ._fsdp_releases import RELEASE
from ._fsdp_scaling import _div_if_needed, Factors, Scaling


if TYPE_CHECKING:
    from ._fsdp_compat import CopyInPlugins

# A rank's 1D sum over the shard group, and its remaining divisor
Sum: TypeAlias = tuple[Tensor, float | None]


def _default_reduce_scatter_input_fn(
    fsdp_params: list[FSDPParam], unsharded_grads: list[Tensor], world_size: int
) -> tuple[torch.Size, ...]:
    """
    Replaces gradients that are sharded on another dim than 0 by ones whose chunks on dim
    0 are the ranks' shards. Returns all sizes, with dim 0 padded for even chunks.
    """
    sizes: list[torch.Size] = []
    for i, (fsdp_param, grad) in enumerate(zip(fsdp_params, unsharded_grads)):
        if (dim := fsdp_param.fsdp_placement.dim) != 0 and world_size > 1:
            by_rank = _view_by_rank(grad, dim, world_size)
            grad = unsharded_grads[i] = by_rank.flatten(0, 1)
        rows = -(-grad.size(0) // world_size) * world_size
        sizes.append(torch.Size([rows, *grad.size()[1:]]))
    return tuple(sizes)


@dataclass(eq=False)
class Reduction:
    """The groups, streams and settings that all buckets of a unit are reduced with."""

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
    plugins: CopyInPlugins | None = None  # if they have replaced the copy-in
    clones_output: bool = False  # as the comm may reuse its memory too early
    holds_one_input: bool = False  # as another may use its memory, or more of a pool

    def __post_init__(self) -> None:
        scatter_group, group = self.reduce_scatter_group, self.all_reduce_group
        self.shard_world_size = 1 if scatter_group is None else scatter_group.size()
        # Whether an all-reduce or a hook follows the sum over the shard group
        self.continues = group is not None or self.all_reduce_hook is not None
        self.defers_all_reduce = group is not None and not self.all_reduce_grads
        factor, is_sum = self.gradient_divide_factor, self.force_sum_reduction_for_comms
        self.scaling = Scaling(scatter_group, group, self.device.type, factor, is_sum)

    @property
    def is_default(self) -> bool:
        """Whether neither users nor plugins have replaced a part of the reduction."""
        is_default = type(self.reduce_scatter_comm) is DefaultReduceScatter
        return is_default and self.plugins is None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return allocate(self.reduce_scatter_comm, numel, dtype, self.device)


@dataclass(eq=False)
class BucketGrads:
    """A bucket to reduce and its gradients, then the buffers that its reduction uses."""

    fsdp_params: list[FSDPParam]  # in slot order, as the gradients
    bucket: ReduceBucket
    unsharded_grads: list[Tensor]  # the copy-in drops them
    # (shard_numel,): that of earlier microbatches, and once deferred again the new one
    partial_reduce_output: Tensor | None = None
    consumer_stream: torch.Stream = field(init=False)  # reads the sharded gradients
    is_viewed: bool = False  # whether these gradients are views of the reduced buffer
    way: Any = None  # to send the bucket: `Packed`, ...
    inputs: list[Tensor] = field(default_factory=list)  # the collective's, in use until
    reduce_scatter_event: torch.Event | None = None
    post_reduce_stream: torch.Stream = field(init=False)  # of the last phase, done at
    post_reduce_event: torch.Event = field(init=False)
    # 1D, the reduced buffer, if a stream uses it that did not allocate it
    all_reduce_input: Tensor | None = None
    all_reduce_event: torch.Event | None = None  # after its last use

    @property
    def partial_dtype(self) -> torch.dtype:
        """The dtype that partial reduces are added in: the widest accumulation dtype."""
        dtype = self.bucket.dtype
        dtypes = [layouts.accumulation_dtype(p, dtype) for p in self.fsdp_params]
        return max(dtypes, key=lambda d: d.itemsize)


def make_parts(
    buckets: Sequence[ReduceBucket], fsdp_params: Sequence[FSDPParam], grads: list[Any]
) -> list[BucketGrads]:
    """Moves each bucket's gradients out of ``grads``, which is emptied to free them."""
    parts: list[BucketGrads] = []
    for bucket in buckets:
        params = [fsdp_params[i] for i in bucket.params]
        parts.append(BucketGrads(params, bucket, [grads[i] for i in bucket.params]))
    grads.clear()
    return parts


def reduce_buckets(reduction: Reduction, parts: Sequence[BucketGrads]) -> None:
    """
    Reduces buckets, called in the compute stream, in one order on all ranks. All copy-ins
    come first, so that streams wait only once.
    """
    handle = _get_device_handle(reduction.device.type)
    compute_stream, stream = handle.current_stream(), reduction.reduce_scatter_stream
    exchange, exchanged = Exchanged(), []
    # An error gets a note about `batch`
    batch, has_grad = parts, torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        for part in parts:
            part.consumer_stream = compute_stream
            if part.bucket.comm_dtype is not None and reduction.shard_world_size > 1:
                part.way = exchange
                exchanged.append(part)
                continue
            batch, part.way = [part], Packed()
            if reduction.shard_world_size == 1:
                part.way = SingleRank()
            elif part.bucket.has_direct and reduction.is_default:
                part.way = Grouped()
            part.way.copy_in(reduction, part)
        if exchanged:
            batch = exchanged
            exchange.copy_in(reduction, exchanged)
        stream.wait_stream(compute_stream)
        with handle.stream(stream):
            if exchanged:
                exchange.send(reduction, exchanged)
            joins = reduction.all_reduce_group and reduction.all_reduce_grads
            key: Any = (lambda part: part.bucket.all_reduce_key) if joins else id
            for _, run in groupby(parts, key):
                batch = [*run]
                _reduce_batch(reduction, batch)
    except Exception as error:
        note_reduction(error, batch)
        raise
    finally:
        torch._C._set_grad_enabled(has_grad)


# Ways to send: a copy-in (phase 1), and the sum over the shard group (phase 2) #


class Packed:
    """One buffer, with a row for each rank, and one reduce-scatter."""

    def copy_in(self, reduction: Reduction, part: BucketGrads) -> None:
        bucket, grads = part.bucket, part.unsharded_grads
        world_size = reduction.shard_world_size
        buffer = reduction.allocate(world_size * bucket.shard_numel, bucket.wire_dtype)
        part.inputs = [buffer]
        if reduction.plugins is None:
            copy_in_grads(bucket, grads, buffer.view(world_size, bucket.shard_numel))
        else:
            reduction.plugins.copy_in_part(part, buffer, world_size)
        grads.clear()  # only now: the copy-in has been issued

    def reduce(self, reduction: Reduction, part: BucketGrads, factors: Factors) -> Sum:
        before, after, op, _ = factors
        if before is not None:
            _div_if_needed(part.inputs[0], before)
        output = reduction.allocate(part.bucket.shard_numel, part.bucket.dtype)
        group: Any = reduction.reduce_scatter_group
        buffers = {"output_tensor": output, "input_tensor": part.inputs[0]}
        reduction.reduce_scatter_comm(**buffers, group=group, op=op)
        return output, after


class SingleRank(Packed):
    """No collective. Where nothing needs to be computed, the sum is the input itself."""

    def reduce(self, reduction: Reduction, part: BucketGrads, factors: Factors) -> Sum:
        (reduce_input,), (before, after, _, _) = part.inputs, factors
        _div_if_needed(reduce_input, before)
        if (
            part.partial_reduce_output is None
            and not reduction.defers_all_reduce
            and reduce_input.dtype == part.bucket.dtype
            and allocates_anew(reduction.reduce_scatter_comm)
        ):
            return reduce_input, after
        output = reduction.allocate(part.bucket.shard_numel, part.bucket.dtype)
        return output.copy_(reduce_input), after


class Grouped:
    """One grouped call for direct gradients, and for buffers of those between them."""

    def copy_in(self, reduction: Reduction, part: BucketGrads) -> None:
        bucket, world_size = part.bucket, reduction.shard_world_size
        pairs = zip(bucket.slots, part.unsharded_grads)
        for is_direct, run in groupby(pairs, lambda pair: pair[0].is_direct):
            slots, grads = zip(*run)
            if not is_direct:
                packed = replace(bucket, slots=slots)
                numel = world_size * packed.shard_numel
                buffer = reduction.allocate(numel, bucket.dtype)
                copy_in_grads(packed, [*grads], buffer.view(world_size, -1))
                part.inputs.append(buffer)
                continue
            for slot, grad in zip(slots, grads):
                sent = grad.to(bucket.dtype).contiguous()
                if is_shared(sent):
                    sent = sent.clone()
                part.inputs += [piece.view(-1) for piece in slot.split(sent)]
        part.unsharded_grads.clear()

    def reduce(self, reduction: Reduction, part: BucketGrads, factors: Factors) -> Sum:
        before, after, op, _ = factors
        inputs, world_size = part.inputs, reduction.shard_world_size
        if before not in (None, 1):  # not in place: users may hold gradients
            inputs = [*torch._foreach_div(inputs, before)]
        output = reduction.allocate(part.bucket.shard_numel, part.bucket.dtype)
        outputs = output.split([tensor.numel() // world_size for tensor in inputs])
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = cast(Any, op), False
        group: Any = reduction.reduce_scatter_group
        # One call, for inputs of one dtype
        work = group.reduce_scatter_tensor_coalesced([*outputs], inputs, options)
        if work is not None:
            work.wait()
        return output, after


class Exchanged:
    """One all-to-all for several buckets, added by [Note: One tree for every mesh]."""

    layout: GatherLayout  # of what is sent to one rank, a region for each dtype
    received: dict[BucketKey, Tensor]  # (world_size, shard_numel), until they are added

    def copy_in(self, reduction: Reduction, parts: Sequence[BucketGrads]) -> None:
        """Copies gradients into one buffer to send."""
        sizes = [(part.bucket.wire_dtype, part.bucket.shard_numel) for part in parts]
        self.layout = layouts.plan_gather(*zip(*sizes))
        world_size, dtype = reduction.shard_world_size, self.layout.buffer_dtype
        buffer = reduction.allocate(world_size * self.layout.segment_numel, dtype)
        columns = _as_columns(buffer, self.layout, world_size)
        for part, rows in zip(parts, columns, strict=True):
            copy_in_grads(part.bucket, part.unsharded_grads, rows)
            part.inputs = [buffer]
            part.unsharded_grads.clear()

    def send(self, reduction: Reduction, parts: Sequence[BucketGrads]) -> None:
        """Exchanges the gradients of all ``parts``, in the reduce-scatter stream."""
        comm: Any = reduction.reduce_scatter_comm
        (sent,) = parts[0].inputs
        if allocates_anew(comm):
            received = reduction.allocate(sent.numel(), sent.dtype)
        else:  # the comm may return the memory that is being sent
            received = torch.empty_like(sent)
        group = reduction.reduce_scatter_group
        comm.exchange(output_tensor=received, input_tensor=sent, group=group)
        columns = _as_columns(received, self.layout, reduction.shard_world_size)
        self.received = dict(zip([part.bucket.key for part in parts], columns))

    def reduce(self, reduction: Reduction, part: BucketGrads, factors: Factors) -> Sum:
        before, after, *_ = factors
        rows = self.received.pop(part.bucket.key)
        _div_if_needed(rows, before)
        output = reduction.allocate(part.bucket.shard_numel, part.bucket.dtype)
        is_last = not reduction.continues and part.partial_reduce_output is None
        scales.add_in_tree(rows, output, after if is_last else None)
        return output, None if is_last else after


# Copy-in #


def _as_columns(buffer: Tensor, layout: GatherLayout, world_size: int) -> list[Tensor]:
    """Views a ``buffer`` (1D) as ``layout``'s inputs, each (world_size, numel)."""
    rows = buffer.view(world_size, layout.segment_numel)
    slots = [(i, region.dtype) for region in layout.regions for i, _ in region.slots]
    pieces = rows.split([numel for _, numel in layout.slots], dim=1)
    columns = {i: p.view(d) for (i, d), p in zip(slots, pieces) if i is not None}
    return [columns[i] for i in sorted(columns)]


# Gradients are copied together through a temporary up to this many elements: to copy them
# once more takes a GPU no longer than a kernel launch
_MAX_RUN_NUMEL = 2**20


class CopyInPlan(NamedTuple):
    """How gradients of certain dtypes and strides are copied in."""

    by_operator: bool  # or by the fused kernel
    runs: Sequence[range] = ()  # adjacent gradients that are copied apart
    largest: int | None = None  # stands in for them. None: all are copied apart


def copy_in_grads(bucket: ReduceBucket, grads: list[Tensor], rows: Tensor) -> None:
    """Copies gradients of any dtypes into ``rows`` (world_size, shard_numel)."""
    if bucket.has_pieces:
        pieces = [slot.split(grad) for slot, grad in zip(bucket.slots, grads)]
        if all(pieces):
            bucket, grads = bucket.in_pieces, [*chain(*pieces)]
    # None for those that the kernel cannot chunk
    dtypes = [
        grad.dtype if slot.shard_dim == 0 and grad.is_contiguous() else None
        for slot, grad in zip(bucket.slots, grads)
    ]
    is_dense, is_observed = rows.is_contiguous(), gets_operators(rows.device)
    facts = dtypes, rows.dtype, rows.device, rows.size(0), is_dense, is_observed
    if bucket.copy_in[0] != facts:
        bucket.copy_in = facts, _plan_copy_in(bucket, grads, facts)
    by_operator, runs, largest = bucket.copy_in[1]
    if not runs:
        _chunk_cat(grads, rows, by_operator)
        return
    if largest is not None:
        fused, flat = [*grads], grads[largest].view(-1)
        for i in chain(*runs):
            # The least length whose chunks, one for each rank, fill the columns
            fused[i] = flat[: rows.size(0) * (bucket.slots[i].shard_numel - 1) + 1]
        _chunk_cat(fused, rows, by_operator)
    for run in runs:
        columns = rows[:, bucket.starts[run.start] : bucket.starts[run.stop]]
        dim, in_run = bucket.slots[run.start].shard_dim, grads[run.start : run.stop]
        _copy_run(in_run, dim, columns, by_operator)


def _plan_copy_in(bucket: ReduceBucket, grads: list[Tensor], facts: Any) -> CopyInPlan:
    """
    [Note: One kernel for most gradients]
    The fused kernel needs dense tensors of one dtype and fills all columns. It casts
    bf16 to fp32 only; another cast, or one mismatched tensor, would send all down its
    slow path. So of the gradients that it accepts it gets the largest and those of the
    same dtype. Slices of the largest, if that is long enough, stand in for the rest,
    which is then copied over these columns. (Since 2.15 an operator accepts bf16 and fp32
    together on CUDA.) To parts of longer rows, not dense, each is copied apart.
    """
    dtypes, target, device, world_size, is_dense, is_observed = facts
    found, bf16_and_fp32 = {*dtypes}, {torch.bfloat16, torch.float32}
    accepted = bf16_and_fp32 if target is torch.float32 else {target}
    # A uniform unit uses the release's memory and launches
    is_uniform = not bucket.is_mixed and bucket.comm_dtype is None
    if len(found) == 1 and (is_uniform or is_observed):
        accepted = found - {None}  # even if that is the slow path
    elif is_dense and not (len(found) == 1 and found <= accepted):
        is_cheaper = device.type == "cuda" and {*found, target} <= bf16_and_fp32
        by_release = is_uniform and None not in found
        if RELEASE.chunk_cat != "chunk_cat" and (by_release or is_cheaper):
            return CopyInPlan(by_operator=True)
    fits = [i for i, dtype in enumerate(dtypes) if is_dense and dtype in accepted]
    largest = max(fits, key=lambda i: grads[i].numel(), default=None)
    apart = [i for i, d in enumerate(dtypes) if largest is None or d != dtypes[largest]]
    shard_numel = max((bucket.slots[i].shard_numel for i in apart), default=1)
    if largest is not None and world_size * (shard_numel - 1) >= grads[largest].numel():
        largest, apart = None, [*range(len(grads))]
    runs: list[range] = []
    run_numel = 0
    for i in apart:
        run_numel += grads[i].numel()
        is_next = runs and runs[-1].stop == i and dtypes[i] == dtypes[i - 1]
        if is_next and dtypes[i] is not None and run_numel <= _MAX_RUN_NUMEL:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
            run_numel = grads[i].numel()
    return CopyInPlan(is_observed, runs, largest)


def _copy_run(grads: list[Tensor], dim: int, rows: Tensor, by_operator: bool) -> None:
    """Copies gradients of one dtype, several by way of a dense temporary."""
    grad, num_whole, rest = grads[0], rows.size(0), None
    if len(grads) > 1:
        temporary = grad.new_empty(rows.size())
        _chunk_cat(grads, temporary, by_operator)
        rows.copy_(temporary)
        return
    if dim == 0 and grad.size(0) % num_whole != 0:
        size = -(-grad.size(0) // rows.size(0))
        num_whole = grad.size(0) // size
        grad, rest = grad.split([num_whole * size, grad.size(0) - num_whole * size])
    by_rank = _view_by_rank(grad, dim, num_whole)
    rows[:num_whole].unflatten(1, by_rank.size()[1:]).copy_(by_rank)
    if rest is not None:  # for the next rank. Later ones have padding only
        rows[num_whole:].zero_()
        rows[num_whole, : rest.numel()].view(rest.size()).copy_(rest)


def _view_by_rank(grad: Tensor, dim: int, world_size: int) -> Tensor:
    """Views a gradient as (world_size, ..., size of ``dim`` / world_size, ...)."""
    if grad.size(dim) % world_size != 0:
        raise AssertionError(f"Shard({dim}) requires even sharding")
    return grad.unflatten(dim, (world_size, -1)).movedim(dim, 0)


def foreach_reduce_scatter_copy_in(
    unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int
) -> None:
    """Fills ``reduce_scatter_input`` (1D), with a row for each rank."""
    row_numel = reduce_scatter_input.numel() // world_size
    rows = reduce_scatter_input.view(world_size, row_numel)
    _chunk_cat(unsharded_grads, rows, gets_operators(rows.device))


def _chunk_cat(tensors: list[Tensor], rows: Tensor, by_operator: bool) -> None:
    """Fills dense ``rows`` (world_size, numel) with chunks of ``tensors`` on dim 0."""
    world_size, row_numel = rows.size()
    if by_operator:
        getattr(torch.ops.fsdp, RELEASE.chunk_cat)(tensors, 0, world_size, out=rows)
    else:
        torch._chunk_cat(tensors, 0, world_size, out=rows)
    if rows.size(1) != row_numel:  # the kernel has resized them
        found = f"{rows.size(1)} padded elements, not {row_numel}"
        raise RuntimeError(f"a rank's gradients have {found}")


# Phase 3: over replicas, and into sharded gradients #


def _reduce_batch(reduction: Reduction, parts: list[BucketGrads]) -> None:
    """Reduces buckets that share an all-reduce, and so have the same factors."""
    part, stream, scaling = parts[0], reduction.reduce_scatter_stream, reduction.scaling
    bucket, defers = part.bucket, reduction.defers_all_reduce
    if bucket.factors[0] != scaling:
        bucket.factors = scaling, scales.get_divide_factors(bucket.key, scaling)
    factors, sums, after = bucket.factors[1], [], None
    for part in parts:
        shard, after = part.way.reduce(reduction, part, factors)
        if defers:
            shard = shard.to(part.partial_dtype)
        # Now, as the all-reduce must sum the partial reduces of all replicas
        if part.partial_reduce_output is not None:
            shard += part.partial_reduce_output
            part.partial_reduce_output = None
        sums.append(shard.clone() if reduction.clones_output else shard)
    scattered = done = stream.record_event()
    if defers:  # of one bucket
        part.partial_reduce_output = sums[0]
    elif reduction.continues:
        stream = reduction.all_reduce_stream
        done = _reduce_over_replicas(reduction, parts, sums, factors)
    else:
        if after is not None:
            _div_if_needed(sums[0], after)
        accumulate_sharded_grads(part, sums[0], stream)
        done = stream.record_event()
        if sums[0] is part.inputs[0]:
            scattered = done  # over a single rank the result is the input
    for part in parts:
        part.reduce_scatter_event = scattered
        part.post_reduce_stream, part.post_reduce_event = stream, done
        part.all_reduce_event = done


def _reduce_over_replicas(
    reduction: Reduction, parts: list[BucketGrads], sums: list[Tensor], factors: Factors
) -> torch.Event:
    """All-reduces buckets' 1D sums together and runs the hook, in the last stream."""
    buffer, stream, (_, after, _, op) = sums[0], reduction.all_reduce_stream, factors
    group, hook = reduction.all_reduce_group, reduction.all_reduce_hook
    if len(sums) > 1:
        buffer = torch.cat(sums)
        sums = [*buffer.split([shard.numel() for shard in sums])]
    needs_casts = any(part.bucket.needs_casts for part in parts)
    stream.wait_stream(reduction.reduce_scatter_stream)
    with _get_device_handle(reduction.device.type).stream(stream):
        if group is not None and parts[0].bucket.comm_dtype is not None:
            scales.all_reduce_in_tree(buffer, group)
        elif group is not None:
            dist.all_reduce(buffer, group=group, op=op)
        if hook is not None:
            hook(buffer)
        _div_if_needed(buffer, after)
        for part, shard in zip(parts, sums, strict=True):
            accumulate_sharded_grads(part, shard, stream, needs_casts)
            part.all_reduce_input = buffer
        return stream.record_event()


def record_grad_output_stream(buffer: Tensor, stream: torch.Stream) -> None:
    """Tells a vendor's kernel (2.15) which stream reads sharded gradients."""
    if buffer.device.type != "cpu" and RELEASE.accumulates_by_autograd:
        args = stream.stream_id, stream.device_index, stream.device_type
        torch.ops.fsdp.record_grad_output_stream(buffer, *args)


def accumulate_sharded_grads(
    part: BucketGrads, shard: Tensor, stream: torch.Stream, needs_casts: bool = False
) -> None:
    """
    Accumulates a rank's ``shard`` (1D) of the reduced bucket in sharded gradients, which
    are views of it. If any is cast, also one of another bucket in the same buffer
    (``needs_casts``), all are views of copies, so that the buffer can be freed.
    """
    bucket, starts, fsdp_params = part.bucket, part.bucket.starts, part.fsdp_params
    # A plugin's `allocate` may return another dtype
    needs_casts |= bucket.needs_casts or shard.dtype != bucket.dtype
    part.is_viewed = not needs_casts
    record_grad_output_stream(shard, part.consumer_stream)
    for dtype, indices in bucket.runs:
        flat, start = shard, starts[indices[0]]
        if len(bucket.runs) > 1:
            flat = shard[start : starts[indices[-1] + 1]]
        if needs_casts:
            flat = flat.to(dtype, copy=True)
            record_grad_output_stream(flat, part.consumer_stream)
        base = flat.storage_offset() - start
        rest: list[tuple[FSDPParam, Tensor]] = []
        # Else each access looks for an override in DTensor: 2 % of a unit's host time
        with torch._C.DisableTorchFunctionSubclass():
            for i in indices:
                fsdp_param = fsdp_params[i]
                param = fsdp_param.sharded_param
                size = fsdp_param.sharded_size
                stride = fsdp_param.contiguous_sharded_stride
                sharded_grad = flat.as_strided(size, stride, base + starts[i])
                is_plain = param.grad is None and not param._post_accumulate_grad_hooks
                if is_plain and not rest and not fsdp_param.offload_to_cpu:
                    param.grad = _as_dtensor(fsdp_param, sharded_grad)
                else:  # in order, as hooks may look at the gradients before theirs
                    rest.append((fsdp_param, sharded_grad))
        part.is_viewed &= not rest
        for fsdp_param, sharded_grad in rest:
            accumulate_sharded_grad(fsdp_param, sharded_grad, stream)


def _as_dtensor(fsdp_param: FSDPParam, sharded_grad: Tensor) -> DTensor:
    spec, dtype = fsdp_param._sharding_spec, sharded_grad.dtype
    if dtype != fsdp_param.orig_dtype:
        meta = cast(TensorMeta, spec.tensor_meta)._replace(dtype=dtype)
        spec = replace(spec, tensor_meta=meta)
    # No `__init__`: it only looks for Dynamo, 5 % of a unit's host time
    return DTensor.__new__(DTensor, sharded_grad, spec, requires_grad=False)


def accumulate_sharded_grad(
    fsdp_param: FSDPParam, sharded_grad: Tensor, stream: torch.Stream
) -> None:
    """Offloads a sharded gradient, adds it to the present one, and runs hooks."""
    sharded_param: Any = fsdp_param.sharded_param
    hooks, present = sharded_param._post_accumulate_grad_hooks, sharded_param.grad
    if fsdp_param.offload_to_cpu:
        # A CPU addition or a hook would read the gradient before it has been copied
        overlaps = fsdp_param.pin_memory and present is None and not hooks
        sharded_grad = sharded_grad.to("cpu", non_blocking=overlaps)
        if overlaps:
            fsdp_param.grad_offload_event = stream.record_event()
    if present is None:
        sharded_param.grad = _as_dtensor(fsdp_param, sharded_grad)
    elif isinstance(present, DTensor):
        stored = sharded_param._local_tensor.dtype
        if sharded_param.dtype != stored:  # only its `data` was cast
            fault = f"is {sharded_param.dtype} now, but its shard is {stored}"
            fix = "cast a model before its first forward"
            raise RuntimeError(f"{fsdp_param._param_fqn} {fault}: {fix}")
        present._local_tensor += sharded_grad
    else:
        fault = f"The gradient of {fsdp_param._param_fqn} is a {type(present).__name__}"
        fix = "set the gradient of a sharded parameter to a DTensor like it, or to None"
        raise AssertionError(f"{fault}: {fix}")
    for hook in [*hooks.values()] if hooks else ():
        hook(sharded_param)
