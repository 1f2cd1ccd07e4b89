# Owner(s): ["oncall: distributed"]

"""
Modules with a mesh for each parameter have several parameter groups, whose
post-backwards need not come in one order. In every order gradients are those of the
order in which autograd brings them, which ``test_fully_shard_parity.py`` compares with
the release, and no more reduce-scatter inputs are held than
``set_reduce_scatter_max_input_buffers`` allows beside those of the module's own groups.

The release drops inputs only when a module's last group comes. Where that one
comes late it holds those of all modules before, and where it comes after others of its
module it waits for these too.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from fsdp_helpers.common.parity_layers import (
    batch_of,
    BF16,
    FP32,
    loss_of,
    shard_stack,
    Stack,
    stack,
)
from fsdp_helpers.common.utils import FSDPProcessTest, hybrid_mesh, shard_mesh

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    ShardPlacementResult,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


BLOCKS = 3
DIM = 8
# Of a layer, each of which is sharded over a mesh of its own
NAMES = ("weight", "gain", "shift")
GROUPS = len(NAMES)


@dataclass(frozen=True)
class Order:
    """When the post-backwards of a module's groups come: by itself, as hooks run."""

    # All of them once the last has come, in this order of their indices
    permutation: tuple[int, ...] = ()
    # One comes only at the end of backward, after those of all other modules
    late: int | None = None


NATURAL = Order()
ORDERS = {
    "first to last": Order(permutation=(0, 1, 2)),
    "first one last": Order(permutation=(1, 2, 0)),
    "first one late": Order(late=0),
    "last one late": Order(late=GROUPS - 1),
}


class PostBackwards:
    """Brings post-backwards into an order, and notes what is held after each."""

    def __init__(self, order: Order):
        self.order = order
        # Group's index, and inputs held after its post-backward
        self.ran: list[tuple[int, int]] = []
        self._waiting: dict[int, list[tuple[FSDPParamGroup, Any]]] = {}
        self._held_back: set[int] = set()

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        original = FSDPParamGroup.post_backward

        def run(group: FSDPParamGroup) -> None:
            original(group)
            held = len(group.comm_ctx.reduce_scatter_states)
            self.ran.append((group._param_group_index, held))

        def post_backward(group: FSDPParamGroup, *args: Any) -> None:
            for each in self._due(group):
                run(each)

        with mock.patch.object(FSDPParamGroup, "post_backward", post_backward):
            yield

    def _due(self, group: FSDPParamGroup) -> list[FSDPParamGroup]:
        """Returns the groups whose turn it is when this one's hook comes."""
        if group._param_group_index == self.order.late:
            # Held back once: then the root's final callback runs its post-backward
            if id(group) not in self._held_back:
                self._held_back.add(id(group))
                return []
        if not self.order.permutation:
            return [group]
        waiting = self._waiting.setdefault(id(group.modules[0]), [])
        waiting.append((group, group._training_state))
        if len(waiting) < GROUPS:
            # As if it had run, so that the root's callback does not come to it
            group._training_state = TrainingState.POST_BACKWARD
            return []
        for each, state in waiting:
            each._training_state = state
        by_index = {each._param_group_index: each for each, _ in waiting}
        waiting.clear()
        return [by_index[index] for index in self.order.permutation]


@instantiate_parametrized_tests
class TestSeveralGroups(FSDPProcessTest):
    world_size = 4

    def shard(self, model: Stack) -> Stack:
        pairs = hybrid_mesh(2)
        meshes = shard_mesh(), pairs["shard"], pairs["replicate"]
        infos = {
            name: FSDPMeshInfo(mesh, shard_mesh_dim=0)
            for name, mesh in zip(NAMES, meshes)
        }
        names = {id(p): n.rpartition(".")[-1] for n, p in model.named_parameters()}

        def place(param: nn.Parameter) -> ShardPlacementResult:
            return ShardPlacementResult(Shard(0), infos[names[id(param)]])

        return shard_stack(model, mesh=shard_mesh(), shard_placement_fn=place)

    def backward(
        self,
        order: Order,
        *,
        is_mixed: bool = False,
        unused: str | None = None,
        input_buffers: int = 1,
    ) -> tuple[dict[str, torch.Tensor], list[tuple[int, int]]]:
        """Returns the gradients of the second of two steps, and its post-backwards."""
        dtypes = (FP32, BF16) if is_mixed else (FP32,)
        model = self.shard(stack(dtypes, blocks=BLOCKS, dim=DIM).to(self.device))
        model.set_reduce_scatter_max_input_buffers(input_buffers)
        for step in range(2):
            # So that autograd comes to every unit, and not only the root's callback
            batch = batch_of(step, self.rank, dim=DIM).to(self.device).requires_grad_()
            model.zero_grad()
            post_backwards = PostBackwards(order)
            with post_backwards.ordered():
                loss_of(model(batch, skip=[unused])).backward()
        params = model.named_parameters()
        grads = {n: p.grad.to_local() for n, p in params if p.grad is not None}
        return grads | {"input": batch.grad}, post_backwards.ran

    @pytest.mark.quick
    @parametrize("name", [*ORDERS])
    def test_any_order_gives_the_bits_of_autograds_and_holds_no_more_inputs(
        self, name: str
    ) -> None:
        order = ORDERS[name]
        settings: tuple[dict[str, Any], ...]
        settings = {}, {"input_buffers": 2}, {"unused": "gain"}, {"is_mixed": True}
        for setting in settings:
            expected, natural = self.backward(NATURAL, **setting)
            actual, ran = self.backward(order, **setting)
            self.assertEqual(actual, expected, atol=0, rtol=0)
            self.assertEqual(len(ran), (BLOCKS + 1) * GROUPS)
            groups, held = zip(*ran)
            self.assertLessEqual(max(held), setting.get("input_buffers", 1) + GROUPS)
            if order.permutation:
                self.assertEqual(groups, order.permutation * (BLOCKS + 1))
                # A module waits for no reduction of its own
                if "unused" not in setting:
                    self.assertEqual(held, tuple(held for _, held in natural))
            else:
                self.assertEqual([*groups[-BLOCKS - 1 :]], [order.late] * (BLOCKS + 1))


if __name__ == "__main__":
    run_tests()
