"""
What moves: the data of one unit, one step each way, by which backend.

- Unshard: copy-in, all-gather, copy-out.
- Reduce: copy-in, reduce-scatter, all-reduce, sharded gradients, for each bucket. A
  deferred all-reduce ends with a partial reduce, which the next reduction is given.

:mod:`_fsdp_layout` plans where things lie, :mod:`_fsdp_param_group` decides when they
move, and :mod:`_fsdp_copies` copies them into the buffers and out of these.
"""

# Tests: comm, reduce, hsdp, parity
from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, cast, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.distributed_c10d import ReduceOp  # noqa: F401  (as released)
from torch.distributed.tensor import DTensor  # noqa: F401  (as in the release)

from . import _fsdp_copies as copies
from . import _fsdp_layout as layouts
from ._fsdp_api import _ReduceOp, AllGather, ReduceScatter
from ._fsdp_compat import _get_all_gather_input_metadatas, _get_param_all_gather_inputs
from ._fsdp_copies import (
    foreach_reduce_scatter_copy_in,
    record_grad_output_stream,  # noqa: F401  (as in the release)
)
from ._fsdp_errors import explain_all_to_all, explain_reduction
from ._fsdp_layout import GatherLayout, ReduceBucket, ReduceSlot
from ._fsdp_observers import NO_RANGE, without_grad
from ._fsdp_param import FSDPParam, ShardedState  # noqa: F401  (as in the release)
from ._fsdp_param_cache import ParamGroupCache
from ._fsdp_releases import FOLLOWS_GRAD_DTYPE
from ._fsdp_scaling import (
    _div_if_needed,
    _get_gradient_divide_factors,  # noqa: F401  (as in the release)
    add_in_tree,
    all_reduce_in_tree,
    Factors,
    get_divide_factors,
)


# Backends of collectives, which allocate #

_Size: TypeAlias = Sequence[int | torch.SymInt]


