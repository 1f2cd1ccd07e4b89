"""
What allocates a unit's buffers and issues its collectives, and the ``fsdp::``
operators that fill and empty the buffers.

All of it is importable from :mod:`_fsdp_collectives` too, where the release has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from ._fsdp_api import _ReduceOp, AllGather, ReduceScatter
from ._fsdp_layout import GatherLayout
from ._fsdp_release import FOLLOWS_GRAD_DTYPE, has_operator


class DefaultAllocMixin:
    """Takes every buffer from the device's caching allocator."""

    def allocate(
        self,
        size: Sequence[int | torch.SymInt],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ProcessGroupAllocMixin:
    """
    Takes buffers from the process group's own allocator where its backend has
    one for the device, e.g. memory registered with the network.
    """

    def __init__(self, group: dist.ProcessGroup, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._group = group

    def allocate(
        self,
        size: Sequence[int | torch.SymInt],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        allocator = self._group._get_backend(device)
        if not allocator.supports_tensor_alloc(device):
            return torch.empty(*size, dtype=dtype, device=device)
        numel = math.prod(map(int, size))  # backends allocate 1D only
        return allocator.allocate_tensor(numel, dtype=dtype, device=device)


class SymmMemAllocMixin:
    """
    Takes buffers from the device's symmetric-memory pool, which registers memory for
    each one that is held, and gives it again once it is free.
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
        # A rendezvous needs the group's communicator, which is created by the
        # group's first collective
        dist.barrier(group=group)

    def allocate(
        self,
        size: Sequence[int | torch.SymInt],
        *,
        dtype: torch.dtype,
        device: torch.device,
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
        """Sends each rank its part of the input, where FSDP adds the parts."""
        dist.all_to_all_single(output_tensor, input_tensor, group=group)


def is_of_group(comm: AllGather | ReduceScatter) -> bool:
    """
    Whether ``comm`` issues a collective of the process group, which all ranks come to:
    a class that replaces the call must say whether it still does.
    """
    return _says_with_call(type(comm), "needs_all_ranks")


def can_exchange(kind: type) -> bool:
    """
    Whether a reduce-scatter can send gradients without adding them: a class that
    reduces in its own way must say how it does that, too.
    """
    return _says_with_call(kind, "exchange")


def _says_with_call(kind: type, name: str) -> bool:
    """Whether the class that last defines the call, or one derived from it, has this."""
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
    Returns the 1D buffer of a gather from ``comm``.

    Raises:
        ValueError: if it is another one than was asked for, which would be written
            past or elsewhere, or does not start where the layout's views can.
    """
    numel, dtype = world_size * layout.segment_numel, layout.buffer_dtype
    buffer = comm.allocate((numel,), dtype=dtype, device=device)
    if type(comm) is DefaultAllGather:
        return buffer
    setter = "set_custom_all_gather"
    _check_buffer(buffer, numel, comm, setter, len(layout.regions) > 1)
    if buffer.dtype != dtype or buffer.dim() != 1:
        wrong = f"one of {buffer.dtype} and {buffer.dim()} dims, not 1D of {dtype}"
        _raise_about_buffer(comm, setter, wrong)
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
    """
    Returns an input or output of a reduce-scatter from ``comm``.

    Raises:
        ValueError: if it is another one than was asked for.
    """
    buffer = comm.allocate((numel,), dtype=dtype, device=device)
    if type(comm) is not DefaultReduceScatter:
        _check_buffer(buffer, numel, comm, "set_custom_reduce_scatter")
    return buffer


def allocates_anew(comm: ReduceScatter) -> bool:
    """Whether no buffer from ``comm`` shares memory with one that is still held."""
    mixins = (DefaultAllocMixin, ProcessGroupAllocMixin, SymmMemAllocMixin)
    return any(type(comm).allocate is mixin.allocate for mixin in mixins)


def holds_one_input(comm: ReduceScatter) -> bool:
    """
    Whether a unit's buckets must be reduced one after the other: the next one may get
    an input that is still held, or would register symmetric memory of its own.
    """
    is_symmetric = type(comm).allocate is SymmMemAllocMixin.allocate
    return is_symmetric or not allocates_anew(comm)


def _check_buffer(
    buffer: Any, numel: int, comm: Any, setter: str, is_contiguous: bool = True
) -> None:
    if not isinstance(buffer, torch.Tensor):
        _raise_about_buffer(comm, setter, f"a {type(buffer).__name__}")
    if buffer.numel() != numel:
        wrong = f"{buffer.numel()} elements where {numel} were asked for"
        _raise_about_buffer(comm, setter, wrong)
    if buffer.device.type == "meta":
        _raise_about_buffer(comm, setter, "a tensor on the meta device")
    if is_contiguous and not buffer.is_contiguous():
        wrong = f"a tensor that is not contiguous: its stride is {buffer.stride()}"
        _raise_about_buffer(comm, setter, wrong)


def _raise_about_buffer(comm: Any, setter: str, wrong: str) -> NoReturn:
    raise ValueError(
        f"{type(comm).__name__}.allocate, from {setter}, returned {wrong}: return a "
        "contiguous tensor of the size, dtype and device that it is asked for"
    )


# Operators #
# Compiled graphs are matched and rewritten with the first three. Eager training calls
# what they call where nobody gets them, see [Note: Who observes].

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
        slots = segment.split(inp_split_sizes)
        torch._foreach_copy_(slots, all_gather_inputs)
    return segment, all_gather_output


def split_with_sizes_copy(
    all_gather_output: torch.Tensor,
    all_gather_input_split_sizes: list[int],
    dim: int = 0,
    *,
    out: list[torch.Tensor],
) -> None:
    sizes = all_gather_input_split_sizes
    torch.split_with_sizes_copy(all_gather_output, sizes, dim=dim, out=out)


def chunk_cat(
    tensors: list[torch.Tensor],
    dim: int,
    num_chunks: int,
    out: torch.Tensor,
) -> None:
    torch._chunk_cat(tensors, dim, num_chunks, out=out)


# Since 2.15 the release has an operator in C++ that does as `chunk_cat`, for tensors of
# several dtypes. On CUDA it casts as it copies, where these are bf16 and fp32.
_HAS_MIXED = has_operator("chunk_cat_mixed_dtype")


def copies_mixed(dtypes: set[torch.dtype], device: torch.device) -> bool:
    """Returns whether one kernel for each dtype copies and casts gradients."""
    return (
        _HAS_MIXED
        and device.type == "cuda"
        and dtypes <= {torch.bfloat16, torch.float32}
    )


def chunk_cat_by_operator(
    tensors: list[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor
) -> None:
    """Calls the operator that the release calls."""
    name = "chunk_cat_mixed_dtype" if _HAS_MIXED else "chunk_cat"
    getattr(torch.ops.fsdp, name)(tensors, dim, num_chunks, out=out)


def record_grad_output_stream(buffer: torch.Tensor, stream: torch.Stream) -> None:
    """
    Tells a device (2.15) that sharded gradients in ``buffer`` are read in ``stream``.
    Only where to free memory is an operation of the device does that do anything.
    """
    if not FOLLOWS_GRAD_DTYPE or buffer.device.type == "cpu":
        return
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
        lib.define(
            "record_grad_output_stream(Tensor buffer, int stream_id, "
            "int device_index, int device_type) -> ()"
        )
        nothing = "CompositeExplicitAutograd"
        lib.impl("record_grad_output_stream", lambda *_: None, nothing)


_register_kernels()
