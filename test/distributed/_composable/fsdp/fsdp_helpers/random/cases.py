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

import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp as fsdp_package
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor, Shard
from torch.utils.checkpoint import checkpoint


FP64, FP32 = torch.float64, torch.float32
BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = (FP32, BF16, FP16, FP64)
PARALLELISMS = ("shard", "hybrid", "replicate")
PREFETCHES = (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None)


# The parts of a case #


@dataclass(frozen=True)
class Param:
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool = True
    has_two_names: bool = False
    # Set on it before it is sharded
    grad_dtype: torch.dtype | None = None
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
    parallelism: str  # of `PARALLELISMS`
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
    # From which size on parameters are gathered and reduced without copies
    direct_min_nbytes: int | None = None
    # When the next gather of backward starts; None: not before it is needed
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE

    def microbatches(self, step: int, rank: int) -> list[Microbatch]:
        """Returns the microbatches of a step as this rank runs them."""
        mine = [*self.steps[step].microbatches]
        if not self.reverses or rank // self.shards % 2 == 0:
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
        return math.prod(self.mesh)

    @property
    def shards(self) -> int:
        return 1 if self.parallelism == "replicate" else self.mesh[-1]

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


def draw_case(
    rng: random.Random, rank_counts: Sequence[int], *, uniform_steps: int = 0
) -> Case:
    """Draws a case: of two steps, or of ``uniform_steps`` with one dtype."""
    ranks, parallelism = rng.choice(rank_counts), rng.choice(PARALLELISMS)
    mesh: tuple[int, ...] = (ranks,)
    if parallelism == "hybrid":
        replicas = rng.choice([n for n in (1, 2, 4, 8) if ranks % n == 0])
        mesh = (replicas, ranks // replicas)
    reshard = None
    if parallelism != "replicate":
        fewer = [n for n in (2, 4) if n < mesh[-1] and mesh[-1] % n == 0]
        reshard = rng.choice([None, True, False, *fewer])
    is_uniform = uniform_steps > 0
    stored = (rng.choice((FP32, *DTYPES)),) if is_uniform else DTYPES
    blocks = tuple(
        tuple(_draw_param(rng, stored) for _ in range(rng.randint(1 + is_uniform, 4)))
        for _ in range(rng.randint(1 + is_uniform, 4))
    )
    has_replicas = mesh[0] > 1 and parallelism != "shard"
    if reverses := has_replicas and not is_uniform and rng.random() < 0.4:
        # Replicas all-reduce blocks in one order
        blocks = tuple((replace(b[0], is_trained=True), *b[1:]) for b in blocks)
    how = {"is_uniform": is_uniform, "reverses": reverses}
    return Case(
        blocks,
        parallelism,
        mesh,
        tuple(_draw_step(rng, blocks, **how) for _ in range(uniform_steps or 2)),
        param_dtype=rng.choice((None, FP32, BF16, FP16)),
        reduce_dtype=rng.choice((None, FP32, BF16, FP16)),
        reshard=reshard,
        prefetch=(rng.randint(0, 2), rng.randint(0, 2)),
        divide_factor=None if is_uniform else rng.choice((None, None, 1.0, 3.0, 4.0)),
        recomputes=rng.random() < 0.5,
        offloads=rng.random() < 0.3,
        # Resharded over fewer ranks, columns divide by neither in the release
        shards_columns=not (is_uniform and reshard in (2, 4)) and rng.random() < 0.4,
        input_buffers=rng.choice((1, 1, 2)),
        reverses=reverses,
        # Never reached, and by a few blocks
        bucket_cap_mb=None if is_uniform else rng.choice((None, 1.0, 2.0**-12)),
        direct_min_nbytes=None if is_uniform else rng.choice((None, None, 0, 32)),
        backward_prefetch=PREFETCHES[0] if is_uniform else rng.choice(PREFETCHES),
    )


def _draw_param(rng: random.Random, dtypes: Sequence[torch.dtype]) -> Param:
    columns = (rng.choice((1, 2, 3, 4, 8)),) if rng.random() < 0.5 else ()
    shape, dtype = (rng.randint(len(dtypes) == 1, 9), *columns), rng.choice(dtypes)
    has_two_names = rng.random() < 0.25
    if len(dtypes) == 1:
        return Param(shape, dtype, has_two_names=has_two_names)
    maybe = (None, None, None, None, FP32, BF16, FP16)
    return Param(
        shape,
        dtype,
        is_trained=rng.random() < 0.75,
        has_two_names=has_two_names,
        grad_dtype=rng.choice(maybe),
        compute=rng.choice(maybe),
        reduce=rng.choice(maybe),
        is_sent=rng.random() < 0.5,
    )


def _draw_step(
    rng: random.Random,
    blocks: Sequence[Sequence[Param]],
    *,
    is_uniform: bool,
    reverses: bool,
) -> Step:
    count = rng.randint(1, 3)
    keeps, is_always_last = rng.random() < 0.3, rng.random() < 0.3
    microbatches: list[Microbatch] = []
    skips = frozenset(), frozenset()
    for n in range(count)[::-1]:
        is_end = n == count - 1
        sync = "all" if is_end else rng.choice(("all", "none", "scatter"))
        # In the release, those that share a reduction or an all-reduce skip the same
        if sync == "all" or not is_uniform:
            skips = _draw_skips(rng, blocks, reverses=reverses)
        microbatch = Microbatch(
            sync, *skips, reshards=is_end or not keeps, is_last=is_end or is_always_last
        )
        microbatches.insert(0, microbatch)
    return Step(tuple(microbatches))


def _draw_skips(
    rng: random.Random, blocks: Sequence[Sequence[Param]], *, reverses: bool
) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
    """Returns blocks and parameters to leave out, often none."""
    places = [
        (b, i) for b, params in enumerate(blocks) for i in range(reverses, len(params))
    ]
    some_blocks = rng.sample(
        range(len(blocks)), min(rng.choice((0, 0, 1, 2)), len(blocks))
    )
    some_params = rng.sample(places, min(rng.randint(0, 3), len(places)))
    return frozenset(() if reverses else some_blocks), frozenset(some_params)


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
            if param.grad_dtype is not None:
                value.grad_dtype = param.grad_dtype
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
        self.case = case

    def all_blocks(self) -> list[Block]:
        return [*self.blocks, self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if not block.weights:
                continue
            if self.case.recomputes:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return super().forward(x)


def shard_model(case: Case, device: str) -> Model:
    model = Model(case).to(device)
    names = ("replicate", "shard")[-len(case.mesh) :]
    mesh = init_device_mesh(device, case.mesh, mesh_dim_names=names)
    kwargs: dict[str, Any] = {"mesh": mesh, "mp_policy": _policy(case, model)}
    if case.offloads:
        kwargs["offload_policy"] = fsdp_package.CPUOffloadPolicy(
            pin_memory=device != "cpu"
        )
    apply = replicate
    if case.parallelism != "replicate":
        apply = fsdp_package.fully_shard
        kwargs["reshard_after_forward"] = case.reshard
        if case.shards_columns:  # where they divide, as they must
            kwargs["shard_placement_fn"] = lambda param: (
                Shard(1)
                if param.ndim == 2
                and param.numel() > 0
                and param.size(1) % case.shards == 0
                and param.size(0) % int(case.reshard or 1) == 0
                else None
            )
    for block in (*model.blocks, model):
        apply(block, **kwargs)
        block.set_gradient_divide_factor(case.divide_factor)
    model.set_reduce_scatter_max_input_buffers(case.input_buffers)
    if case.bucket_cap_mb is not None:
        fsdp_package.set_reduce_bucket_cap(model, case.bucket_cap_mb)
    if case.direct_min_nbytes is not None:
        fsdp_package.set_coalesced_collectives(model, case.direct_min_nbytes)
    if case.backward_prefetch != PREFETCHES[0]:
        fsdp_package.set_backward_prefetch(model, case.backward_prefetch)
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


def values_of(case: Case, step: int, block: int, i: int) -> torch.Tensor:
    """Returns what a parameter holds in a step, on every rank."""
    param = case.blocks[block][i]
    return _random(param.shape, 1, step, block, i).to(param.dtype)


def weights_of(case: Case, step: int, block: int, i: int) -> torch.Tensor:
    """Returns what each rank and microbatch gives, for each name of a parameter."""
    param = case.blocks[block][i]
    size = (case.ranks, len(case.steps[step].microbatches), *param.shape)
    return _random(size, 2, step, block, i).to(case.compute_dtype(param))


def _random(size: tuple[int, ...], *seeds: int) -> torch.Tensor:
    seed = functools.reduce(lambda whole, part: whole * 31 + part, seeds)
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def fill(model: Model, step: int) -> None:
    """Writes new values to the shards, as an optimizer does."""
    blocks = model.all_blocks()
    for block, i, _ in model.case.params():
        sharded = getattr(blocks[block], f"p{i}")
        full = values_of(model.case, step, block, i)
        with torch.no_grad():
            sharded.to_local().copy_(local_of(full, sharded))


def local_of(full: torch.Tensor, like: Any) -> torch.Tensor:
    full = full.to(like.device)
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()


def run_forward(model: Model, step: int, batch: int) -> torch.Tensor:
    """Returns the loss of a microbatch."""
    case, rank, blocks = model.case, dist.get_rank(), model.all_blocks()
    microbatch = case.microbatches(step, rank)[batch]
    for block in blocks:
        block.weights, block.seen = {}, {}
    for block, i, _ in case.params():
        if microbatch.uses(block, i):
            weight = weights_of(case, step, block, i)[rank, batch]
            blocks[block].weights[i] = weight.to(model.device)
    return model(torch.zeros(1, device=model.device, requires_grad=True)).sum()


def run_microbatch(model: Model, step: int, batch: int) -> torch.Tensor:
    """Runs it forward and backward, and returns the loss."""
    microbatch = model.case.microbatches(step, dist.get_rank())[batch]
    model.set_requires_gradient_sync(microbatch.sync != "none")
    model.set_requires_all_reduce(microbatch.sync == "all")
    model.set_reshard_after_backward(microbatch.reshards)
    model.set_is_last_backward(microbatch.is_last)
    loss = run_forward(model, step, batch)
    loss.backward()
    return loss
