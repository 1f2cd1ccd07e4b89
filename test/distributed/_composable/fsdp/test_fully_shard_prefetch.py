# Owner(s): ["oncall: distributed"]

"""
When the gather that comes next in backward starts, as ``set_backward_prefetch`` says.
"""

from __future__ import annotations

from typing import Any

from fsdp_helpers.common.comms import BlocksTest, Checkpointed, group_of, mesh_of
from fsdp_helpers.common.utils import (
    FakeGroupTest,
    linear_stack,
    record_collectives,
    shard_blocks,
)

import torch
import torch.nn as nn
from torch.distributed.fsdp import BackwardPrefetch, fully_shard, set_backward_prefetch
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
BLOCKS = 4


class Chain(nn.Sequential):
    """Blocks whose outputs all count."""

    # After the block whose backward fails
    fails: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = []
        for i, block in enumerate(self):
            x = block(x)
            if i == self.fails:
                x.register_hook(self._fail)
            losses.append(x.float().square().mean())
        return torch.stack(losses).sum()

    @staticmethod
    def _fail(_: torch.Tensor) -> None:
        raise ArithmeticError


class Boundary(nn.Module):
    """Notes when backward comes to the unit, before the unit itself does so."""

    def __init__(self, block: nn.Module, notes: list[Any], name: int):
        super().__init__()
        self.block, self.notes, self.name = block, notes, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)

        def note(_: torch.Tensor) -> None:
            is_ahead = group_of(self)._all_gather_result is not None
            self.notes.append((self.name, is_ahead))

        y.register_hook(note)
        return y


class PrefetchTest(BlocksTest):
    blocks = BLOCKS

    def mesh(self) -> Any:
        return mesh_of(self.world_size)

    def noting(self, notes: list[Any]) -> nn.Sequential:
        units = (Boundary(b, notes, i) for i, b in enumerate(self.new_blocks()))
        return shard_blocks(nn.Sequential(*units), mesh=self.mesh())

    def assert_at_rest(self, model: nn.Module) -> None:
        """Nothing is gathered, or waits to be."""
        for block in model:
            group = group_of(block)
            self.assertIsNone(group._all_gather_result)
            self.assertEqual(group._to_prefetch_late, [])
            self.assertTrue(group.is_sharded)


class TestOrder(PrefetchTest):
    def order(self, mode: Any) -> tuple[list[Any], list[str]]:
        notes: list[Any] = []
        model = self.noting(notes)
        if mode != "default":
            set_backward_prefetch(model, mode)
        for _ in range(2):
            loss = model(self.input()).sum()
            notes.clear()
            with record_collectives() as recorder:
                loss.backward()
        self.assert_at_rest(model)
        return notes, [call.name for call in recorder.calls]

    @parametrize("mode", ("default", PRE, POST, None))
    def test_when_the_next_unit_is_gathered(self, mode: Any) -> None:
        """As far ahead or not, but behind the reductions of the unit before."""
        ahead, calls = self.order(mode)
        is_ahead = mode is not None
        self.assertEqual(ahead, [(3, False), *((i, is_ahead) for i in (2, 1, 0))])
        expected = ["all_gather", *["reduce_scatter"] * 3] * BLOCKS
        if mode in (PRE, "default"):  # each gather but the first before a reduction
            gather, *reductions = expected[:4]
            expected = [gather, *[gather, *reductions] * (BLOCKS - 1), *reductions]
        self.assertEqual(calls, expected)

    def test_forwards_without_gradients_are_not_recorded(self) -> None:
        model = shard_blocks(self.new_blocks(), mesh=self.mesh())
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for _ in range(3):
                    model(self.input().detach())
            groups = [group_of(block) for block in model]
            self.assertEqual(groups[0].comm_ctx.post_forward_order, [])
            self.assertEqual([g._post_forward_indices for g in groups], [[]] * BLOCKS)
        loss = model(self.input()).sum()
        self.assertEqual(groups[0].comm_ctx.post_forward_order, groups)
        loss.backward()  # needs no tensor of the inference mode
        self.assert_at_rest(model)

    def test_reentrant_checkpoints_are_recorded(self) -> None:
        """Their forwards run without gradients, and again when backward comes."""
        model = shard_blocks(Checkpointed(*self.new_blocks()), mesh=self.mesh())
        loss = model(self.input()).sum()
        groups = [group_of(block) for block in model]
        self.assertEqual(groups[0].comm_ctx.post_forward_order, groups)
        loss.backward()
        self.assert_at_rest(model)

    def test_named_units_come_first(self) -> None:
        """Those that a unit is told to gather, it gathers before its backward."""
        notes: list[Any] = []
        model = self.noting(notes)
        set_backward_prefetch(model, None)
        model[3].set_modules_to_backward_prefetch([model[1]])
        model(self.input()).sum().backward()
        self.assertEqual(notes, [(3, False), (2, False), (1, True), (0, False)])
        set_backward_prefetch(model, POST)
        notes.clear()
        model(self.input()).sum().backward()
        self.assertEqual(notes, [(3, False), (2, False), (1, True), (0, True)])
        self.assert_at_rest(model)


