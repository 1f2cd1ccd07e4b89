# Owner(s): ["oncall: distributed"]

"""
Gradients of mixed dtypes over shards and replicas: HSDP, replicate, microbatches
that sync in different ways, divide factors, the all-reduce hook, and tensor
parallelism beneath.

Most tests give each rank's gradients directly, see :class:`GivenGrads`, and
compare with their mean over ranks and microbatches in fp64. The bound is
:func:`rounding_bound`, which follows from the dtypes.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_common.release_rules import (
    FOLLOWS_GRAD_DTYPE,
    REDUCE_ARGUMENTS,
    REDUCE_KEYWORDS,
    summed_apart_dtype,
)
from fsdp_common.utils import (
    DEVICE_TYPE,
    FakeGroupTest,
    FSDPProcessTest,
    FSDPThreadTest,
    hybrid_mesh,
    on_first_rank,
    record_collectives,
)
from fsdp_plugins.later_releases import with_a_row_more

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    fully_shard,
    MixedPrecisionPolicy,
    set_reduce_bucket_cap,
)
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter,
    ReduceResult,
)
from torch.distributed.fsdp._fully_shard._fsdp_context import FSDPCommContext
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.testing._internal.common_utils import run_tests, TestCase


# Name of each parameter to its shape and dtype: dim 0 smaller than a shard group,
# not divisible by it, and divisible by it
SHAPES = {
    "fp32": ((9, 3), torch.float32),
    "fp32_single": ((1,), torch.float32),
    "bf16": ((16, 2), torch.bfloat16),
    "bf16_uneven": ((5, 2), torch.bfloat16),
    "fp16": ((8,), torch.float16),
}
ALL = tuple(SHAPES)
NO_POLICY = MixedPrecisionPolicy()


class GivenGrads(nn.Module):
    """Gets exactly the gradients that it is called with: its loss is their product."""

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]):
        super().__init__()
        for name, (shape, dtype) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, x: torch.Tensor, grads: Mapping[str, torch.Tensor]):
        for name, grad in grads.items():
            param = getattr(self, name)
            x = x + (param * grad.to(param.dtype)).sum().to(x.dtype)
        return x


def given_grad(name: str, rank: int, microbatch: int) -> torch.Tensor:
    """Returns what ``rank`` gives to the parameter, the same wherever it is asked for."""
    shape, dtype = SHAPES[name]
    seed = (ALL.index(name) * 1000 + rank) * 100 + microbatch
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


@dataclass(frozen=True)
class Microbatch:
    """Which parameters get a gradient, and how much of the reduction follows."""

    params: Sequence[str]
    sync: str = "all"  # "none", "scatter" (no all-reduce) or "all"


def run_backward(model: nn.Module, rank: int, schedule: Sequence[Microbatch]) -> None:
    for i, microbatch in enumerate(schedule):
        model.set_requires_gradient_sync(microbatch.sync != "none")
        model.set_requires_all_reduce(microbatch.sync == "all")
        model.set_is_last_backward(i == len(schedule) - 1)
        x = torch.zeros(1, requires_grad=True, device=DEVICE_TYPE)
        grads = {name: given_grad(name, rank, i) for name in microbatch.params}
        model(x, {n: g.to(DEVICE_TYPE) for n, g in grads.items()}).sum().backward()


def rounding_bound(
    name: str, ranks: int, schedule: Sequence[Microbatch], policy: MixedPrecisionPolicy
) -> torch.Tensor:
    """
    Returns how far a mean may be from the exact one. Every addition, division
    and cast rounds once, by at most half an ulp of a partial sum, and no partial
    sum is larger than the sum of magnitudes. A gradient takes part in at most
    one addition for each rank and each microbatch; divisions and casts are few.
    """
    dtype = SHAPES[name][1]
    dtypes = {dtype, policy.param_dtype or dtype, policy.reduce_dtype or dtype}
    eps = max(torch.finfo(d).eps for d in dtypes)
    roundings = ranks + len(schedule) + 4
    magnitude = mean_grad(name, ranks, schedule, torch.abs)
    return eps / 2 * roundings * magnitude + torch.finfo(torch.float16).tiny


def mean_grad(
    name: str,
    ranks: int,
    schedule: Sequence[Microbatch],
    of: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> torch.Tensor:
    total = torch.zeros(SHAPES[name][0], dtype=torch.float64)
    for i, microbatch in enumerate(schedule):
        if name in microbatch.params:
            total += sum(
                of(given_grad(name, rank, i).double()) for rank in range(ranks)
            )
    return total / ranks


def full_grad(param: nn.Parameter) -> torch.Tensor | None:
    grad = param.grad
    return None if grad is None else grad.full_tensor().double().cpu()


def group_of(model: nn.Module) -> FSDPParamGroup:
    return model._get_fsdp_state()._fsdp_param_groups[0]


def check_schedule(
    rank: int,
    mesh: DeviceMesh,
    schedule: Sequence[Microbatch],
    policy: MixedPrecisionPolicy = NO_POLICY,
    **kwargs: Any,
) -> nn.Module:
    """Runs the microbatches and compares with the mean of what they gave."""
    model = GivenGrads(SHAPES).to(DEVICE_TYPE)
    fully_shard(model, mesh=mesh, mp_policy=policy, **kwargs)
    run_backward(model, rank, schedule)
    ranks = mesh.size()
    for name, param in model.named_parameters():
        grad = full_grad(param)
        if not any(name in microbatch.params for microbatch in schedule):
            assert grad is None, f"{name} got a gradient from nowhere"
            continue
        assert grad is not None, f"{name} lost its gradient"
        assert param.grad.dtype == SHAPES[name][1]
        error = (grad - mean_grad(name, ranks, schedule)).abs()
        bound = rounding_bound(name, ranks, schedule, policy)
        assert (error <= bound).all(), f"{name}: {error.max()} over {bound.min()}"
    group = group_of(model)
    assert not group._reducer.partial_reduces and not group.comm_ctx.all_reduce_states
    assert not group.comm_ctx.reduce_scatter_states
    return model


def thread_mesh(replicas: int, shards: int) -> DeviceMesh:
    names = ("replicate", "shard")
    return init_device_mesh(DEVICE_TYPE, (replicas, shards), mesh_dim_names=names)


# Which parameters, of which dtypes, get gradients in three microbatches
THREE_DIFFERENT = (
    ("fp32", "bf16"),
    ("bf16_uneven", "fp16"),
    ("fp32", "fp32_single"),
)


class TestManyRanks(FSDPThreadTest):
    """4 replicas of 8 shards, each rank a thread."""

    world_size = 32

    def test_one_microbatch(self):
        check_schedule(self.rank, thread_mesh(4, 8), [Microbatch(ALL)])

    @pytest.mark.quick
    def test_deferred_all_reduce(self):
        schedule = [Microbatch(ALL, "scatter")] * 2 + [Microbatch(ALL)]
        check_schedule(self.rank, thread_mesh(4, 8), schedule)

    def test_deferred_all_reduce_of_different_parameters(self):
        first, second, third = THREE_DIFFERENT
        schedule = [Microbatch(first, "scatter"), Microbatch(second, "scatter")]
        check_schedule(self.rank, thread_mesh(4, 8), [*schedule, Microbatch(third)])

    def test_dtype_without_gradient_in_the_last_microbatch(self):
        schedule = [Microbatch(ALL, "scatter"), Microbatch(["fp16"])]
        check_schedule(self.rank, thread_mesh(4, 8), schedule)

    def test_one_dimension_of_size_one(self):
        schedule = [Microbatch(ALL, "scatter"), Microbatch(ALL)]
        for replicas, shards in ((1, 32), (32, 1)):
            check_schedule(self.rank, thread_mesh(replicas, shards), schedule)

    def test_partial_must_be_added_before_the_all_reduce(self):
        """The bound tells that mistake: 1/8 of one shard group for 1/32 of all."""
        schedule = [Microbatch(["fp32"], "scatter"), Microbatch(["fp32"])]
        model = check_schedule(self.rank, thread_mesh(4, 8), schedule)
        group_ranks = range(self.rank // 8 * 8, self.rank // 8 * 8 + 8)
        kept = sum(given_grad("fp32", r, 0).double() for r in group_ranks) / 8
        fresh = sum(given_grad("fp32", r, 1).double() for r in range(32)) / 32
        bound = rounding_bound("fp32", 32, schedule, NO_POLICY)
        error = (full_grad(model.fp32) - (kept + fresh)).abs()
        self.assertTrue((error > bound).any())

    def test_fp16_neither_overflows_nor_underflows(self):
        """8 before and 4 after: 32 at once would lose one of the two values."""
        large, small = 2.0**13, 2.0**-20
        values = torch.tensor([large, small], dtype=torch.float16)
        self.assertEqual((values / 32)[1].item(), 0)
        self.assertEqual((values * 32)[0].item(), float("inf"))
        model = GivenGrads({"p": ((2,), torch.float16)})
        fully_shard(model, mesh=thread_mesh(4, 8))
        model(torch.zeros(1, requires_grad=True), {"p": values}).sum().backward()
        self.assertEqual(full_grad(model.p), values.double())

    def test_replicate(self):
        model = GivenGrads(SHAPES)
        replicate(model, mesh=init_device_mesh("cpu", (32,)))
        schedule = [Microbatch(ALL, "scatter"), Microbatch(["fp16"], "none")]
        schedule.append(Microbatch(ALL))
        run_backward(model, self.rank, schedule)
        for name, param in model.named_parameters():
            bound = rounding_bound(name, 32, schedule, NO_POLICY)
            error = (full_grad(param) - mean_grad(name, 32, schedule)).abs()
            self.assertTrue((error <= bound).all(), name)


class TestProcesses(FSDPProcessTest):
    """2 replicas of 2 shards, each rank a process."""

    def test_one_reduction_of_each_kind_for_each_bucket(self):
        model = GivenGrads(SHAPES).to(self.device)
        fully_shard(model, mesh=hybrid_mesh(2))
        with record_collectives() as recorder:
            run_backward(model, self.rank, [Microbatch(ALL)])
        issued = [
            (call.name, call.dtype)
            for call in recorder.calls
            if call.name != "all_gather"
        ]
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        kinds = ("reduce_scatter", "all_reduce")
        self.assertEqual(issued, [(kind, dtype) for dtype in dtypes for kind in kinds])

    def test_deferred_all_reduce_issues_none(self):
        model = GivenGrads(SHAPES).to(self.device)
        fully_shard(model, mesh=hybrid_mesh(2))
        with record_collectives() as recorder:
            run_backward(model, self.rank, [Microbatch(ALL, "scatter")])
            self.assertEqual(len(recorder.reduce_scatters), 3)
            self.assertEqual(recorder.all_reduces, [])
            recorder.clear()
            run_backward(model, self.rank, [Microbatch(["bf16"])])
        # What was kept of the other two dtypes is all-reduced alone
        self.assertEqual(len(recorder.reduce_scatters), 1)
        self.assertEqual(len(recorder.all_reduces), 3)

    @pytest.mark.quick
    def test_three_microbatches(self):
        for params in ([ALL] * 3, THREE_DIFFERENT):
            for syncs in (("scatter", "scatter"), ("none", "scatter"), ("none",) * 2):
                schedule = [
                    Microbatch(p, sync)
                    for p, sync in zip(params, (*syncs, "all"), strict=True)
                ]
                check_schedule(self.rank, hybrid_mesh(2), schedule)

    def test_what_others_prepare_is_kept_as_it_was_reduced(self):
        """Whichever parameters the next microbatch has, if any of them."""
        name = "_default_reduce_scatter_input_fn"
        with mock.patch.object(param_group, name, with_a_row_more):
            for params in (THREE_DIFFERENT, [ALL] * 3, [ALL, ALL, ["fp16"]]):
                syncs = ("scatter", "scatter", "all")
                check_schedule(
                    self.rank, hybrid_mesh(2), [*map(Microbatch, params, syncs)]
                )

    def test_microbatches_without_sync_add_up_in_the_reduce_dtype(self):
        """bf16 has no room for 256 + 1, which fp32 keeps."""
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        model = GivenGrads({"p": ((4,), torch.float32)}).to(self.device)
        fully_shard(model, mesh=hybrid_mesh(2), mp_policy=policy)
        for value, syncs in ((256.0, False), (1.0, True)):
            model.set_requires_gradient_sync(syncs)
            x = torch.zeros(1, requires_grad=True, device=self.device)
            grad = torch.full((4,), value, device=self.device)
            model(x, {"p": grad}).sum().backward()
        self.assertEqual(full_grad(model.p), torch.full((4,), 257.0).double())

    def test_microbatches_add_up_in_a_wider_grad_dtype(self):
        """Which users have set: bf16 would add up 256, 1 and -256 to 0."""
        dtype = torch.bfloat16
        setters = "set_requires_all_reduce", "set_requires_gradient_sync"
        for setter, reduce_dtype in itertools.product(setters, (dtype, None)):
            policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
            model = GivenGrads({"p": ((4,), dtype), "q": ((4,), dtype)})
            model = model.to(self.device)
            for param in model.parameters():
                param.grad_dtype = torch.float32
            fully_shard(model, mesh=hybrid_mesh(2), mp_policy=policy)
            for i, value in enumerate((256.0, 1.0, -256.0)):
                getattr(model, setter)(i == 2)
                x = torch.zeros(1, requires_grad=True, device=self.device)
                grad = torch.full((4,), value, device=self.device, dtype=dtype)
                # The last microbatch leaves one out, and another the other
                grads = {"p": grad} | ({"q": grad} if i != 2 else {})
                model(x, grads).sum().backward()
            with self.subTest(f"{setter}, {reduce_dtype}"):
                self.assertEqual(full_grad(model.p), torch.full((4,), 1.0).double())
                # 257, which bf16 rounds to 256 where it is what all ranks add
                in_fp32 = FOLLOWS_GRAD_DTYPE and reduce_dtype is None
                expected = torch.full((4,), 257.0 if in_fp32 else 256.0).double()
                self.assertEqual(full_grad(model.q), expected)
                self.assertEqual(model.p.grad.dtype, torch.float32)

    def test_replicas_use_the_same_parameters_in_another_order(self):
        self.check_parameters_in_another_order()

    def test_reduction_that_others_replace_gets_the_same_arguments(self):
        """No plan comes along: which parameter lies where, it finds out itself."""
        own, calls = param_group.foreach_reduce, []

        def foreach_reduce(*args, **kwargs):
            calls.append((len(args), [*kwargs]))
            named = dict(zip(REDUCE_ARGUMENTS, args))
            if "orig_dtype" in named:  # before 2.15: of all sharded gradients
                dtypes = [p.sharded_param.dtype for p in named["fsdp_params"]]
                is_one = all(dtype == dtypes[0] for dtype in dtypes)
                self.assertEqual(named["orig_dtype"], dtypes[0] if is_one else None)
            return tuple(own(*args, **kwargs))

        with mock.patch.object(param_group, "foreach_reduce", foreach_reduce):
            self.check_parameters_in_another_order()
            *others, last = THREE_DIFFERENT
            schedule = [Microbatch(params, "scatter") for params in others]
            check_schedule(self.rank, hybrid_mesh(2), [*schedule, Microbatch(last)])
        self.assertGreater(len(calls), 0)
        for found in calls:
            self.assertEqual(found, (len(REDUCE_ARGUMENTS), REDUCE_KEYWORDS))

    def check_parameters_in_another_order(self):
        """What replicas all-reduce in the end is laid out alike nevertheless."""
        orders = {False: ("first", "second"), True: ("second", "first")}
        for last in ((), ("first",), ("first", "second")):
            shapes = dict.fromkeys(orders[False], ((4,), torch.float32))
            model = GivenGrads(shapes).to(self.device)
            fully_shard(model, mesh=hybrid_mesh(2))
            expected = dict.fromkeys(shapes, 0.0)
            for i in range(2 + bool(last)):
                is_last = i == 1 + bool(last)
                model.set_requires_all_reduce(is_last)
                for rank in range(4):
                    names = orders[rank >= 2][i : i + 1] if i < 2 else last
                    value = 2.0 ** (4 * i + rank)
                    for name in names:
                        expected[name] += value / 4
                    if rank == self.rank:
                        grad = torch.full((4,), value, device=self.device)
                        x = torch.zeros(1, requires_grad=True, device=self.device)
                        model(x, dict.fromkeys(names, grad)).sum().backward()
            found = {n: full_grad(p).tolist() for n, p in model.named_parameters()}
            self.assertEqual(found, {n: [v] * 4 for n, v in expected.items()}, last)

    def test_policies(self):
        schedule = [Microbatch(p, "scatter") for p in THREE_DIFFERENT]
        schedule.append(Microbatch(ALL))
        for policy in (
            MixedPrecisionPolicy(reduce_dtype=torch.float32),
            MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        ):
            check_schedule(self.rank, hybrid_mesh(2), schedule, policy)

    def test_cpu_offload(self):
        schedule = [Microbatch(p, "scatter") for p in THREE_DIFFERENT]
        schedule.append(Microbatch(ALL))
        offload = CPUOffloadPolicy(pin_memory=DEVICE_TYPE != "cpu")
        check_schedule(self.rank, hybrid_mesh(2), schedule, offload_policy=offload)

    def test_gradients_already_on_the_sharded_parameters(self):
        model = GivenGrads(SHAPES).to(self.device)
        fully_shard(model, mesh=hybrid_mesh(2))
        schedule = [Microbatch(ALL), Microbatch(["bf16", "fp32"])]
        run_backward(model, self.rank, schedule)
        for name, param in model.named_parameters():
            bound = rounding_bound(name, 4, schedule, NO_POLICY)
            error = (full_grad(param) - mean_grad(name, 4, schedule)).abs()
            self.assertTrue((error <= bound).all(), name)

    def test_custom_divide_factor_and_forced_sums(self):
        for factor, forced in ((3.0, False), (3.0, True), (None, True), (2.0, False)):
            model = GivenGrads(SHAPES).to(self.device)
            fully_shard(model, mesh=hybrid_mesh(2))
            if factor is not None:
                model.set_gradient_divide_factor(factor)
            model.set_force_sum_reduction_for_comms(forced)
            schedule = [Microbatch(ALL, "scatter"), Microbatch(ALL)]
            run_backward(model, self.rank, schedule)
            for name, param in model.named_parameters():
                scale = 4 / (factor or 4)
                expected = mean_grad(name, 4, schedule) * scale
                bound = rounding_bound(name, 4, schedule, NO_POLICY)
                error = (full_grad(param) - expected).abs()
                self.assertTrue((error <= bound * scale).all(), (name, factor, forced))

    def test_unused_parameters_reduce_zeros_in_their_own_dtype(self):
        """Ranks of one shard group use different parameters and do not hang."""
        model = GivenGrads(SHAPES).to(self.device)
        fully_shard(model, mesh=hybrid_mesh(2))
        model.set_reduce_scatter_unused_params(True)
        mine = ("fp32", "fp16") if self.rank % 2 == 0 else ("fp32", "bf16")
        with record_collectives() as recorder:
            run_backward(model, self.rank, [Microbatch(mine)])
        self.assertEqual(len(recorder.reduce_scatters), 3)
        for name, users in (("fp16", (0, 2)), ("bf16", (1, 3)), ("fp32", range(4))):
            expected = sum(given_grad(name, r, 0).double() for r in users) / 4
            grad = full_grad(getattr(model, name))
            bound = rounding_bound(name, 4, [Microbatch(ALL)], NO_POLICY)
            self.assertTrue(((grad - expected).abs() <= bound).all(), name)
        self.assertEqual(full_grad(model.bf16_uneven).abs().max().item(), 0)

    def test_reduce_dtype_that_changes_before_the_all_reduce_is_an_error(self):
        model = GivenGrads({"p": ((4,), torch.float32)}).to(self.device)
        fully_shard(model, mesh=hybrid_mesh(2))
        group = group_of(model)

        def microbatch(reduce_dtype: torch.dtype, is_last: bool) -> None:
            for fsdp_param in group.fsdp_params:
                fsdp_param.mp_policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
            group._cache.invalidate_buckets_if_changed()
            model.set_requires_all_reduce(is_last)
            x = torch.zeros(1, requires_grad=True, device=self.device)
            grad = torch.ones(4, device=self.device)
            model(x, {"p": grad}).sum().backward()

        for is_last in (False, True):
            microbatch(torch.float32, is_last=False)
            with self.assertRaisesRegex(
                RuntimeError,
                r"p was reduced in torch\.float32 in an earlier microbatch, whose "
                r"all-reduce was deferred, and would be in torch\.bfloat16 now",
            ):
                microbatch(torch.bfloat16, is_last)
            model.reset_iter_state()
            microbatch(torch.bfloat16, is_last=False)
            microbatch(torch.bfloat16, is_last=True)
            expected = torch.full((4,), 2.0, dtype=torch.float64)
            self.assertEqual(full_grad(model.p), expected)
            self.assertEqual(group._reducer.partial_reduces, {})
            model.zero_grad()

    def test_all_reduce_hook_gets_each_bucket_once(self):
        seen: list[tuple[torch.dtype, int]] = []

        def double(buffer: torch.Tensor) -> None:
            seen.append((buffer.dtype, buffer.numel()))
            buffer.mul_(2)

        for mesh in (hybrid_mesh(2), hybrid_mesh(4)["shard"]):
            seen.clear()
            model = GivenGrads(SHAPES).to(self.device)
            fully_shard(model, mesh=mesh)
            handle = torch.get_device_module(self.device)
            # Native HSDP has a stream of its own for the hook
            stream = handle.Stream() if mesh.ndim == 1 else None
            model.set_all_reduce_hook(double, stream=stream)
            run_backward(model, self.rank, [Microbatch(ALL)])
            shards = mesh.size(-1)
            numels = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0)
            for shape, dtype in SHAPES.values():
                rows = -(-shape[0] // shards)
                numels[dtype] += rows * torch.Size(shape[1:]).numel()
            self.assertEqual(seen, [*numels.items()])
            for name, param in model.named_parameters():
                expected = 2 * mean_grad(name, 4, [Microbatch(ALL)])
                bound = 2 * rounding_bound(name, 4, [Microbatch(ALL)], NO_POLICY)
                error = (full_grad(param) - expected).abs()
                self.assertTrue((error <= bound).all(), name)

    def test_no_buffer_outlives_the_last_microbatch(self):
        buffers: list[weakref.ref[torch.Tensor]] = []

        class Watched(DefaultReduceScatter):
            def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                buffer = super().allocate(*args, **kwargs)
                buffers.append(weakref.ref(buffer))
                return buffer

        model = GivenGrads(SHAPES).to(self.device)
        fully_shard(model, mesh=hybrid_mesh(2))
        model.set_custom_reduce_scatter(Watched())
        schedule = [Microbatch(p, "scatter") for p in THREE_DIFFERENT]
        run_backward(model, self.rank, [*schedule, Microbatch(["fp16"])])
        model.zero_grad()
        gc.collect()
        self.assertGreater(len(buffers), 8)
        self.assertEqual([ref for ref in buffers if ref() is not None], [])

    def test_tensor_parallel_sum_runs_in_the_gradients_dtype(self):
        """As in the release, whatever comes after it: bf16 rounds 256 + 1 to 256."""
        mesh = init_device_mesh(DEVICE_TYPE, (2, 2), mesh_dim_names=("dp", "tp"))
        tp_mesh = mesh["tp"]

        class Gain(nn.Module):
            def __init__(self, device: torch.device):
                super().__init__()
                ones = torch.ones(4, device=device)
                gain = distribute_tensor(ones, tp_mesh, [Replicate()])
                self.gain = nn.Parameter(gain)
                self.plain = nn.Parameter(torch.ones(3, device=device).bfloat16())

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                local = (tokens * self.gain).to_local()
                return local.sum() + (self.plain.sum() * 2).to(local.dtype)

        model = Gain(self.device)
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        value = 256.0 if tp_mesh.get_local_rank() == 0 else 1.0
        mine = torch.full((1, 4), value, device=self.device, dtype=torch.bfloat16)
        tokens = DTensor.from_local(mine, tp_mesh, [Shard(0)])
        model(tokens).backward()
        dtype = summed_apart_dtype(policy, torch.float32)
        expected = torch.full((4,), 256.0, dtype=dtype) + 1
        self.assertEqual(full_grad(model.gain), expected.double())
        self.assertEqual(model.plain.grad.dtype, torch.bfloat16)
        self.assertEqual(full_grad(model.plain), torch.full((3,), 2.0).double())


SCHEDULES = st.lists(
    st.builds(
        Microbatch,
        st.sets(st.sampled_from(ALL), min_size=1).map(sorted),
        st.sampled_from(["none", "scatter", "all"]),
    ),
    min_size=1,
    max_size=4,
)
DTYPES = st.sampled_from([None, torch.float32, torch.bfloat16])
POLICIES = st.builds(MixedPrecisionPolicy, DTYPES, DTYPES)


@on_first_rank
class TestRandomSchedules(TestCase):
    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(SCHEDULES, POLICIES, st.sampled_from([(1, 4), (2, 2), (4, 1)]))
    def test_against_the_mean(self, drawn, policy, mesh_shape):
        schedule = [*drawn, Microbatch(["fp32_single"])]  # the last one syncs

        @spawn_threads_and_init_comms(world_size=4)
        def run(self: TestCase) -> None:
            check_schedule(dist.get_rank(), thread_mesh(*mesh_shape), schedule, policy)

        run(self)


class Layers(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x, {"weight": torch.ones(64, 64), "gain": torch.ones(64)})
        return x


class TestBuffers(FakeGroupTest):
    """How long reduced buffers live, and what gradients keep alive."""

    ranks = 4

    def make(
        self,
        layers: int,
        is_mixed: bool,
        *,
        api: Callable[..., Any] = fully_shard,
        **kwargs: Any,
    ) -> Any:
        dtypes = (torch.bfloat16, torch.float32 if is_mixed else torch.bfloat16)
        shapes = {"weight": ((64, 64), dtypes[0]), "gain": ((64,), dtypes[1])}
        model = Layers(GivenGrads(shapes) for _ in range(layers))
        for layer in model:
            api(layer, **kwargs)
        return api(model, **kwargs)

    def backward(self, model: nn.Module) -> None:
        model(torch.zeros(1, requires_grad=True)).sum().backward()

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def test_all_groups_of_a_module_are_one_unit(self) -> None:
        """One group for each mesh: the buffers of the module before are not waited for."""
        context = FSDPCommContext()
        context.lazy_init(torch.device("cpu"))
        reduced = torch.empty(1), None, None
        for module in range(4):
            modules = (module,)
            for i in range(2):
                group = mock.Mock(modules=modules, _module_fqn=str(module))
                context.recycle_reduce_buffers(group)
                held = [
                    held.param_group._module_fqn for held in context.all_reduce_states
                ]
                before = [str(module - 1)] * 2 if module else []
                self.assertEqual(held, before + [str(module)] * i)
                result = ReduceResult(None, None, None, None, *reduced)
                context.hold_reduce_buffers(group, [result])

    def test_few_reduced_buffers_are_alive(self) -> None:
        """Those of this unit and of the one before, however many units there are."""
        allocate = _fsdp_collectives.allocate

        def most_alive(layers: int, is_mixed: bool, mode: str) -> int:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            mesh = self.mesh() if mode != "hook" else self.mesh()["shard"]
            model = self.make(layers, is_mixed, mesh=mesh, mp_policy=policy)
            if mode == "hook":
                for unit in (*model, model):
                    unit.set_all_reduce_hook(lambda _: None)
            alive: list[StorageWeakRef] = []
            counts: list[int] = []

            def noting(*args: Any, gathers: bool = False) -> torch.Tensor:
                buffer = allocate(*args, gathers=gathers)
                if gathers:
                    return buffer
                alive.append(StorageWeakRef(buffer.untyped_storage()))
                counts.append(sum(not ref.expired() for ref in alive))
                return buffer

            with mock.patch.object(_fsdp_collectives, "allocate", noting):
                for is_last in (False, True) if mode == "deferred" else (True,):
                    model.set_requires_all_reduce(is_last)
                    counts.clear()
                    self.backward(model)
            return max(counts) - (layers if mode == "deferred" else 0)

        modes = "plain", "deferred", "hook"
        for is_mixed, mode in itertools.product((False, True), modes):
            with self.subTest(f"mixed: {is_mixed}, {mode}"):
                few = most_alive(4, is_mixed, mode)
                self.assertLessEqual(few, 5)  # with inputs, of two units and one more
                self.assertEqual(most_alive(8, is_mixed, mode), few)

    def test_gradients_keep_nothing_else_alive(self) -> None:
        sent = MixedPrecisionPolicy(
            grad_comm_dtype=torch.bfloat16,
            grad_comm_dtype_override_fn=lambda p: (
                torch.float32 if p.ndim == 1 else None
            ),
        )
        policies = {
            "none": MixedPrecisionPolicy(),
            "fp32": MixedPrecisionPolicy(reduce_dtype=torch.float32),
            "sent": sent,
        }
        meshes = {"plain": self.mesh()["shard"], "hsdp": self.mesh()}
        modes = itertools.product(policies, (*meshes, "replicate"), (None, 1.0))
        for policy, mesh, cap in modes:
            kwargs = {"mesh": meshes[mesh]} if mesh in meshes else {}
            model = self.make(
                3,
                is_mixed=True,
                mp_policy=policies[policy],
                api=fully_shard if mesh in meshes else replicate,
                **kwargs,
            )
            set_reduce_bucket_cap(model, cap)
            self.backward(model)
            grads = [p.grad._local_tensor for p in model.parameters()]
            storages = {g.untyped_storage().data_ptr(): g for g in grads}
            held = sum(g.untyped_storage().nbytes() for g in storages.values())
            with self.subTest(f"{policy}, {mesh}, {cap}"):
                self.assertLessEqual(held, 1.05 * sum(g.nbytes for g in grads))


class TestAssignedPartialReduce(FakeGroupTest):
    """A plugin's own sum must be one that the unit would have reduced."""

    ranks = 4

    def test_only_what_the_unit_reduces_is_accepted(self) -> None:
        model = GivenGrads({"p": ((8,), torch.float32)})
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        group = group_of(fully_shard(model, mesh=mesh))
        for dtype, numel in ((torch.bfloat16, 4), (torch.float32, 5)):
            with self.assertRaisesRegex(
                ValueError,
                f"_partial_reduce_output of unit .* got {numel} elements of {dtype}, "
                "but the unit reduces 4 of torch.float32",
            ):
                group._partial_reduce_output = torch.zeros(numel, dtype=dtype)
        self.assertIsNone(group._partial_reduce_output)
        output = group._partial_reduce_output = torch.zeros(4)
        self.assertIs(group._partial_reduce_output, output)


if __name__ == "__main__":
    run_tests()
