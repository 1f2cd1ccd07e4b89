"""The copies between a unit's tensors and its flat buffers. No collectives."""

# Tests: reduce, layout, gather
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from ._fsdp_layout import GatherLayout, GatherRegion, in_plan_order, ReduceBucket
from ._fsdp_observers import gets_operators
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_param_cache import GatherOutputs, GatherPlan
from ._fsdp_releases import FOLLOWS_GRAD_DTYPE, HAS_MIXED_CHUNK_CAT


_is_cpu = attrgetter("is_cpu")
_new_dtensor = DTensor.__new__


# Shards into a gather's buffer, parameters out of it #


def fill_segment(
    output: Tensor, plan: GatherPlan, tensors: Sequence[Tensor], rank: int
) -> Tensor:
    """Writes this rank's shards into its segment of a gather's buffer. Returns that."""
    layout, numel = plan.layout, plan.layout.segment_numel
    if not gets_operators(output.device):
        segment = output[rank * numel : (rank + 1) * numel]
        _copy_in(segment, plan.copies, tensors)
        return segment
    # The operator neither casts nor moves
    has_casts = any(region.casts for region in plan.copies)
    if has_casts or _are_on_host(tensors, output.device):
        filled = output.new_empty(numel)
        _copy_in(filled, plan.copies, tensors)
        inputs = [*filled.split(layout.split_sizes)]
    else:
        own = _viewed(tensors, layout.buffer_dtype)
        inputs = [
            output.new_zeros(size) if i is None else own[i] for i, size in layout.slots
        ]
    sizes = [*layout.split_sizes]
    return torch.ops.fsdp.all_gather_copy_in(inputs, output, sizes, numel, rank)[0]


def _copy_in(
    segment: Tensor, regions: Sequence[GatherRegion], tensors: Sequence[Tensor]
) -> None:
    """Fills this rank's segment in one pass, which also casts."""
    for region in regions:
        sources, target = [tensors[i] for i in region.inputs], region.view(segment)
        if viewed := region.viewed:
            sources[:viewed] = _viewed(sources[:viewed], region.dtype)
        if region.casts or _are_on_host(sources, segment.device):
            targets = [*target.split(region.sizes)]
            for k, _ in reversed(region.gaps):
                del targets[k]
            _copy_groups(targets, sources, region.casts)
            continue
        for k, numel in region.gaps:
            sources.insert(k, target.new_empty(numel))
        torch.cat(sources, out=target)  # needs no view of each slot


