# Owner(s): ["oncall: distributed"]

"""
What moves: all-gather and reduce-scatter of a unit against plain references at
every world size, how many collectives a step issues, and how many bytes they carry.
"""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from fsdp_common.comms import (
    BF16,
    FP16,
    FP32,
    FP64,
    group_of,
    INT64,
    integers,
    mixed_specs,
    policy_of,
    sharded,
    Spec,
    ThreadTest,
    Weighted,
)
from fsdp_common.release_rules import (
    compute_dtype,
    FOLLOWS_GRAD_DTYPE,
    reduce_dtype,
    reduce_dtypes,
)
from fsdp_common.utils import (
    BACKEND,
    Collective,
    DEVICE_TYPE,
    FSDPProcessTest,
    mixed_model,
    random_input,
    record_collectives,
    shard_blocks,
    shard_mesh,
)

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.common_utils import run_tests


class GatherAndReduceTests:
    """Run at every world size."""

    def test_gathers_parameters_of_several_dtypes(self):
        specs = mixed_specs(self.world_size)
        unit = self.unit(specs)
        self.copy_out(unit, self.all_gather(unit))
        self.assert_unsharded(unit, specs)

    def test_gathers_in_the_compute_dtype(self):
        specs = [*mixed_specs(self.world_size), Spec((3,), INT64)]
        unit = self.unit(specs, mp_policy=policy_of(BF16))
        self.copy_out(unit, self.all_gather(unit))
        self.assert_unsharded(unit, specs, BF16)

    def test_reduces_gradients_of_several_dtypes_in_one(self):
        """Into parameters of several storage dtypes."""
        specs = mixed_specs(self.world_size)
        dtypes = [FP32, BF16, FP16, FP32, FP64, BF16, BF16]
        unit = self.unit(specs)
        self.reduce(unit, self.grads(specs, dtypes), reduce_dtype=FP32)
        self.assert_reduced(unit, specs, dtypes, FP32)

    def test_reduces_each_dtype_by_itself(self):
        for dtype in (FP32, BF16, FP16, FP64):
            specs = [
                Spec((5, 3), dtype),
                Spec((1,), dtype),
                Spec((2, self.world_size), dtype, shard_dim=1),
            ]
            unit = self.unit(specs)
            grads = self.grads(specs, [dtype] * 3, limit=4)
            self.reduce(unit, grads, orig_dtype=dtype)
            self.assert_reduced(unit, specs, [dtype] * 3, dtype, limit=4)


class TestOn16Ranks(GatherAndReduceTests, ThreadTest):
    world_size = 16


@pytest.mark.quick
class TestOn3Ranks(GatherAndReduceTests, ThreadTest):
    """Three divides no size evenly, and no sum exactly."""

    world_size = 3


