"""
What the other files of FSDP2 share: the meshes that parameters are spread over, the
states of training, and small helpers.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import auto, Enum
from typing import Any, TypeVar
from typing_extensions import ParamSpec

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed._composable.contract import _get_registry
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ._fsdp_api import DataParallelMeshDims


_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


# Whose values hold no others
_LEAVES = frozenset(
    (torch.Tensor, nn.Parameter, DTensor, int, float, bool, str, type(None))
)


# How hooks run #


def _dynamo_disable(func: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """
    Keeps dynamo out of a hook and of what it calls. Where it is not in, as in eager
    training, nothing is done, which is five times as fast.
    """
    untraced: Callable[_Args, _Result] | None = None

    @functools.wraps(func)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        nonlocal untraced
        # The first of them is known while dynamo traces this, and the second is not
        if not torch.compiler.is_compiling() and get_eval_frame_callback() is None:
            return func(*args, **kwargs)
        if untraced is None:
            reason = "skipping FSDP hooks"
            untraced = torch._dynamo.disable(func, recursive=True, reason=reason)
        return untraced(*args, **kwargs)

    return call


def _disable_functorch_if_active(
    func: Callable[_Args, _Result],
) -> Callable[_Args, _Result]:
    """Runs a method outside of the functorch transforms that are on, if any is."""
    are_active = torch._C._are_functorch_transforms_active

    @functools.wraps(func)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if not are_active():
            return func(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return func(*args, **kwargs)

    return call


def without_grad(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """
    Does as the decorator ``torch.no_grad()``, at a fifth of its cost and at none where
    gradients are off, as they are in backward.
    """

    @functools.wraps(function)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return call


def is_bw() -> bool:
    """Whether this thread runs a backward."""
    no_task = -1
    return torch._C._current_graph_task_id() != no_task


class TrainingState(Enum):
    """What a state or a parameter group is doing."""

    FORWARD = auto()  # from pre-forward to post-forward
    PRE_BACKWARD = auto()  # unsharding for backward
    POST_BACKWARD = auto()  # resharding, and reducing gradients
    IDLE = auto()


# Meshes #


@dataclass
class DataParallelMeshInfo:
    """A mesh, and which of its dims shard and which replicate."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    # What the parameters are distributed on, if ``dp_mesh_dims`` says which dims of it
    # are data parallel: all dims but those of pipeline stages, tensor parallel ones
    # included. A part of it would lose placements.
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)
    is_spmd_mesh: bool = field(default=False, init=False, repr=False)

    def __post_init__(self):
        if (self.shard_mesh_dim, self.replicate_mesh_dim) == (None, None):
            raise AssertionError(
                "At least one of shard_mesh_dim and replicate_mesh_dim must not be None"
            )
        self.is_spmd_mesh = self.dp_mesh_dims is not None


@dataclass
class FSDPMeshInfo(DataParallelMeshInfo):
    """One that shards."""

    def __post_init__(self):
        super().__post_init__()
        dim = self.shard_mesh_dim
        if dim is None:
            raise AssertionError("Expects non-None shard_mesh_dim")
        group = self.mesh.get_group(dim)
        self.shard_mesh_size: int = self.mesh.size(dim)
        self.shard_process_group = group
        self.shard_mesh_rank: int = group.rank()
        # None as long as reduce-scatter uses the group above, see
        # `FSDPModule.set_separate_reduce_scatter_group`
        self.reduce_scatter_process_group: dist.ProcessGroup | None = None


@dataclass
class DDPMeshInfo(DataParallelMeshInfo):
    """One that replicates."""

    def __post_init__(self):
        super().__post_init__()
        dim = self.replicate_mesh_dim
        if dim is None:
            raise AssertionError("Expects non-None replicate_mesh_dim")
        group = self.mesh.get_group(dim)
        self.replicate_mesh_size: int = self.mesh.size(dim)
        self.replicate_process_group = group
        self.replicate_mesh_rank: int = group.rank()


@dataclass
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """One that shards within each replica."""

    def __post_init__(self):  # pylint:disable=useless-parent-delegation
        super().__post_init__()  # of both bases, in turn


@dataclass
class ShardPlacementResult:
    """On which dim a parameter is sharded, None for the first, and over which mesh."""

    placement: Shard | None
    mesh_info: FSDPMeshInfo


ShardPlacementFnResult = Shard | ShardPlacementResult | None


def resolve_shard_placement(
    result: ShardPlacementFnResult,
    default_mesh_info: FSDPMeshInfo,
) -> ShardPlacementResult:
    """
    Completes what a ``shard_placement_fn`` has returned: without a mesh the unit's own
    is meant.

    Raises:
        ValueError: if it is nothing of that kind.
    """
    match result:
        case ShardPlacementResult():
            return result
        case Shard() | None:
            return ShardPlacementResult(result, default_mesh_info)
    raise ValueError(f"Invalid shard_placement_fn result: {result}")


def _is_composable_with_fsdp(module: nn.Module) -> bool:
    applied = _get_registry(module) or {}
    return "replicate" not in applied


# Tensors #


def _get_dim0_padded_size(tensor_size: torch.Size, dim0_factor: int) -> torch.Size:
    rows, *rest = tensor_size
    return torch.Size([math.ceil(rows / dim0_factor) * dim0_factor, *rest])


def _chunk_with_empty(
    tensor: torch.Tensor, num_chunks: int, dim: int
) -> list[torch.Tensor]:
    """Returns as many chunks as asked for, where there are too few with empty ones."""
    chunks = [*tensor.chunk(num_chunks, dim)]
    missing = num_chunks - len(chunks)
    return chunks + [tensor.new_empty(0) for _ in range(missing)]


def _get_dim_chunked_size(
    chunk: torch.Tensor, unchunked_size: torch.Size, dim: int
) -> torch.Size:
    """Returns a chunk's size. An empty one has that of the whole but for ``dim``."""
    if chunk.numel() == 0:
        return torch.Size(
            0 if i == dim else size for i, size in enumerate(unchunked_size)
        )
    return chunk.size()


def _from_local_no_grad(
    local_tensor: torch.Tensor,
    sharding_spec: DTensorSpec,
) -> DTensor:
    """
    Does as :meth:`DTensor.from_local`, not differentiably and without its checks. The
    local tensor itself is in the result, no view of it.
    """
    requires_grad = local_tensor.requires_grad
    # pyrefly: ignore [bad-argument-type, bad-argument-count, unexpected-keyword]
    return DTensor(local_tensor, sharding_spec, requires_grad=requires_grad)


def _to_dtype_if_needed(
    tensor: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    return tensor if dtype in (None, tensor.dtype) else tensor.to(dtype)


def _cast_fp_tensor(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Casts a floating-point tensor, and returns anything else as it is."""
    if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != dtype:
        return x.to(dtype)
    return x


def are_leaves(values: Iterable[Any]) -> bool:
    """
    Whether no value holds others, as far as is known: a look at each does then, which
    takes a tenth of a walk through containers.
    """
    return _LEAVES.issuperset(map(type, values))


def _raise_assert_with_print(*args: Any, **kwargs: Any):
    """Prints the rank, a message and the stack, and raises."""
    print(f"[Rank {dist.get_rank()}]", *args, **kwargs)
    traceback.print_stack()
    raise AssertionError(*args, **kwargs)
