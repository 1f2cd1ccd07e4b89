"""
Trains modules that have a parameter group for each of three meshes, and lets the
groups' post-backwards come in several orders. Saves how many reductions' inputs were
held after each post-backward, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from fsdp_common.parity_layers import (
    batch_of,
    BF16,
    digest,
    FP32,
    groups_of,
    loss_of,
    Record,
    shard_stack,
    Stack,
    stack,
)
from fsdp_common.scenarios import Place, Scenario, Scenarios, train

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    ShardPlacementResult,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard


STEPS = 2
BLOCKS = 3
DIM = 8
# Of a layer, each of which is sharded over a mesh of its own
NAMES = ("weight", "gain", "shift")
GROUPS = len(NAMES)
# Of one post-backward: unit, group, inputs held after it
Ran = tuple["str | None", int, int]


@dataclass(frozen=True)
class Order:
    """When the post-backwards of a module's groups come: by itself, the last first."""

    # All of them once the last has come, in this order of their indices
    permutation: tuple[int, ...] = ()
    # One comes only at the end of backward, after those of all other modules
    late: int | None = None
    # Of the blocks' parameters: a group without gradients
    unused: str | None = None
    input_buffers: int = 1
    is_mixed: bool = False

    @property
    def natural(self) -> Order:
        """The same with hooks that come as autograd brings them."""
        return replace(self, permutation=(), late=None)

    @property
    def most_held(self) -> int:
        """The inputs that may be held, those of a module's own groups included."""
        return self.input_buffers + GROUPS


COMINGS = [
    {},
    {"permutation": (0, 1, 2)},
    {"permutation": (1, 2, 0)},
    {"late": 0},
    {"late": GROUPS - 1},
]
OTHERS = [{}, {"input_buffers": 2}, {"unused": "gain"}]
ORDERS = [
    *(Order(**coming, **other) for coming, other in itertools.product(COMINGS, OTHERS)),
    *(Order(**coming, is_mixed=True) for coming in COMINGS),
]


class Hooks:
    """Brings post-backwards into an order, and notes what is held after each."""

    def __init__(self, order: Order):
        self.order = order
        self.ran: list[Ran] = []
        self._waiting: dict[int, list[tuple[FSDPParamGroup, Any]]] = {}
        self._held_back: set[int] = set()

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        original = FSDPParamGroup.post_backward

        def post_backward(group: FSDPParamGroup, *args: Any) -> None:
            self._come(group, original)

        with mock.patch.object(FSDPParamGroup, "post_backward", post_backward):
            yield

    def pop(self) -> list[Ran]:
        ran, self.ran = self.ran, []
        if self._waiting:
            raise AssertionError("Some post-backwards have not come")
        self._held_back.clear()
        return ran

    def _come(self, group: FSDPParamGroup, original: Callable[..., None]) -> None:
        if group._param_group_index == self.order.late:
            # Held back once: then the root's final callback runs its post-backward
            if id(group) not in self._held_back:
                self._held_back.add(id(group))
                return
        if not self.order.permutation:
            self._run(group, original)
            return
        module = id(group.modules[0])
        waiting = self._waiting.setdefault(module, [])
        waiting.append((group, group._training_state))
        if len(waiting) < group._num_param_groups:
            # As if it had run, so that the root's callback does not come to it
            group._training_state = TrainingState.POST_BACKWARD
            return
        by_index = {each._param_group_index: (each, was) for each, was in waiting}
        del self._waiting[module]
        for index in self.order.permutation:
            each, was = by_index[index]
            each._training_state = was
            self._run(each, original)

    def _run(self, group: FSDPParamGroup, original: Callable[..., None]) -> None:
        original(group)
        held = len(group.comm_ctx.reduce_scatter_states)
        self.ran.append((group._module_fqn, group._param_group_index, held))


def shard(model: Stack, place: Place) -> Stack:
    meshes = place.mesh, place.pairs["shard"], place.pairs["replicate"]
    infos = {
        name: FSDPMeshInfo(mesh, shard_mesh_dim=0) for name, mesh in zip(NAMES, meshes)
    }
    names = {id(p): n.rpartition(".")[-1] for n, p in model.named_parameters()}

    def result_of(param: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), infos[names[id(param)]])

    return shard_stack(model, mesh=place.mesh, shard_placement_fn=result_of)


def run_order(order: Order, place: Place) -> Record:
    dtypes = (FP32, BF16) if order.is_mixed else (FP32,)
    model = shard(stack(dtypes, blocks=BLOCKS, dim=DIM), place)
    model.set_reduce_scatter_max_input_buffers(order.input_buffers)
    hooks, ran, inputs = Hooks(order), [], []

    def run(model: nn.Module, place: Place, step: int) -> torch.Tensor:
        # So that autograd comes to every unit, and not only the root's callback
        batch = batch_of(step, place.rank, dim=DIM).requires_grad_()
        loss = loss_of(model(batch, skip=[order.unused]))
        loss.backward()
        ran.append(hooks.pop())
        inputs.append(digest(batch.grad))
        return loss

    with hooks.ordered():
        bits = train(model, place, steps=range(STEPS), run=run)
    left = [group.is_sharded for group in groups_of(model)]
    return {"ran": ran, "bits": bits | {"inputs": inputs, "left": left}}


SCENARIOS = Scenarios(
    {
        str(each): Scenario(
            functools.partial(run_order, each), is_on_release=not each.is_mixed
        )
        for each in ORDERS
    }
)


if __name__ == "__main__":
    sys.exit(SCENARIOS.main(__doc__))
