"""What tests of collectives share, which they call on one rank of several threads."""

import contextlib
import copy
import functools
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_helpers.common import utils
from fsdp_helpers.common.doubles import copying_unobserved, dispatched
from fsdp_helpers.common.utils import FSDPThreadTest, random_input, THREAD_DEVICE_TYPE

import torch
import torch.nn as nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Spec:
    """A parameter of a test."""

    size: tuple[int, ...]
    dtype: torch.dtype
    shard_dim: int = 0

    def padded_shard_numel(self, ranks: int) -> int:
        rows = self.size[self.shard_dim]
        return math.ceil(rows / ranks) * math.prod(self.size) // rows


def mixed_specs(ranks: int) -> list[Spec]:
    """Uneven, 1-element and empty shards, in no order of dtypes."""
    return [
        Spec((5, 3), BF16),
        Spec((1,), FP32),
        Spec((3, 2 * ranks), FP16, shard_dim=1),
        Spec((7,), FP32),
        Spec((ranks + 1, 2), FP64),
        Spec((4, 2, ranks), BF16, shard_dim=2),
        Spec((2 * ranks, 2), FP32),
    ]


class Weighted(nn.Module):
    """Parameters whose gradients are what it is called with."""

    def __init__(self, specs: Sequence[Spec], device: str):
        super().__init__()
        self.specs = specs
        for i, spec in enumerate(specs):
            value = random_input(*spec.size, seed=i, dtype=spec.dtype, device=device)
            param = nn.Parameter(value, requires_grad=spec.dtype.is_floating_point)
            self.register_parameter(f"p{i}", param)

    def forward(self, weights: Sequence[torch.Tensor | None]) -> torch.Tensor:
        terms = [
            (param.to(weight.dtype) * weight).sum().double()
            for param, weight in zip(self.parameters(), weights)
            if weight is not None
        ]
        return torch.stack(terms).sum()


class GivenGrads(nn.Module):
    """Gets exactly the gradients that it is called with: its loss is their product."""

    def __init__(self, **params: torch.Tensor):
        super().__init__()
        for name, values in params.items():
            self.register_parameter(name, nn.Parameter(values))
        self.seen: dict[str, torch.dtype] = {}  # in forward

    def forward(self, x: torch.Tensor, **grads: float | torch.Tensor) -> torch.Tensor:
        for name, grad in grads.items():
            param = self.get_parameter(name)
            self.seen[name] = param.dtype
            x = x + (param * grad).sum().to(x.dtype)
        return x


def backward(model: nn.Module, **grads: float | torch.Tensor) -> None:
    x = torch.zeros(1, requires_grad=True, device=next(model.parameters()).device)
    model(x, **grads).sum().backward()


def sharded(
    specs: Sequence[Spec], mesh: DeviceMesh, *, device: str, **kwargs: Any
) -> Weighted:
    """Returns a unit of these parameters, the same on every rank."""
    module = Weighted(specs, device)
    dims = {id(p): spec.shard_dim for p, spec in zip(module.parameters(), specs)}
    placements = {i: Shard(dim) for i, dim in dims.items()}
    return fully_shard(
        module,
        mesh=mesh,
        shard_placement_fn=lambda param: placements[id(param)],
        **kwargs,
    )


def policy_of(
    param_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


def group_of(module: nn.Module) -> FSDPParamGroup:
    return module._get_fsdp_state()._fsdp_param_group


def mesh_of(*sizes: int, device: str = THREAD_DEVICE_TYPE) -> DeviceMesh:
    """Returns a mesh to shard over, or to replicate and to shard over."""
    names = ("replicate", "shard")[-len(sizes) :]
    return device_mesh.init_device_mesh(device, sizes, mesh_dim_names=names)


class ThreadTest(FSDPThreadTest):
    """Calls into the collectives directly, on a unit of this thread's rank."""

    def mesh(self) -> DeviceMesh:
        return mesh_of(self.world_size)

    def unit(self, specs: Sequence[Spec], **kwargs: Any) -> FSDPParamGroup:
        module = sharded(specs, self.mesh(), device=THREAD_DEVICE_TYPE, **kwargs)
        group = group_of(module)
        group.lazy_init()
        for i, fsdp_param in enumerate(group.fsdp_params):
            fsdp_param._param_fqn = f"p{i}"
        return group

    @property
    def stream(self) -> torch.Stream:
        # One stream for all: the threads' collectives know of no other
        return device_mesh._get_device_handle(THREAD_DEVICE_TYPE).current_stream()

    def all_gather(
        self, unit: FSDPParamGroup, **changes: Any
    ) -> collectives.AllGatherResult:
        arguments = {
            "fsdp_params": unit.fsdp_params,
            "group": unit.mesh_info.shard_process_group,
            "async_op": False,
            "all_gather_copy_in_stream": self.stream,
            "all_gather_stream": self.stream,
            "device": self.device,
            "all_gather_comm": collectives.DefaultAllGather(),
            "cache": unit._cache,
        }
        return collectives.foreach_all_gather(**(arguments | changes))

    def copy_out(
        self, unit: FSDPParamGroup, result: collectives.AllGatherResult
    ) -> None:
        group = unit.mesh_info.shard_process_group
        collectives.foreach_all_gather_copy_out(
            result, unit.fsdp_params, group, cache=unit._cache
        )
        for fsdp_param in unit.fsdp_params:
            fsdp_param.init_unsharded_param()


BLOCK_DIM = 9


@functools.cache
def first_blocks(count: int) -> nn.Sequential:
    """Returns the same ones again. Call it before there are threads."""
    return utils.mixed_model(count, dim=BLOCK_DIM)


class Checkpointed(nn.Sequential):
    """Each of its segments runs a backward of its own inside of the root's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class BlocksTest(FSDPThreadTest):
    """Trains copies of the same blocks."""

    blocks: int

    def setUp(self) -> None:
        first_blocks(self.blocks)  # threads share the random number generator
        super().setUp()

    def new_blocks(self) -> nn.Sequential:
        return copy.deepcopy(first_blocks(self.blocks)).to(self.device)

    def input(self, seed: int = 0) -> torch.Tensor:
        """Returns another one on each rank."""
        seed = self.world_size * seed + self.rank
        device = self.device.type
        return random_input(3, BLOCK_DIM, seed=seed, device=device).requires_grad_()

    def assert_same_grads(self, model: nn.Module, expected: nn.Module) -> None:
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            self.assertEqual(one.grad is None, other.grad is None)
            if one.grad is not None:
                self.assert_same(one.grad.to_local(), other.grad.to_local())


class OwnReduction(ReduceScatter):
    """Has no ``exchange``, which ``grad_comm_dtype`` needs."""

    allocate = collectives.DefaultReduceScatter.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return collectives.DefaultReduceScatter()(*args, **kwargs)


class NoGather(collectives.DefaultAllGather):
    """Leaves only the copies to be counted."""

    def __call__(self, **kwargs: Any) -> None:
        pass


_one_counts = threading.Lock()


@contextlib.contextmanager
def count_operators() -> Iterator[Counter[str]]:
    """Counts this thread's operators, while no other counts: nothing may be sent."""
    counts: Counter[str] = Counter()
    # As if the mode that counts, which gets operators, were not there
    with _one_counts, copying_unobserved(), dispatched() as names:
        yield counts
        counts.update(names)