def _viewed(shards: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    try:
        return [shard.view(dtype) for shard in shards]
    except RuntimeError:  # one is not dense, loaded with `assign=True`
        dense = torch.contiguous_format
        return [shard.clone(memory_format=dense).view(dtype) for shard in shards]


def _copy_groups(
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    groups: Iterable[Sequence[int]],
) -> None:
    """Copies tensors to others, moved and cast. Each group is of one pair of dtypes."""
    device = targets[0].device
    if _are_on_host(sources, device):
        for target, source in zip(targets, sources, strict=True):
            if target.dtype != source.dtype:
                # A copy that also casts would go through one more temporary. Moved one
                # at a time, so that only one is on the device uncast.
                source = source.to(device, non_blocking=True)
            target.copy_(source, non_blocking=True)
        return
    for group in groups:
        torch._foreach_copy_([targets[k] for k in group], [sources[k] for k in group])


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors to others, moved and cast, those of a pair of dtypes at once."""
    targets, sources = [*targets], [*sources]
    groups: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        dtype = target.dtype
        if dtype == source.dtype and dtype.itemsize == 1:  # see `storage_dtype`
            targets[i], sources[i] = target.view(torch.uint8), source.view(torch.uint8)
        groups.setdefault((dtype, source.dtype), []).append(i)
    _copy_groups(targets, sources, groups.values())


def _are_on_host(sources: Sequence[Tensor], device: torch.device) -> bool:
    """Whether any are offloaded, so that a copy to ``device`` moves them."""
    return device.type != "cpu" and any(map(_is_cpu, sources))


def copy_out(
    fsdp_params: Sequence[FSDPParam],
    state: ShardedState,
    buffer: Tensor,
    layout: GatherLayout,
    outputs: GatherOutputs,
    world_size: int,
) -> None:
    """Writes the all-gather outputs of parameters that were gathered in ``state``."""
    last_layout, columns = outputs.columns.get(state, (None, []))
    interleaved: list[tuple[FSDPParam, Tensor, Tensor]] = []
    if last_layout is not layout:
        targets: list[Tensor] = []
        for fsdp_param in fsdp_params:
            for output in fsdp_param.all_gather_outputs:
                targets.append(output)
                # Flat pieces, as after forward, lie in order whatever the dim
                if fsdp_param.fsdp_placement.dim and state == ShardedState.SHARDED:
                    targets[-1] = torch.empty_like(output)
                    interleaved.append((fsdp_param, targets[-1], output))
        columns = _to_columns(targets, layout, world_size)
        if not interleaved:
            outputs.columns[state] = layout, columns
    _split_copy(buffer, layout, columns)
    for fsdp_param, rank_major, output in interleaved:
        shards = rank_major.view(world_size, *fsdp_param.padded_sharded_param_size)
        shards = shards.movedim(0, fsdp_param.fsdp_placement.dim)
        output.data.view(shards.size()).copy_(shards)  # see `_to_columns`


def _to_columns(
    outputs: Sequence[Tensor], layout: GatherLayout, world_size: int
) -> list[Tensor]:
    """
    Views the outputs, and for padding tensors that nothing reads, as columns of a
    buffer with a row for each rank. They do not share the outputs' version: to autograd
    an unshard, which writes the same values, must not change what was saved.
    """
    dtype = layout.buffer_dtype
    return [
        outputs[0].new_empty(world_size, size, dtype=dtype)
        if i is None
        else outputs[i].data.view(dtype).view(world_size, size)
        for i, size in layout.slots
    ]


def _split_copy(buffer: Tensor, layout: GatherLayout, columns: list[Tensor]) -> None:
    """Copies a gather buffer as a whole: the fused kernel takes dense tensors only."""
    world_size = columns[0].size(0)
    if buffer.dtype != layout.buffer_dtype:
        buffer = buffer.view(layout.buffer_dtype)
    rows = buffer.view(world_size, layout.segment_numel)
    copy, sizes = torch.split_with_sizes_copy, [*layout.split_sizes]
    if gets_operators(buffer.device):
        copy = torch.ops.fsdp.split_with_sizes_copy
    copy(rows, sizes, dim=1, out=columns)


# Gradients into the input of a reduction #


def columns_of(buffer: Tensor, layout: GatherLayout, world_size: int) -> list[Tensor]:
    """Views the inputs of ``layout`` in a buffer, each with one row for each rank."""
    rows = buffer.view(world_size, layout.segment_numel)
    if len(layout.slots) == 1:
        return [rows]
    rest = iter(rows.split([*layout.split_sizes], dim=1))
    columns: dict[int | None, Tensor] = {}
    for region in layout.regions:
        for (i, _), column in zip(region.slots, rest):
            columns[i] = column.view(region.dtype)
    return [columns[i] for i in range(len(columns) - (None in columns))]


def copy_in_buckets(
    layout: GatherLayout,
    buckets: Sequence[ReduceBucket],
    grads: Sequence[list[Tensor]],
    buffer: Tensor,
    world_size: int,
) -> None:
    """
    Copies the gradients of several buckets, the inputs of ``layout``: all viewed in the
    narrowest dtype by one kernel, unless any is to be cast, or is not dense on dim 0.
    """
    dtype = layout.regions[-1].dtype
    tensors: list[Tensor] = []
    for i, size in layout.slots:
        if i is None:
            numel = size * layout.buffer_dtype.itemsize // dtype.itemsize
            tensors.append(buffer.new_zeros(1, numel, dtype=dtype))
            continue
        wire_dtype = buckets[i].wire_dtype
        if any(found != wire_dtype for found in _dense_dtypes(buckets[i], grads[i])):
            columns = columns_of(buffer, layout, world_size)
            for bucket, own_grads, rows in zip(buckets, grads, columns):
                copy_in_grads(bucket, own_grads, rows)
            return
        padded = with_padding(buckets[i], grads[i])
        if wire_dtype != dtype:
            padded = [grad.unsqueeze(-1).view(dtype) for grad in padded]
        tensors += padded
    foreach_reduce_scatter_copy_in(tensors, buffer.view(dtype), world_size)


def _dense_dtypes(
    bucket: ReduceBucket, grads: Sequence[Tensor]
) -> list[torch.dtype | None]:
    """Returns the gradients' dtypes, None for those that the kernel cannot chunk."""
    return [
        grad.dtype if slot.shard_dim == 0 and grad.is_contiguous() else None
        for slot, grad in zip(bucket.slots, grads)
    ]


def with_padding(bucket: ReduceBucket, grads: Sequence[Tensor]) -> list[Tensor]:
    """Adds a row of zeros for each padding in the bucket."""
    padded = [*grads]
    for run in reversed(bucket.runs):
        if run.padding and run.last <= len(grads):
            padded.insert(run.last, grads[0].new_zeros(1, run.padding))
    return padded


# The operator that the release calls, and the dtypes that it takes together on CUDA
_CHUNK_CAT = "chunk_cat_mixed_dtype" if HAS_MIXED_CHUNK_CAT else "chunk_cat"
_MIXED_ON_CUDA = {torch.bfloat16, torch.float32}
# Of gradients that are copied together through a temporary, in elements. Copying these
# once more takes a GPU as long as launching a kernel
_MAX_RUN_NUMEL = 2**20


def _casts_in_kernel(source: torch.dtype | None, target: torch.dtype) -> bool:
    """Whether ``_chunk_cat`` takes this pair in one kernel on CUDA."""
    return source == target or (source, target) == (torch.bfloat16, torch.float32)


def copy_in_grads(bucket: ReduceBucket, grads: list[Tensor], rows: Tensor) -> None:
    """
    Copies gradients of any dtypes, those of a bucket's first slots, to their columns of
    ``rows``, one for each rank.

    [Note: One kernel for most gradients]
    The fused kernel needs dense tensors of one dtype and fills all columns. It casts
    bf16 to fp32 only; another cast, or one mismatched tensor, would send all down its
    slow path. So it takes all gradients of the largest one's dtype. Mismatched ones
    have placeholders, slices of the largest one, and are copied to their columns
    afterwards. (Since 2.15 an operator takes bf16 and fp32 together on CUDA.) Rows of a
    larger buffer are not dense, so that all gradients are copied to them apart.
    """
    world_size, dtypes = rows.size(0), _dense_dtypes(bucket, grads)
    is_dense, first, device = rows.is_contiguous(), dtypes[0], rows.device
    # A uniform unit takes the release's memory and launches
    is_uniform = not bucket.is_mixed and bucket.comm_dtype is None
    is_same = first is not None and dtypes.count(first) == len(dtypes)
    fits = is_same and (
        is_uniform or _casts_in_kernel(first, rows.dtype) or gets_operators(device)
    )
    # The operator casts without a temporary, or as in the release
    mixes = (not fits and HAS_MIXED_CHUNK_CAT) and (
        (is_uniform and None not in dtypes)
        or (device.type == "cuda" and {*dtypes, rows.dtype} <= _MIXED_ON_CUDA)
    )
    if is_dense and (fits or mixes):
        _chunk_cat(with_padding(bucket, grads), rows, by_operator=not fits)
        return
    taken = [
        grad
        for grad, dtype in zip(grads, dtypes)
        if is_dense and _casts_in_kernel(dtype, rows.dtype)
    ]
    largest = max(taken, key=Tensor.numel, default=None)
    # The least that fills as many columns, with the kernel's padding
    numels = {
        i: max(world_size * (bucket.slots[i].shard_numel - 1) + 1, 0)
        for i, dtype in enumerate(dtypes)
        if largest is None or dtype != largest.dtype
    }
    mismatched: Iterable[int] = numels
    if largest is not None and max(numels.values()) <= largest.numel():
        like, flat = [*grads], largest.view(-1)
        for i, numel in numels.items():
            like[i] = flat[:numel]
        _chunk_cat(with_padding(bucket, like), rows)
    else:
        mismatched = range(len(grads))
        for run in bucket.runs:
            if run.padding and run.last <= len(grads):
                rows.narrow(1, run.start_numel + run.numel, run.padding).zero_()
    _copy_in_apart(bucket, grads, dtypes, rows, mismatched)


def _copy_in_apart(
    bucket: ReduceBucket,
    grads: list[Tensor],
    dtypes: Sequence[torch.dtype | None],
    rows: Tensor,
    indices: Iterable[int],
) -> None:
    """
    Copies some gradients to their columns: adjacent dense ones of one dtype are fused
    to a temporary, and cast from there by one copy, unless they are too large for that.
    """
    world_size, starts, slots = rows.size(0), bucket.starts, bucket.slots
    runs: list[list[int]] = []
    end = run_numel = 0  # of the last run, in a rank's shard and in all
    for i in indices:
        run_numel += grads[i].numel()
        is_next = runs and starts[i] == end and dtypes[i] == dtypes[runs[-1][0]]
        if not is_next or dtypes[i] is None or run_numel > _MAX_RUN_NUMEL:
            runs.append([])
            run_numel = grads[i].numel()
        runs[-1].append(i)
        end = starts[i] + slots[i].shard_numel
    for run in runs:
        first, numel = run[0], sum(slots[i].shard_numel for i in run)
        columns, dim = rows.narrow(1, starts[first], numel), slots[first].shard_dim
        if len(run) == 1 and (dim != 0 or grads[first].size(0) % world_size == 0):
            by_rank = view_by_rank(grads[first], dim, world_size)
            columns.unflatten(1, by_rank.size()[1:]).copy_(by_rank)
        else:
            temporary = grads[first].new_empty(columns.size())
            _chunk_cat([grads[i].contiguous() for i in run], temporary)
            columns.copy_(temporary)


def view_by_rank(grad: Tensor, dim: int, world_size: int) -> Tensor:
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
            f"the gradients of a rank have {rows.size(1)} elements with their padding, "
            f"but {row_numel} are to be reduced"
        )


