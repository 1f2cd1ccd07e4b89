# Owner(s): ["oncall: distributed"]
"""When the next gather of backward starts, by ``set_backward_prefetch``."""

from typing import Any

from fsdp_helpers.common import utils
from fsdp_helpers.common.comms import BlocksTest, Checkpointed, group_of, mesh_of

import torch
import torch.nn as nn
from torch.distributed.fsdp import BackwardPrefetch, fully_shard, set_backward_prefetch
from torch.testing._internal.common_utils import parametrize, run_tests


PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
BLOCKS = 4


class Boundary(nn.Module):
    """Notes when backward reaches the unit, before the unit's own hook."""

    is_ahead: bool | None = None  # whether it was gathered by then

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)

        def note(_: torch.Tensor) -> None:
            self.is_ahead = group_of(self)._all_gather_result is not None

        y.register_hook(note)
        return y


def fail_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    """Fails once the unit has begun its backward, whose hook is there already."""

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    output.register_hook(fail)


class PrefetchTest(BlocksTest):
    blocks = BLOCKS

    def mesh(self) -> Any:
        return mesh_of(self.world_size)

    def noting(self, mode: Any = "default") -> Any:
        model = nn.Sequential(*map(Boundary, self.new_blocks()))
        utils.shard_blocks(model, mesh=self.mesh())
        if mode != "default":
            set_backward_prefetch(model, mode)
        return model

    def ahead(
        self, model: Any, loss: torch.Tensor | None = None, **kwargs: Any
    ) -> list[bool | None]:
        """Runs backward; returns whether each unit was gathered at its turn."""
        if loss is None:
            loss = model(self.input()).sum()
        loss.backward(**kwargs)
        return [boundary.is_ahead for boundary in reversed(model)]

    def assert_at_rest(self, model: nn.Module) -> None:
        """Nothing is gathered, or waits to be."""
        for block in model:
            group = group_of(block)
            self.assertIsNone(group._all_gather_result)
            self.assertEqual(group._to_prefetch_after, [])
            self.assertTrue(group.is_sharded)


class TestOrder(PrefetchTest):
    @parametrize("mode", ("default", PRE, POST, None))
    def test_when_the_next_unit_is_gathered(self, mode: Any) -> None:
        """As far ahead or not, but behind the reductions of the unit before."""
        model = self.noting(mode)
        self.ahead(model)
        with utils.record_collectives() as recorder:
            ahead = self.ahead(model)
        self.assert_at_rest(model)
        self.assertEqual(ahead, [False, *[mode is not None] * 3])
        expected = ["all_gather", *["reduce_scatter"] * 3] * BLOCKS
        if mode in (PRE, "default"):  # each gather but the first before a reduction
            gather, *reductions = expected[:4]
            expected = [gather, *[gather, *reductions] * (BLOCKS - 1), *reductions]
        calls = [call.name for call in recorder.calls]
        self.assertEqual(calls, ["all_gather"] * BLOCKS + expected)

    @parametrize("mode", ("inference_mode", "no_grad"))
    def test_forwards_without_gradients_are_not_recorded(self, mode: str) -> None:
        model = utils.shard_blocks(self.new_blocks(), mesh=self.mesh())
        with getattr(torch, mode)():
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
        model = utils.shard_blocks(Checkpointed(*self.new_blocks()), mesh=self.mesh())
        loss = model(self.input()).sum()
        groups = [group_of(block) for block in model]
        self.assertEqual(groups[0].comm_ctx.post_forward_order, groups)
        loss.backward()
        self.assert_at_rest(model)

    @parametrize("mode", (PRE, POST))
    def test_children_whose_backward_is_over_are_not_gathered_again(
        self, mode: BackwardPrefetch
    ) -> None:
        """A unit whose inputs need gradients ends after its children, as the root here."""
        model = nn.Sequential(self.new_blocks(), *self.new_blocks())
        for unit in (*model[0][:2], model[0], *model[1:], model):
            fully_shard(unit, mesh=self.mesh())
        set_backward_prefetch(model, mode)
        for _ in range(2):
            loss = model(self.input()).sum()
            with utils.record_collectives() as recorder:
                loss.backward()
            gathers = [call for call in recorder.calls if call.name == "all_gather"]
            self.assertEqual(len(gathers), 2 + 1 + BLOCKS)  # the root is empty
            self.assert_at_rest([*model[0][:2], *model])

    def test_named_units_come_first(self) -> None:
        """A unit gathers those that the user named before its backward."""
        model = self.noting(None)
        model[3].set_modules_to_backward_prefetch([model[1]])
        self.assertEqual(self.ahead(model), [False, False, True, False])
        set_backward_prefetch(model, POST)
        self.assertEqual(self.ahead(model), [False, False, True, True])
        self.assert_at_rest(model)


