"""
How gradients are scaled and summed: divide factors, and sums over ranks in a fixed
order for ``grad_comm_dtype``.

[Note: One tree for every mesh]
The order in which a library's reduce-scatter adds depends on the ranks and the mesh.
Here each rank receives its shard of all ranks' gradients and adds neighbours, then
neighbouring sums, and so on; the last of an odd number waits. An HSDP mesh numbers its
ranks replica by replica, so a shard group of a power of two ranks is a subtree, which
the tree over the replicas continues. Hence all such meshes add in the same order, with
the same bits.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.distributed.distributed_c10d import ReduceOp
from torch.nn.functional import pad

from ._fsdp_api import _ReduceOp
from ._fsdp_layout import BucketKey
from ._fsdp_releases import SCALES_BF16


Factors: TypeAlias = tuple[float | None, float | None, _ReduceOp, _ReduceOp]
# The pieces that a large buffer is summed in, to bound the memory for that
_MIN_PIECE_NBYTES, _MAX_PIECES = 16 * 2**20, 8
# The Triton kernel adds tensors of these. ROCm's devices have this type, too
_KERNEL_DEVICE_TYPE = "cuda"
_KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_has_kernel = True  # until Triton turns out to be missing or to fail


def _get_gradient_divide_factors(
    reduce_scatter_group: dist.ProcessGroup | None,
    all_reduce_group: dist.ProcessGroup | None,
    reduce_dtype: torch.dtype,
    device_type: str = "",
    factor: float | None = None,
    force_sum_reduction_for_comms: bool = False,
) -> Factors:
    """
    Returns the divide factors before the reduce-scatter and after the all-reduce (None:
    no division), and the operation of each. Together they divide the sum by d, which is
    ``factor`` or the number of data-parallel ranks:

    - fp32 and bf16: the collective divides (AVG, or PREMUL_SUM by 1 / d). Where it can
      only sum, the result, as it is smaller than the input, is divided by d.
    - Other dtypes: before by f, after by d / f, as fp16 could overflow in the sum or
      underflow before it. f is the least power of two that is at least sqrt(d) or does
      not divide d: 4 for 8 ranks, 4 for 6.
    """
    shards = _size(reduce_scatter_group)
    workers = shards * _size(all_reduce_group)
    divisor = float(workers) if factor is None else factor
    SUM, AVG = ReduceOp.SUM, ReduceOp.AVG
    if reduce_dtype not in (torch.float32, torch.bfloat16):
        before = 1
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return before, divisor / before, SUM, SUM
    if force_sum_reduction_for_comms or device_type == "mtia":
        return None, divisor, SUM, SUM
    if factor is None:
        # Over a single rank some backends' AVG is wrong
        op = SUM if workers == 1 else AVG
        return None, None, op, op
    if reduce_scatter_group is not None and factor == shards:
        return None, None, AVG, SUM
    if reduce_scatter_group is not None and shards > 1:
        backend = backend_name(reduce_scatter_group, torch.device(device_type or "cpu"))
        has_premul_sum = backend not in ("gloo", "mpi", "threaded", "threadpg")
        if not has_premul_sum or (reduce_dtype is torch.bfloat16 and not SCALES_BF16):
            return None, factor, SUM, SUM
    return None, None, ReduceOp.PREMUL_SUM(1 / factor), SUM


class Scaling(NamedTuple):
    """The source of a unit's divide factors. Units that join reductions share it."""

    reduce_scatter_group: dist.ProcessGroup | None
    all_reduce_group: dist.ProcessGroup | None
    device_type: str
    factor: float | None
    is_sum: bool  # `force_sum_reduction_for_comms`