@torch.no_grad()
def relaid(bucket: ReduceBucket, shard: Tensor, target_bucket: ReduceBucket) -> Tensor:
    """Lays a rank's 1D shard out as another bucket, zero where this has no slot."""
    if bucket.slots == target_bucket.slots:
        return shard
    target = shard.new_zeros(target_bucket.shard_numel)
    starts = {s.param: at for s, at in zip(bucket.slots, bucket.starts)}
    for slot, target_start in zip(target_bucket.slots, target_bucket.starts):
        if (start := starts.get(slot.param)) is not None:
            piece = shard.narrow(0, start, slot.shard_numel)
            target.narrow(0, target_start, slot.shard_numel).copy_(piece)
    return target


def in_common_order(
    fsdp_params: list[FSDPParam], bucket: ReduceBucket, output: Tensor
) -> tuple[list[FSDPParam], ReduceBucket, Tensor]:
    """
    Reorders ``output`` as planned: which microbatch had which gradients, and so the
    order of slots, may differ between replicas, whose elements must line up.
    """
    common = in_plan_order(bucket)
    of_slot = dict(zip((slot.param for slot in bucket.slots), fsdp_params))
    params = [of_slot[slot.param] for slot in common.slots]
    return params, common, relaid(bucket, output, common)


# Sharded gradients out of its output #


