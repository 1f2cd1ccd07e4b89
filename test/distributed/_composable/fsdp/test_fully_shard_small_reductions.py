# Owner(s): ["oncall: distributed"]
"""``set_reduce_bucket_cap``: the same bits as without it, in fewer collectives."""

from collections.abc import Callable
from typing import Any
from unittest import skipUnless

import pytest

from fsdp_helpers.common import utils
from fsdp_helpers.common.comms import BlocksTest, group_of, mesh_of
from fsdp_helpers.common.release_rules import IS_2_15
from fsdp_helpers.parity.modes import differing, Record, train_with

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, set_reduce_bucket_cap
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import Shard
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.timeout(600)

BLOCKS, DIM = 3, 9
# MiB: never reached, and one that a few buckets reach
CAPS = {"at_the_end": 1.0, "now_and_then": 0.002}

# Cases of `fsdp_helpers/parity/modes.py` whose gradients random cases do not have
CASES = (
    "uniform root_only",
    "uniform group_run_in_part",
    "uniform unused_by_rank",
    "uniform hsdp_deferred",
    "mixed unfrozen_later",
    "mixed step_in_backward",
)


class TestModes(utils.FSDPProcessTest):
    world_size = 4

    def train(self, case: str, cap: float | None) -> tuple[Record, int]:
        """Returns the bits, and how many reductions a rank issued."""
        with utils.record_collectives() as seen:
            record = train_with(
                lambda model: set_reduce_bucket_cap(model, cap), case, self.rank
            )
        return record, len(seen.reduce_scatters) + len(seen.all_reduces)

    @parametrize("case", CASES)
    def test_equals_a_reduction_for_each_unit(self, case: str) -> None:
        if utils.BACKEND != "gloo" and "hsdp" in case:
            self.skipTest("the backend may add over replicas in another order")
        expected, most = self.train(case, None)
        self.assertNotEqual(expected["step 0 loss"], expected["step 1 loss"])
        for cap in CAPS:
            actual, count = self.train(case, CAPS[cap])
            self.assertEqual(differing(actual, expected), [], cap)
            if "root_only" in case or "group" in case or cap == "now_and_then":
                self.assertLessEqual(count, most, cap)
            elif "deferred" in case:
                self.assertEqual(count, most, cap)
            else:
                self.assertLess(count, most, cap)


