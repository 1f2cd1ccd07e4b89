"""
Gathers a unit by one collective, with one copy before and one after it.

:mod:`_fsdp_layout` plans where things lie, :mod:`_fsdp_param_group` decides when they
move, :mod:`_fsdp_reduce` reduces gradients, and :mod:`_fsdp_comms` allocates the buffers
and issues the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.distributed_c10d import ReduceOp  # noqa: F401  (as released)
from torch.distributed.tensor import DTensor  # noqa: F401  (as in the release)

from . import _fsdp_layout as layouts
from ._fsdp_api import AllGather
from ._fsdp_comms import *  # noqa: F403  (as in the release)
from ._fsdp_comms import all_gather_coalesced, allocate
from ._fsdp_compat import (
    _get_all_gather_input_metadatas,
    _get_param_all_gather_inputs,
    check_uniform,
    fit_release,
    stage_inputs,
)
from ._fsdp_direct import split
from ._fsdp_layout import GatherLayout
from ._fsdp_observers import gets_operators
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_param_cache import (
    Columns,
    GatherInputs,
    GatherOutputs,
    ParamGroupCache,
    SplitSizes,
    view_as,
)
from ._fsdp_reduce import (  # noqa: F401  (as in the release)
    _default_reduce_scatter_input_fn,
    foreach_reduce_scatter_copy_in,
    record_grad_output_stream,
)
from ._fsdp_releases import RELEASE
from ._fsdp_scaling import _div_if_needed, _get_gradient_divide_factors  # noqa: F401


# Operators #
# Inductor rewrites graphs with these operators. An eager step calls them only where
# somebody may see or replace them, see [Note: Who observes], else their kernels.

lib = torch.library.Library("fsdp", "FRAGMENT")

for _schema in (
    "all_gather_copy_in(Tensor[] all_gather_inputs, Tensor all_gather_output, "
    "SymInt[] inp_split_sizes, SymInt all_gather_input_numel, SymInt rank) "
    "-> (Tensor, Tensor)",
    "split_with_sizes_copy(Tensor all_gather_output, "
    "SymInt[] all_gather_input_split_sizes, int dim=0, *, Tensor(a!)[] out) -> ()",
    "chunk_cat(Tensor[] tensors, int dim, int num_chunks, *, Tensor(a!) out) -> ()",
):
    lib.define(_schema)


def all_gather_copy_in_cuda(
    all_gather_inputs: list[Tensor],
    all_gather_output: Tensor,
    inp_split_sizes: list[int],
    all_gather_input_numel: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    start = rank * all_gather_input_numel
    segment = all_gather_output.narrow(0, start, all_gather_input_numel)
    with torch.no_grad():
        torch._foreach_copy_(segment.split(inp_split_sizes), all_gather_inputs)
    return segment, all_gather_output


all_gather_copy_in_meta = all_gather_copy_in_cuda  # meta tensors have no data to copy


def split_with_sizes_copy(
    all_gather_output: Tensor,
    all_gather_input_split_sizes: list[int],
    dim: int = 0,
    *,
    out: list[Tensor],
) -> None:
    sizes = all_gather_input_split_sizes
    torch.split_with_sizes_copy(all_gather_output, sizes, dim=dim, out=out)


def chunk_cat(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    torch._chunk_cat(tensors, dim, num_chunks, out=out)


for _key in ("CUDA", "XPU", "HPU", "CPU", "MTIA", "PrivateUse1", "Meta"):
    lib.impl("all_gather_copy_in", all_gather_copy_in_cuda, _key)
    lib.impl("split_with_sizes_copy", split_with_sizes_copy, _key)
    lib.impl("chunk_cat", chunk_cat, _key)
RELEASE.define_operators(lib)


# Unshard #


class AllGatherResult(NamedTuple):
    """An all-gather in flight. Owns the buffer until gather streams await copy-out."""

    all_gather_output: Tensor  # 1D
    all_gather_event: torch.Event | None
    all_gather_work: dist.distributed_c10d.Work | None
    # For each parameter, its inputs' dtypes, and their elements on one rank
    param_all_gather_input_dtypes: list[list[torch.dtype]]
    param_all_gather_input_numels: list[list[int]]
    # In elements of the output, in the order in which a segment holds them
    all_gather_input_split_sizes: list[int]


# Plugins may monkeypatch these two
_BRANCH_INPUTS = (_get_param_all_gather_inputs, _get_all_gather_input_metadatas)


def foreach_all_gather(
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    async_op: bool,
    all_gather_copy_in_stream: torch.Stream,
    all_gather_stream: torch.Stream,
    device: torch.device,
    all_gather_comm: AllGather,
    *,
    cache: ParamGroupCache | None = None,
) -> AllGatherResult | None:
    """
    Starts the one all-gather of a unit, whose parameters may have any dtypes but must
    all be sharded, or all be resharded after forward. The buffer is allocated and filled
    in the first stream and gathered in the second. ``cache``: that of the parameters.
    """
    cache = cache or ParamGroupCache(fsdp_params)
    comm, stream = all_gather_comm, all_gather_stream
    device_handle = _get_device_handle(device.type)
    has_grad = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        with device_handle.stream(all_gather_copy_in_stream):
            in_use = (_get_param_all_gather_inputs, _get_all_gather_input_metadatas)
            if in_use == _BRANCH_INPUTS:
                inputs = cache.prepare_gather()
                plan, layout = inputs.plan, inputs.plan.layout
                size = group.size() * layout.segment_numel, layout.buffer_dtype
                output = allocate(comm, *size, device, gathers=True)
                segment = fill_segment(output, inputs, group.rank())
                fields = plan.dtypes, plan.numels, plan.split_sizes
                sent = stage_direct(inputs, device) if plan.direct else []
            else:
                plan, sent = cast(Any, None), []
                param_inputs = _get_param_all_gather_inputs(fsdp_params)
                metadatas = _get_all_gather_input_metadatas(param_inputs)
                args = param_inputs, metadatas, group, device, comm
                output, segment, fields = stage_inputs(*args)
        stream.wait_stream(all_gather_copy_in_stream)
        with device_handle.stream(stream):
            if sent:
                args = fsdp_params, plan, group.size(), stream
                received, copies = cache.direct_memory.prepare(*args)
                members = [*zip(received, sent, strict=True), (output, segment)]
                work = all_gather_coalesced(members, group, async_op)
                direct = SplitSizes(plan.layout, plan.split_sizes.state, sent, copies)
                fields = plan.dtypes, plan.numels, direct
            else:
                buffers = {"output_tensor": output, "input_tensor": segment}
                work = comm(**buffers, group=group, async_op=async_op)
            return AllGatherResult(output, stream.record_event(), work, *fields)
    finally:
        torch._C._set_grad_enabled(has_grad)


def _default_all_gather_output_fn(
    fsdp_params: list[FSDPParam],
    all_gather_result: AllGatherResult,
    world_size: int,
    cache: ParamGroupCache | None = None,
) -> None:
    """Writes every parameter's all-gather outputs from a gather's buffer."""
    cache = cache or ParamGroupCache(fsdp_params)
    buffer, _, _, dtypes, numels, split_sizes = all_gather_result
    if not isinstance(split_sizes, SplitSizes):  # a plugin gathered, in parameter order
        dtype, numel = layouts.storage_dtype(buffer.dtype), sum(split_sizes)
        buffer = buffer.view(dtype)
        layout = GatherLayout((), dtype, (*enumerate(split_sizes),), numel)
        split_sizes = SplitSizes(layout, fsdp_params[0].sharded_state)
    outputs = cache.alloc_outputs(dtypes, numels, world_size, buffer.device)
    copy_out(buffer, split_sizes, outputs, world_size)
    if split_sizes.copies:
        copy_each(*split_sizes.copies)


def foreach_all_gather_copy_out(
    all_gather_result: AllGatherResult,
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    *,
    all_gather_output_fn: Callable[..., None] = _default_all_gather_output_fn,
    cache: ParamGroupCache | None = None,
) -> None:
    """
    Waits for an all-gather and writes every parameter's all-gather outputs from its
    buffer: one kernel, and one more copy for each parameter that must be reordered. The
    segments of a plugin's gather hold the inputs in parameter order. A custom
    ``all_gather_output_fn`` writes the outputs instead, given ``fsdp_params``, the
    complete result and the number of ranks.
    """
    buffer, event, work, *_ = all_gather_result
    args = fsdp_params, all_gather_result, group.size()
    if all_gather_output_fn is _default_all_gather_output_fn:
        args = *args, cache
    else:
        check_uniform(all_gather_result.param_all_gather_input_dtypes, fsdp_params)
    if event is not None:
        _get_device_handle(buffer.device.type).current_stream().wait_event(event)
    if isinstance(work, dist.distributed_c10d.Work):
        work.wait()
    has_grad = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        all_gather_output_fn(*args)
    finally:
        torch._C._set_grad_enabled(has_grad)


foreach_reduce = fit_release(lambda: foreach_reduce_scatter_copy_in)


@torch.no_grad()
def unshard_single_rank(cache: ParamGroupCache, device: torch.device) -> None:
    """Unshards parameters over a single rank: a copy in place of an all-gather."""
    inputs = cache.prepare_gather()
    plan = inputs.plan
    outputs = cache.alloc_outputs(plan.dtypes, plan.numels, 1, device)
    targets = [output.data for output in outputs.tensors]  # see `_make_columns`
    if cache._has_extensions:  # see `prepare_gather`
        targets = [t.view(d) for t, d in zip(targets, chain(*plan.dtypes))]
    copy_each(targets, inputs.tensors)


def fill_segment(output: Tensor, inputs: GatherInputs, rank: int) -> Tensor:
    """Writes this rank's shards into its segment of a gather's buffer. Returns that."""
    layout = inputs.plan.layout
    if layout.slots and gets_operators(output.device):
        return _fill_by_operator(output, inputs, rank)
    numel = layout.segment_numel
    return _copy_in(output[rank * numel : (rank + 1) * numel], inputs)


def _fill_by_operator(output: Tensor, inputs: GatherInputs, rank: int) -> Tensor:
    """Calls the operator, which neither casts nor moves."""
    plan, shards, layout = inputs.plan, inputs.tensors, inputs.plan.layout
    if any(copy.casts for copy in plan.copies) or inputs.are_on_host:
        filled = _copy_in(output.new_empty(layout.segment_numel), inputs)
        sent = [*filled.split(plan.split_sizes)]
    else:
        slots = layout.slots
        sent = [output.new_zeros(n) if i is None else shards[i] for i, n in slots]
        sent = view_as(layout.buffer_dtype, sent)
    args = sent, output, plan.split_sizes, layout.segment_numel, rank
    return torch.ops.fsdp.all_gather_copy_in(*args)[0]


def _copy_in(segment: Tensor, inputs: GatherInputs) -> Tensor:
    """Fills and returns this rank's ``segment`` (1D), in one pass, which also casts."""
    by_copy = inputs.sources or inputs.make_sources()
    for (region, casts, _), sources in zip(inputs.plan.copies, by_copy, strict=True):
        target, slots = region.view(segment), region.slots
        if not casts and not inputs.are_on_host:
            torch.cat(sources, out=target)  # needs no view of each slot
            continue
        targets = target.split([numel for _, numel in slots])
        for group in casts or [[k for k, (i, _) in enumerate(slots) if i is not None]]:
            _copy_group([targets[k] for k in group], [sources[k] for k in group])
    return segment


