"""
Gathers a unit by one collective, with one copy before and one after it.

:mod:`_fsdp_layout` plans where things lie, :mod:`_fsdp_param_group` decides when they
move, :mod:`_fsdp_copies` copies shards and parameters, :mod:`_fsdp_reduce` reduces
gradients, and :mod:`_fsdp_comms` allocates the buffers and issues the collectives.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.distributed_c10d import ReduceOp  # noqa: F401  (as released)
from torch.distributed.tensor import DTensor  # noqa: F401  (as in the release)

from . import _fsdp_copies as copies
from . import _fsdp_layout as layouts
from ._fsdp_api import AllGather, ReduceScatter
from ._fsdp_comms import *  # noqa: F403  (as in the release)
from ._fsdp_comms import all_gather_coalesced, allocate, allocates_anew
from ._fsdp_compat import _get_all_gather_input_metadatas, _get_param_all_gather_inputs
from ._fsdp_grads import make_slot
from ._fsdp_layout import ReduceBucket
from ._fsdp_observers import without_grad
from ._fsdp_param import FSDPParam, ShardedState  # noqa: F401  (as in the release)
from ._fsdp_param_cache import ParamGroupCache, SplitSizes
from ._fsdp_reduce import (
    _default_reduce_scatter_input_fn,
    BucketGrads,
    foreach_reduce_scatter_copy_in,
    prepare_inputs,
    record_grad_output_stream,  # noqa: F401  (as in the release)
    reduce_buckets,
    ReduceResult,
    Reduction,
)
from ._fsdp_releases import IS_2_15
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
if IS_2_15:
    lib.define(
        "record_grad_output_stream(Tensor buffer, int stream_id, int device_index, "
        "int device_type) -> ()"
    )
    lib.impl("record_grad_output_stream", lambda *_: None, "CompositeExplicitAutograd")


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


class DirectGatherResult(AllGatherResult):
    """An all-gather in flight, some of whose outputs are not in the buffer."""

    sent: list[Tensor]  # shards of direct parameters
    # To copy after the gather: (outputs, the temporaries that received)
    copies: tuple[list[Tensor], list[Tensor]]


# Plugins may monkeypatch these two
_OWN_INPUTS = (_get_param_all_gather_inputs, _get_all_gather_input_metadatas)


def _stage_plugins(
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    device: torch.device,
    comm: AllGather,
) -> tuple[Tensor, Tensor, tuple[list, list, list[int]]]:
    """Returns buffer, segment and the result's last fields for a plugin's inputs."""
    param_inputs = _get_param_all_gather_inputs(fsdp_params)
    dtypes, numels, dtype = _get_all_gather_input_metadatas(param_inputs)
    inputs = [*chain.from_iterable(param_inputs)]
    if dtype == torch.uint8:
        inputs = [tensor.view(torch.uint8) for tensor in inputs]
    split_sizes = [tensor.numel() for tensor in inputs]
    numel = sum(split_sizes)
    output = comm.allocate((group.size() * numel,), dtype=dtype, device=device)
    segment, output = torch.ops.fsdp.all_gather_copy_in(
        inputs, output, split_sizes, numel, group.rank()
    )
    return output, segment, (dtypes, numels, split_sizes)


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
    in one stream and gathered in the other. ``cache`` is of these parameters.
    """
    cache = cache or ParamGroupCache(fsdp_params)
    comm, stream = all_gather_comm, all_gather_stream
    device_handle = _get_device_handle(device.type)
    has_grad = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        with device_handle.stream(all_gather_copy_in_stream):
            in_use = (_get_param_all_gather_inputs, _get_all_gather_input_metadatas)
            if in_use == _OWN_INPUTS:
                tensors, plan = cache.prepare_gather()
                layout = plan.layout
                size = group.size() * layout.segment_numel, layout.buffer_dtype
                output = allocate(comm, *size, device, gathers=True)
                segment = copies.fill_segment(output, plan, tensors, group.rank())
                fields = plan.dtypes, plan.numels, plan.split_sizes
                sent = copies.stage_direct(plan, tensors, device) if plan.direct else []
            else:
                args = fsdp_params, group, device, comm
                plan, sent = None, []
                output, segment, fields = _stage_plugins(*args)
        stream.wait_stream(all_gather_copy_in_stream)
        with device_handle.stream(stream):
            if not sent:
                buffers = {"output_tensor": output, "input_tensor": segment}
                work = comm(**buffers, group=group, async_op=async_op)
                return AllGatherResult(output, stream.record_event(), work, *fields)
            args = fsdp_params, plan, group.size(), stream
            received, to_copy = cache.direct_memory.prepare(*args)
            members = [*zip(received, sent, strict=True), (output, segment)]
            work = all_gather_coalesced(members, group, async_op)
            result = DirectGatherResult(output, stream.record_event(), work, *fields)
            result.sent, result.copies = sent, to_copy
            return result
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
    if isinstance(split_sizes, SplitSizes):
        # The gather's own: a save since may reshard
        layout, state = split_sizes.layout, split_sizes.state
    else:  # a plugin gathered, in parameter order
        dtype, numel = layouts.storage_dtype(buffer.dtype), sum(split_sizes)
        layout = layouts.GatherLayout((), dtype, (*enumerate(split_sizes),), numel)
        state = cache.fsdp_params[0].sharded_state
    outputs = cache.alloc_outputs(dtypes, numels, world_size, buffer.device)
    copies.copy_out(state, buffer, layout, outputs, world_size)
    if isinstance(all_gather_result, DirectGatherResult):
        copies.copy_each(*all_gather_result.copies)


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
        _check_uniform(all_gather_result, fsdp_params)
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