def record_grad_output_stream(buffer: Tensor, stream: torch.Stream) -> None:
    """Tells a vendor's kernel (2.15) which stream reads sharded gradients."""
    if FOLLOWS_GRAD_DTYPE and buffer.device.type != "cpu":
        torch.ops.fsdp.record_grad_output_stream(
            buffer, stream.stream_id, stream.device_index, stream.device_type
        )


def accumulate_sharded_grads(
    fsdp_params: list[FSDPParam],
    bucket: ReduceBucket,
    output: Tensor,
    stream: torch.Stream,
    reading_stream: torch.Stream,
    *,
    as_views: bool,
) -> None:
    """
    Accumulates a rank's shard of the reduced bucket in the sharded gradients: views of
    ``output``, or of one copy for each gradient dtype.
    """
    starts = bucket.starts
    record_grad_output_stream(output, reading_stream)
    for run in bucket.runs:
        flat, dtype = output, run.grad_dtype
        if len(bucket.runs) > 1:
            flat = output[run.start_numel : run.start_numel + run.numel]
        if not as_views:
            flat = flat.to(dtype, copy=True)
            record_grad_output_stream(flat, reading_stream)
        base = flat.storage_offset() - run.start_numel
        for i in range(run.first, run.last):
            fsdp_param = fsdp_params[i]
            size, stride = fsdp_param.sharded_size, fsdp_param.contiguous_sharded_stride
            sharded_grad = flat.as_strided(size, stride, base + starts[i])
            sharded_param = fsdp_param.sharded_param
            if (
                sharded_param.grad is None
                and not fsdp_param.offload_to_cpu
                and not sharded_param._post_accumulate_grad_hooks
            ):
                sharded_param.grad = _as_dtensor(fsdp_param, sharded_grad, dtype)
            else:
                accumulate_sharded_grad(fsdp_param, sharded_grad, stream)


