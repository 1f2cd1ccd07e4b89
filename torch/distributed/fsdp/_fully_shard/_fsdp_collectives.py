"""
What moves: the data of one unit, one step each way.

- Unshard: copy-in, all-gather, copy-out (:func:`foreach_all_gather`,
  :func:`foreach_all_gather_copy_out`).
- Reduce: copy-in, reduce-scatter, all-reduce, and the sharded gradients out of
  the result (:func:`foreach_reduce`), for one bucket at a time.

Where things lie is planned in :mod:`_fsdp_layout`, and when they move is
decided in :mod:`_fsdp_param_group`. :mod:`_fsdp_comms` has the backends, which
allocate the buffers and issue the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast, NamedTuple, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from ._fsdp_api import _ReduceOp, AllGather, ReduceScatter
from ._fsdp_comms import (  # noqa: F401  (importable from here, as in the release)
    all_gather_copy_in_cuda,
    all_gather_copy_in_meta,
    allocate_gather_buffer,
    allocate_reduce_buffer,
    chunk_cat,
    chunk_cat_by_operator,
    copies_mixed,
    DefaultAllGather,
    DefaultAllocMixin,
    DefaultReduceScatter,
    lib,
    Literal,
    math,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocMixin,
    ProcessGroupAllocReduceScatter,
    record_grad_output_stream,
    split_with_sizes_copy,
    symm_mem,
    SymmMemAllGather,
    SymmMemAllocMixin,
    SymmMemReduceScatter,
)
from ._fsdp_kept_names import (
    _get_all_gather_input_metadatas,
    _get_param_all_gather_inputs,
)
from ._fsdp_layout import (
    GatherLayout,
    in_plan_order,
    moves_between,
    padded_shard_numel,
    reduce_dtype_of,
    ReduceBucket,
    ReduceSlot,
    RegionCopy,
    storage_dtype,
)
from ._fsdp_observers import gets_operators
from ._fsdp_param import FSDPParam, ShardedState
from ._fsdp_release import FOLLOWS_GRAD_DTYPE
from ._fsdp_scaling import (  # noqa: F401  (one of them as above)
    _div_if_needed,
    _get_gradient_divide_factors,
    ReduceOp,
    scatter_divisor,
)
from ._fsdp_unit import GatherOutputs, GatherPlan, grad_dtype_of, UnitParams


# Unshard #


class AllGatherResult(NamedTuple):
    """An all-gather in flight. It owns the buffer until copy-out is ordered."""

    all_gather_output: torch.Tensor  # 1D
    all_gather_event: torch.Event | None
    all_gather_work: dist.distributed_c10d.Work | None
    # For each parameter, dtype and elements on one rank of each of its inputs
    param_all_gather_input_dtypes: list[list[torch.dtype]]
    param_all_gather_input_numels: list[list[int]]
    # In elements of the output, in the order in which a segment holds them
    all_gather_input_split_sizes: list[int]


class _Staged(NamedTuple):
    """A gather whose buffer has this rank's shards in it."""

    output: torch.Tensor  # 1D
    segment: torch.Tensor  # this rank's part of it
    dtypes: list[list[torch.dtype]]
    numels: list[list[int]]
    split_sizes: list[int]


def _stage(
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    device: torch.device,
    comm: AllGather,
) -> _Staged:
    """Allocates the buffer of a gather and fills this rank's segment of it."""
    tensors, plan = UnitParams.of(fsdp_params).prepare_gather()
    output = allocate_gather_buffer(comm, plan.layout, group.size(), device)
    if gets_operators(device):
        segment = _copy_in_by_operator(output, plan, tensors, group.rank())
    else:
        numel = plan.layout.segment_numel
        segment = output.narrow(0, group.rank() * numel, numel)
        _copy_in(segment, plan.copies, tensors)
    return _Staged(output, segment, plan.dtypes, plan.numels, plan.split_sizes)


# Plugins put functions of their own in place of these two
_OWN_INPUTS = (_get_param_all_gather_inputs, _get_all_gather_input_metadatas)


def _stage_replaced(
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    device: torch.device,
    comm: AllGather,
) -> _Staged:
    """Does as :func:`_stage`, with what a plugin wants to gather, in parameter order."""
    own = _get_param_all_gather_inputs(fsdp_params)
    dtypes, numels, dtype = _get_all_gather_input_metadatas(own)
    inputs = [*chain.from_iterable(own)]
    if dtype == torch.uint8:
        inputs = [tensor.view(torch.uint8) for tensor in inputs]
    split_sizes = [tensor.numel() for tensor in inputs]
    numel = sum(split_sizes)
    output = comm.allocate((group.size() * numel,), dtype=dtype, device=device)
    segment, output = torch.ops.fsdp.all_gather_copy_in(
        inputs, output, split_sizes, numel, group.rank()
    )
    return _Staged(output, segment, dtypes, numels, split_sizes)