def get_divide_factors(key: BucketKey, scaling: Scaling) -> Factors:
    """Returns a bucket's divide factors. Over one rank no collective applies them."""
    (dtype, comm_dtype), is_sum = key, scaling.is_sum
    scatter_group, replicate_group, device_type, factor, _ = scaling
    if comm_dtype is not None:
        # [Note: One tree for every mesh] only sums. fp16, which could overflow, is also
        # divided before. Other dtypes get fp32's factors of a forced sum.
        dtype, is_sum = torch.float16 if dtype is torch.float16 else torch.float32, True
    args = scatter_group, replicate_group, dtype, device_type, factor, is_sum
    before, after, op, all_reduce_op = _get_gradient_divide_factors(*args)
    if _size(scatter_group) == 1 and op not in (ReduceOp.SUM, ReduceOp.AVG):
        before = factor  # no collective multiplies
    return before, after, op, all_reduce_op


def get_remaining_divisor(key: BucketKey, scaling: Scaling) -> float:
    """Returns the number by which a bucket's partial reduce is still to be divided."""
    _, after, _, op = get_divide_factors(key, scaling)
    return (after or 1) * (_size(scaling.all_reduce_group) if op == ReduceOp.AVG else 1)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the name of the group's backend for a device, e.g. "nccl"."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:  # groups that are threads of a test
        return group.name()


def _div_if_needed(tensor: Tensor, div_factor: float | None) -> None:
    if div_factor not in (None, 1):
        tensor.div_(div_factor)


def add_in_tree(rows: Tensor, output: Tensor, divisor: float | None = None) -> None:
    """
    Writes the sum of ``rows``, see [Note: One tree for every mesh], to ``output`` (1D),
    divided. May overwrite ``rows``, of which ``output`` may be the first.
    """
    if _add_by_kernel(rows, output, divisor):
        return
    numel = max(_piece_numel(rows) // rows.size(0), 1)  # bounds the memory of casts
    for piece, target in zip(rows.split(numel, dim=1), output.split(numel)):
        # Only every other row is cast, and its neighbour added uncast
        sums, neighbours = piece[0::2].to(output.dtype), piece[1::2]
        sums[: neighbours.size(0)].add_(neighbours)
        count, step = sums.size(0), 1
        while step < count:
            sums[0 : count - step : 2 * step].add_(sums[step :: 2 * step])
            step *= 2
        target.copy_(sums[0])
    _div_if_needed(output, divisor)


def _add_by_kernel(rows: Tensor, output: Tensor, divisor: float | None = None) -> bool:
    """Adds rows by one kernel with the operators' bits. Returns whether it did."""
    global _has_kernel
    is_accepted = {rows.dtype, output.dtype} <= _KERNEL_DTYPES
    if not (_has_kernel and is_accepted and rows.device.type == _KERNEL_DEVICE_TYPE):
        return False
    if _len_torch_dispatch_stack() > 0:  # fake tensors etc. see only operators
        return False
    try:
        from ._fsdp_triton import add_rows

        add_rows(rows, output, divisor)
    except Exception as error:
        # It did not compile, so nothing is written. No collective depends on it
        _has_kernel = False
        if not isinstance(error, ModuleNotFoundError):
            warnings.warn(
                f"The Triton kernel that adds gradients failed: {error!r}. Gradients with "
                "a grad_comm_dtype are added by operators, slower but with the same "
                "bits. Triton needs a C compiler and a folder, TRITON_CACHE_DIR",
                stacklevel=2,
            )
    return _has_kernel


def _piece_numel(tensor: Tensor) -> int:
    return max(-(-tensor.numel() // _MAX_PIECES), _MIN_PIECE_NBYTES // tensor.itemsize)


def all_reduce_in_tree(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """
    Sums ``tensor`` (1D) in place: each rank sums a part of each piece, which all gather.
    Needs the memory of a piece, and of another for the last one if it must be padded.
    """
    world_size = group.size()
    if world_size == 1:
        return
    numel = _piece_numel(tensor)
    numel += -numel % (world_size * -(-16 // tensor.itemsize))  # aligns each part
    for piece in tensor.split(numel):
        padding = -piece.numel() % world_size
        padded = pad(piece, (0, padding)) if padding else piece
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=group)
        rows = received.view(world_size, padded.numel() // world_size)
        add_in_tree(rows, rows[0])
        dist.all_gather_single(padded, rows[0], group=group)
        if padding:
            piece.copy_(padded[: piece.numel()])
        del received, rows, padded  # before the next ones are allocated