def _check_uniform(result: AllGatherResult, fsdp_params: list[FSDPParam]) -> None:
    dtypes = chain.from_iterable(result.param_all_gather_input_dtypes)
    if len({*dtypes}) > 1:
        names = ", ".join(str(p._param_fqn) for p in fsdp_params)
        raise NotImplementedError(
            f"_all_gather_output_fn takes units of one dtype only, not {names}"
        )


@without_grad
def unshard_single_rank(cache: ParamGroupCache, device: torch.device) -> None:
    """Unshards parameters over a single rank: a copy in place of an all-gather."""
    tensors, plan = cache.prepare_gather()
    outputs = cache.alloc_outputs(plan.dtypes, plan.numels, 1, device)
    targets = [output.data for output in outputs.tensors]  # see `_make_columns`
    if cache._has_extensions:  # see `prepare_gather`
        targets = [t.view(d) for t, d in zip(targets, chain(*plan.dtypes))]
    copies.copy_each(targets, tensors)


# Reduce #


def _fit_release(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hides the argument that this release lacks, and passes None."""
    lacking = "orig_dtype" if IS_2_15 else "prepare_reduce_scatter_inputs"
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != lacking]
    signature = signature.replace(parameters=parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**signature.bind(*args, **kwargs).arguments, **{lacking: None})

    call.__signature__ = signature  # pyrefly: ignore [missing-attribute]
    return call


@_fit_release
def foreach_reduce(
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[Tensor],
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
    partial_reduce_output: Tensor | None,
    all_reduce_hook: Callable[[Tensor], None] | None,
    force_sum_reduction_for_comms: bool = False,
    *,
    prepare_reduce_scatter_inputs: Callable | None = _default_reduce_scatter_input_fn,
) -> ReduceResult:
    """
    Reduces gradients in one reduce dtype, by default the one they share, and accumulates
    them in the sharded parameters, in each one's ``grad_dtype``; ignores ``orig_dtype``.
    Plugins and tests call it; a step calls :func:`reduce_buckets`.

    ``unsharded_grads`` is emptied once copied. ``all_reduce_grads=False`` stops before
    the all-reduce and returns the sum so far (1D, laid out as ``fsdp_params``) for the
    next call to add.
    """
    prepare = prepare_reduce_scatter_inputs or _default_reduce_scatter_input_fn
    reduction = Reduction(
        reduce_scatter_group=reduce_scatter_group,
        reduce_scatter_stream=reduce_scatter_stream,
        reduce_scatter_comm=reduce_scatter_comm,
        all_reduce_group=all_reduce_group,
        all_reduce_stream=all_reduce_stream,
        all_reduce_grads=all_reduce_grads,
        all_reduce_hook=all_reduce_hook,
        gradient_divide_factor=gradient_divide_factor,
        force_sum_reduction_for_comms=force_sum_reduction_for_comms,
        device=device,
        copy_in=foreach_reduce_scatter_copy_in,
        prepare_reduce_scatter_inputs=prepare,
        clones_output=not allocates_anew(reduce_scatter_comm),
    )
    grad_dtypes = [grad.dtype for grad in unsharded_grads]
    bucket = _plan_one_bucket(fsdp_params, grad_dtypes, reduce_dtype)
    part = BucketGrads(fsdp_params, bucket, unsharded_grads, partial_reduce_output)
    if not reduction.no_plugin_prepares:
        prepare_inputs(reduction, part)
    return reduce_buckets(reduction, [part])[0]


_REDUCE_SIGNATURE = inspect.signature(foreach_reduce)


def reduce_monkeypatched(
    replacement: Callable[..., Any], reduction: Reduction, parts: Sequence[BucketGrads]
) -> list[ReduceResult]:
    """Reduces buckets by a plugin's replacement of :func:`foreach_reduce`."""
    results: list[ReduceResult] = []
    names = _REDUCE_SIGNATURE.parameters
    for part in parts:
        runs = part.bucket.runs
        values = reduction._asdict() | {
            "fsdp_params": part.fsdp_params,
            "unsharded_grads": part.unsharded_grads,
            "partial_reduce_output": part.partial_reduce_output,
            "reduce_dtype": part.bucket.dtype,
            "orig_dtype": runs[0][0] if len(runs) == 1 else None,
        }
        bound = _REDUCE_SIGNATURE.bind(**{name: values[name] for name in names})
        results.append(ReduceResult._make(replacement(*bound.args, **bound.kwargs)))
    return results


def _plan_one_bucket(
    fsdp_params: Sequence[FSDPParam],
    grad_dtypes: Sequence[torch.dtype],
    reduce_dtype: torch.dtype | None,
) -> ReduceBucket:
    """Plans the bucket of a caller. Raises if the gradients do not fit in one."""
    dtypes = [layouts.reduce_dtype_of(dtype, reduce_dtype) for dtype in grad_dtypes]
    keys = [*map(layouts.bucket_key, fsdp_params, dtypes)]
    if len({*keys}) != 1:
        names = ", ".join(str(fsdp_param._param_fqn) for fsdp_param in fsdp_params)
        found = " and ".join(dict.fromkeys(map(layouts.describe_key, keys))) or "none"
        raise AssertionError(
            f"Gradients of {names} would be reduced in {found}: pass reduce_dtype, or "
            "reduce them in several calls"
        )
    slots = (make_slot(i, p, dtypes[0]) for i, p in enumerate(fsdp_params))
    return ReduceBucket(keys[0], tuple(slots))