def _copy_in(
    segment: torch.Tensor,
    copies: Sequence[RegionCopy],
    inputs: Sequence[torch.Tensor],
) -> None:
    """
    Writes this rank's shards into its segment of the gather buffer in one
    pass: each region is viewed in its own dtype and the shards cast into it.
    """
    for copy in copies:
        region, target = copy.region, copy.region.view(segment)
        sources = [inputs[i] for i in region.inputs]
        if copy.casts or _are_on_host(sources, segment.device):
            _copy_cast(target.split(region.numels), sources, copy)
            continue
        # The same as a copy into each slot, without a view for each
        target, *sources = _as_stored([target, *sources])
        torch.cat(sources, out=target)


def _copy_cast(
    slots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], copy: RegionCopy
) -> None:
    """Copies what a region is made of into its slots, from the host as well."""
    if _are_on_host(sources, slots[0].device):
        # Moved before they are cast: a copy that casts across devices is staged
        # through another temporary. One at a time, so that only one is there uncast.
        for slot, source in zip(slots, sources, strict=True):
            slot.copy_(source.to(slot.device, non_blocking=True))
        return
    if not copy.casts:
        torch._foreach_copy_(_as_stored(slots), _as_stored(sources))
    for members in copy.casts:
        torch._foreach_copy_([slots[k] for k in members], [sources[k] for k in members])