class DefaultAllocMixin:
    """Allocates from the device's caching allocator."""

    def allocate(
        self, size: _Size, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ProcessGroupAllocMixin:
    """Allocates from the group's backend, where it has an allocator for the device."""

    def __init__(self, group: dist.ProcessGroup, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._group = group

    def allocate(
        self, size: _Size, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        allocator = self._group._get_backend(device)
        if not allocator.supports_tensor_alloc(device):
            return torch.empty(*size, dtype=dtype, device=device)
        numel = math.prod(map(int, size))  # backends allocate 1D only
        return allocator.allocate_tensor(numel, dtype=dtype, device=device)


class SymmMemAllocMixin:
    """Allocates from the symmetric-memory pool, which registers what is in use."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        backend: Literal["NCCL"] = "NCCL",
        *args: Any,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        symm_mem.set_backend(backend)
        self._group = group
        # A rendezvous needs the communicator, which the first collective creates
        dist.barrier(group=group)

    def allocate(
        self, size: _Size, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        pool = symm_mem.get_mem_pool(device)
        with torch.get_device_module(device).use_mem_pool(pool):
            return torch.empty(*size, dtype=dtype, device=device)


class _SingleAllGather(AllGather):
    # Ranks may be compared before: a call completes only if all of them call
    needs_all_ranks = True

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return dist.all_gather_single(output_tensor, input_tensor, group, async_op)


class _SingleReduceScatter(ReduceScatter):
    needs_all_ranks = True

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: _ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        tensors = output_tensor, input_tensor
        return dist.reduce_scatter_single(*tensors, op, group, async_op)

    def exchange(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Does the all-to-all of gradients that FSDP then adds itself."""
        dist.all_to_all_single(output_tensor, input_tensor, group=group)


class DefaultAllGather(DefaultAllocMixin, _SingleAllGather): ...


class DefaultReduceScatter(DefaultAllocMixin, _SingleReduceScatter): ...


class ProcessGroupAllocAllGather(ProcessGroupAllocMixin, _SingleAllGather): ...


class ProcessGroupAllocReduceScatter(ProcessGroupAllocMixin, _SingleReduceScatter): ...


class SymmMemAllGather(SymmMemAllocMixin, _SingleAllGather):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        # The input is a part of the output, so this registers both
        symm_mem.rendezvous(output_tensor, group=group.group_name)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class SymmMemReduceScatter(SymmMemAllocMixin, _SingleReduceScatter):
    # Its kernels only sum
    exchange = None  # pyrefly: ignore [bad-override-mutable-attribute]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: _ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        for tensor in (input_tensor, output_tensor):
            symm_mem.rendezvous(tensor, group=group.group_name)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def allocate(
    comm: AllGather | ReduceScatter,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: GatherLayout | None = None,
    *,
    gathers: bool = False,
) -> Tensor:
    """
    Returns a buffer that can be viewed in the dtypes of ``layout``; one to gather is 1D
    of ``dtype``. Raises a ValueError if what the comm returns is not so.
    """
    buffer: Any = comm.allocate((numel,), dtype=dtype, device=device)
    if type(comm) is DefaultAllGather or type(comm) is DefaultReduceScatter:
        return buffer
    kind = type(comm).__name__
    itemsize = layout.regions[0].dtype.itemsize if layout else 1  # of the widest
    if not isinstance(buffer, Tensor):
        wrong = f"a {type(buffer).__name__}"
    elif buffer.numel() != numel:
        wrong = f"{buffer.numel()} elements where {numel} were asked for"
    elif buffer.device.type == "meta":
        wrong = "a tensor on the meta device"
    elif not buffer.is_contiguous() and (itemsize > dtype.itemsize or not gathers):
        wrong = f"a tensor that is not contiguous: its stride is {buffer.stride()}"
    elif gathers and (buffer.dtype != dtype or buffer.dim() != 1):
        wrong = f"one of {buffer.dtype} and {buffer.dim()} dims, not 1D of {dtype}"
    elif (start_nbytes := buffer.storage_offset() * buffer.itemsize) % itemsize != 0:
        raise ValueError(
            f"{kind}.allocate returned a buffer that starts at byte {start_nbytes} of "
            "its storage, but the parameters of several dtypes need it aligned to "
            f"{itemsize} bytes: return one that starts at a multiple of that"
        )
    else:
        return buffer
    setter = "set_custom_all_gather" if gathers else "set_custom_reduce_scatter"
    raise ValueError(
        f"{kind}.allocate, from {setter}, returned {wrong}: return a contiguous tensor "
        "of the size, dtype and device that it is asked for"
    )


_OWN_KINDS = (DefaultAllocMixin, ProcessGroupAllocMixin, SymmMemAllocMixin)
_OWN_ALLOCATORS = frozenset(kind.allocate for kind in _OWN_KINDS)


def allocates_anew(comm: ReduceScatter) -> bool:
    """Whether no buffer from ``comm`` shares memory with one in use."""
    return type(comm).allocate in _OWN_ALLOCATORS


def holds_one_input(comm: ReduceScatter) -> bool:
    """Whether only one reduce-scatter input may be in use at a time."""
    # The next may be the same buffer, or register more symmetric memory
    return isinstance(comm, SymmMemAllocMixin) or not allocates_anew(comm)


# Operators #
# Inductor rewrites graphs with them. An eager step calls what they call unless somebody
# may see or replace them, see [Note: Who observes].

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


all_gather_copy_in_meta = all_gather_copy_in_cuda  # a copy does nothing there


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
if FOLLOWS_GRAD_DTYPE:
    lib.define(
        "record_grad_output_stream(Tensor buffer, int stream_id, int device_index, "
        "int device_type) -> ()"
    )
    lib.impl("record_grad_output_stream", lambda *_: None, "CompositeExplicitAutograd")


# Unshard #


class AllGatherResult(NamedTuple):
    """An all-gather in flight. It owns the buffer until copy-out is ordered."""

    all_gather_output: Tensor  # 1D
    all_gather_event: torch.Event | None
    all_gather_work: dist.distributed_c10d.Work | None
    # For each parameter, dtype and elements on one rank of each of its inputs
    param_all_gather_input_dtypes: list[list[torch.dtype]]
    param_all_gather_input_numels: list[list[int]]
    # In elements of the output, in the order in which a segment holds them
    all_gather_input_split_sizes: list[int]


# Which plugins may monkeypatch
_OWN_INPUTS = (_get_param_all_gather_inputs, _get_all_gather_input_metadatas)


def _stage_monkeypatched(
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    device: torch.device,
    comm: AllGather,
) -> tuple[Tensor, Tensor, tuple[list, list, list[int]]]:
    """
    Allocates the buffer of a gather and fills this rank's segment of it with a plugin's
    inputs, in parameter order. Returns both, and the last fields of the result.
    """
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
    return output, segment, (dtypes, numels, split_sizes)


@without_grad
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
        fsdp_params: The unit's, all sharded or all resharded after forward.
        group: Ranks to gather over, in the order of their segments.
        async_op: Whether the collective returns a work, and both streams are current.
        all_gather_copy_in_stream: Where the buffer is allocated and filled.
        all_gather_stream: Where the collective runs, after the copy-in.
        device: Of the buffer.
        all_gather_comm: Allocates the buffer and issues the collective.

    Returns:
        The gather in flight. Its buffer is 1D, in the inputs' one dtype, else in bytes.
    """
    device_handle = _get_device_handle(device.type)
    with device_handle.stream(all_gather_copy_in_stream):
        own = (_get_param_all_gather_inputs, _get_all_gather_input_metadatas)
        if own == _OWN_INPUTS:
            tensors, plan = ParamGroupCache.of(fsdp_params).prepare_gather()
            layout, comm = plan.layout, all_gather_comm
            numel, dtype = group.size() * layout.segment_numel, layout.buffer_dtype
            output = allocate(comm, numel, dtype, device, layout, gathers=True)
            segment = copies.fill_segment(output, plan, tensors, group.rank())
            fields = plan.dtypes, plan.numels, plan.split_sizes
        else:
            output, segment, fields = _stage_monkeypatched(
                fsdp_params, group, device, all_gather_comm
            )
    all_gather_stream.wait_stream(all_gather_copy_in_stream)
    with device_handle.stream(all_gather_stream):
        work = all_gather_comm(
            output_tensor=output, input_tensor=segment, group=group, async_op=async_op
        )
        event = all_gather_stream.record_event()
    return AllGatherResult(output, event, work, *fields)


def _default_all_gather_output_fn(
    fsdp_params: list[FSDPParam], all_gather_result: AllGatherResult, world_size: int
) -> None:
    """Writes every parameter's all-gather outputs from a gather's buffer."""
    buffer, _, _, dtypes, numels, split_sizes = all_gather_result
    if (layout := getattr(split_sizes, "layout", None)) is None:
        # Of another gather, in parameter order
        flat = [*chain(*dtypes)], [*chain(*numels)]
        layout = layouts.plan_gather(*flat, by_dtype=False)
    cache = ParamGroupCache.of(fsdp_params)
    outputs = cache.alloc_outputs(dtypes, numels, world_size, buffer.device)
    # They may have been resharded since, e.g. to save a state dict
    states = [state for state, plan in cache.plans.items() if plan.layout is layout]
    state = states[0] if states else fsdp_params[0].sharded_state
    copies.copy_out(fsdp_params, state, buffer, layout, outputs, world_size)


AllGatherOutputFn: TypeAlias = Callable[[list[FSDPParam], AllGatherResult, int], None]


@without_grad
def foreach_all_gather_copy_out(
    all_gather_result: AllGatherResult,
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    *,
    all_gather_output_fn: AllGatherOutputFn = _default_all_gather_output_fn,
) -> None:
    """
    Waits for an all-gather and writes every parameter's all-gather outputs from its
    buffer: one kernel, and one more copy for each parameter not sharded on dim 0.

    Args:
        all_gather_result: From :func:`foreach_all_gather`, or from another one whose
            segments hold the inputs in parameter order.
        fsdp_params: The parameters that were gathered.
        group: The group that they were gathered over.
        all_gather_output_fn: Makes and fills the outputs, given ``fsdp_params``, the
            result, which is complete then, and the number of ranks.

    Raises:
        NotImplementedError: if a custom one would be given several dtypes.
    """
    buffer, event, work, dtypes, *_ = all_gather_result
    if all_gather_output_fn is not _default_all_gather_output_fn:
        if len({*chain.from_iterable(dtypes)}) > 1:
            names = ", ".join(str(p._param_fqn) for p in fsdp_params)
            raise NotImplementedError(
                f"_all_gather_output_fn would be given parameters of several dtypes, "
                f"which do not lie in their own order: {names}. Set it on units of "
                "one dtype only"
            )
    if event is not None:
        _get_device_handle(buffer.device.type).current_stream().wait_event(event)
    if isinstance(work, dist.distributed_c10d.Work):
        work.wait()
    all_gather_output_fn(fsdp_params, all_gather_result, group.size())


@without_grad
def unshard_single_rank(fsdp_params: list[FSDPParam], device: torch.device) -> None:
    """Unshards parameters over a single rank: a copy in place of an all-gather."""
    cache = ParamGroupCache.of(fsdp_params)
    tensors, plan = cache.prepare_gather()
    outputs = cache.alloc_outputs(plan.dtypes, plan.numels, 1, device)
    targets = [output.data for output in outputs.tensors]  # see `_to_columns`
    copies.copy_each(targets, tensors)


# Reduce #


class ReduceResult(NamedTuple):
    """A reduction in flight: what must be held, and until which event."""

    reduce_scatter_input: Tensor | None  # None if there was no new gradient
    reduce_scatter_event: torch.Event | None
    post_reduce_stream: torch.Stream
    post_reduce_event: torch.Event
    # The reduced buffer, if other streams than the one that allocated it use it
    all_reduce_input: Tensor | None
    all_reduce_event: torch.Event | None
    # The sum so far, if the all-reduce is deferred
    partial_reduce_output: Tensor | None


# See `_default_reduce_scatter_input_fn`
PrepareFn: TypeAlias = Callable[[list[FSDPParam], list[Tensor], int], tuple]


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
        dim = fsdp_param.fsdp_placement.dim
        if dim != 0 and world_size > 1:
            by_rank = copies.view_by_rank(grad, dim, world_size)
            grad = unsharded_grads[i] = by_rank.flatten(0, 1)
        rows = -(-grad.size(0) // world_size) * world_size
        sizes.append(torch.Size([rows, *grad.size()[1:]]))
    return tuple(sizes)


class Reduction(NamedTuple):
    """The arguments of :func:`foreach_reduce` that are the same for all buckets."""

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
    prepare_reduce_scatter_inputs: PrepareFn = _default_reduce_scatter_input_fn
    # Whether the comm may allocate the same output for the next bucket
    reuses_output: bool = False
    # What a plugin has put in place of `foreach_reduce`, if anything
    replacement: Callable[..., Any] | None = None

    @property
    def defers_all_reduce(self) -> bool:
        return self.all_reduce_group is not None and not self.all_reduce_grads

    @property
    def shard_world_size(self) -> int:
        group = self.reduce_scatter_group
        return 1 if group is None else group.size()

    @property
    def prepares_by_default(self) -> bool:
        """Whether the copy-in itself does what would be prepared."""
        return self.prepare_reduce_scatter_inputs is _default_reduce_scatter_input_fn

    def input_nbytes(self, bucket: ReduceBucket) -> int:
        nbytes = bucket.shard_numel * bucket.wire_dtype.itemsize
        return nbytes * self.shard_world_size


@dataclass(eq=False)
class BucketGrads:
    """A bucket to reduce: its parameters, and what there is of their gradients."""

    fsdp_params: list[FSDPParam]  # in slot order
    bucket: ReduceBucket
    unsharded_grads: list[Tensor]  # of the first parameters, until the copy-in
    partial_reduce_output: Tensor | None
    # Each rank's shards of new gradients, or None. One all-to-all's buckets share it.
    reduce_scatter_input: Tensor | None = None
    # After the all-to-all: from each rank its new gradients for this rank's shards
    received: Tensor | None = None

    def __post_init__(self) -> None:
        count, bucket = len(self.unsharded_grads), self.bucket
        # Whether some parameters are in the partial reduce only
        self.is_extended = count < len(bucket.slots)
        # Elements of a rank's shards of the new gradients
        numel = bucket.starts[count] if self.is_extended else bucket.shard_numel
        self.new_numel = numel

    @property
    def partial_dtype(self) -> torch.dtype:
        """What partial reduces are added in: the widest of the parameters'."""
        dtype = self.bucket.dtype
        for fsdp_param in self.fsdp_params:
            dtype = layouts.accumulation_dtype(fsdp_param, dtype)
        return dtype


def join_parts(parts: Sequence[BucketGrads]) -> BucketGrads:
    """Joins buckets of one key, of several units, to one. All gradients are new."""
    placed = [
        (slot, fsdp_param, grad)
        for part in parts
        for slot, fsdp_param, grad in zip(
            part.bucket.slots, part.fsdp_params, part.unsharded_grads, strict=True
        )
    ]
    dtype, comm_dtype = parts[0].bucket.key
    bucket = ReduceBucket(dtype, (), comm_dtype, is_aligned=True)
    placed.sort(key=lambda of: layouts.slot_sort_key(of[0], bucket))  # stable
    slots = tuple(replace(slot, param=i) for i, (slot, _, _) in enumerate(placed))
    bucket = replace(bucket, slots=slots)
    grads = [grad for _, _, grad in placed]
    for part in parts:
        part.unsharded_grads.clear()
    return BucketGrads([p for _, p, _ in placed], bucket, grads, None)


if FOLLOWS_GRAD_DTYPE:

    def foreach_reduce(
        fsdp_params: list[FSDPParam],
        unsharded_grads: list[Tensor],
        reduce_scatter_group: dist.ProcessGroup | None,
        reduce_scatter_stream: torch.Stream,
        reduce_scatter_comm: ReduceScatter,
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
        prepare_reduce_scatter_inputs: PrepareFn = _default_reduce_scatter_input_fn,
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
        gradients, which it may replace in place, and the number of ranks. It returns
        the gradients' padded sizes, which a rank gets one chunk of on dim 0.
        """
        scatter = reduce_scatter_group, reduce_scatter_stream, reduce_scatter_comm
        add = all_reduce_group, all_reduce_stream, all_reduce_grads, all_reduce_hook
        scale = gradient_divide_factor, force_sum_reduction_for_comms
        prepare = prepare_reduce_scatter_inputs
        reduction = Reduction(*scatter, *add, *scale, device, prepare)
        of_bucket = fsdp_params, unsharded_grads, partial_reduce_output
        return _reduce_one_bucket(reduction, *of_bucket, reduce_dtype, None)

else:

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
    ) -> ReduceResult:
        """
        As above. Without ``orig_dtype`` each sharded gradient is cast to its
        parameter's own dtype (the release then casts nothing).
        """
        scatter = reduce_scatter_group, reduce_scatter_stream, reduce_scatter_comm
        add = all_reduce_group, all_reduce_stream, all_reduce_grads, all_reduce_hook
        scale = gradient_divide_factor, force_sum_reduction_for_comms
        reduction = Reduction(*scatter, *add, *scale, device)
        of_bucket = fsdp_params, unsharded_grads, partial_reduce_output
        return _reduce_one_bucket(reduction, *of_bucket, reduce_dtype, orig_dtype)


_REDUCE_SIGNATURE = inspect.signature(foreach_reduce)


def call_monkeypatched(reduction: Reduction, part: BucketGrads) -> ReduceResult:
    """Calls what a plugin has put in place of :func:`foreach_reduce`."""
    replacement = cast(Callable[..., Any], reduction.replacement)
    runs = part.bucket.runs
    values = {
        **reduction._asdict(),
        **vars(part),
        "reduce_dtype": part.bucket.dtype,
        "orig_dtype": runs[0].grad_dtype if len(runs) == 1 else None,
    }
    names = _REDUCE_SIGNATURE.parameters
    bound = _REDUCE_SIGNATURE.bind(**{name: values[name] for name in names})
    return ReduceResult._make(replacement(*bound.args, **bound.kwargs))


def _reduce_one_bucket(
    reduction: Reduction,
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[Tensor],
    partial_reduce_output: Tensor | None,
    reduce_dtype: torch.dtype | None,
    orig_dtype: torch.dtype | None,
) -> ReduceResult:
    dtypes = [
        layouts.reduce_dtype_of(grad.dtype, reduce_dtype) for grad in unsharded_grads
    ]
    dtype = dtypes[0] if dtypes else cast(torch.dtype, reduce_dtype)
    dtypes += [dtype] * (len(fsdp_params) - len(dtypes))
    keys = [layouts.bucket_key(p, d) for p, d in zip(fsdp_params, dtypes)]
    for key, fsdp_param in zip(keys, fsdp_params):
        if key != keys[0]:
            first, other = map(layouts.describe_key, (keys[0], key))
            raise AssertionError(
                "One reduction takes one reduce dtype, but the gradients of "
                f"{fsdp_params[0]._param_fqn} and {fsdp_param._param_fqn} would be "
                f"reduced in {first} and {other}: pass reduce_dtype, or reduce "
                "them in two calls"
            )
    # By name: which of them are new may differ between replicas
    by_name = sorted(fsdp_params, key=lambda p: str(p._param_fqn))
    slots = []
    for fsdp_param in fsdp_params:
        param, dim = fsdp_param.sharded_param, fsdp_param.fsdp_placement.dim
        is_set = param.grad_dtype != param.dtype  # by users, which comes first
        grad_dtype = param.grad_dtype if is_set else orig_dtype or param.dtype
        numel = fsdp_param.padded_sharded_param_size.numel()
        slots.append(ReduceSlot(by_name.index(fsdp_param), grad_dtype, numel, dim))
    bucket = ReduceBucket(dtype, tuple(slots), keys[0][1] if keys else None)
    bucket = prepare_inputs(reduction, bucket, fsdp_params, unsharded_grads)
    part = BucketGrads(fsdp_params, bucket, unsharded_grads, partial_reduce_output)
    return reduce_buckets(reduction, [part])[0]


def prepare_inputs(
    reduction: Reduction,
    bucket: ReduceBucket,
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[Tensor],
) -> ReduceBucket:
    """Lets a plugin prepare the gradients, and returns where these lie then."""
    world_size, count = reduction.shard_world_size, len(unsharded_grads)
    if count == 0 or reduction.prepares_by_default:
        return bucket
    prepare = reduction.prepare_reduce_scatter_inputs
    try:
        sizes = prepare(fsdp_params[:count], unsharded_grads, world_size)
        if len(sizes) != count:
            raise ValueError(
                f"the function that prepares {count} gradients, first that of "
                f"{fsdp_params[0]._param_fqn}, returned {len(sizes)} sizes"
            )
    except Exception as error:
        raise explain_reduction(  # noqa: B904  (has its cause)
            error, fsdp_params, bucket, unsharded_grads, reduction.device
        )
    slots = [
        replace(slot, shard_numel=size.numel() // world_size, shard_dim=0)
        for slot, size in zip(bucket.slots, sizes)
    ]
    return replace(bucket, slots=(*slots, *bucket.slots[count:]))


@without_grad
def reduce_buckets(
    reduction: Reduction, parts: Sequence[BucketGrads]
) -> list[ReduceResult]:
    """
    Does as :func:`foreach_reduce` for each of several buckets. All copy-ins come first,
    so that the streams meet once: the first collective waits for the last copy-in.

    Buckets with a comm dtype share one all-to-all. Over replicas, those of one reduce
    dtype share the all-reduce.
    """
    handle = _get_device_handle(reduction.device.type)
    current, stream = handle.current_stream(), reduction.reduce_scatter_stream
    world_size = reduction.shard_world_size
    results: list[ReduceResult] = []
    new = [part for part in parts if part.unsharded_grads]
    sent = [p for p in new if p.bucket.comm_dtype is not None and world_size > 1]
    # Copied into one buffer. A single bucket is copied in as for a reduce-scatter.
    joined = sent if len(sent) > 1 else []
    batch = parts  # what an error is explained by
    try:
        for part in new:
            if part not in joined:
                batch = [part]
                _reduce_copy_in(reduction, part, world_size)
        if batch := joined:
            _all_to_all_copy_in(reduction, joined, world_size)
        stream.wait_stream(current)
        with handle.stream(stream):
            if sent:
                _all_to_all(reduction, sent, world_size)
            for batch in _all_reduced_together(reduction, parts):
                results += _reduce_together(reduction, batch, world_size, current)
    except Exception as error:
        of_parts = ((p.fsdp_params, p.bucket, p.unsharded_grads) for p in batch)
        explained = (explain_reduction(error, *of, reduction.device) for of in of_parts)
        raise next((e for e in explained if e is not error), error)  # noqa: B904
    return results


def _reduce_copy_in(reduction: Reduction, part: BucketGrads, world_size: int) -> None:
    """Copies the new gradients into the reduction's input, and drops them."""
    bucket, grads, numel = part.bucket, part.unsharded_grads, part.new_numel
    comm, dtype = reduction.reduce_scatter_comm, bucket.wire_dtype
    reduce_input = allocate(comm, world_size * numel, dtype, reduction.device)
    if foreach_reduce_scatter_copy_in is _OWN_COPY_IN:
        copies.copy_in_grads(bucket, grads, reduce_input.view(world_size, numel))
    else:  # which takes gradients of one dtype, to be chunked on dim 0
        if reduction.prepares_by_default:
            _default_reduce_scatter_input_fn(part.fsdp_params, grads, world_size)
        if any(grad.dtype != grads[0].dtype for grad in grads):
            grads[:] = [grad.to(reduce_input.dtype) for grad in grads]
        padded = copies.with_padding(bucket, grads)
        foreach_reduce_scatter_copy_in(padded, reduce_input, world_size)
    part.reduce_scatter_input = reduce_input
    grads.clear()  # only now: the copy-in has been issued


# Which upstream's tests and plugins may monkeypatch
_OWN_COPY_IN = foreach_reduce_scatter_copy_in


def _all_to_all_copy_in(
    reduction: Reduction, parts: Sequence[BucketGrads], world_size: int
) -> None:
    """Copies the new gradients of buckets into one buffer to send, and drops them."""
    comm, layout = reduction.reduce_scatter_comm, _all_to_all_layout(parts)
    numel, dtype = world_size * layout.segment_numel, layout.buffer_dtype
    buffer = allocate(comm, numel, dtype, reduction.device, layout)
    buckets = [part.bucket for part in parts]
    grads = [part.unsharded_grads for part in parts]
    copies.copy_in_buckets(layout, buckets, grads, buffer, world_size)
    for part in parts:
        part.reduce_scatter_input = buffer
        part.unsharded_grads.clear()


def _all_to_all_layout(parts: Sequence[BucketGrads]) -> GatherLayout:
    """Lays out what a rank is sent: by dtype, as what it contributes to a gather."""
    dtypes = tuple(part.bucket.wire_dtype for part in parts)
    return layouts.plan_all_to_all(dtypes, tuple(part.new_numel for part in parts))


def _all_to_all(
    reduction: Reduction, parts: Sequence[BucketGrads], world_size: int
) -> None:
    """Exchanges the new gradients of all ``parts`` in one collective."""
    comm: Any = reduction.reduce_scatter_comm
    sent = cast(Tensor, parts[0].reduce_scatter_input)
    if allocates_anew(comm):
        received = allocate(comm, sent.numel(), sent.dtype, reduction.device)
    else:  # it may allocate what is sent once more
        received = torch.empty_like(sent)
    group = reduction.reduce_scatter_group
    try:
        comm.exchange(output_tensor=received, input_tensor=sent, group=group)
    except Exception as error:
        raise explain_all_to_all(error, parts, reduction.device)  # noqa: B904
    columns = copies.columns_of(received, _all_to_all_layout(parts), world_size)
    for part, rows in zip(parts, columns, strict=True):
        part.received = rows


def _all_reduced_together(
    reduction: Reduction, parts: Sequence[BucketGrads]
) -> Sequence[Sequence[BucketGrads]]:
    """Groups buckets that share one all-reduce, by keys equal on all replicas."""
    if reduction.all_reduce_group is None or reduction.defers_all_reduce:
        return [[part] for part in parts]
    grouped = groupby(parts, lambda p: (p.bucket.dtype, p.bucket.comm_dtype is None))
    return [[*batch] for _, batch in grouped]


def _reduce_together(
    reduction: Reduction,
    parts: Sequence[BucketGrads],
    world_size: int,
    reader: torch.Stream,
) -> list[ReduceResult]:
    """Reduces buckets that share an all-reduce, for the stream ``reader`` to read."""
    key, device = parts[0].bucket.key, reduction.device  # all have the same factors
    groups = reduction.reduce_scatter_group, reduction.all_reduce_group
    scale = reduction.gradient_divide_factor, reduction.force_sum_reduction_for_comms
    factors = get_divide_factors(key, *groups, device.type, *scale)
    output, slices = None, [None]
    if len(parts) > 1:
        numels = [part.bucket.shard_numel for part in parts]
        output = torch.empty(sum(numels), dtype=key[0], device=device)
        slices = output.split(numels)
    targets = []  # (params, bucket, reduced tensor)
    for part, slice_of in zip(parts, slices, strict=True):
        reduced = _reduce_scatter(reduction, part, world_size, factors, slice_of)
        target = part.fsdp_params, part.bucket, reduced
        if part.is_extended and not reduction.defers_all_reduce:
            target = copies.in_common_order(*target)
        if slice_of is not None and target[2] is not slice_of:
            target = (*target[:2], slice_of.copy_(target[2]))
        targets.append(target)
    output = targets[0][2] if output is None else output
    stream = reduction.reduce_scatter_stream
    reduce_input = parts[0].reduce_scatter_input
    scattered = done = stream.record_event()
    if reduction.defers_all_reduce:
        return [ReduceResult(reduce_input, done, stream, done, None, None, output)]
    has_hook = reduction.all_reduce_hook is not None
    all_reduces = has_hook or reduction.all_reduce_group is not None
    if all_reduces:
        stream = reduction.all_reduce_stream
        stream.wait_stream(reduction.reduce_scatter_stream)
    # A view keeps all of the output alive: no use where another gradient is cast
    needs_casts = any(part.bucket.needs_casts for part in parts)
    as_views = output.dtype == key[0] and not needs_casts
    handle = _get_device_handle(device.type) if all_reduces else None
    with handle.stream(stream) if handle else NO_RANGE:
        if all_reduces:
            _all_reduce(reduction, parts, output, factors[3])
        _div_if_needed(output, factors[1])
        for target in targets:
            copies.accumulate_sharded_grads(*target, stream, reader, as_views=as_views)
        done = stream.record_event()
    # Held as well if it was allocated in another stream, where the allocator must not
    # hand out its memory before this one has read it
    held = (output, done) if all_reduces else (None, None)
    if output is reduce_input and not all_reduces:
        scattered = done  # it is read until then, and nothing else holds it
    inputs = [part.reduce_scatter_input for part in parts]
    return [ReduceResult(i, scattered, stream, done, *held, None) for i in inputs]


def _reduce_scatter(
    reduction: Reduction,
    part: BucketGrads,
    world_size: int,
    factors: Factors,
    output: Tensor | None,
) -> Tensor:
    """
    Returns this rank's sum over the shard group, with the partial reduce, which must be
    added before the all-reduce, or those of other replicas would be missing. Without
    ``output`` it is the input itself where nothing is summed or cast.
    """
    bucket, partial = part.bucket, part.partial_reduce_output
    reduce_input = part.reduce_scatter_input
    if reduce_input is None:
        if partial is None:
            raise AssertionError("Expects gradients or a partial result to reduce")
        return partial if reduction.defers_all_reduce else partial.to(bucket.dtype)
    comm, numel = reduction.reduce_scatter_comm, bucket.shard_numel
    new_grads = reduce_input if part.received is None else part.received
    _div_if_needed(new_grads, factors[0])
    if (
        world_size == 1
        and output is None
        and partial is None
        and not reduction.defers_all_reduce
        and reduce_input.dtype == bucket.dtype
        and allocates_anew(comm)
    ):
        return reduce_input
    if is_own := output is None:
        output = allocate(comm, numel, bucket.dtype, reduction.device)
    new = output
    if part.new_numel < numel:  # the rest has a partial reduce only
        new = output[: part.new_numel]
        output[part.new_numel :].zero_()
    if world_size == 1:
        new.copy_(reduce_input)
    elif part.received is None:
        comm(
            output_tensor=new,
            input_tensor=reduce_input,
            group=cast(dist.ProcessGroup, reduction.reduce_scatter_group),
            op=factors[2],
        )
    else:  # what has been sent is needed no more
        add_in_tree(part.received, new, reduce_input)
        part.received = None
    if reduction.defers_all_reduce and part.partial_dtype != output.dtype:
        wider = output.to(part.partial_dtype)
        return wider if partial is None else wider.add_(partial)
    if partial is not None:
        output += partial
    return output.clone() if is_own and reduction.reuses_output else output


def _all_reduce(
    reduction: Reduction,
    parts: Sequence[BucketGrads],
    output: Tensor,
    op: _ReduceOp,
) -> None:
    """Reduces ``output`` over the replicas and runs the user's hook on it."""
    group = reduction.all_reduce_group
    if group is not None and parts[0].bucket.comm_dtype is None:
        dist.all_reduce(output, group=group, op=op)
    elif group is not None:
        try:
            all_reduce_in_tree(output, group)
        except Exception as error:
            raise explain_all_to_all(error, parts, reduction.device)  # noqa: B904
    if reduction.all_reduce_hook is not None:
        reduction.all_reduce_hook(output)
