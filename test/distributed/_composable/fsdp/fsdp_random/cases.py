"""
Random models, meshes, policies and schedules, run with ``fully_shard``. ``exact.py``
compares them with what the gradients must be, and ``beside_release.py`` those of one
dtype with the release, which runs this too.

[Note: Given gradients]
A parameter's gradient is a weight that is drawn: the loss is the sum of all products
of parameter and weight. So the reference needs no model. It adds the weights of all
ranks and microbatches in fp64, and what forward computed with is compared with the
stored values, cast once, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.fsdp as fsdp_package
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor, Shard
from torch.utils.checkpoint import checkpoint


FP64, FP32, BF16, FP16 = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
)
DTYPES = (FP32, BF16, FP16, FP64)


# What a case is #


@dataclass(frozen=True)
class Param:
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool = True
    has_two_names: bool = False
    # Overrides of the policy
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    # Whether its gradient is sent as it is and added afterwards, if that can be
    is_sent: bool = False


@dataclass(frozen=True)
class Microbatch:
    sync: str = "all"  # "none", "scatter" (no all-reduce) or "all"
    # Blocks and (block, parameter) that forward leaves out
    skipped_blocks: frozenset[int] = frozenset()
    skipped_params: frozenset[tuple[int, int]] = frozenset()
    reshards: bool = True
    is_last: bool = True

    def uses(self, block: int, param: int) -> bool:
        is_skipped = block in self.skipped_blocks
        return not is_skipped and (block, param) not in self.skipped_params


@dataclass(frozen=True)
class Step:
    microbatches: tuple[Microbatch, ...] = (Microbatch(),)
    # Before the first microbatch, and how gradients are zeroed after the last
    actions: tuple[str, ...] = ()
    to_none: bool = True


@dataclass(frozen=True)
class Case:
    # The last block's parameters are the root's own
    blocks: tuple[tuple[Param, ...], ...]
    parallelism: str  # "shard", "hybrid" or "replicate"
    mesh: tuple[int, ...]
    steps: tuple[Step, ...] = (Step(),)
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard: bool | int | None = None
    # How many blocks ahead to gather explicitly, in forward and in backward
    prefetch: tuple[int, int] = (0, 0)
    divide_factor: float | None = None
    recomputes: bool = False
    offloads: bool = False
    shards_columns: bool = False
    input_buffers: int = 1
    # Whether every other replica leaves out parameters in the opposite order of
    # the microbatches that one all-reduce ends
    reverses: bool = False
    # MiB up to which small reductions of several blocks are joined
    bucket_cap_mb: float | None = None

    def microbatches(self, step: int, rank: int) -> list[Microbatch]:
        """Returns the microbatches of a step as this rank runs them."""
        mine = [*self.steps[step].microbatches]
        shards = {"shard": self.ranks, "hybrid": self.mesh[-1], "replicate": 1}
        replica = rank // shards[self.parallelism]
        if not self.reverses or replica % 2 == 0:
            return mine
        ends = [n + 1 for n, m in enumerate(mine) if m.sync == "all"]
        opposite = []
        for start, end in zip([0, *ends], ends):
            opposite += mine[start:end][::-1]
        return [
            replace(m, skipped_params=other.skipped_params)
            for m, other in zip(mine, opposite, strict=True)
        ]

    @property
    def ranks(self) -> int:
        return torch.Size(self.mesh).numel()

    def params(self) -> Iterator[tuple[int, int, Param]]:
        for block, params in enumerate(self.blocks):
            for i, param in enumerate(params):
                yield block, i, param

    def compute_dtype(self, param: Param) -> torch.dtype:
        return param.compute or self.param_dtype or param.dtype

    def reduce_dtype_of(self, param: Param) -> torch.dtype:
        default = FP32 if self.comm_dtype(param) else self.compute_dtype(param)
        return param.reduce or self.reduce_dtype or default

    def comm_dtype(self, param: Param) -> torch.dtype | None:
        """Returns what a gradient is sent in, where the sum's dtype holds all of it."""
        added = param.reduce or self.reduce_dtype or FP32
        sent = self.compute_dtype(param)
        holds = added == sent or added.itemsize > sent.itemsize
        return sent if param.is_sent and holds else None


# How cases are drawn #


