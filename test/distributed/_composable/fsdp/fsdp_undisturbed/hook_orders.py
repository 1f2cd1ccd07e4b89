"""
Trains modules that have a parameter group for each of three meshes, with whatever
torch is imported, and lets the groups' post-backwards come in every order. Saves the
bits of losses, gradients and parameters, and how many reductions' inputs were held
after each post-backward.

The tests run it on the release and on this branch and compare. With ``--mixed``
units of several dtypes are run too, which the release refuses.
"""

from __future__ import annotations

import argparse
import contextlib
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
    gradients,
    groups_of,
    loss_of,
    LR,
    parameters,
    Record,
    shard_stack,
    Stack,
    stack,
)
from fsdp_common.run_ranks import run_ranks

import torch
import torch._dynamo  # the first hook would, in each rank anew
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    ShardPlacementResult,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard


RANKS = 4
STEPS = 2
BLOCKS = 3
DIM = 8
# Of a layer, each of which is sharded over a mesh of its own
NAMES = ("weight", "gain", "shift")
GROUPS = len(NAMES)


@dataclass(frozen=True)
class Order:
    """When the post-backwards of a module's groups come."""

    # All of them once the last has come, in this order of their indices
    permutation: tuple[int, ...] | None = None
    # One comes only at the end of backward, after those of all other modules
    late: int | None = None
    # Of the blocks' parameters: a group without gradients
    unused: str | None = None
    input_buffers: int = 1
    is_mixed: bool = False

    @property
    def is_natural(self) -> bool:
        return self.permutation is None and self.late is None

    @property
    def natural(self) -> Order:
        """The same with hooks that come as autograd brings them."""
        return replace(self, permutation=None, late=None)

    @property
    def most_held(self) -> int:
        """The inputs that may be held, those of a module's own groups included."""
        return self.input_buffers + GROUPS

    def __str__(self) -> str:
        parts = [
            "natural" if self.is_natural else "",
            f"permuted {self.permutation}" if self.permutation else "",
            f"late {self.late}" if self.late is not None else "",
            f"without {self.unused}" if self.unused else "",
            f"{self.input_buffers} buffers",
            "mixed" if self.is_mixed else "",
        ]
        return ", ".join(filter(None, parts))


_PERMUTATIONS = [*itertools.permutations(range(GROUPS))]
COMINGS = [{}, *({"permutation": p} for p in _PERMUTATIONS)]
COMINGS += [{"late": k} for k in range(GROUPS)]


def orders() -> Iterator[Order]:
    for buffers, coming in itertools.product((1, 2), COMINGS):
        yield Order(**coming, input_buffers=buffers)
    for unused, coming in itertools.product(NAMES, COMINGS):
        yield Order(**coming, unused=unused)


def mixed_orders() -> Iterator[Order]:
    for coming in COMINGS:
        yield Order(**coming, is_mixed=True)


class Hooks:
    """Brings post-backwards into an order, and notes what is held after each."""

    def __init__(self, order: Order):
        self.order = order
        # Of each post-backward that ran: unit, group, inputs held after it
        self.ran: list[tuple[str | None, int, int]] = []
        self._waiting: dict[int, list[tuple[FSDPParamGroup, Any]]] = {}
        self._held_back: set[int] = set()

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        original = FSDPParamGroup.post_backward

        def post_backward(group: FSDPParamGroup, *args: Any) -> None:
            self._come(group, original)

        with mock.patch.object(FSDPParamGroup, "post_backward", post_backward):
            yield

    def take(self) -> list[tuple[str | None, int, int]]:
        ran, self.ran = self.ran, []
        if self._waiting:
            raise AssertionError("Some post-backwards have not come")
        self._held_back.clear()
        return ran

    def _come(self, group: FSDPParamGroup, original: Callable[..., None]) -> None:
        if group._param_group_index == self.order.late:
            # The root's callback comes to a group whose own hook has not come
            if id(group) not in self._held_back:
                self._held_back.add(id(group))
                return
        if self.order.permutation is None:
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


@dataclass(frozen=True)
class Meshes:
    all: DeviceMesh
    pairs: DeviceMesh  # of all ranks, in two dims

    def shard(self, model: Stack) -> Stack:
        meshes = self.all, self.pairs["shard"], self.pairs["replicate"]
        infos = {
            name: FSDPMeshInfo(mesh, shard_mesh_dim=0)
            for name, mesh in zip(NAMES, meshes)
        }
        names = {id(p): n.rpartition(".")[-1] for n, p in model.named_parameters()}

        def place(param: nn.Parameter) -> ShardPlacementResult:
            return ShardPlacementResult(Shard(0), infos[names[id(param)]])

        return shard_stack(model, mesh=self.all, shard_placement_fn=place)


def run_order(order: Order, meshes: Meshes, rank: int) -> Record:
    dtypes = (FP32, BF16) if order.is_mixed else (FP32,)
    model = meshes.shard(stack(dtypes, blocks=BLOCKS, dim=DIM))
    model.set_reduce_scatter_max_input_buffers(order.input_buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    skip = () if order.unused is None else (order.unused,)
    record: Record = {}
    hooks = Hooks(order)
    with hooks.ordered():
        for step in range(STEPS):
            # So that autograd comes to every unit, and not only the root's callback
            batch = batch_of(step, rank, dim=DIM).requires_grad_()
            loss = loss_of(model(batch, skip=skip))
            loss.backward()
            record[f"{step} ran"] = hooks.take()
            record[f"{step} loss"] = digest(loss)
            record[f"{step} gradient of the input"] = digest(batch.grad)
            record |= {f"{step} {name}": bits for name, bits in gradients(model)}
            optimizer.step()
            optimizer.zero_grad()
    record["left"] = [group.is_sharded for group in groups_of(model)]
    return record | dict(parameters(model))


def find(order: Order, meshes: Meshes, rank: int) -> Record:
    try:
        return run_order(order, meshes, rank)
    except Exception as error:
        # All ranks do the same, so that they also fail alike
        return {"error": f"{type(error).__name__}: {error}"}


def run_all(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (RANKS,))
    meshes = Meshes(mesh, init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    wanted = itertools.chain(orders(), mixed_orders() if args.mixed else ())
    return {str(order): find(order, meshes, rank) for order in wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for a file of each rank")
    parser.add_argument("--mixed", action="store_true", help="run mixed units too")
    run_ranks(run_all, parser.parse_args(), RANKS)


if __name__ == "__main__":
    sys.exit(main())
