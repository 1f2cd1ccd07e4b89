"""
The backends that allocate a unit's buffers and issue its collectives, and the
``fsdp::`` operators that copy into the buffers and out of them.

The release has them in :mod:`_fsdp_collectives`, which therefore exports them too.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from ._fsdp_api import _ReduceOp, _Size, AllGather, ReduceScatter
from ._fsdp_layout import GatherLayout
from ._fsdp_release import FOLLOWS_GRAD_DTYPE, has_operator


class DefaultAllocMixin:
    """Takes every buffer from the device's caching allocator."""

    def allocate(
        self, size: _Size, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ProcessGroupAllocMixin:
    """
    Takes buffers from the allocator of the process group's backend, e.g. memory
    registered with the network, where the backend has one for the device.
    """

    def __init__(self, group: dist.ProcessGroup, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._group = group

    def allocate(
        self, size: _Size, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        allocator = self._group._get_backend(device)
        if not allocator.supports_tensor_alloc(device):
            return torch.empty(*size, dtype=dtype, device=device)
        numel = math.prod(map(int, size))  # backends allocate 1D only
        return allocator.allocate_tensor(numel, dtype=dtype, device=device)


class SymmMemAllocMixin:
    """
    Takes buffers from the device's symmetric-memory pool, which registers memory for
    each buffer in use and reuses that of freed ones.
    """

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
    ) -> torch.Tensor:
        pool = symm_mem.get_mem_pool(device)
        with torch.get_device_module(device).use_mem_pool(pool):
            return torch.empty(*size, dtype=dtype, device=device)


class _SingleAllGather(AllGather):
    """Gathers from one tensor into one tensor."""

    needs_all_ranks = True

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return dist.all_gather_single(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class _SingleReduceScatter(ReduceScatter):
    """Reduces from one tensor into one tensor."""

    needs_all_ranks = True

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: _ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        return dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )

    def exchange(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        """Is an all-to-all: each rank gets its part of all inputs, for FSDP to add."""
        dist.all_to_all_single(output_tensor, input_tensor, group=group)


def is_of_group(comm: AllGather | ReduceScatter) -> bool:
    """Whether a call of ``comm`` is a collective that needs all ranks of the group."""
    return _declares(type(comm), "needs_all_ranks")


def can_exchange(kind: type) -> bool:
    """Whether a reduce-scatter can send gradients without adding them."""
    return _declares(kind, "exchange")


def _declares(kind: type, name: str) -> bool:
    """Whether ``name`` is set where the class has its ``__call__`` from, or below."""
    for base in kind.__mro__:
        if name in vars(base) or "__call__" in vars(base):
            return bool(vars(base).get(name))
    return False


class DefaultAllGather(DefaultAllocMixin, _SingleAllGather):
    pass


class DefaultReduceScatter(DefaultAllocMixin, _SingleReduceScatter):
    pass


class ProcessGroupAllocAllGather(ProcessGroupAllocMixin, _SingleAllGather):
    pass


class ProcessGroupAllocReduceScatter(ProcessGroupAllocMixin, _SingleReduceScatter):
    pass


class SymmMemAllGather(SymmMemAllocMixin, _SingleAllGather):
    needs_all_ranks = True

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        # The input is a part of the output, so this registers both
        symm_mem.rendezvous(output_tensor, group=group.group_name)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class SymmMemReduceScatter(SymmMemAllocMixin, _SingleReduceScatter):
    needs_all_ranks = True

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: _ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        for tensor in (input_tensor, output_tensor):
            symm_mem.rendezvous(tensor, group=group.group_name)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


# Buffers #


def allocate_gather_buffer(
    comm: AllGather, layout: GatherLayout, world_size: int, device: torch.device
) -> torch.Tensor:
    """
    Returns the 1D buffer of a gather from ``comm``. Raises a ValueError if copies would
    be written past its end or elsewhere, or the layout's views would not be aligned.
    """
    numel, dtype = world_size * layout.segment_numel, layout.buffer_dtype
    buffer = comm.allocate((numel,), dtype=dtype, device=device)
    if type(comm) is DefaultAllGather:
        return buffer
    is_mixed = len(layout.regions) > 1
    _check_buffer(comm, buffer, numel, dtype=dtype, is_contiguous=is_mixed)
    start_nbytes = buffer.storage_offset() * buffer.itemsize
    if start_nbytes % layout.alignment != 0:
        raise ValueError(
            f"{type(comm).__name__}.allocate returned a buffer that starts at byte "
            f"{start_nbytes} of its storage, but the parameters to gather need it "
            f"aligned to {layout.alignment} bytes: return one that starts at a "
            "multiple of that"
        )
    return buffer


def allocate_reduce_buffer(
    comm: ReduceScatter, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns an input or output of a reduce-scatter from ``comm``, as requested."""
    buffer = comm.allocate((numel,), dtype=dtype, device=device)
    if type(comm) is not DefaultReduceScatter:
        _check_buffer(comm, buffer, numel)
    return buffer


def _check_buffer(
    comm: AllGather | ReduceScatter,
    buffer: Any,
    numel: int,
    *,
    dtype: torch.dtype | None = None,
    is_contiguous: bool = True,
) -> None:
    """Raises if a buffer is not as requested. A gather's must be 1D of ``dtype``."""
    if not isinstance(buffer, torch.Tensor):
        wrong = f"a {type(buffer).__name__}"
    elif buffer.numel() != numel:
        wrong = f"{buffer.numel()} elements where {numel} were asked for"
    elif buffer.device.type == "meta":
        wrong = "a tensor on the meta device"
    elif is_contiguous and not buffer.is_contiguous():
        wrong = f"a tensor that is not contiguous: its stride is {buffer.stride()}"
    elif dtype is not None and (buffer.dtype != dtype or buffer.dim() != 1):
        wrong = f"one of {buffer.dtype} and {buffer.dim()} dims, not 1D of {dtype}"
    else:
        return
    setter = "reduce_scatter" if dtype is None else "all_gather"
    raise ValueError(
        f"{type(comm).__name__}.allocate, from set_custom_{setter}, returned {wrong}: "
        "return a contiguous tensor of the size, dtype and device that it is asked for"
    )


def allocates_anew(comm: ReduceScatter) -> bool:
    """Whether no buffer from ``comm`` shares memory with one that is in use."""
    mixins = (DefaultAllocMixin, ProcessGroupAllocMixin, SymmMemAllocMixin)
    return any(type(comm).allocate is mixin.allocate for mixin in mixins)


def holds_one_input(comm: ReduceScatter) -> bool:
    """
    Whether a unit's buckets must be reduced one after the other: the input of the next
    one may be a buffer still in use, or register more symmetric memory.
    """
    is_symmetric = type(comm).allocate is SymmMemAllocMixin.allocate
    return is_symmetric or not allocates_anew(comm)


# Operators #
# Inductor matches and rewrites the first three in graphs. An eager step calls what they
# call unless somebody may see or replace them, see [Note: Who observes].

lib = torch.library.Library("fsdp", "FRAGMENT")

lib.define(
    "all_gather_copy_in(Tensor[] all_gather_inputs, Tensor all_gather_output, "
    "SymInt[] inp_split_sizes, SymInt all_gather_input_numel, SymInt rank) "
    "-> (Tensor, Tensor)"
)
lib.define(
    "split_with_sizes_copy(Tensor all_gather_output, "
    "SymInt[] all_gather_input_split_sizes, int dim=0, *, Tensor(a!)[] out) -> ()"
)
lib.define(
    "chunk_cat(Tensor[] tensors, int dim, int num_chunks, *, Tensor(a!) out) -> ()"
)


def all_gather_copy_in_meta(
    all_gather_inputs: list[torch.Tensor],
    all_gather_output: torch.Tensor,
    inp_split_sizes: list[int],
    all_gather_input_numel: int,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    start = rank * all_gather_input_numel
    segment = all_gather_output.narrow(0, start, all_gather_input_numel)
    return segment, all_gather_output


def all_gather_copy_in_cuda(
    all_gather_inputs: list[torch.Tensor],
    all_gather_output: torch.Tensor,
    inp_split_sizes: list[int],
    all_gather_input_numel: int,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    start = rank * all_gather_input_numel
    segment = all_gather_output.narrow(0, start, all_gather_input_numel)
    with torch.no_grad():
        torch._foreach_copy_(segment.split(inp_split_sizes), all_gather_inputs)
    return segment, all_gather_output


def split_with_sizes_copy(
    all_gather_output: torch.Tensor,
    all_gather_input_split_sizes: list[int],
    dim: int = 0,
    *,
    out: list[torch.Tensor],
) -> None:
    torch.split_with_sizes_copy(
        all_gather_output, all_gather_input_split_sizes, dim=dim, out=out
    )


def chunk_cat(
    tensors: list[torch.Tensor],
    dim: int,
    num_chunks: int,
    out: torch.Tensor,
) -> None:
    torch._chunk_cat(tensors, dim, num_chunks, out=out)


# Since 2.15 the release has it in C++ for tensors of several dtypes as well. Its CUDA
# kernel casts between bf16 and fp32 while it copies.
_HAS_MIXED = has_operator("chunk_cat_mixed_dtype")
_CHUNK_CAT = "chunk_cat_mixed_dtype" if _HAS_MIXED else "chunk_cat"


def copies_mixed(dtypes: set[torch.dtype], device: torch.device) -> bool:
    """Whether the operator casts between these dtypes without a temporary."""
    on_cuda = device.type == "cuda"
    return _HAS_MIXED and on_cuda and dtypes <= {torch.bfloat16, torch.float32}


def chunk_cat_by_operator(
    tensors: list[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor
) -> None:
    """Calls the operator that the release calls."""
    getattr(torch.ops.fsdp, _CHUNK_CAT)(tensors, dim, num_chunks, out=out)


def record_grad_output_stream(buffer: torch.Tensor, stream: torch.Stream) -> None:
    """
    Tells a device (2.15) that sharded gradients in ``buffer`` are read in ``stream``.
    Does nothing unless a vendor has replaced the operator's kernel.
    """
    if FOLLOWS_GRAD_DTYPE and buffer.device.type != "cpu":
        torch.ops.fsdp.record_grad_output_stream(
            buffer, stream.stream_id, stream.device_index, stream.device_type
        )


def _register_kernels() -> None:
    devices = ("CUDA", "XPU", "HPU", "CPU", "MTIA", "PrivateUse1")
    for key in devices:
        lib.impl("all_gather_copy_in", all_gather_copy_in_cuda, key)
    lib.impl("all_gather_copy_in", all_gather_copy_in_meta, "Meta")
    for key in (*devices, "Meta"):
        lib.impl("split_with_sizes_copy", split_with_sizes_copy, key)
        lib.impl("chunk_cat", chunk_cat, key)
    if FOLLOWS_GRAD_DTYPE:
        name = "record_grad_output_stream"
        arguments = "Tensor buffer, int stream_id, int device_index, int device_type"
        lib.define(f"{name}({arguments}) -> ()")
        lib.impl(name, lambda *_: None, "CompositeExplicitAutograd")


_register_kernels()
