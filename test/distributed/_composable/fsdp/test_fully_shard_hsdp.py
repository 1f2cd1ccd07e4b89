# Owner(s): ["oncall: distributed"]

"""
Gradients of mixed dtypes over shards and replicas: what is all-reduced, what waits for
a later microbatch, and how long buffers live. Random schedules, meshes and policies are
in ``test_fully_shard_random.py``, all-reduce hooks in ``test_fully_shard_parity.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fsdp_helpers.common.comms import (
    backward,
    BF16,
    FP16,
    FP32,
    FP64,
    GivenGrads,
    group_of,
    integers,
    mesh_of,
)
from fsdp_helpers.common.release_rules import (
    FOLLOWS_GRAD_DTYPE,
    REDUCE_ARGUMENTS,
    REDUCE_KEYWORDS,
)
from fsdp_helpers.common.utils import (
    DEVICE_TYPE,
    FakeGroupTest,
    FSDPProcessTest,
    hybrid_mesh,
    record_collectives,
)
from fsdp_helpers.plugins.later_releases import with_a_row_more

import torch
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    fully_shard,
    MixedPrecisionPolicy,
    set_reduce_bucket_cap,
)
from torch.distributed.fsdp._fully_shard import _fsdp_context, _fsdp_reduce
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.common_utils import run_tests


# Name of each parameter to its shape and dtype: dim 0 smaller than a shard group,
# not divisible by it, and divisible by it
SHAPES = {
    "fp32": ((9, 3), FP32),
    "fp32_single": ((1,), FP32),
    "bf16": ((16, 2), BF16),
    "bf16_uneven": ((5, 2), BF16),
    "fp16": ((8,), FP16),
}
ALL = tuple(SHAPES)


def model_of(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> GivenGrads:
    zeros = {name: torch.zeros(size, dtype=d) for name, (size, d) in shapes.items()}
    return GivenGrads(**zeros).to(DEVICE_TYPE)


def given_grad(name: str, rank: int, microbatch: int) -> torch.Tensor:
    """Returns what ``rank`` gives to the parameter, the same wherever it is asked for."""
    shape, dtype = SHAPES[name]
    seed = (ALL.index(name) * 1000 + rank) * 100 + microbatch
    return integers(shape, 1, seed=seed, dtype=dtype, device=DEVICE_TYPE)


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
        grads = {name: given_grad(name, rank, i) for name in microbatch.params}
        backward(model, **grads)


def mean_grad(name: str, ranks: int, schedule: Sequence[Microbatch]) -> torch.Tensor:
    grads = [
        given_grad(name, rank, i).double().cpu()
        for i, microbatch in enumerate(schedule)
        if name in microbatch.params
        for rank in range(ranks)
    ]
    return torch.stack(grads).sum(0) / ranks


def full_grad(param: nn.Parameter) -> torch.Tensor | None:
    grad = param.grad
    return None if grad is None else grad.full_tensor().double().cpu()


def check_schedule(rank: int, mesh: DeviceMesh, schedule: Sequence[Microbatch]) -> None:
    """Runs the microbatches and compares with the mean of what they gave."""
    model = fully_shard(model_of(SHAPES), mesh=mesh)
    run_backward(model, rank, schedule)
    for name, param in model.named_parameters():
        grad = full_grad(param)
        if not any(name in microbatch.params for microbatch in schedule):
            assert grad is None, f"{name} got a gradient from nowhere"
            continue
        assert grad is not None, f"{name} lost its gradient"
        assert param.grad.dtype == SHAPES[name][1]
        expected = mean_grad(name, mesh.size(), schedule)
        assert torch.equal(grad, expected), f"{name}: {grad}, not {expected}"
    group = group_of(model)
    assert not group._partial_reduces and not group.comm_ctx.all_reduce_states
    assert not group.comm_ctx.reduce_scatter_states


# Which parameters, of which dtypes, get gradients in three microbatches
THREE_DIFFERENT = (("fp32", "bf16"), ("bf16_uneven", "fp16"), ("fp32", "fp32_single"))


class TestProcesses(FSDPProcessTest):
    """2 replicas of 2 shards, each rank a process."""

    def test_partial_reduces_are_all_reduced_in_the_order_of_buckets(self):
        """Also those of dtypes that the last microbatch has no gradient of."""
        model = fully_shard(model_of(SHAPES), mesh=hybrid_mesh(2))
        run_backward(model, self.rank, [Microbatch(ALL, "scatter")])
        with record_collectives() as recorder:
            run_backward(model, self.rank, [Microbatch(["bf16"])])
        self.assertEqual([c.dtype for c in recorder.reduce_scatters], [BF16])
        self.assertEqual([c.dtype for c in recorder.all_reduces], [FP32, BF16, FP16])

    def test_what_others_prepare_is_kept_as_it_was_reduced(self):
        """Whichever parameters the next microbatch has, if any of them."""
        name = "_default_reduce_scatter_input_fn"
        with mock.patch.object(param_group, name, with_a_row_more):
            for params in (THREE_DIFFERENT, [ALL] * 3, [ALL, ALL, ["fp16"]]):
                syncs = ("scatter", "scatter", "all")
                schedule = [*map(Microbatch, params, syncs)]
                check_schedule(self.rank, hybrid_mesh(2), schedule)

    def test_microbatches_add_up_in_a_wider_grad_dtype(self):
        """Which users have set: bf16 would add up 256, 1 and -256 to 0."""
        dtype = BF16
        setters = "set_requires_all_reduce", "set_requires_gradient_sync"
        for setter, reduce_dtype in itertools.product(setters, (dtype, None)):
            policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
            model = model_of({"p": ((4,), dtype), "q": ((4,), dtype)})
            for param in model.parameters():
                param.grad_dtype = FP32
            fully_shard(model, mesh=hybrid_mesh(2), mp_policy=policy)
            for i, value in enumerate((256.0, 1.0, -256.0)):
                getattr(model, setter)(i == 2)
                # The last microbatch leaves one out
                backward(model, **dict.fromkeys("pq" if i != 2 else "p", value))
            with self.subTest(f"{setter}, {reduce_dtype}"):
                self.assertEqual(full_grad(model.p), torch.full((4,), 1.0).double())
                # 257, which bf16 rounds to 256 where it is what all ranks add
                in_fp32 = FOLLOWS_GRAD_DTYPE and reduce_dtype is None
                expected = torch.full((4,), 257.0 if in_fp32 else 256.0).double()
                self.assertEqual(full_grad(model.q), expected)
                self.assertEqual(model.p.grad.dtype, FP32)

    def test_replaced_reduction_gets_the_arguments_of_the_release(self):
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
            *others, last = THREE_DIFFERENT
            schedule = [Microbatch(params, "scatter") for params in others]
            check_schedule(self.rank, hybrid_mesh(2), [*schedule, Microbatch(last)])
        self.assertGreater(len(calls), 3)  # one for each bucket
        for found in calls:
            self.assertEqual(found, (len(REDUCE_ARGUMENTS), REDUCE_KEYWORDS))

    def test_reduce_dtype_that_changes_before_the_all_reduce_is_an_error(self):
        model = model_of({"p": ((4,), FP32)})
        fully_shard(model, mesh=hybrid_mesh(2))
        group = group_of(model)

        def microbatch(reduce_dtype: torch.dtype, is_last: bool) -> None:
            for fsdp_param in group.fsdp_params:
                fsdp_param.mp_policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
            group._cache.invalidate_buckets_if_changed()
            model.set_requires_all_reduce(is_last)
            backward(model, p=1.0)

        for is_last in (False, True):
            microbatch(FP32, is_last=False)
            with self.assertRaisesRegex(
                RuntimeError,
                r"p was reduced in torch\.float32 in an earlier microbatch, whose "
                r"all-reduce was deferred, and would be in torch\.bfloat16 now",
            ):
                microbatch(BF16, is_last)
            model.reset_iter_state()
            microbatch(BF16, is_last=False)
            microbatch(BF16, is_last=True)
            expected = torch.full((4,), 2.0, dtype=FP64)
            self.assertEqual(full_grad(model.p), expected)
            self.assertEqual(group._partial_reduces, {})
            model.zero_grad()


class Layers(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x, weight=1.0, gain=1.0)
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
        dtypes = (BF16, FP32 if is_mixed else BF16)
        shapes = {"weight": ((64, 64), dtypes[0]), "gain": ((64,), dtypes[1])}
        model = Layers(model_of(shapes) for _ in range(layers))
        for layer in model:
            api(layer, **kwargs)
        return api(model, **kwargs)

    def test_few_reduced_buffers_are_held_beyond_the_limit(self) -> None:
        """Those of this unit and of the one before, however many units there are."""
        allocate = _fsdp_reduce.allocate

        def most_alive(layers: int, is_mixed: bool, mode: str) -> int:
            policy = MixedPrecisionPolicy(reduce_dtype=FP32)
            hybrid = mesh_of(2, 2, device="cpu")
            mesh = hybrid["shard"] if mode == "hook" else hybrid
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

            no_room = mock.patch.object(_fsdp_context, "_MAX_HELD_NBYTES", 0)
            with no_room, mock.patch.object(_fsdp_reduce, "allocate", noting):
                for is_last in (False, True) if mode == "deferred" else (True,):
                    model.set_requires_all_reduce(is_last)
                    counts.clear()
                    backward(model)
            return max(counts) - (layers if mode == "deferred" else 0)

        modes = "plain", "deferred", "hook"
        for is_mixed, mode in itertools.product((False, True), modes):
            with self.subTest(f"mixed: {is_mixed}, {mode}"):
                few = most_alive(4, is_mixed, mode)
                self.assertLessEqual(few, 5)  # with inputs, of two units and one more
                self.assertEqual(most_alive(8, is_mixed, mode), few)

    def test_gradients_keep_nothing_else_alive(self) -> None:
        sent = MixedPrecisionPolicy(
            grad_comm_dtype=BF16,
            grad_comm_dtype_override_fn=lambda p: FP32 if p.ndim == 1 else None,
        )
        policies = {
            "none": MixedPrecisionPolicy(),
            "fp32": MixedPrecisionPolicy(reduce_dtype=FP32),
            "sent": sent,
        }
        hybrid = mesh_of(2, 2, device="cpu")
        apis = {
            "plain": (fully_shard, {"mesh": hybrid["shard"]}),
            "hsdp": (fully_shard, {"mesh": hybrid}),
            "replicate": (replicate, {}),
        }
        for policy, how, cap in itertools.product(policies, apis, (None, 1.0)):
            api, kwargs = apis[how]
            model = self.make(3, True, mp_policy=policies[policy], api=api, **kwargs)
            set_reduce_bucket_cap(model, cap)
            backward(model)
            grads = [p.grad._local_tensor for p in model.parameters()]
            storages = {g.untyped_storage().data_ptr(): g for g in grads}
            held = sum(g.untyped_storage().nbytes() for g in storages.values())
            with self.subTest(f"{policy}, {how}, {cap}"):
                self.assertLessEqual(held, 1.05 * sum(g.nbytes for g in grads))

    def test_assigned_partial_reduce_must_be_one_of_the_unit(self) -> None:
        """A plugin's own sum, see ``_partial_reduce_output``."""
        model = model_of({"p": ((8,), FP32)})
        group = group_of(fully_shard(model, mesh=mesh_of(2, 2, device="cpu")))
        for dtype, numel in ((BF16, 4), (FP32, 5)):
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