def _as_dtensor(
    fsdp_param: FSDPParam, sharded_grad: Tensor, dtype: torch.dtype
) -> DTensor:
    # Skips the size check of the parameter's own method, and an empty `__init__`
    spec = fsdp_param._sharding_spec
    if dtype != fsdp_param.orig_dtype:
        # To make a spec takes longer than the gradient
        cached = vars(fsdp_param).setdefault("_spec_by_grad_dtype", {})
        of, cast_spec = cached.get(dtype, (None, None))
        if of is not spec:
            meta = cast(TensorMeta, spec.tensor_meta)._replace(dtype=dtype)
            cast_spec = replace(spec, tensor_meta=meta)
            cached[dtype] = spec, cast_spec
        spec = cast_spec
    return _new_dtensor(DTensor, sharded_grad, spec, requires_grad=False)


def accumulate_sharded_grad(
    fsdp_param: FSDPParam, sharded_grad: Tensor, stream: torch.Stream
) -> None:
    """Accumulates a sharded gradient and runs its post-accumulate-grad hooks."""
    sharded_param = fsdp_param.sharded_param
    hooks, present = sharded_param._post_accumulate_grad_hooks, sharded_param.grad
    if fsdp_param.offload_to_cpu:
        # An addition on the CPU and a hook read the gradient at once, so its copy to
        # the host may be in flight only without either
        overlaps = fsdp_param.pin_memory and present is None and not hooks
        sharded_grad = sharded_grad.to(torch.device("cpu"), non_blocking=overlaps)
        if overlaps:
            fsdp_param.grad_offload_event = stream.record_event()
    if present is None:
        sharded_param.grad = _as_dtensor(fsdp_param, sharded_grad, sharded_grad.dtype)
    elif isinstance(present, DTensor):
        stored = cast(DTensor, sharded_param)._local_tensor.dtype
        if sharded_param.dtype != stored:  # only its `data` was cast
            raise RuntimeError(
                f"{fsdp_param._param_fqn} is {sharded_param.dtype} now, but its shard "
                f"is {stored}: cast a model before its first forward, not between steps"
            )
        present._local_tensor += sharded_grad
    else:
        raise AssertionError(
            f"The gradient of {fsdp_param._param_fqn} must be a DTensor like its "
            f"sharded parameter, but it is a {type(present).__name__}: do not set "
            "the gradient of a sharded parameter to a plain tensor"
        )
    for hook in [*hooks.values()] if hooks else ():
        hook(sharded_param)
