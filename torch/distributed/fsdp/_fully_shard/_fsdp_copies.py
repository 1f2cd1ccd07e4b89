"""
The copies between a unit's tensors and its flat buffers: shards into a gather's buffer
and parameters out of it, gradients into a reduction's input and sharded gradients out
of its output. No collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from ._fsdp_comms import (
    chunk_cat_by_operator,
    copies_mixed,
    record_grad_output_stream,
)
from ._fsdp_layout import (
    GatherLayout,
    in_plan_order,
    moves_between,
    ReduceBucket,
    RegionCopy,
)
from ._fsdp_observers import gets_operators
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_unit import GatherOutputs, GatherPlan, UnitParams


_is_cpu = attrgetter("is_cpu")


# Shards into a gather's buffer, parameters out of it #


def fill_segment(
    output: torch.Tensor,
    plan: GatherPlan,
    tensors: Sequence[torch.Tensor],
    rank: int,
) -> torch.Tensor:
    """Writes this rank's shards into its segment of a gather's buffer. Returns that."""
    if gets_operators(output.device):
        return _copy_in_by_operator(output, plan, tensors, rank)
    numel = plan.layout.segment_numel
    segment = output[rank * numel : (rank + 1) * numel]
    _copy_in(segment, plan.copies, tensors)
    return segment


def _copy_in(
    segment: torch.Tensor,
    copies: Sequence[RegionCopy],
    inputs: Sequence[torch.Tensor],
) -> None:
    """Writes this rank's shards into its segment in one pass, which casts them too."""
    for copy in copies:
        target, sources = copy.region.view(segment), _sources(copy, inputs)
        if copy.casts or _are_on_host(sources, segment.device):
            _copy_groups(target.split(copy.region.numels), sources, copy.casts)
        else:
            # Needs no view of each slot
            torch.cat(sources, out=target)