def _as_stored(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views tensors of one dtype in that in which every kernel copies them."""
    dtype = storage_dtype(tensors[0].dtype)
    if dtype == tensors[0].dtype:
        return [*tensors]
    return [tensor.view(dtype) for tensor in tensors]


def _are_on_host(sources: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether shards are offloaded, and a copy to ``device`` moves them."""
    source = sources[0].device
    return source != device and source.type == "cpu"


def _copy_in_by_operator(
    output: torch.Tensor,
    plan: GatherPlan,
    tensors: Sequence[torch.Tensor],
    rank: int,
) -> torch.Tensor:
    """Does as :func:`_copy_in` by the operator, which casts nothing and moves nothing."""
    layout, inputs = plan.layout, []
    for copy in plan.copies:
        region = copy.region
        sources = [tensors[i] for i in region.inputs]
        if copy.casts or _are_on_host(sources, output.device):
            flat = output.new_empty(sum(region.numels), dtype=region.dtype)
            pieces = flat.split(region.numels)
            _copy_cast(pieces, sources, copy)
            sources = pieces
        inputs += [source.view(layout.buffer_dtype) for source in sources]
    if layout.padding_nbytes:
        inputs.append(output.new_zeros(layout.split_sizes[-1]))
    segment, _ = torch.ops.fsdp.all_gather_copy_in(
        inputs, output, [*layout.split_sizes], layout.segment_numel, rank
    )
    return segment


@torch.no_grad()
def foreach_all_gather(
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    async_op: bool,
    all_gather_copy_in_stream: torch.Stream,
    all_gather_stream: torch.Stream,
    device: torch.device,
    all_gather_comm: AllGather,
) -> AllGatherResult | None:
    """
    Starts the one all-gather of a unit, whatever dtypes its parameters have.

    Args:
        fsdp_params: The unit's parameters, all sharded or all resharded after
            forward.
        group: Ranks to gather over, in the order of their segments.
        async_op: Whether the collective returns a work to wait on, in which
            case both streams are the current one.
        all_gather_copy_in_stream: Where the buffer is allocated and filled.
        all_gather_stream: Where the collective runs, after the copy-in.
        device: Of the buffer.
        all_gather_comm: Allocates the buffer and issues the collective.

    Returns:
        The gather in flight, for :func:`foreach_all_gather_copy_out`. Its
        buffer is 1D, in the common dtype of all inputs or else in bytes.
    """
    device_handle = _get_device_handle(device.type)
    with device_handle.stream(all_gather_copy_in_stream):
        own = (_get_param_all_gather_inputs, _get_all_gather_input_metadatas)
        stage = _stage if own == _OWN_INPUTS else _stage_replaced
        staged = stage(fsdp_params, group, device, all_gather_comm)
    all_gather_stream.wait_stream(all_gather_copy_in_stream)
    with device_handle.stream(all_gather_stream):
        work = all_gather_comm(
            output_tensor=staged.output,
            input_tensor=staged.segment,
            group=group,
            async_op=async_op,
        )
        event = all_gather_stream.record_event()
    return AllGatherResult(
        staged.output, event, work, staged.dtypes, staged.numels, staged.split_sizes
    )


def _default_all_gather_output_fn(
    fsdp_params: list[FSDPParam],
    all_gather_result: AllGatherResult,
    world_size: int,
) -> None:
    """Writes every parameter's all-gather outputs from a gather's buffer."""
    buffer, _, _, dtypes, numels, split_sizes = all_gather_result
    unit = UnitParams.of(fsdp_params)
    layout = unit.layout_of(dtypes, numels, split_sizes)
    outputs = _alloc_outputs(unit, dtypes, numels, world_size, buffer.device)
    if (columns := unit.columns(layout, outputs)) is not None:
        _split_copy(buffer, layout, columns)
        return
    targets: list[torch.Tensor] = []
    interleaved: list[tuple[FSDPParam, torch.Tensor, torch.Tensor]] = []
    for fsdp_param in fsdp_params:
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


# Does as the above, with what others put in its place
AllGatherOutputFn: TypeAlias = Callable[[list[FSDPParam], AllGatherResult, int], None]


@torch.no_grad()
def foreach_all_gather_copy_out(
    all_gather_result: AllGatherResult,
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    *,
    all_gather_output_fn: AllGatherOutputFn = _default_all_gather_output_fn,
) -> None:
    """
    Waits for an all-gather and writes every parameter's all-gather outputs
    from its buffer: one kernel over the whole buffer, and one more copy for
    each parameter sharded on another dim than 0.

    Args:
        all_gather_result: From :func:`foreach_all_gather`, or from another
            one whose segments hold the inputs in parameter order.
        fsdp_params: The parameters that were gathered.
        group: The group that they were gathered over.
        all_gather_output_fn: Makes and fills the outputs, given ``fsdp_params``,
            the result, which is complete then, and the number of ranks.
    """
    buffer, event, work = all_gather_result[:3]
    if event is not None:
        _get_device_handle(buffer.device.type).current_stream().wait_event(event)
    if isinstance(work, dist.distributed_c10d.Work):
        work.wait()
    all_gather_output_fn(fsdp_params, all_gather_result, group.size())


def _alloc_outputs(
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


def _gathers_out_of_order(fsdp_param: FSDPParam) -> bool:
    """
    Whether the ranks' shards one after the other are not yet the parameter. A
    shard resharded after forward is a flat piece of it, whatever its dim was.
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
    row a rank, and in its dtype. The padding gets a tensor of its own, which
    nothing reads.

    The views do not share the outputs' version: the unsharded parameter is the
    same value whenever it is there, so that a write to it is no in-place change
    of what autograd saved.
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
    """
    Copies a gather buffer to its columns: all of it and all in its own dtype,
    because the fused kernel takes dense tensors of one dtype.
    """
    world_size = columns[0].size(0)
    rows = buffer.view(layout.buffer_dtype).view(world_size, layout.segment_numel)
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
    """
    Puts the shards of a parameter sharded on dim ``d > 0``, which lie one
    after the other in ``rank_major``, side by side in ``output``.
    """
    dim = fsdp_param.fsdp_placement.dim
    shard_size = fsdp_param.padded_sharded_param_size
    before, after = shard_size[:dim], shard_size[dim:]
    by_rank = rank_major.view(world_size, *shard_size)
    target = output.data.view(*before, world_size, *after)  # see `_to_columns`
    target.copy_(by_rank.movedim(0, dim))


@torch.no_grad()
def unshard_single_rank(fsdp_params: list[FSDPParam], device: torch.device) -> None:
    """
    Unshards parameters whose only shard is this rank's: a copy from the
    sharded parameters in place of an all-gather.
    """
    unit = UnitParams.of(fsdp_params)
    tensors, plan = unit.prepare_gather()
    outputs = _alloc_outputs(unit, plan.dtypes, plan.numels, 1, device)
    for copy in plan.copies:
        members = copy.region.inputs
        slots = [outputs.tensors[i].data for i in members]  # see `_to_columns`
        _copy_cast(slots, [tensors[i] for i in members], copy)


# Reduce #


class ReduceResult(NamedTuple):
    """A reduction in flight: what must be kept, and until which event."""

    reduce_scatter_input: torch.Tensor | None  # None if there was no new gradient
    reduce_scatter_event: torch.Event | None
    post_reduce_stream: torch.Stream
    post_reduce_event: torch.Event
    # The reduced buffer, if other streams than the one that allocated it use it
    all_reduce_input: torch.Tensor | None
    all_reduce_event: torch.Event | None
    # The sum so far, if the all-reduce is put off
    partial_reduce_output: torch.Tensor | None


# See `_default_reduce_scatter_input_fn`
ReduceScatterInputFn: TypeAlias = Callable[
    [list[FSDPParam], list[torch.Tensor], int], tuple[torch.Size, ...]
]


class Reduction(NamedTuple):
    """Who takes part in a unit's reductions, where and how."""

    device: torch.device
    reduce_scatter_comm: ReduceScatter
    reduce_scatter_group: dist.ProcessGroup | None
    reduce_scatter_stream: torch.Stream
    all_reduce_group: dist.ProcessGroup | None  # not None iff HSDP or replicate
    all_reduce_stream: torch.Stream
    all_reduce_hook: Callable[[torch.Tensor], None] | None
    all_reduce_grads: bool
    divide_factor: float | None  # the user's own
    force_sum: bool
    # None: the default one
    prepare_inputs: ReduceScatterInputFn | None = None

    @property
    def is_last(self) -> bool:
        """Whether what is reduced goes to the sharded parameters now."""
        return self.all_reduce_grads or self.all_reduce_group is None

    @property
    def shard_world_size(self) -> int:
        group = self.reduce_scatter_group
        return 1 if group is None else group.size()

    def arguments(
        self,
        fsdp_params: list[FSDPParam],
        unsharded_grads: list[torch.Tensor],
        grad_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype,
        partial: torch.Tensor | None,
    ) -> tuple[Any, ...]:
        """Returns the arguments of :func:`foreach_reduce` for one bucket."""
        grad_dtypes = () if FOLLOWS_GRAD_DTYPE else (grad_dtype,)
        return (
            fsdp_params,
            unsharded_grads,
            self.reduce_scatter_group,
            self.reduce_scatter_stream,
            self.reduce_scatter_comm,
            *grad_dtypes,
            reduce_dtype,
            self.device,
            self.divide_factor,
            self.all_reduce_group,
            self.all_reduce_stream,
            self.all_reduce_grads,
            partial,
            self.all_reduce_hook,
            self.force_sum,
        )

    def options(self) -> dict[str, Any]:
        """Returns its keyword arguments."""
        if not FOLLOWS_GRAD_DTYPE:
            return {}
        prepare = self.prepare_inputs or _default_reduce_scatter_input_fn
        return {"prepare_reduce_scatter_inputs": prepare}


def _default_reduce_scatter_input_fn(
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[torch.Tensor],
    world_size: int,
) -> tuple[torch.Size, ...]:
    """
    Replaces each gradient that is sharded on another dim than 0 by one whose chunks
    on dim 0 are the ranks' shards. Returns the sizes of all, with dim 0 padded to a
    multiple of ``world_size``.
    """
    sizes: list[torch.Size] = []
    for i, (fsdp_param, grad) in enumerate(zip(fsdp_params, unsharded_grads)):
        dim = fsdp_param.fsdp_placement.dim
        if dim != 0 and world_size > 1:
            grad = unsharded_grads[i] = _by_rank(grad, dim, world_size).flatten(0, 1)
        rows = -(-grad.size(0) // world_size) * world_size
        sizes.append(torch.Size([rows, *grad.size()[1:]]))
    return tuple(sizes)


def foreach_reduce(
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[torch.Tensor],
    reduce_scatter_group: dist.ProcessGroup | None,
    reduce_scatter_stream: torch.Stream,
    reduce_scatter_comm: ReduceScatter,
    reduce_dtype: torch.dtype | None,
    device: torch.device,
    gradient_divide_factor: float | None,
    all_reduce_group: dist.ProcessGroup | None,
    all_reduce_stream: torch.Stream,
    all_reduce_grads: bool,
    partial_reduce_output: torch.Tensor | None,
    all_reduce_hook: Callable[[torch.Tensor], None] | None,
    force_sum_reduction_for_comms: bool = False,
    *,
    prepare_reduce_scatter_inputs: ReduceScatterInputFn = (
        _default_reduce_scatter_input_fn
    ),
) -> ReduceResult:
    """
    Reduces gradients of any dtypes in one reduce dtype, and gives the results to
    the sharded parameters, in what their ``grad_dtype`` says.

    ``fsdp_params`` after the first ``len(unsharded_grads)`` have no new
    gradient, only a part of ``partial_reduce_output``. ``unsharded_grads`` is
    emptied once copied. Without ``reduce_dtype`` the gradients' one dtype is used.
    ``all_reduce_grads=False`` stops before the all-reduce and returns the sum
    so far (1D, laid out as ``fsdp_params``) for the next call to add.
    ``prepare_reduce_scatter_inputs`` is given the parameters with a gradient, the
    gradients, which it may replace in place, and the number of ranks. It returns the
    gradients' padded sizes, which a rank gets one chunk of on dim 0.
    """
    prepare: ReduceScatterInputFn | None = prepare_reduce_scatter_inputs
    if prepare is _default_reduce_scatter_input_fn:
        prepare = None
    reduction = Reduction(
        device,
        reduce_scatter_comm,
        reduce_scatter_group,
        reduce_scatter_stream,
        all_reduce_group,
        all_reduce_stream,
        all_reduce_hook,
        all_reduce_grads,
        gradient_divide_factor,
        force_sum_reduction_for_comms,
        prepare,
    )
    bucket = _plan_bucket(reduction, fsdp_params, unsharded_grads, None, reduce_dtype)
    return reduce_bucket(
        reduction, bucket, fsdp_params, unsharded_grads, partial_reduce_output
    )


def _foreach_reduce_to_orig_dtype(
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[torch.Tensor],
    reduce_scatter_group: dist.ProcessGroup | None,
    reduce_scatter_stream: torch.Stream,
    reduce_scatter_comm: ReduceScatter,
    orig_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    device: torch.device,
    gradient_divide_factor: float | None,
    all_reduce_group: dist.ProcessGroup | None,
    all_reduce_stream: torch.Stream,
    all_reduce_grads: bool,
    partial_reduce_output: torch.Tensor | None,
    all_reduce_hook: Callable[[torch.Tensor], None] | None,
    force_sum_reduction_for_comms: bool = False,
) -> ReduceResult:
    """
    Is :func:`foreach_reduce` before 2.15. Without ``orig_dtype`` each sharded gradient
    is cast to its parameter's own dtype (the release then casts nothing).
    """
    reduction = Reduction(
        device,
        reduce_scatter_comm,
        reduce_scatter_group,
        reduce_scatter_stream,
        all_reduce_group,
        all_reduce_stream,
        all_reduce_hook,
        all_reduce_grads,
        gradient_divide_factor,
        force_sum_reduction_for_comms,
    )
    bucket = _plan_bucket(
        reduction, fsdp_params, unsharded_grads, orig_dtype, reduce_dtype
    )
    return reduce_bucket(
        reduction, bucket, fsdp_params, unsharded_grads, partial_reduce_output
    )


if not FOLLOWS_GRAD_DTYPE:
    _foreach_reduce_to_orig_dtype.__name__ = foreach_reduce.__name__
    foreach_reduce = _foreach_reduce_to_orig_dtype


@torch.no_grad()
def reduce_bucket(
    reduction: Reduction,
    bucket: ReduceBucket,
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[torch.Tensor],
    partial: torch.Tensor | None,
) -> ReduceResult:
    """Does as :func:`foreach_reduce`, for parameters that lie as ``bucket`` says."""
    factors = _get_gradient_divide_factors(
        reduction.reduce_scatter_group,
        reduction.all_reduce_group,
        bucket.dtype,
        reduction.device.type,
        reduction.divide_factor,
        reduction.force_sum,
    )
    handle = _get_device_handle(reduction.device.type)
    current_stream = handle.current_stream()
    stream, world_size = reduction.reduce_scatter_stream, reduction.shard_world_size
    if reduction.prepare_inputs is not None:
        bucket = _prepare_inputs(reduction, bucket, fsdp_params, unsharded_grads)
    reduce_input = _reduce_copy_in(reduction, bucket, fsdp_params, unsharded_grads)
    is_extended = len(unsharded_grads) < len(bucket.slots)
    unsharded_grads.clear()  # only now: the copy-in has been issued
    stream.wait_stream(current_stream)
    is_last = reduction.is_last
    with handle.stream(stream):
        if reduce_input is not None:
            divisor = factors[0]
            if world_size == 1:  # no collective divides it
                group, custom = reduction.reduce_scatter_group, reduction.divide_factor
                divisor = scatter_divisor(group, factors, custom)
            _div_if_needed(reduce_input, divisor)
        if world_size == 1 and is_last and partial is None and reduce_input is not None:
            output = reduce_input
        else:
            output = _reduce_scatter(
                reduction, bucket, reduce_input, partial, factors[2]
            )
        scattered = stream.record_event()
    if not is_last:
        return ReduceResult(
            reduce_input, scattered, stream, scattered, None, None, output
        )
    if is_extended:
        with handle.stream(stream):
            fsdp_params, bucket, output = _in_common_order(fsdp_params, bucket, output)
    stream, shared_output = _all_reduce(reduction, output, factors[3], handle)
    with handle.stream(stream):
        _div_if_needed(output, factors[1])
        _give_sharded_grads(fsdp_params, bucket, output, stream, current_stream)
        done = stream.record_event()
    if output is reduce_input and shared_output is None:
        scattered = done  # the input is read until then, and nothing else holds it
    shared_event = None if shared_output is None else done
    return ReduceResult(
        reduce_input, scattered, stream, done, shared_output, shared_event, None
    )


def _plan_bucket(
    reduction: Reduction,
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[torch.Tensor],
    orig_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
) -> ReduceBucket:
    dtypes = [reduce_dtype_of(grad.dtype, reduce_dtype) for grad in unsharded_grads]
    for dtype, fsdp_param in zip(dtypes, fsdp_params):
        if dtype != dtypes[0]:
            raise AssertionError(
                "One reduction takes one reduce dtype, but the gradients of "
                f"{fsdp_params[0]._param_fqn} and {fsdp_param._param_fqn} would be "
                f"reduced in {dtypes[0]} and {dtype}: pass reduce_dtype, or reduce "
                "them in two calls"
            )
    world_size = reduction.shard_world_size
    numels = [p.padded_sharded_param_size.numel() for p in fsdp_params]
    for i, (fsdp_param, grad) in enumerate(zip(fsdp_params, unsharded_grads)):
        dim = fsdp_param.fsdp_placement.dim
        numels[i] = padded_shard_numel(grad.size(), world_size, dim)
    # By name: which of them are new may differ between replicas
    names = [str(fsdp_param._param_fqn) for fsdp_param in fsdp_params]
    number = {
        i: n for n, i in enumerate(sorted(range(len(names)), key=names.__getitem__))
    }
    slots = [
        ReduceSlot(number[i], grad_dtype_of(fsdp_param, orig_dtype), numel)
        for i, (fsdp_param, numel) in enumerate(zip(fsdp_params, numels))
    ]
    dtype = dtypes[0] if dtypes else cast(torch.dtype, reduce_dtype)
    return ReduceBucket(dtype, tuple(slots))


def _prepare_inputs(
    reduction: Reduction,
    bucket: ReduceBucket,
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[torch.Tensor],
) -> ReduceBucket:
    """Lets others prepare the gradients, and returns where these lie then."""
    prepare = cast(ReduceScatterInputFn, reduction.prepare_inputs)
    world_size, count = reduction.shard_world_size, len(unsharded_grads)
    if count == 0:
        return bucket
    sizes = prepare(fsdp_params[:count], unsharded_grads, world_size)
    slots = [
        replace(slot, shard_numel=size.numel() // world_size)
        for slot, size in zip(bucket.slots, sizes, strict=False)
    ]
    return ReduceBucket(bucket.dtype, (*slots, *bucket.slots[count:]))


def _reduce_copy_in(
    reduction: Reduction,
    bucket: ReduceBucket,
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[torch.Tensor],
) -> torch.Tensor | None:
    """
    Returns the reduce-scatter's input: for each rank in turn, its shards of
    all new gradients. None if there are none.
    """
    if not unsharded_grads:
        return None
    world_size = reduction.shard_world_size
    shard_numel = bucket.shard_numel
    if len(unsharded_grads) < len(bucket.slots):
        shard_numel = bucket.starts[len(unsharded_grads)]
    comm, numel = reduction.reduce_scatter_comm, world_size * shard_numel
    reduce_input = allocate_reduce_buffer(comm, numel, bucket.dtype, reduction.device)
    dims = [0] * len(unsharded_grads)
    if world_size > 1 and reduction.prepare_inputs is None:
        dims = [p.fsdp_placement.dim for p, _ in zip(fsdp_params, unsharded_grads)]
    _copy_in_grads(bucket, dims, unsharded_grads, reduce_input, world_size)
    return reduce_input


def _copy_in_grads(
    bucket: ReduceBucket,
    dims: Sequence[int],
    grads: list[torch.Tensor],
    reduce_input: torch.Tensor,
    world_size: int,
) -> None:
    """
    Copies gradients of any dtypes, sharded on ``dims``, to their columns of ``reduce_input``, which has one
    row for each rank.

    [Note: One kernel for most gradients]
    The fused kernel takes dense tensors of one dtype and fills all columns of a dense
    output; one tensor of another kind would send all of them down its slow path. So
    it is given those that are like the largest, and a piece of the largest in place
    of each other one, whose columns are written again afterwards. Casts happen on the
    way, so that no gradient is there in two dtypes but for those others. Since 2.15
    an operator does the same for bf16 and fp32 on CUDA, see :func:`copies_mixed`.
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
    wanted = None if largest is None else largest.dtype
    odd = [
        i
        for i, (dtype, is_one) in enumerate(zip(dtypes, is_dense))
        if not is_one or dtype != wanted
    ]
    slots = bucket.slots
    # The least that fills as many columns, with the kernel's padding
    numels = {i: max(world_size * (slots[i].shard_numel - 1) + 1, 0) for i in odd}
    if largest is not None and max(numels.values()) <= largest.numel():
        flat = largest.view(-1)
        like = [flat[: numels[i]] if i in numels else g for i, g in enumerate(grads)]
        foreach_reduce_scatter_copy_in(like, reduce_input, world_size)
        runs = _adjacent(odd, grads, is_dense)
    else:
        runs = [[i] for i in range(len(grads))]
    rows = reduce_input.view(world_size, -1)
    for run in runs:
        numel = sum(slots[i].shard_numel for i in run)
        columns = rows.narrow(1, bucket.starts[run[0]], numel)
        _copy_to_columns(columns, [grads[i] for i in run], dims[run[0]])


def _adjacent(
    odd: Sequence[int], grads: Sequence[torch.Tensor], is_dense: Sequence[bool]
) -> list[list[int]]:
    """Returns the runs of odd gradients that the kernel can copy together."""
    runs: list[list[int]] = []
    for i in odd:
        if (
            runs
            and runs[-1][-1] == i - 1
            and is_dense[i - 1]
            and is_dense[i]
            and grads[i - 1].dtype == grads[i].dtype
        ):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _copy_to_columns(
    columns: torch.Tensor, grads: list[torch.Tensor], dim: int
) -> None:
    """
    Copies a gradient that is sharded on ``dim``, or several on dim 0 and of one
    dtype, to their columns of the rows of all ranks.
    """
    world_size, row_numel = columns.size()
    if len(grads) == 1 and (dim != 0 or grads[0].size(0) % world_size == 0):
        by_rank = _by_rank(grads[0], dim, world_size)
        if by_rank[0].numel() != row_numel:
            _raise_about_row(by_rank[0].numel(), row_numel)
        columns.unflatten(1, by_rank.size()[1:]).copy_(by_rank)
        return
    rows = grads[0].new_empty(columns.size())
    grads = [grad.contiguous() for grad in grads]
    foreach_reduce_scatter_copy_in(grads, rows.view(-1), world_size)
    columns.copy_(rows)


def _by_rank(grad: torch.Tensor, dim: int, world_size: int) -> torch.Tensor:
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
    if rows.size(1) != row_numel:
        # The kernel took what there was, and made the rows fit
        _raise_about_row(rows.size(1), row_numel)


def _raise_about_row(fresh_numel: int, row_numel: int) -> NoReturn:
    raise RuntimeError(
        f"the gradients of a rank have {fresh_numel} elements with their padding, "
        f"but {row_numel} are to be reduced"
    )


def _reduce_scatter(
    reduction: Reduction,
    bucket: ReduceBucket,
    reduce_input: torch.Tensor | None,
    partial: torch.Tensor | None,
    op: _ReduceOp,
) -> torch.Tensor:
    """
    Returns this rank's sum over the shard group, with what earlier
    microbatches left added.

    That sum must be complete before the all-reduce: what were added after it
    would be the sum of one shard group alone.
    """
    if reduce_input is None:
        if partial is None:
            raise AssertionError("Expects gradients or a partial result to reduce")
        return partial
    world_size = reduction.shard_world_size
    fresh_numel = reduce_input.numel() // world_size
    comm, numel = reduction.reduce_scatter_comm, bucket.shard_numel
    output = allocate_reduce_buffer(comm, numel, bucket.dtype, reduction.device)
    fresh = output
    if fresh_numel < bucket.shard_numel:
        # The rest has a partial result only: nothing of it is scattered
        fresh = output[:fresh_numel]
        output[fresh_numel:].zero_()
    if world_size == 1:
        fresh.copy_(reduce_input)
    else:
        comm(
            output_tensor=fresh,
            input_tensor=reduce_input,
            group=cast(dist.ProcessGroup, reduction.reduce_scatter_group),
            op=op,
        )
    if partial is not None:
        output += partial
    return output


def _in_common_order(
    fsdp_params: list[FSDPParam], bucket: ReduceBucket, output: torch.Tensor
) -> tuple[list[FSDPParam], ReduceBucket, torch.Tensor]:
    """
    Lays ``output`` out as it would be if all of it were new: which microbatch
    gave what may differ between replicas, whose elements must meet.
    """
    common = in_plan_order(bucket)
    if common is bucket:
        return fsdp_params, bucket, output
    of_slot = dict(zip((slot.param for slot in bucket.slots), fsdp_params))
    in_order = torch.empty_like(output)
    copy_between(bucket, output, common, in_order)
    return [of_slot[slot.param] for slot in common.slots], common, in_order


def copy_between(
    source_bucket: ReduceBucket,
    source: torch.Tensor,
    target_bucket: ReduceBucket,
    target: torch.Tensor,
    factor: float = 1.0,
) -> None:
    """
    Copies the parameters that both buckets hold from a rank's 1D part of the one to
    that of the other, cast to its dtype and multiplied by ``factor``.
    """
    for source_start, target_start, numel in moves_between(
        source_bucket, target_bucket
    ):
        piece = target.narrow(0, target_start, numel)
        piece.copy_(source.narrow(0, source_start, numel))
        if factor != 1.0:
            piece.mul_(factor)


def _all_reduce(
    reduction: Reduction, output: torch.Tensor, op: _ReduceOp, device_handle: Any
) -> tuple[torch.Stream, torch.Tensor | None]:
    """
    Reduces ``output`` over the replicas and runs the user's hook on it.

    Returns:
        The stream that ``output`` is ready in, and ``output`` itself if that
        is another stream than the one that it was allocated in: the allocator
        must not hand out its memory before that stream has read it.
    """
    has_all_reduce = reduction.all_reduce_group is not None
    if not has_all_reduce and reduction.all_reduce_hook is None:
        return reduction.reduce_scatter_stream, None
    stream = reduction.all_reduce_stream
    stream.wait_stream(reduction.reduce_scatter_stream)
    with device_handle.stream(stream):
        if has_all_reduce:
            dist.all_reduce(output, group=reduction.all_reduce_group, op=op)
        if reduction.all_reduce_hook is not None:
            reduction.all_reduce_hook(output)
    return stream, output


def _give_sharded_grads(
    fsdp_params: list[FSDPParam],
    bucket: ReduceBucket,
    output: torch.Tensor,
    stream: torch.Stream,
    reading_stream: torch.Stream,
) -> None:
    """
    Casts a rank's part of the reduced bucket to the gradients' dtypes, flat, and
    makes each parameter's piece of it the parameter's sharded gradient.
    """
    starts = bucket.starts
    record_grad_output_stream(output, reading_stream)
    for run in bucket.runs:
        flat = output
        if len(bucket.runs) > 1:
            flat = output.narrow(0, run.start_numel, run.numel)
        # A run of several is copied even where it needs no cast: as a view it
        # would keep the whole bucket alive as long as its gradients
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


_new_dtensor = DTensor.__new__


def _as_dtensor(
    fsdp_param: FSDPParam, sharded_grad: torch.Tensor, dtype: torch.dtype
) -> DTensor:
    # Less than the parameter's method does: a check of the size, which is the
    # parameter's own here, and an initializer that is idle
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
        # An addition on the CPU and a hook both read the gradient at once, so
        # only without either may its copy to the host still be under way
        overlaps = fsdp_param.pin_memory and present is None and not hooks
        sharded_grad = sharded_grad.to(torch.device("cpu"), non_blocking=overlaps)
        if overlaps:
            fsdp_param.grad_offload_event = stream.record_event()
    if present is None:
        dtype = sharded_grad.dtype
        sharded_param.grad = _as_dtensor(fsdp_param, sharded_grad, dtype)
    elif isinstance(present, DTensor):
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
