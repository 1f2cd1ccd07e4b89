"""Backends of collectives, which allocate buffers and issue collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from ._fsdp_api import _ReduceOp, AllGather, ReduceScatter


# As in the release's `_fsdp_collectives`
__all__ = [
    "AllGather", "DefaultAllGather", "DefaultAllocMixin", "DefaultReduceScatter",
    "ProcessGroupAllocAllGather", "ProcessGroupAllocMixin",
    "ProcessGroupAllocReduceScatter", "ReduceScatter", "SymmMemAllGather",
    "SymmMemAllocMixin", "SymmMemReduceScatter",
]  # fmt: skip

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
        if isinstance(self, SymmMemAllocMixin):  # the input is a part of the output
            symm_mem.rendezvous(output_tensor, group=group.group_name)
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
        if isinstance(self, SymmMemAllocMixin):
            symm_mem.rendezvous(input_tensor, group=group.group_name)
            symm_mem.rendezvous(output_tensor, group=group.group_name)
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


class SymmMemAllGather(SymmMemAllocMixin, _SingleAllGather): ...


class SymmMemReduceScatter(SymmMemAllocMixin, _SingleReduceScatter):
    # The kernels of symmetric memory only sum
    exchange = None  # pyrefly: ignore [bad-override-mutable-attribute]


def all_gather_coalesced(
    members: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Gathers dense 1D tensors by one grouped call, given pairs of output and input."""
    members = [member for member in members if member[0].numel()]
    dtype, *dtypes = [output.dtype for output, _ in members]
    is_plain = dtype.itemsize > 1 and not dtype.is_complex
    if not is_plain or dtypes.count(dtype) != len(dtypes):
        # Backends lack some dtypes, and gloo sends all tensors in that of the first
        members = [(o.view(torch.uint8), i.view(torch.uint8)) for o, i in members]
    outputs, inputs = map(list, zip(*members))
    options = AllgatherOptions()
    options.asyncOp = async_op
    work = group.allgather_into_tensor_coalesced(outputs, inputs, options)
    if not async_op and work is not None:
        work.wait()
    return work if async_op else None


def allocate(
    comm: AllGather | ReduceScatter,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    gathers: bool = False,
) -> Tensor:
    """Returns a buffer from ``comm``. A reduction's may have another dtype."""
    buffer = comm.allocate((numel,), dtype=dtype, device=device)
    if type(comm) not in _DEFAULTS:
        _check_buffer(comm, buffer, (numel, dtype, device), gathers)
    return buffer


def _check_buffer(comm: Any, buffer: Tensor, wanted: tuple, gathers: bool) -> None:
    numel, dtype, device = wanted
    has_dtype = buffer.dtype == dtype or not gathers
    if buffer.numel() != numel or buffer.device.type != device.type or not has_dtype:
        found = f"{buffer.numel()} elements of {buffer.dtype} on {buffer.device}"
        fix = f"return {numel} contiguous elements of {dtype} on {device}"
        raise ValueError(f"{type(comm).__name__}.allocate returned {found}: {fix}")


_DEFAULTS = (DefaultAllGather, DefaultReduceScatter)
_MIXINS = (DefaultAllocMixin, ProcessGroupAllocMixin, SymmMemAllocMixin)
_FRESH_ALLOCATES = frozenset(mixin.allocate for mixin in _MIXINS)


def allocates_anew(comm: ReduceScatter) -> bool:
    """Whether no buffer from ``comm`` shares memory with one in use."""
    return getattr(type(comm), "allocate", None) in _FRESH_ALLOCATES
