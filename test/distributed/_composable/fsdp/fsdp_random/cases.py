"""
Random models, meshes, policies and schedules, run with ``fully_shard`` and compared
with what the gradients must be.

[Note: Given gradients]
A parameter's gradient is a weight that is drawn: the loss is the sum of all products
of parameter and weight. So the reference needs no model. It adds the weights of all
ranks and microbatches in fp64, and what forward computed with is compared with the
stored values, cast once, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

import torch
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    fully_shard,
    MixedPrecisionPolicy,
    set_reduce_bucket_cap,
)
from torch.distributed.tensor import distribute_tensor
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
    sync: str  # "none", "scatter" (no all-reduce) or "all"
    # Blocks and (block, parameter) that forward leaves out
    skipped_blocks: frozenset[int] = frozenset()
    skipped_params: frozenset[tuple[int, int]] = frozenset()

    def uses(self, block: int, param: int) -> bool:
        is_skipped = block in self.skipped_blocks
        return not is_skipped and (block, param) not in self.skipped_params


@dataclass(frozen=True)
class Case:
    # The last block's parameters are the root's own
    blocks: tuple[tuple[Param, ...], ...]
    parallelism: str  # "shard", "hybrid" or "replicate"
    mesh: tuple[int, ...]
    schedule: tuple[Microbatch, ...]
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard: bool | int | None = None
    # How many blocks ahead to gather explicitly
    prefetch: int = 0
    divide_factor: float | None = None
    recomputes: bool = False
    offloads: bool = False
    # Whether every other replica leaves out parameters in the opposite order of
    # the microbatches that one all-reduce ends
    reverses: bool = False
    # MiB up to which small reductions of several blocks are joined
    bucket_cap_mb: float | None = None

    def microbatch(self, i: int, rank: int) -> Microbatch:
        """Returns the microbatch as this rank runs it."""
        microbatch = self.schedule[i]
        if not self.reverses or self._replica_of(rank) % 2 == 0:
            return microbatch
        first, last = self._all_reduced_with(i)
        if not self._may_reverse(self.schedule[first : last + 1]):
            return microbatch
        opposite = self.schedule[last - (i - first)]
        return replace(microbatch, skipped_params=opposite.skipped_params)

    def _replica_of(self, rank: int) -> int:
        shards = {"shard": self.ranks, "hybrid": self.mesh[-1], "replicate": 1}
        return rank // shards[self.parallelism]

    def _all_reduced_with(self, i: int) -> tuple[int, int]:
        """Returns the first and the last microbatch of one all-reduce."""
        ends = [n for n, m in enumerate(self.schedule) if m.sync == "all"]
        last = min(end for end in ends if end >= i)
        return max([end + 1 for end in ends if end < i], default=0), last

    def _may_reverse(self, microbatches: Sequence[Microbatch]) -> bool:
        """
        Whether all of them reduce gradients of every block, so that replicas
        all-reduce blocks in one order.
        """
        always_used = {
            block
            for block, i, param in self.params()
            if param.is_trained and all(m.uses(block, i) for m in microbatches)
        }
        return len(always_used) == len(self.blocks)

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
        added, sent = (
            param.reduce or self.reduce_dtype or FP32,
            self.compute_dtype(param),
        )
        holds = added == sent or added.itemsize > sent.itemsize
        return sent if param.is_sent and holds else None


# How cases are drawn #

_SOME_DTYPE = st.sampled_from(DTYPES)
# The default comes first, which is what shrinking tries
_MAYBE_DTYPE = st.sampled_from((None, FP32, BF16, FP16))
_MOSTLY_NO_DTYPE = st.one_of(st.none(), st.none(), _MAYBE_DTYPE)
_SHAPES = st.one_of(
    st.tuples(st.integers(1, 17)), st.tuples(st.integers(1, 9), st.integers(1, 3))
)


def _params() -> st.SearchStrategy[Param]:
    mostly = st.sampled_from((True, True, True, False))
    return st.builds(
        Param,
        _SHAPES,
        _SOME_DTYPE,
        mostly,
        mostly.map(lambda is_usual: not is_usual),
        _MOSTLY_NO_DTYPE,
        _MOSTLY_NO_DTYPE,
        st.booleans(),
    )


@st.composite
def cases(draw: st.DrawFn, rank_counts: tuple[int, ...]) -> Case:
    """Draws cases for these numbers of ranks."""
    params = st.lists(_params(), min_size=1, max_size=5).map(tuple)
    blocks = tuple(draw(st.lists(params, min_size=1, max_size=4)))
    ranks = draw(st.sampled_from(rank_counts))
    parallelism = draw(st.sampled_from(("shard", "hybrid", "replicate")))
    mesh: tuple[int, ...] = (ranks,)
    if parallelism == "hybrid":
        replicas = draw(st.sampled_from([n for n in (1, 2, 4, 8) if ranks % n == 0]))
        mesh = (replicas, ranks // replicas)
    sizes = [n for n in (2, 4) if n < mesh[-1] and mesh[-1] % n == 0]
    reshards = [None, True, False, *sizes]
    return Case(
        blocks,
        parallelism,
        mesh,
        draw(_schedules(blocks)),
        param_dtype=draw(_MAYBE_DTYPE),
        reduce_dtype=draw(_MAYBE_DTYPE),
        reshard=None if parallelism == "replicate" else draw(st.sampled_from(reshards)),
        prefetch=draw(st.integers(0, 2)),
        divide_factor=draw(st.sampled_from((None, None, 1.0, 3.0, 4.0))),
        recomputes=draw(st.booleans()),
        offloads=draw(st.sampled_from((False, False, True))),
        # Never reached, and by a few blocks
        bucket_cap_mb=draw(st.sampled_from((None, 1.0, 2.0**-12))),
    )


@st.composite
def cases_of_replicas(draw: st.DrawFn, rank_counts: tuple[int, ...]) -> Case:
    """Draws cases of which replicas give gradients in the opposite order."""
    case = draw(cases(rank_counts))
    parallelism, mesh = "replicate", (case.ranks,)
    if case.parallelism != "replicate" and case.reshard in (None, True, False):
        parallelism, mesh = "hybrid", (2, case.ranks // 2)
    kept = {(block, 0) for block in range(len(case.blocks))}
    schedule = tuple(
        Microbatch(m.sync, skipped_params=m.skipped_params - kept)
        for m in case.schedule
    )
    blocks = tuple(
        (replace(params[0], is_trained=True), *params[1:]) for params in case.blocks
    )
    return replace(
        case,
        blocks=blocks,
        schedule=schedule,
        parallelism=parallelism,
        mesh=mesh,
        reshard=case.reshard if parallelism == "hybrid" else None,
        reverses=True,
    )


@st.composite
def _schedules(
    draw: st.DrawFn, blocks: tuple[tuple[Param, ...], ...]
) -> tuple[Microbatch, ...]:
    places = [(b, i) for b, params in enumerate(blocks) for i in range(len(params))]
    some_blocks = st.frozensets(st.sampled_from(range(len(blocks))), max_size=2)
    some_params = st.frozensets(st.sampled_from(places), max_size=3)
    syncs = draw(st.lists(st.sampled_from(("all", "none", "scatter")), max_size=3))
    return tuple(
        Microbatch(sync, draw(some_blocks), draw(some_params))
        for sync in (*syncs, "all")
    )


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


def shard_model(case: Case, device: str) -> Model:
    model = Model(case).to(device)
    named = case.parallelism == "hybrid"
    names = ("replicate", "shard") if named else None
    mesh = init_device_mesh(device, case.mesh, mesh_dim_names=names)
    kwargs: dict[str, Any] = {"mesh": mesh, "mp_policy": _policy(case, model)}
    if case.offloads:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=device != "cpu")
    apply = fully_shard
    if case.parallelism == "replicate":
        apply = replicate
    elif case.reshard is not None:
        kwargs["reshard_after_forward"] = case.reshard
    for block in (*model.blocks, model):
        apply(block, **kwargs)
    if case.divide_factor is not None:
        for block in model.all_blocks():
            block.set_gradient_divide_factor(case.divide_factor)
    set_reduce_bucket_cap(model, case.bucket_cap_mb)
    if case.prefetch:
        _prefetch([*model.blocks], case.prefetch)
    return model


def _policy(case: Case, model: Model) -> MixedPrecisionPolicy:
    blocks = model.all_blocks()
    # Without the parameters themselves, which are gone once they are sharded
    params = {id(getattr(blocks[b], f"p{i}")): param for b, i, param in case.params()}
    return MixedPrecisionPolicy(
        case.param_dtype,
        case.reduce_dtype,
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda param: params[id(param)].compute,
        reduce_dtype_override_fn=lambda param: params[id(param)].reduce,
        grad_comm_dtype_override_fn=lambda param: case.comm_dtype(params[id(param)]),
    )


def _prefetch(blocks: list[Any], count: int) -> None:
    for i, block in enumerate(blocks):
        if after := blocks[i + 1 : i + 1 + count]:
            block.set_modules_to_forward_prefetch(after)
        if before := blocks[max(i - count, 0) : i][::-1]:
            block.set_modules_to_backward_prefetch(before)


# A run, and what it must give #


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


def run_case(case: Case, rank: int, device: str, *, steps: int = 2) -> None:
    """Runs the case on this rank; raises AssertionError if a step is not right."""
    model = shard_model(case, device)
    for step in range(steps):
        _fill(case, model, step)
        for i in range(len(case.schedule)):
            run_microbatch(case, model, step, i, rank)
            _check_seen(case, model, step, i, rank)
        _check_gradients(case, model, step)
        model.zero_grad()
    _check_nothing_is_left(model)


def _fill(case: Case, model: Model, step: int) -> None:
    """Writes new values to the shards, as an optimizer does."""
    blocks = model.all_blocks()
    for block, i, param in case.params():
        sharded = getattr(blocks[block], f"p{i}")
        full = values_of(step, block, i, param)
        with torch.no_grad():
            sharded.to_local().copy_(_local(full, sharded))


def _local(full: torch.Tensor, like: Any) -> torch.Tensor:
    full = full.to(like.device)
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()


def run_microbatch(case: Case, model: Model, step: int, i: int, rank: int) -> None:
    microbatch, blocks = case.microbatch(i, rank), model.all_blocks()
    model.set_requires_gradient_sync(microbatch.sync != "none")
    model.set_requires_all_reduce(microbatch.sync == "all")
    model.set_is_last_backward(i == len(case.schedule) - 1)
    device = _device_of(model)
    for block in blocks:
        block.weights, block.seen = {}, {}
    for block, j, param in case.params():
        if microbatch.uses(block, j):
            weight = weight_of(case, block, j, param, step=step, batch=i, rank=rank)
            blocks[block].weights[j] = weight.to(device)
    x = torch.zeros(1, device=device, requires_grad=True)
    model(x).sum().backward()


def _check_seen(case: Case, model: Model, step: int, i: int, rank: int) -> None:
    blocks = model.all_blocks()
    for block, j, param in case.params():
        if case.microbatch(i, rank).uses(block, j):
            values = values_of(step, block, j, param)
            expected = values.to(case.compute_dtype(param))
            seen = blocks[block].seen[j].cpu()
            assert seen.dtype == expected.dtype, f"{block}.p{j} is in {seen.dtype}"
            assert torch.equal(seen, expected), f"{block}.p{j} is {seen}"


def _device_of(model: Model) -> torch.device:
    mesh: DeviceMesh = next(model.parameters()).device_mesh
    return torch.device(mesh.device_type)


def _check_gradients(case: Case, model: Model, step: int) -> None:
    blocks = model.all_blocks()
    for block, i, param in case.params():
        name = f"block {block}, parameter {i}"
        sharded = getattr(blocks[block], f"p{i}")
        grad = sharded.grad
        is_used = any(microbatch.uses(block, i) for microbatch in case.schedule)
        if not (is_used and param.is_trained):
            assert grad is None, f"{name} got a gradient from nowhere"
            continue
        assert grad is not None, f"{name} lost its gradient"
        assert grad.dtype == param.dtype, f"{name}: the gradient is {grad.dtype}"
        exact, bound = _exact_gradient(case, block, i, param, step)
        error = (grad.to_local().double() - _local(exact, sharded)).abs()
        # A NaN is not below the bound
        is_right = bool((error <= _local(bound, sharded)).all())
        assert is_right, f"{name}: {error} over {bound}, got {grad.to_local()}"


def _exact_gradient(
    case: Case, block: int, i: int, param: Param, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the exact gradient and how far from it the reduced one may be.

    Each cast, addition and division rounds by at most half an eps of a partial
    sum, which is at most the sum of magnitudes: one addition for each rank and
    up to two for each microbatch, and few casts and divisions. fp16 also has
    subnormals, into which the division before the sum may lead.
    """
    total = torch.zeros(param.shape, dtype=FP64)
    magnitude = torch.zeros(param.shape, dtype=FP64)
    names = 2 if param.has_two_names else 1
    batches = range(len(case.schedule))
    for batch, rank in itertools.product(batches, range(case.ranks)):
        if not case.microbatch(batch, rank).uses(block, i):
            continue
        weight = weight_of(case, block, i, param, step=step, batch=batch, rank=rank)
        total += names * weight.double()
        magnitude += names * weight.double().abs()
    divisor = case.divide_factor or case.ranks
    dtypes = {param.dtype, case.compute_dtype(param), case.reduce_dtype_of(param)}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    roundings = case.ranks + 2 * len(case.schedule) + 5
    subnormals = roundings * 2.0**-24 if FP16 in dtypes else 0.0
    bound = (roundings * eps / 2 * magnitude + subnormals * case.ranks) / divisor
    return total / divisor, bound + (subnormals if FP16 in dtypes else 0.0)


def _check_nothing_is_left(model: Model) -> None:
    for block in model.all_blocks():
        for group in block._get_fsdp_state()._fsdp_param_groups:
            assert (
                not group._reducer.partial_reduces
                and not group.comm_ctx.all_reduce_states
            )
            assert not group.comm_ctx.reduce_scatter_states
            assert not group.comm_ctx.small_reductions
            assert group._all_gather_result is None
            assert not group.is_unsharded
