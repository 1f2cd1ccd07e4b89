"""Copies of shards into a gather's buffer, and out of it into unsharded parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _fsdp_layout as layouts
from ._fsdp_direct import split
from ._fsdp_layout import CopyPlan, GatherLayout
from ._fsdp_observers import gets_operators
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_param_cache import Columns, GatherOutputs, GatherPlan


def fill_segment(
    output: Tensor, plan: GatherPlan, tensors: Sequence[Tensor], rank: int
) -> Tensor:
    """Writes this rank's shards into its segment of a gather's buffer. Returns that."""
    if plan.layout.slots and gets_operators(output.device):
        return _fill_by_operator(output, plan, tensors, rank)
    numel = plan.layout.segment_numel
    segment = output[rank * numel : (rank + 1) * numel]
    _copy_in(segment, plan.copies, tensors)
    return segment


def _fill_by_operator(
    output: Tensor, plan: GatherPlan, tensors: Sequence[Tensor], rank: int
) -> Tensor:
    """Calls the operator, which neither casts nor moves."""
    layout, numel = plan.layout, plan.layout.segment_numel
    if any(copy.casts for copy in plan.copies) or _are_on_host(tensors, output.device):
        filled = output.new_empty(numel)
        _copy_in(filled, plan.copies, tensors)
        inputs = [*filled.split(layout.split_sizes)]
    else:
        inputs = [
            output.new_zeros(n) if i is None else tensors[i] for i, n in layout.slots
        ]
        inputs = _view_as(layout.buffer_dtype, inputs)
    args = inputs, output, layout.split_sizes, numel, rank
    return torch.ops.fsdp.all_gather_copy_in(*args)[0]


def _copy_in(
    segment: Tensor, copies: Sequence[CopyPlan], tensors: Sequence[Tensor]
) -> None:
    """Fills this rank's segment in one pass, which also casts."""
    for region, casts, num_viewed in copies:
        target, slots = region.view(segment), region.slots
        sources = [target.new_empty(n) if i is None else tensors[i] for i, n in slots]
        if num_viewed:
            sources[:num_viewed] = _view_as(region.dtype, sources[:num_viewed])
        if not casts and not _are_on_host(sources, segment.device):
            torch.cat(sources, out=target)  # needs no view of each slot
            continue
        targets = target.split([numel for _, numel in slots])
        for group in casts or [[k for k, (i, _) in enumerate(slots) if i is not None]]:
            _copy_group([targets[k] for k in group], [sources[k] for k in group])


def stage_direct(
    plan: GatherPlan, tensors: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """Returns the pieces of direct shards as they are sent, moved and cast."""
    sent = [tensors[position] for _, position in plan.direct]
    moved = [*range(len(sent))] if _are_on_host(sent, device) else plan.direct_casts
    shards = [sent[k] for k in moved]
    for k, shard in zip(moved, shards):
        (dtype,) = plan.dtypes[plan.direct[k][0]]
        sent[k] = torch.empty(shard.numel(), dtype=dtype, device=device)
    copy_each([sent[k] for k in moved], shards)
    return split([*map(Tensor.contiguous, sent)], plan.direct_pieces)


def _view_as(dtype: torch.dtype, shards: Sequence[Tensor]) -> list[Tensor]:
    try:
        return [shard.view(dtype) for shard in shards]
    except RuntimeError:  # one is not dense, loaded with `assign=True`
        dense = torch.contiguous_format
        return [shard.clone(memory_format=dense).view(dtype) for shard in shards]


def _copy_group(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies tensors of one dtype to tensors of one dtype, to another device as well."""
    device = targets[0].device
    if not _are_on_host(sources, device):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        if target.dtype != source.dtype:
            # A copy that also casts would go through one more temporary. Moved one at
            # a time, so that only one is on the device uncast.
            source = source.to(device, non_blocking=True)
        target.copy_(source, non_blocking=True)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors of any dtypes, those of each pair of dtypes at once."""
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list, list]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.dtype == source.dtype and source.itemsize == 1:
            # Not all of these have the kernel, see `storage_dtype`
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        group = groups.setdefault((target.dtype, source.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        _copy_group(*group)


def _are_on_host(sources: Sequence[Tensor], device: torch.device) -> bool:
    """Whether any are offloaded, so that a copy to ``device`` moves them."""
    return device.type != "cpu" and any(tensor.is_cpu for tensor in sources)


def copy_out(
    state: ShardedState,
    buffer: Tensor,
    layout: GatherLayout,
    outputs: GatherOutputs,
    world_size: int,
) -> None:
    """Writes the all-gather outputs of parameters that were gathered in ``state``."""
    if not layout.slots:
        return
    columns = outputs.columns.get(state)
    if columns is None or columns.layout is not layout:
        columns = _make_columns(state, layout, outputs, world_size)
    # The fused kernel takes dense tensors only: the buffer as a whole
    rows = buffer.view(layout.buffer_dtype).view(world_size, layout.segment_numel)
    ops = torch.ops.fsdp if gets_operators(buffer.device) else torch
    ops.split_with_sizes_copy(rows, columns.sizes, dim=1, out=columns.tensors)
    for fsdp_param, rank_major, output in columns.reordered:
        shards = rank_major.view(world_size, *fsdp_param.padded_sharded_param_size)
        shards = shards.movedim(0, fsdp_param.fsdp_placement.dim)
        output.data.view(shards.size()).copy_(shards)  # see `_make_columns`


def _make_columns(
    state: ShardedState, layout: GatherLayout, outputs: GatherOutputs, world_size: int
) -> Columns:
    """
    Views the pieces of outputs, and for padding tensors that nothing reads, as columns
    of a buffer with a row for each rank. They do not share the outputs' version: to
    autograd an unshard, which writes the same values, must not change what was saved.
    """
    tensors: list[Tensor] = []
    reordered: list[tuple[FSDPParam, Tensor, Tensor]] = []
    dtype = layout.buffer_dtype
    for i, size in layout.slots:
        if i is None:
            tensors.append(outputs.tensors[0].new_empty(world_size, size, dtype=dtype))
            continue
        fsdp_param, output, count = outputs.owners[i], outputs.tensors[i], 1
        if state is ShardedState.SHARDED:  # else flat, in order whatever the dim
            count = layouts.count_pieces(fsdp_param, output.dtype)
        if not count:
            temporary, count = torch.empty_like(output), 1
            reordered.append((fsdp_param, temporary, output))
            output = temporary
        pieces = output.data.view(dtype).view(count, world_size, size // count)
        tensors += pieces.unbind()
    columns = Columns(layout, tensors, [t.size(1) for t in tensors], reordered)
    if not reordered:  # temporaries are not kept
        outputs.columns[state] = columns
    return columns