def stage_direct(inputs: GatherInputs, device: torch.device) -> list[Tensor]:
    """Returns the pieces of direct shards as they are sent, moved and cast."""
    plan = inputs.plan
    sent = [inputs.tensors[position] for _, position in plan.direct]
    moved = [*range(len(sent))] if inputs.are_on_host else plan.direct_casts
    shards = [sent[k] for k in moved]
    for k, shard in zip(moved, shards):
        (dtype,) = plan.dtypes[plan.direct[k][0]]
        sent[k] = torch.empty(shard.numel(), dtype=dtype, device=device)
    copy_each([sent[k] for k in moved], shards)
    return split([*map(Tensor.contiguous, sent)], plan.direct_pieces)


def _copy_group(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies tensors of one dtype to others of one dtype and shape, on any device."""
    device = targets[0].device
    if device.type == "cpu" or not any(source.is_cpu for source in sources):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        if target.dtype != source.dtype:
            # A copy that also casts would go through one more temporary. Moved one at
            # a time, so that only one is on the device uncast.
            source = source.to(device, non_blocking=True)
        target.copy_(source, non_blocking=True)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies tensors of any dtypes to others alike in shape, each pair of dtypes at once."""
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


_NO_COLUMNS = Columns(GatherLayout((), torch.uint8, (), 0), [], [], [])


def copy_out(
    buffer: Tensor, split_sizes: SplitSizes, outputs: GatherOutputs, world_size: int
) -> None:
    """
    Writes all-gather outputs from a gather's ``buffer`` (1D), in the current stream. Their
    state is that when it was gathered: a save since then may have resharded.
    """
    if not split_sizes:
        return
    layout = split_sizes.layout
    columns = outputs.columns.get(split_sizes.state, _NO_COLUMNS)
    if columns.layout is not layout:
        columns = _make_columns(split_sizes, outputs, world_size)
    # The fused kernel accepts dense tensors only: the buffer as a whole
    rows = buffer.view(world_size, layout.segment_numel)
    ops = torch.ops.fsdp if gets_operators(buffer.device) else torch
    ops.split_with_sizes_copy(rows, columns.sizes, dim=1, out=columns.tensors)
    for fsdp_param, rank_major, output in columns.reordered:
        shards = rank_major.view(world_size, *fsdp_param.padded_sharded_param_size)
        shards = shards.movedim(0, fsdp_param.fsdp_placement.dim)
        output.data.view(shards.size()).copy_(shards)  # see `_make_columns`


def _make_columns(
    split_sizes: SplitSizes, outputs: GatherOutputs, world_size: int
) -> Columns:
    """
    Views the pieces of outputs, and for padding tensors that nothing reads, as columns
    of a buffer with a row for each rank. They do not share the outputs' version: to
    autograd an unshard, which writes the same values, must not change what was saved.
    """
    tensors: list[Tensor] = []
    reordered: list[tuple[FSDPParam, Tensor, Tensor]] = []
    layout, state = split_sizes.layout, split_sizes.state
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
