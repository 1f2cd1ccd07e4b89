"""The backends of collectives, which allocate, and the ``fsdp::`` operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from ._fsdp_api import _ReduceOp, AllGather, ReduceScatter
from ._fsdp_host import FOLLOWS_GRAD_DTYPE
from ._fsdp_layout import GatherLayout


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


class DefaultAllGather(DefaultAllocMixin, _SingleAllGather):
    pass


class DefaultReduceScatter(DefaultAllocMixin, _SingleReduceScatter):
    pass


class ProcessGroupAllocAllGather(ProcessGroupAllocMixin, _SingleAllGather):
    pass


class ProcessGroupAllocReduceScatter(ProcessGroupAllocMixin, _SingleReduceScatter):
    pass


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
    """Whether a unit's buckets must be reduced one by one."""
    # The next input may be a buffer still in use, or register more symmetric memory
    is_symmetric = type(comm).allocate is SymmMemAllocMixin.allocate
    return is_symmetric or not allocates_anew(comm)


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
    torch.split_with_sizes_copy(
        all_gather_output, all_gather_input_split_sizes, dim=dim, out=out
    )


def chunk_cat(tensors: list[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    torch._chunk_cat(tensors, dim, num_chunks, out=out)


def record_grad_output_stream(buffer: Tensor, stream: torch.Stream) -> None:
    """Tells a vendor's kernel (2.15) which stream reads sharded gradients."""
    if FOLLOWS_GRAD_DTYPE and buffer.device.type != "cpu":
        torch.ops.fsdp.record_grad_output_stream(
            buffer, stream.stream_id, stream.device_index, stream.device_type
        )


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