class TestSteps(PrefetchTest):
    def test_microbatches_that_reduce_nothing(self) -> None:
        """The next unit is gathered as well, where this one keeps its gradients."""
        model = self.noting(POST)
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            self.assertEqual(self.ahead(model), [False, True, True, True])
        self.assert_at_rest(model)

    @parametrize("mode", (PRE, POST))
    def test_second_backward_of_a_forward(self, mode: BackwardPrefetch) -> None:
        """Which units came after which was used up by the first."""
        model = self.noting(mode)
        loss = model(self.input()).sum()
        for is_last, is_ahead in ((False, True), (True, False)):
            model.set_is_last_backward(is_last)
            ahead = self.ahead(model, loss, retain_graph=True)
            self.assertEqual(ahead, [False, *[is_ahead] * 3])
        self.assert_at_rest(model)

    def test_a_backward_that_ends_in_the_final_callback(self) -> None:
        """A gather that did not start is dropped: the next backward may not need it."""
        model = self.noting(POST)
        model.set_is_last_backward(False)
        detach = model[-1].register_forward_pre_hook(lambda _, args: args[0].detach())
        self.ahead(model)
        detach.remove()
        set_backward_prefetch(model, None)
        model.set_is_last_backward(True)
        self.assertEqual(self.ahead(model), [False] * BLOCKS)
        self.assert_at_rest(model)

    @parametrize("block", range(BLOCKS))
    def test_backward_that_is_given_up(self, block: int) -> None:
        """What was about to be gathered is not, and the next step is right."""
        model, expected = self.noting(POST), self.noting()
        for _ in ("in the first step", "and in a later one"):
            handle = model[block].register_forward_hook(fail_in_backward)
            with self.assertRaises(ArithmeticError):
                self.ahead(model)
            handle.remove()
            model._get_fsdp_state()._reset_iter_state()
            self.assert_at_rest(model)
            for each in (model, expected):
                each.zero_grad()
                self.ahead(each)
            self.assert_at_rest(model)
            self.assert_same_grads(model, expected)


class TestSetting(utils.FakeGroupTest):
    def test_backward_prefetch_is_set_on_the_units_meant(self) -> None:
        layers = utils.linear_stack([torch.float32] * BLOCKS)
        model = utils.shard_blocks(layers, mesh=self.mesh)
        for unit, mode, recurse, expected in (
            (model[1], POST, False, [PRE, POST, PRE, PRE]),
            (model, None, False, [PRE, POST, PRE, PRE]),
            (model, None, True, [None] * BLOCKS),
            (nn.ModuleList([model]), PRE, True, [PRE] * BLOCKS),
        ):
            set_backward_prefetch(unit, mode, recurse=recurse)
            modes = [group_of(block).backward_prefetch for block in model]
            self.assertEqual(modes, expected)

    def test_backward_prefetch_of_no_mode_or_no_unit_is_refused(self) -> None:
        plain = nn.Linear(2, 2)
        with self.assertRaisesRegex(TypeError, "='POST': give a BackwardPrefetch"):
            set_backward_prefetch(fully_shard(nn.Linear(2, 2)), "POST")
        with self.assertRaisesRegex(ValueError, "found no unit in Linear: call"):
            set_backward_prefetch(plain, POST)
        outer = nn.Sequential(fully_shard(nn.Linear(2, 2)))
        with self.assertRaisesRegex(ValueError, "found no unit in Sequential: call"):
            set_backward_prefetch(outer, POST, recurse=False)


if __name__ == "__main__":
    run_tests()