class JoinTest(BlocksTest):
    """Two models of the same blocks, of which only the second joins reductions."""

    blocks = BLOCKS

    def make(
        self,
        cap: float | None = 1.0,
        kind: type[nn.Sequential] = nn.Sequential,
        **kwargs: Any,
    ) -> nn.Sequential:
        kwargs.setdefault("mesh", mesh_of(self.world_size))
        model = utils.shard_blocks(kind(*self.new_blocks()), **kwargs)
        set_reduce_bucket_cap(model, cap)
        return model

    def pair(self, **kwargs: Any) -> tuple[nn.Sequential, nn.Sequential]:
        return self.make(None, **kwargs), self.make(**kwargs)

    def loss(self, model: nn.Module, seed: int = 0) -> torch.Tensor:
        return model(self.input(seed)).float().square().mean()

    def reductions(self, model: nn.Module) -> list[utils.Collective]:
        """Returns those that a step issues."""
        with utils.record_collectives() as seen:
            self.loss(model).backward()
        return seen.reduce_scatters

    def compare(self, run: Callable | None = None, **kwargs: Any) -> list[Any]:
        """Compares the gradients of both models after a step, or ``run``."""
        models, recorders = self.pair(**kwargs), []
        for model in models:
            with utils.record_collectives() as seen:
                run(model) if run else self.loss(model).backward()
            recorders.append(seen)
        self.assert_same_grads(*models)
        return recorders

    def assert_same_grads(self, model: nn.Module, expected: nn.Module) -> None:
        super().assert_same_grads(model, expected)
        for each in (model, expected):
            self.assert_nothing_waits(each)

    def assert_nothing_waits(self, model: nn.Module) -> None:
        self.assertFalse(model._get_fsdp_state()._comm_ctx.joined_reductions)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class TestBackward(JoinTest):
    """When gradients are there, and how they came."""

    world_size = 2

    @pytest.mark.quick
    def test_one_reduction_for_each_dtype(self):
        found = [[c.dtype for c in seen.reduce_scatters] for seen in self.compare()]
        self.assertEqual(found, [DTYPES * BLOCKS, DTYPES])

    def test_bucket_cap_is_kept(self):
        """A bucket that reaches it is sent with those before, and not with more."""
        plain = self.make(None)
        sizes = [call.nbytes for call in self.reductions(plain)]
        # Each unit has buckets of three dtypes; those of two units fit
        joined = self.make(cap=(sum(sizes) // BLOCKS * 2 - 1) / 2**20)
        found = self.reductions(joined)
        self.assertEqual([call.dtype for call in found], DTYPES * 2)
        self.assertEqual(sum(call.nbytes for call in found), sum(sizes))
        self.assert_same_grads(plain, joined)

    def test_larger_buckets_do_not_wait(self):
        plain, joined = self.pair()
        alone = self.reductions(plain)
        largest = max(call.nbytes for call in alone)
        set_reduce_bucket_cap(joined, small_kb=(largest - 1) / 2**10)
        found = [call.dtype for call in self.reductions(joined)]
        wide = [call.dtype for call in alone if call.nbytes == largest]
        self.assertEqual(found[: len(wide)], wide)
        self.assertEqual(len(found), len(wide) + len({*DTYPES} - {*wide}))
        self.assert_same_grads(plain, joined)

    def test_nested_backwards_join_their_own_reductions(self):
        """One within a hook of another: each has its gradients at its end."""

        def run(model: Any) -> None:
            self.loss(model).backward()  # makes the whole model the root
            model.zero_grad()

            def run_other(_: torch.Tensor) -> None:
                with torch.enable_grad():
                    self.loss(model[2:], 5).backward()

            hidden = model[:2](self.input())
            hidden.register_hook(run_other)
            hidden.float().square().mean().backward()

        self.compare(run)

    def test_reductions_over_several_meshes_are_joined(self):
        names = ("other", "shard")
        mesh = init_device_mesh(self.device.type, (1, 2), mesh_dim_names=names)
        infos = [common.FSDPMeshInfo(mesh[name], 0) for name in names]

        def place(param: nn.Parameter) -> common.ShardPlacementResult:
            return common.ShardPlacementResult(Shard(0), infos[param.ndim == 1])

        plain, joined = self.compare(mesh=mesh["shard"], shard_placement_fn=place)
        self.assertLess(len(joined.reduce_scatters), len(plain.reduce_scatters))

    @skipUnless(IS_2_15, "finalized by hand since 2.15")
    def test_finalization_by_hand_sends_joined_reductions(self):
        def run(model: Any) -> None:
            model.set_manual_backward_finalization(True)
            self.loss(model).backward()
            model.finalize_backward()

        self.compare(run)

    def test_stage_of_a_pipeline_sends_joined_reductions(self):
        """Whose last backward is finished outside of any."""

        def run(model: Any) -> None:
            for syncs in (False, True):
                model.set_is_last_backward(syncs)
                model.set_reshard_after_backward(syncs)
                model.set_requires_gradient_sync(syncs)
                for batch in () if syncs else range(2):
                    self.loss(model, batch).backward()
            state = model._get_fsdp_state()
            for unit in state._state_ctx.all_states:
                for group in unit._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()

        self.compare(run)


class TestFailures(JoinTest):
    world_size = 2

    def test_nothing_of_a_failed_backward_is_reduced_later(self):
        were_waiting = []

        def stop(_: torch.Tensor) -> None:
            raise ArithmeticError

        def run(model: Any) -> None:
            self.loss(model).backward()  # makes the whole model the root
            # Ends a backward when the last two blocks have reduced
            hidden = 2 * model[0](self.input(7))
            hidden.register_hook(stop)
            loss = model[2](model[1](hidden)).float().square().mean()
            with self.assertRaises(ArithmeticError):
                loss.backward()
            context = model._get_fsdp_state()._comm_ctx
            were_waiting.append(bool(context.joined_reductions))
            model.reset_iter_state()
            self.assert_nothing_waits(model)
            model.zero_grad()
            self.loss(model, 1).backward()

        self.compare(run)
        self.assertEqual(were_waiting, [False, True])


class TestExcluded(JoinTest):
    """Reductions that must not be joined with other units'."""

    world_size = 4

    def test_units_with_another_divide_factor_are_not_joined(self):
        model = self.make()
        model[1].set_gradient_divide_factor(2.0)
        # Three reductions of that unit, and three of the others
        self.assertEqual(len(self.reductions(model)), 6)
        self.assert_nothing_waits(model)

    @parametrize("which", ["hook", "comm"])
    def test_units_with_their_own_reduction_are_not_joined(self, which: str) -> None:
        """Each of its own, also where all of them have the same."""
        model, seen = self.make(), []
        # Reduces as the default does, but may not be known to
        comm = type("Own", (DefaultReduceScatter,), {})()
        for unit in model[1:]:
            if which == "hook":
                unit.set_all_reduce_hook(seen.append)
            else:
                unit.set_custom_reduce_scatter(comm)
        self.assertEqual(len(self.reductions(model)), 3 * BLOCKS)
        self.assertEqual(len(seen), 6 if which == "hook" else 0)
        self.assert_nothing_waits(model)


class TestSettings(utils.FakeGroupTest):
    def test_bucket_cap_is_set_on_the_root_alone_or_on_all_units(self):
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2))))
        set_reduce_bucket_cap(model, recurse=False)
        self.assertIsNone(group_of(model[0]).reduce_bucket_cap)
        set_reduce_bucket_cap(model)
        self.assertEqual(group_of(model[0]).reduce_bucket_cap, (64 * 2**10, 2**20))


if __name__ == "__main__":
    run_tests()