def draw_mesh(
    rng: random.Random, ranks: int, *, has_replicas: bool
) -> tuple[str, tuple[int, ...]]:
    kinds = (
        ("hybrid", "replicate") if has_replicas else ("shard", "hybrid", "replicate")
    )
    parallelism = rng.choice(kinds)
    if parallelism != "hybrid":
        return parallelism, (ranks,)
    replicas = [n for n in (1, 2, 4, 8) if ranks % n == 0]
    count = 2 if has_replicas else rng.choice(replicas)
    return parallelism, (count, ranks // count)


def draw_reshard(
    rng: random.Random, parallelism: str, mesh: tuple[int, ...]
) -> bool | int | None:
    sizes = [n for n in (2, 4) if n < mesh[-1] and mesh[-1] % n == 0]
    chosen = rng.choice([None, True, False, *sizes])
    return None if parallelism == "replicate" else chosen


def _draw_param(rng: random.Random) -> Param:
    maybe = (None, None, None, None, FP32, BF16, FP16)
    is_matrix = rng.random() < 0.5
    return Param(
        (rng.randint(1, 9), rng.randint(1, 3)) if is_matrix else (rng.randint(1, 17),),
        rng.choice(DTYPES),
        is_trained=rng.random() < 0.75,
        has_two_names=rng.random() < 0.25,
        compute=rng.choice(maybe),
        reduce=rng.choice(maybe),
        is_sent=rng.random() < 0.5,
    )


def draw_case(
    rng: random.Random, rank_counts: Sequence[int], *, reverses: bool = False
) -> Case:
    """Draws a case for one of these numbers of ranks, with units of any dtypes."""
    blocks = []
    for _ in range(rng.randint(1, 4)):
        params = [_draw_param(rng) for _ in range(rng.randint(1, 5))]
        if reverses:  # replicas all-reduce blocks in one order
            params[0] = replace(params[0], is_trained=True)
        blocks.append(tuple(params))
    ranks = rng.choice(rank_counts)
    parallelism, mesh = draw_mesh(rng, ranks, has_replicas=reverses)
    prefetch = rng.randint(0, 2)
    maybe_dtype = (None, FP32, BF16, FP16)
    return Case(
        tuple(blocks),
        parallelism,
        mesh,
        tuple(Step(_draw_microbatches(rng, blocks, reverses)) for _ in range(2)),
        param_dtype=rng.choice(maybe_dtype),
        reduce_dtype=rng.choice(maybe_dtype),
        reshard=draw_reshard(rng, parallelism, mesh),
        prefetch=(prefetch, prefetch),
        divide_factor=rng.choice((None, None, 1.0, 3.0, 4.0)),
        recomputes=rng.random() < 0.5,
        offloads=rng.random() < 0.3,
        reverses=reverses,
        # Never reached, and by a few blocks
        bucket_cap_mb=rng.choice((None, 1.0, 2.0**-12)),
    )


def _draw_microbatches(
    rng: random.Random, blocks: Sequence[Sequence[Param]], reverses: bool
) -> tuple[Microbatch, ...]:
    places = [
        (b, i)
        for b, params in enumerate(blocks)
        for i in range(int(reverses), len(params))
    ]
    count = rng.randint(1, 4)
    microbatches = []
    for n in range(count):
        is_last = n == count - 1
        sync = "all" if is_last else rng.choice(("all", "none", "scatter"))
        some_blocks = rng.sample(
            range(len(blocks)), rng.randint(0, min(2, len(blocks)))
        )
        some_params = rng.sample(places, rng.randint(0, min(3, len(places))))
        microbatches.append(
            Microbatch(
                sync,
                frozenset(() if reverses else some_blocks),
                frozenset(some_params),
                is_last=is_last,
            )
        )
    return tuple(microbatches)


# The model #


class Block(nn.Module):
    """Adds the products of its parameters and the weights that it is given."""

    def __init__(self, params: tuple[Param, ...]):
        super().__init__()
        self.names = nn.Module()
        self.weights: dict[int, torch.Tensor] = {}
        self.seen: dict[int, torch.Tensor] = {}
        for i, param in enumerate(params):
            value = nn.Parameter(
                torch.zeros(param.shape, dtype=param.dtype),
                requires_grad=param.is_trained,
            )
            self.register_parameter(f"p{i}", value)
            if param.has_two_names:
                self.names.register_parameter(f"p{i}", value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()  # a view may not be returned, which nothing added would be
        for i, weight in self.weights.items():
            for owner in (self, self.names):
                param = getattr(owner, f"p{i}", None)
                if param is not None:
                    self.seen[i] = param.detach().clone()
                    x = x + (param * weight).sum().to(x.dtype)
        return x


class Model(Block):
    def __init__(self, case: Case):
        super().__init__(case.blocks[-1])
        self.blocks = nn.ModuleList(map(Block, case.blocks[:-1]))
        self.recomputes = case.recomputes

    def all_blocks(self) -> list[Block]:
        return [*self.blocks, self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if not block.weights:
                continue
            if self.recomputes:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return super().forward(x)


def _place_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 else None


def shard_model(case: Case, device: str) -> Model:
    model = Model(case).to(device)
    named = case.parallelism == "hybrid"
    names = ("replicate", "shard") if named else None
    mesh = init_device_mesh(device, case.mesh, mesh_dim_names=names)
    kwargs: dict[str, Any] = {"mesh": mesh, "mp_policy": _policy(case, model)}
    if case.offloads:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=device != "cpu")
    if case.shards_columns:
        kwargs["shard_placement_fn"] = _place_columns
    apply = fully_shard
    if case.parallelism == "replicate":
        apply = replicate
    elif case.reshard is not None:
        kwargs["reshard_after_forward"] = case.reshard
    for block in (*model.blocks, model):
        apply(block, **kwargs)
    model.set_reduce_scatter_max_input_buffers(case.input_buffers)
    if case.divide_factor is not None:
        for block in model.all_blocks():
            block.set_gradient_divide_factor(case.divide_factor)
    if case.bucket_cap_mb is not None:
        fsdp_package.set_reduce_bucket_cap(model, case.bucket_cap_mb)
    _prefetch([*model.blocks], *case.prefetch)
    model.device = device
    return model


def _policy(case: Case, model: Model) -> MixedPrecisionPolicy:
    blocks = model.all_blocks()
    # Without the parameters themselves, which are gone once they are sharded
    params = {id(getattr(blocks[b], f"p{i}")): param for b, i, param in case.params()}
    overrides: dict[str, Any] = {}
    if any(param.compute or param.reduce or param.is_sent for param in params.values()):
        overrides = {  # which the release has not, and need not have for one dtype
            "param_dtype_override_fn": lambda param: params[id(param)].compute,
            "reduce_dtype_override_fn": lambda param: params[id(param)].reduce,
            "grad_comm_dtype_override_fn": lambda param: case.comm_dtype(
                params[id(param)]
            ),
        }
    return MixedPrecisionPolicy(
        case.param_dtype, case.reduce_dtype, cast_forward_inputs=False, **overrides
    )


def _prefetch(blocks: list[Any], forward: int, backward: int) -> None:
    for i, block in enumerate(blocks):
        if after := blocks[i + 1 : i + 1 + forward]:
            block.set_modules_to_forward_prefetch(after)
        if before := blocks[max(i - backward, 0) : i][::-1]:
            block.set_modules_to_backward_prefetch(before)


# A run #


def values_of(step: int, block: int, i: int, param: Param) -> torch.Tensor:
    """Returns what the parameter holds in a step, on every rank."""
    return _random(param.shape, 1, step, block, i).to(param.dtype)


def weight_of(
    case: Case, block: int, i: int, param: Param, *, step: int, batch: int, rank: int
) -> torch.Tensor:
    """Returns the gradient that a rank gives, times the names that it is used by."""
    values = _random(param.shape, 2, step, block, i, batch, rank)
    return values.to(case.compute_dtype(param))


def _random(shape: tuple[int, ...], *seeds: int) -> torch.Tensor:
    seed = 0
    for part in seeds:
        seed = seed * 31 + part
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(case: Case, model: Model, step: int) -> None:
    """Writes new values to the shards, as an optimizer does."""
    blocks = model.all_blocks()
    for block, i, param in case.params():
        sharded = getattr(blocks[block], f"p{i}")
        full = values_of(step, block, i, param)
        with torch.no_grad():
            sharded.to_local().copy_(local_of(full, sharded))


def local_of(full: torch.Tensor, like: Any) -> torch.Tensor:
    full = full.to(like.device)
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()


def run_forward(
    case: Case,
    model: Model,
    microbatch: Microbatch,
    *,
    step: int,
    batch: int,
    rank: int,
) -> torch.Tensor:
    blocks = model.all_blocks()
    for block in blocks:
        block.weights, block.seen = {}, {}
    for block, i, param in case.params():
        if microbatch.uses(block, i):
            weight = weight_of(case, block, i, param, step=step, batch=batch, rank=rank)
            blocks[block].weights[i] = weight.to(model.device)
    x = torch.zeros(1, device=model.device, requires_grad=True)
    return model(x).sum()


def run_microbatch(
    case: Case, model: Model, step: int, batch: int, rank: int
) -> torch.Tensor:
    """Runs it forward and backward, and returns the loss."""
    microbatch = case.microbatches(step, rank)[batch]
    model.set_requires_gradient_sync(microbatch.sync != "none")
    model.set_requires_all_reduce(microbatch.sync == "all")
    model.set_reshard_after_backward(microbatch.reshards)
    model.set_is_last_backward(microbatch.is_last)
    loss = run_forward(case, model, microbatch, step=step, batch=batch, rank=rank)
    loss.backward()
    return loss