def _sources(copy: RegionCopy, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the shards of a region, viewed in its dtype if none is cast."""
    sources, dtype = [inputs[i] for i in copy.region.inputs], copy.region.dtype
    # Shards that are not cast are sorted by dtype
    if copy.casts or sources[0].dtype == sources[-1].dtype == dtype:
        return sources
    return [s if s.dtype == dtype else _view_as(s, dtype) for s in sources]


def _view_as(shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if shard.stride(0) != 1:  # loaded with `assign=True`
        shard = shard.clone(memory_format=torch.contiguous_format)
    return shard.view(dtype)


def _copy_groups(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    groups: Iterable[Sequence[int]],
) -> None:
    """Copies tensors to others, moved and cast. Each group is of one pair of dtypes."""
    device = targets[0].device
    if _are_on_host(sources, device):
        # Moved before they are cast, because a copy that does both goes through one
        # more temporary. One at a time, so that only one is on the device uncast.
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.to(device, non_blocking=True))
        return
    for group in groups:
        torch._foreach_copy_([targets[k] for k in group], [sources[k] for k in group])


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies tensors to others, moved and cast, those of a pair of dtypes at once."""
    targets, sources = [*targets], [*sources]
    groups: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        dtype = target.dtype
        if dtype == source.dtype and dtype.itemsize == 1:  # see `storage_dtype`
            targets[i], sources[i] = target.view(torch.uint8), source.view(torch.uint8)
        groups.setdefault((dtype, source.dtype), []).append(i)
    _copy_groups(targets, sources, groups.values())


def _are_on_host(sources: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether any are offloaded, so that a copy to ``device`` moves them."""
    return device.type != "cpu" and any(map(_is_cpu, sources))


def _copy_in_by_operator(
    output: torch.Tensor,
    plan: GatherPlan,
    tensors: Sequence[torch.Tensor],
    rank: int,
) -> torch.Tensor:
    """Does as :func:`_copy_in` by the operator, which neither casts nor moves."""
    layout, inputs = plan.layout, []
    for copy in plan.copies:
        region, sources = copy.region, _sources(copy, tensors)
        if copy.casts or _are_on_host(sources, output.device):
            flat = output.new_empty(region.numel, dtype=region.dtype)
            pieces = flat.split(region.numels)
            _copy_groups(pieces, sources, copy.casts)
            sources = pieces
        inputs += [_view_as(source, layout.buffer_dtype) for source in sources]
    if layout.padding_nbytes:
        inputs.append(output.new_zeros(layout.split_sizes[-1]))
    segment, _ = torch.ops.fsdp.all_gather_copy_in(
        inputs, output, [*layout.split_sizes], layout.segment_numel, rank
    )
    return segment


def alloc_outputs(
    unit: UnitParams,
    dtypes: list[list[torch.dtype]],
    numels: list[list[int]],
    world_size: int,
    device: torch.device,
) -> GatherOutputs:
    """Makes the all-gather outputs, or gives them their storage back."""
    if (kept := unit.outputs) is not None:
        kept.alloc()
        return kept
    for fsdp_param, param_dtypes, param_numels in zip(
        unit, dtypes, numels, strict=True
    ):
        fsdp_param.init_all_gather_outputs(
            param_numels, param_dtypes, world_size, device
        )
        fsdp_param.alloc_all_gather_outputs()
    outputs = GatherOutputs(unit)
    unit.keep_outputs(outputs)
    return outputs


def copy_out(
    unit: UnitParams,
    buffer: torch.Tensor,
    layout: GatherLayout,
    outputs: GatherOutputs,
    world_size: int,
) -> None:
    """Writes a unit's all-gather outputs from a gather's buffer."""
    if (columns := unit.columns(layout, outputs)) is not None:
        _split_copy(buffer, layout, columns)
        return
    targets: list[torch.Tensor] = []
    interleaved: list[tuple[FSDPParam, torch.Tensor, torch.Tensor]] = []
    for fsdp_param in unit:
        for output in fsdp_param.all_gather_outputs:
            target = output
            if _gathers_out_of_order(fsdp_param):
                target = torch.empty_like(output)
                interleaved.append((fsdp_param, target, output))
            targets.append(target)
    columns = _to_columns(targets, layout, world_size)
    _split_copy(buffer, layout, columns)
    for fsdp_param, rank_major, output in interleaved:
        _interleave_shards(fsdp_param, rank_major, output, world_size)
    if not interleaved:
        unit.keep_columns(layout, outputs, columns)


def _gathers_out_of_order(fsdp_param: FSDPParam) -> bool:
    """
    Whether the ranks' shards one after the other are not the parameter yet. Resharded
    after forward they are: flat pieces of it, whatever the dim.
    """
    return (
        fsdp_param.fsdp_placement.dim != 0
        and fsdp_param.sharded_state == ShardedState.SHARDED
    )


def _to_columns(
    outputs: Sequence[torch.Tensor], layout: GatherLayout, world_size: int
) -> list[torch.Tensor]:
    """
    Views the outputs, in segment order, as columns of a gather buffer of one
    row a rank, and in its dtype. The padding gets a tensor that nothing reads.

    The views do not share the outputs' version: each unshard writes the same values, so
    that for autograd it must not count as an in-place change of what was saved.
    """
    sizes = layout.split_sizes
    columns = [
        outputs[i].data.view(layout.buffer_dtype).view(world_size, size)
        for i, size in zip(layout.order, sizes)
    ]
    if layout.padding_nbytes:
        columns.append(columns[0].new_empty(world_size, sizes[-1]))
    return columns


def _split_copy(
    buffer: torch.Tensor, layout: GatherLayout, columns: list[torch.Tensor]
) -> None:
    """Copies a gather buffer as a whole: the fused kernel takes dense tensors only."""
    world_size = columns[0].size(0)
    if buffer.dtype != layout.buffer_dtype:
        buffer = buffer.view(layout.buffer_dtype)
    rows = buffer.view(world_size, layout.segment_numel)
    if gets_operators(buffer.device):
        torch.ops.fsdp.split_with_sizes_copy(
            rows, [*layout.split_sizes], dim=1, out=columns
        )
    else:
        torch.split_with_sizes_copy(rows, layout.split_sizes, dim=1, out=columns)


def _interleave_shards(
    fsdp_param: FSDPParam,
    rank_major: torch.Tensor,
    output: torch.Tensor,
    world_size: int,
) -> None:
    """Puts shards on another dim than 0, which lie rank by rank, side by side."""
    dim = fsdp_param.fsdp_placement.dim
    shard_size = fsdp_param.padded_sharded_param_size
    before, after = shard_size[:dim], shard_size[dim:]
    by_rank = rank_major.view(world_size, *shard_size)
    target = output.data.view(*before, world_size, *after)  # see `_to_columns`
    target.copy_(by_rank.movedim(0, dim))


# Gradients into the input of a reduction #


def copy_in_grads(
    bucket: ReduceBucket,
    dims: Sequence[int],
    grads: list[torch.Tensor],
    reduce_input: torch.Tensor,
    world_size: int,
) -> None:
    """
    Copies gradients of any dtypes, sharded on ``dims``, to their columns of
    ``reduce_input``, which has one row for each rank.

    [Note: One kernel for most gradients]
    The fused kernel takes dense tensors of one dtype and fills all columns of a dense
    output. One mismatched tensor, of another dtype or not dense, would send all of them
    down its slow path. So it is given the gradients that match the largest, and in
    place of each mismatched one a piece of the largest, whose columns are written again
    afterwards. The kernel casts, so only mismatched gradients need a temporary. Since
    2.15 an operator takes bf16 and fp32 together on CUDA, see :func:`copies_mixed`.
    """
    is_dense = [dim == 0 and grad.is_contiguous() for dim, grad in zip(dims, grads)]
    dtypes = [grad.dtype for grad in grads]
    if all(is_dense):
        if dtypes.count(dtypes[0]) == len(dtypes):
            foreach_reduce_scatter_copy_in(grads, reduce_input, world_size)
            return
        if copies_mixed({*dtypes, reduce_input.dtype}, reduce_input.device):
            rows = reduce_input.view(world_size, -1)
            chunk_cat_by_operator(grads, 0, world_size, out=rows)
            return
    dense = [grad for grad, is_one in zip(grads, is_dense) if is_one]
    largest = max(dense, key=torch.Tensor.numel, default=None)
    mismatched = [
        i
        for i, (dtype, is_one) in enumerate(zip(dtypes, is_dense))
        if largest is None or not is_one or dtype != largest.dtype
    ]
    slots = bucket.slots
    # The least that fills as many columns, with the kernel's padding
    numels = {
        i: max(world_size * (slots[i].shard_numel - 1) + 1, 0) for i in mismatched
    }
    if largest is not None and max(numels.values()) <= largest.numel():
        flat = largest.view(-1)
        like = [flat[: numels[i]] if i in numels else g for i, g in enumerate(grads)]
        foreach_reduce_scatter_copy_in(like, reduce_input, world_size)
        runs = _adjacent(mismatched, grads, is_dense)
    else:
        runs = [[i] for i in range(len(grads))]
    rows = reduce_input.view(world_size, -1)
    for run in runs:
        numel = sum(slots[i].shard_numel for i in run)
        columns = rows.narrow(1, bucket.starts[run[0]], numel)
        _copy_to_columns(columns, [grads[i] for i in run], dims[run[0]])


def _adjacent(
    indices: Iterable[int], grads: Sequence[torch.Tensor], is_dense: Sequence[bool]
) -> list[list[int]]:
    """Returns runs that the kernel can copy together: adjacent, dense, of one dtype."""

    def run_of(numbered: tuple[int, int]) -> object:
        number, i = numbered
        return (i - number, grads[i].dtype) if is_dense[i] else i

    return [[i for _, i in run] for _, run in groupby(enumerate(indices), run_of)]


def _copy_to_columns(
    columns: torch.Tensor, grads: list[torch.Tensor], dim: int
) -> None:
    """
    Copies a gradient that is sharded on ``dim``, or several on dim 0 and of one
    dtype, to their columns of the rows of all ranks.
    """
    world_size, row_numel = columns.size()
    if len(grads) == 1 and (dim != 0 or grads[0].size(0) % world_size == 0):
        by_rank = view_by_rank(grads[0], dim, world_size)
        _check_row(by_rank[0].numel(), row_numel)
        columns.unflatten(1, by_rank.size()[1:]).copy_(by_rank)
    else:
        rows = grads[0].new_empty(columns.size())
        grads = [grad.contiguous() for grad in grads]
        foreach_reduce_scatter_copy_in(grads, rows.view(-1), world_size)
        columns.copy_(rows)


def view_by_rank(grad: torch.Tensor, dim: int, world_size: int) -> torch.Tensor:
    """Views a gradient sharded on ``dim`` with the rank as its leading dim."""
    if grad.size(dim) % world_size != 0:
        raise AssertionError(
            f"Shard({dim}) requires even sharding: the gradient's size "
            f"{tuple(grad.size())} does not divide by {world_size} ranks on that dim"
        )
    sizes = (world_size, grad.size(dim) // world_size)
    return grad.unflatten(dim, sizes).movedim(dim, 0)


def foreach_reduce_scatter_copy_in(
    unsharded_grads: list[torch.Tensor],
    reduce_scatter_input: torch.Tensor,
    world_size: int,
) -> None:
    """Fills the rows of ``reduce_scatter_input`` (1D), one for each rank."""
    row_numel = reduce_scatter_input.numel() // world_size
    rows = reduce_scatter_input.view(world_size, row_numel)
    if gets_operators(rows.device):
        chunk_cat_by_operator(unsharded_grads, 0, world_size, out=rows)
    else:
        torch._chunk_cat(unsharded_grads, 0, world_size, out=rows)
    _check_row(rows.size(1), row_numel)  # the kernel may have resized them


def _check_row(numel: int, expected_numel: int) -> None:
    if numel != expected_numel:
        raise RuntimeError(
            f"the gradients of a rank have {numel} elements with their padding, "
            f"but {expected_numel} are to be reduced"
        )


def copy_between(
    source_bucket: ReduceBucket,
    source: torch.Tensor,
    target_bucket: ReduceBucket,
    target: torch.Tensor,
    factor: float = 1.0,
) -> None:
    """
    Copies the parameters that both buckets hold from a rank's 1D shard of the one to
    that of the other, cast to its dtype and multiplied by ``factor``.
    """
    for start, target_start, numel in moves_between(source_bucket, target_bucket):
        piece = target.narrow(0, target_start, numel)
        piece.copy_(source.narrow(0, start, numel))
        if factor != 1.0:
            piece.mul_(factor)


def in_common_order(
    fsdp_params: list[FSDPParam], bucket: ReduceBucket, output: torch.Tensor
) -> tuple[list[FSDPParam], ReduceBucket, torch.Tensor]:
    """
    Lays ``output`` out as planned, because which microbatch had which gradients, and so
    the order of slots, may differ between replicas, whose elements must line up.
    """
    common = in_plan_order(bucket)
    if common is bucket:
        return fsdp_params, bucket, output
    of_slot = dict(zip((slot.param for slot in bucket.slots), fsdp_params))
    in_order = torch.empty_like(output)
    copy_between(bucket, output, common, in_order)
    return [of_slot[slot.param] for slot in common.slots], common, in_order


# Sharded gradients out of its output #


_new_dtensor = DTensor.__new__


def give_sharded_grads(
    fsdp_params: list[FSDPParam],
    bucket: ReduceBucket,
    output: torch.Tensor,
    stream: torch.Stream,
    reading_stream: torch.Stream,
) -> None:
    """
    Casts a rank's shard of the reduced bucket to the gradients' dtypes, one copy for
    each, and makes each parameter's piece of it the parameter's sharded gradient.
    """
    starts = bucket.starts
    record_grad_output_stream(output, reading_stream)
    for run in bucket.runs:
        flat = output
        if len(bucket.runs) > 1:
            flat = output[run.start_numel : run.start_numel + run.numel]
        # One of several runs is copied even if it needs no cast: as a view it would
        # keep the whole bucket alive
        dtype = run.grad_dtype
        if dtype != flat.dtype or len(bucket.runs) > 1:
            flat = flat.to(dtype, copy=True)
            record_grad_output_stream(flat, reading_stream)
        base = flat.storage_offset() - run.start_numel
        for i in range(run.first, run.last):
            fsdp_param = fsdp_params[i]
            sharded_grad = flat.as_strided(
                fsdp_param.sharded_size,
                fsdp_param.contiguous_sharded_stride,
                base + starts[i],
            )
            sharded_param = fsdp_param.sharded_param
            if (
                sharded_param.grad is None
                and not fsdp_param.offload_to_cpu
                and not sharded_param._post_accumulate_grad_hooks
            ):
                sharded_param.grad = _as_dtensor(fsdp_param, sharded_grad, dtype)
            else:
                _accumulate_sharded_grad(fsdp_param, sharded_grad, stream)


def _as_dtensor(
    fsdp_param: FSDPParam, sharded_grad: torch.Tensor, dtype: torch.dtype
) -> DTensor:
    # Skips the size check of the parameter's own method, and an empty `__init__`
    spec = fsdp_param._sharding_spec
    if dtype != fsdp_param.orig_dtype:
        meta = cast(TensorMeta, spec.tensor_meta)
        spec = replace(spec, tensor_meta=meta._replace(dtype=dtype))
    return _new_dtensor(DTensor, sharded_grad, spec, requires_grad=False)


def _accumulate_sharded_grad(
    fsdp_param: FSDPParam, sharded_grad: torch.Tensor, stream: torch.Stream
) -> None:
    """
    Makes ``sharded_grad`` the parameter's gradient, or adds it to the one that
    is there, and runs the parameter's post-accumulate-grad hooks.
    """
    sharded_param = fsdp_param.sharded_param
    hooks = sharded_param._post_accumulate_grad_hooks
    present = sharded_param.grad
    if fsdp_param.offload_to_cpu:
        # An addition on the CPU and a hook read the gradient at once, so its copy to
        # the host may be in flight only without either
        overlaps = fsdp_param.pin_memory and present is None and not hooks
        sharded_grad = sharded_grad.to(torch.device("cpu"), non_blocking=overlaps)
        if overlaps:
            fsdp_param.grad_offload_event = stream.record_event()
    if present is None:
        dtype = sharded_grad.dtype
        sharded_param.grad = _as_dtensor(fsdp_param, sharded_grad, dtype)
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
    if hooks:
        for hook in [*hooks.values()]:
            hook(sharded_param)