class TestSteps(PrefetchTest):
    def test_microbatches_that_reduce_nothing(self) -> None:
        """The next unit is gathered as well, where this one keeps its gradients."""
        notes: list[Any] = []
        model = self.noting(notes)
        set_backward_prefetch(model, POST)
        model.set_requires_gradient_sync(False)
        model(self.input()).sum().backward()
        self.assertEqual(notes, [(3, False), (2, True), (1, True), (0, True)])
        model.set_requires_gradient_sync(True)
        model(self.input()).sum().backward()
        self.assert_at_rest(model)

    @parametrize("mode", (PRE, POST))
    def test_second_backward_of_a_forward(self, mode: BackwardPrefetch) -> None:
        """Which units came after which was used up by the first."""
        notes: list[Any] = []
        model = self.noting(notes)
        set_backward_prefetch(model, mode)
        loss = model(self.input()).sum()
        model.set_is_last_backward(False)
        loss.backward(retain_graph=True)
        notes.clear()
        model.set_is_last_backward(True)
        loss.backward()
        self.assertEqual(notes, [(i, False) for i in reversed(range(BLOCKS))])
        self.assert_at_rest(model)

    def test_a_backward_that_ends_in_the_final_callback(self) -> None:
        """What it has not gathered is not gathered in the next, which may not want to."""
        notes: list[Any] = []
        model = self.noting(notes)
        set_backward_prefetch(model, POST)
        model.set_is_last_backward(False)
        detach = model[-1].register_forward_pre_hook(lambda _, args: args[0].detach())
        model(self.input()).sum().backward()
        detach.remove()
        set_backward_prefetch(model, None)
        model.set_is_last_backward(True)
        loss = model(self.input()).sum()
        notes.clear()
        loss.backward()
        self.assertEqual(notes, [(i, False) for i in reversed(range(BLOCKS))])
        self.assert_at_rest(model)

    def test_backward_that_is_given_up(self) -> None:
        """What was about to be gathered is not, and the next step is right."""
        model, expected = (Chain(*self.new_blocks()) for _ in range(2))
        for each in (model, expected):
            shard_blocks(each, mesh=self.mesh())
        x = self.input()
        set_backward_prefetch(model, POST)
        for fails in range(BLOCKS):
            model.fails = fails
            loss = model(x)
            with self.assertRaises(ArithmeticError):
                loss.backward()
            model.fails = None
            model._get_fsdp_state()._reset_iter_state()
            self.assert_at_rest(model)
            model.zero_grad()
            model(x).backward()
            self.assert_at_rest(model)
            expected(x).backward()
            self.assert_same_grads(model, expected)
            model.zero_grad()
            expected.zero_grad()


class TestSetting(FakeGroupTest):
    def test_which_units_are_meant(self) -> None:
        layers = linear_stack([torch.float32] * BLOCKS)
        model = shard_blocks(layers, mesh=self.mesh)
        for unit, mode, recurse, expected in (
            (model[1], POST, False, [PRE, POST, PRE, PRE]),
            (model, None, False, [PRE, POST, PRE, PRE]),
            (model, None, True, [None] * BLOCKS),
            (nn.ModuleList([model]), PRE, True, [PRE] * BLOCKS),
        ):
            set_backward_prefetch(unit, mode, recurse=recurse)
            modes = [group_of(block).backward_prefetch for block in model]
            self.assertEqual(modes, expected)

    def test_what_is_no_mode_or_no_unit(self) -> None:
        plain = nn.Linear(2, 2)
        with self.assertRaisesRegex(TypeError, "is 'POST': give a BackwardPrefetch"):
            set_backward_prefetch(fully_shard(nn.Linear(2, 2)), "POST")
        with self.assertRaisesRegex(ValueError, "found no unit in Linear: call"):
            set_backward_prefetch(plain, POST)
        outer = nn.Sequential(fully_shard(nn.Linear(2, 2)))
        with self.assertRaisesRegex(ValueError, "found no unit in Sequential: call"):
            set_backward_prefetch(outer, POST, recurse=False)


instantiate_parametrized_tests(TestOrder)
instantiate_parametrized_tests(TestSteps)

if __name__ == "__main__":
    run_tests()