class TestUnits(FSDPProcessTest):
    """Counts what ``fully_shard`` issues in training, and checks the gradients."""

    THREE = (Spec((5, 3), BF16), Spec((1,), FP32), Spec((7, 2), FP16), Spec((3,), FP32))
    STORED = [spec.dtype for spec in THREE]

    def module(self, specs: Sequence[Spec], ranks: int = 0, **kwargs: Any) -> Weighted:
        mesh = shard_mesh(ranks or self.world_size)
        return sharded(specs, mesh, device=DEVICE_TYPE, **kwargs)

    def weights(
        self, specs: Sequence[Spec], rank: int | None = None, step: int = 0
    ) -> list[torch.Tensor]:
        """Returns small integers, which every dtype holds."""
        rank = self.rank if rank is None else rank
        seed, how = 10000 * step + 100 * rank, {"dtype": FP32, "device": DEVICE_TYPE}
        return [integers(s.size, 4, seed=seed + i, **how) for i, s in enumerate(specs)]

    def weight_sums(self, specs: Sequence[Spec], steps: int = 1) -> list[torch.Tensor]:
        calls = itertools.product(range(self.world_size), range(steps))
        return [sum(parts) for parts in zip(*(self.weights(specs, *c) for c in calls))]

    def assert_grads(
        self, module: Weighted, totals: Sequence[torch.Tensor], divisor: float
    ) -> None:
        """Over all ranks, and in each parameter's own dtype."""
        params = module.parameters()
        for param, spec, total in zip(params, module.specs, totals, strict=True):
            expected = (total / divisor).to(spec.dtype)
            expected = spec.shard(expected, self.rank, self.world_size)
            self.assertEqual(param.grad.dtype, spec.dtype)
            self.assertEqual(param.grad.to_local(), expected)

    def step(self, module: Weighted, step: int = 0) -> list[Collective]:
        with record_collectives() as recorded:
            module(self.weights(module.specs, step=step)).backward()
        return recorded.calls

    def padded_numel(self, specs: Sequence[Spec]) -> int:
        return sum(spec.padded_shard_numel(self.world_size) for spec in specs)

    def assert_gathers(
        self, call: Collective, specs: Sequence[Spec], dtypes: Sequence[torch.dtype]
    ) -> None:
        """In the parameters' bytes, those of each of several dtypes padded to 16."""
        self.assertEqual((call.name, call.group_size), ("all_gather", self.world_size))
        sizes = [self.padded_numel([spec]) for spec in specs]
        nbytes = dict.fromkeys(dtypes, 0)
        for numel, dtype in zip(sizes, dtypes, strict=True):
            nbytes[dtype] += numel * dtype.itemsize
        if len(nbytes) == 1:
            self.assertEqual(call.dtype, dtypes[0])
        else:
            nbytes = {dtype: n + -n % 16 for dtype, n in nbytes.items()}
        self.assertEqual(call.nbytes_per_rank, sum(nbytes.values()))

    def assert_reduces(
        self, call: Collective, specs: Sequence[Spec], dtype: torch.dtype
    ) -> None:
        numel = self.padded_numel(specs) * self.world_size
        op = "AVG" if dtype in (BF16, FP32) else "SUM"
        expected = Collective("reduce_scatter", dtype, numel, op, self.world_size)
        self.assertEqual(call, expected)

    def assert_same_on_all_ranks(self, calls: list[Collective]) -> None:
        everywhere: list[Any] = [None] * self.world_size
        dist.all_gather_object(everywhere, calls)
        for others in everywhere:
            self.assertEqual(others, calls)

    @pytest.mark.quick
    def test_one_gather_whatever_the_dtypes_and_one_reduction_for_each(self):
        for dtypes in (
            [FP32],
            [BF16],
            [FP16, FP16, FP16],
            [BF16, FP32],
            [FP32, BF16, FP32, BF16],
            [FP16, BF16, FP64, FP32, FP16],
        ):
            specs = [Spec((3 + i, 3), dtype) for i, dtype in enumerate(dtypes)]
            module = self.module(specs, reshard_after_forward=True)
            forward, backward, *reductions = self.step(module)
            for gather in (forward, backward):
                self.assert_gathers(gather, specs, dtypes)
            in_order = [d for d in (FP64, FP32, BF16, FP16) if d in dtypes]
            for call, dtype in zip(reductions, in_order, strict=True):
                of_dtype = [spec for spec in specs if spec.dtype == dtype]
                self.assert_reduces(call, of_dtype, dtype)
            self.assert_same_on_all_ranks([forward, backward, *reductions])
            self.assert_grads(module, self.weight_sums(specs), self.world_size)

    def test_policies(self):
        for policy in (
            policy_of(None, FP32),
            policy_of(BF16),
            policy_of(FP16),
            policy_of(BF16, FP32),
        ):
            module = self.module(self.THREE, mp_policy=policy)
            gather, *reductions = self.step(module)
            computed = [compute_dtype(policy, dtype) for dtype in self.STORED]
            self.assert_gathers(gather, self.THREE, computed)
            by_dtype = {d: [] for d in reduce_dtypes(policy, self.STORED)}
            for spec in self.THREE:
                by_dtype[reduce_dtype(policy, spec.dtype)].append(spec)
            for call, (d, specs) in zip(reductions, by_dtype.items(), strict=True):
                self.assert_reduces(call, specs, d)
            self.assert_grads(module, self.weight_sums(self.THREE), self.world_size)

    def test_each_nested_unit_has_its_own_in_the_same_order_on_every_rank(self):
        model = mixed_model(3)
        model[1].requires_grad_(False)  # and reduces nothing
        shard_blocks(model, mesh=shard_mesh())
        with record_collectives() as recorded:
            model(random_input(2, 9, seed=self.rank)).sum().backward()
        self.assertEqual(len(recorded.all_gathers), 3 + 3)
        dtypes = [call.dtype for call in recorded.reduce_scatters]
        self.assertEqual(dtypes, [FP32, BF16, FP16] * 2)
        self.assertEqual(len(recorded.calls), 6 + 6)
        self.assert_same_on_all_ranks(recorded.calls)

    def test_frozen_parameters_gather_and_never_reduce(self):
        module = self.module(self.THREE)
        module.p0.requires_grad_(False)
        module.p3.requires_grad_(False)
        gather, fp32, fp16 = self.step(module)
        self.assert_gathers(gather, self.THREE, [s.dtype for s in self.THREE])
        self.assert_reduces(fp32, self.THREE[1:2], FP32)
        self.assert_reduces(fp16, self.THREE[2:3], FP16)
        self.assertIsNone(module.p0.grad)
        self.assertIsNone(module.p3.grad)
        module.zero_grad()
        module.requires_grad_(True)
        dtypes = [call.dtype for call in self.step(module)[1:]]
        self.assertEqual(dtypes, [FP32, BF16, FP16])
        self.assert_grads(module, self.weight_sums(self.THREE), self.world_size)

    def test_any_parameters_may_have_gradients_in_a_step(self):
        """More patterns of them than a unit remembers."""
        specs = [Spec((3 + i,), (BF16, FP32, FP16)[i % 3]) for i in range(6)]
        module, totals = self.module(specs), self.weight_sums(specs)
        weights = self.weights(specs)
        patterns = [p for p in itertools.product((False, True), repeat=6) if any(p)]
        for used in patterns + patterns[:3]:
            with record_collectives() as recorded:
                module([w if u else None for w, u in zip(weights, used)]).backward()
            dtypes = {spec.dtype for spec, u in zip(specs, used) if u}
            found = [call.dtype for call in recorded.reduce_scatters]
            self.assertEqual(found, [d for d in (FP32, BF16, FP16) if d in dtypes])
            for i, param in enumerate(module.parameters()):
                self.assertEqual(param.grad is not None, used[i])
                if used[i]:
                    mean = (totals[i] / self.world_size).to(param.dtype)
                    expected = specs[i].shard(mean, self.rank, self.world_size)
                    self.assertEqual(param.grad.to_local(), expected)
            module.zero_grad()

    def test_units_are_gathered_without_autograd_and_trained_afterwards(self):
        module = self.module(self.THREE, reshard_after_forward=True)
        for mode in (torch.inference_mode, torch.no_grad):
            with mode(), record_collectives() as recorded:
                module(self.weights(self.THREE))
            (gather,) = recorded.calls
            self.assert_gathers(gather, self.THREE, [s.dtype for s in self.THREE])
        self.step(module)
        self.assert_grads(module, self.weight_sums(self.THREE), self.world_size)

    def test_gathers_once_again_in_backward_if_resharded(self):
        specs = [*self.THREE, Spec((2, self.world_size), BF16, shard_dim=1)]
        smaller = self.world_size // 2
        for reshard, groups in (
            (True, [self.world_size, self.world_size]),
            (False, [self.world_size]),
            (smaller, [self.world_size, smaller] if smaller > 1 else [self.world_size]),
        ):
            module = self.module(specs, reshard_after_forward=reshard)
            for step in range(2):
                calls = self.step(module, step)
                gathers = [c.group_size for c in calls if c.name == "all_gather"]
                # Without resharding, backward reshards nevertheless
                self.assertEqual(gathers, groups)
                module.zero_grad()
            self.step(module)
            self.assert_grads(module, self.weight_sums(specs), self.world_size)

    def test_accumulation_reduces_only_the_last_microbatch(self):
        for policy, reductions in (
            (policy_of(), 3),
            (policy_of(None, FP32), 1),
            (policy_of(BF16, FP32), 1),
            (policy_of(BF16, BF16), 1),
        ):
            module = self.module(self.THREE, mp_policy=policy)
            module.set_requires_gradient_sync(False)
            calls = self.step(module, 0)
            self.assertEqual({call.name for call in calls}, {"all_gather"})
            self.assertIsNone(module.p0.grad)
            module.set_requires_gradient_sync(True)
            calls = self.step(module, 1)
            names = [call.name for call in calls if call.name != "all_gather"]
            self.assertEqual(names, ["reduce_scatter"] * reductions)
            totals = self.weight_sums(self.THREE, steps=2)
            self.assert_grads(module, totals, self.world_size)

    def test_accumulated_and_fresh_gradients_share_a_reduction(self):
        """The former are kept in fp32, the latter come in bf16."""
        module = self.module(self.THREE, mp_policy=policy_of(BF16, FP32))
        first, second = self.weights(self.THREE)[:2]
        module.set_requires_gradient_sync(False)
        module([first]).backward()
        module.set_requires_gradient_sync(True)
        with record_collectives() as recorded:
            module([None, second]).backward()
        (reduction,) = recorded.reduce_scatters
        self.assert_reduces(reduction, self.THREE[:2], FP32)
        totals = self.weight_sums(self.THREE)
        for param, spec, total in zip(module.parameters(), self.THREE[:2], totals):
            expected = (total / self.world_size).to(spec.dtype)
            expected = spec.shard(expected, self.rank, self.world_size)
            self.assertEqual(param.grad.to_local(), expected)

    def test_custom_factors_and_forced_sums_divide_once_on_any_backend(self):
        scaled = "PREMUL_SUM" if BACKEND == "nccl" else "SUM"
        size = float(self.world_size)
        for factor, is_forced, op in (
            (2.0, False, scaled),
            (size, False, "AVG"),
            (None, True, "SUM"),
            (2.0, True, "SUM"),
        ):
            module = self.module(self.THREE)
            module.set_force_sum_reduction_for_comms(is_forced)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            reductions = self.step(module)[-3:]
            # fp32 and bf16, and then fp16, which is divided apart
            is_wrong = op == "PREMUL_SUM" and not FOLLOWS_GRAD_DTYPE  # in bf16
            ops = [op, "SUM" if is_wrong else op, "SUM"]
            self.assertEqual([call.op for call in reductions], ops)
            self.assert_grads(module, self.weight_sums(self.THREE), factor or size)

    def test_over_one_rank_nothing_is_sent_and_the_factor_divides_once(self):
        for factor, force_sum in itertools.product((None, 4.0), (False, True)):
            module = self.module(self.THREE, ranks=1)
            module.set_force_sum_reduction_for_comms(force_sum)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            self.assertEqual(self.step(module), [])
            weights = self.weights(self.THREE)
            for param, weight in zip(module.parameters(), weights, strict=True):
                expected = (weight / (factor or 1)).to(param.dtype)
                self.assertEqual(param.grad.to_local(), expected)

    def test_unused_parameters_reduce_zeros_in_their_own_dtype(self):
        """Even ranks use the first parameter, odd ones the second, none the rest."""
        mine = self.rank % 2
        for policy in (policy_of(), policy_of(BF16), policy_of(BF16, FP32)):
            module = self.module(self.THREE, mp_policy=policy)
            module.p3.requires_grad_(False)
            module.set_reduce_scatter_unused_params(True)
            weights = [
                w if i == mine else None for i, w in enumerate(self.weights(self.THREE))
            ]
            with record_collectives() as recorded:
                module(weights).backward()
            found = [call.dtype for call in recorded.reduce_scatters]
            self.assertEqual(found, reduce_dtypes(policy, self.STORED))
            self.assert_same_on_all_ranks(recorded.calls)
            self.assertIsNone(module.p3.grad)
            self.assert_unused_grads(module)

    def assert_unused_grads(self, module: Weighted) -> None:
        for i in range(3):
            spec, param = self.THREE[i], getattr(module, f"p{i}")
            users = [r for r in range(self.world_size) if i < 2 and r % 2 == i]
            total = sum(self.weights(self.THREE, rank)[i] for rank in users)
            mean = torch.as_tensor(total / self.world_size, device=self.device)
            mean = mean.expand(spec.size).to(spec.dtype)
            expected = spec.shard(mean, self.rank, self.world_size)
            self.assertEqual(param.grad.to_local(), expected)

    def test_input_buffers_are_counted_by_module_not_by_bucket(self):
        for cap, held in ((None, [1, 1, 1, 1]), (2, [1, 2, 2, 2]), (3, [1, 2, 3, 3])):
            model = shard_blocks(mixed_model(4), mesh=shard_mesh())
            if cap is not None:
                model.set_reduce_scatter_max_input_buffers(cap)
            found, buffers = [], []
            post_backward = FSDPParamGroup.post_backward

            def watch(group, *args, found=found, buffers=buffers, inner=post_backward):
                inner(group, *args)
                states = group.comm_ctx.reduce_scatter_states
                found.append(len(states))
                buffers.append(len(states[-1].reduce_scatter_inputs))

            with mock.patch.object(FSDPParamGroup, "post_backward", watch):
                x = random_input(2, 9, seed=self.rank).requires_grad_()
                model(x).sum().backward()
            self.assertEqual(found[:4], held)
            self.assertEqual({*buffers}, {3})  # one for each dtype
            states = group_of(model[0]).comm_ctx.reduce_scatter_states
            self.assertEqual(states, [])


if __name__ == "__main__":
    run_tests()
