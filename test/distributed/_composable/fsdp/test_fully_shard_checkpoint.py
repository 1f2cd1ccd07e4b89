# Owner(s): ["oncall: distributed"]
"""Values and dtypes survive checkpoints, other meshes and other units."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from fsdp_helpers.common import utils

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_utils import parametrize, run_tests


FULL = StateDictOptions(full_state_dict=True)
FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST_RANK = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FP32 = torch.float32

MESHES: dict[str, Callable[[], DeviceMesh]] = {
    "all": utils.shard_mesh,
    "hsdp": lambda: utils.hybrid_mesh(utils.WORLD_SIZE // 2),
}


class Training:
    """A sharded model, and an optimizer with a state in each parameter's dtype."""

    def __init__(self, mesh: DeviceMesh, *, seed: int = 0):
        self.model: nn.Module = utils.mixed_model(seed=seed)
        self.model.to(mesh.device_type)
        utils.shard_blocks(self.model, mesh=mesh)
        # An eps that fp16 can hold
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3)

    def step(self, seed: int) -> None:
        x = utils.random_input(4, 9, seed=seed)
        self.model(x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sharded(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model_state_dict": model, "optim_state_dict": optimizer}

    def load(self, state: dict[str, Any]) -> None:
        state_dict.set_state_dict(self.model, self.optimizer, **state)

    def full(self) -> dict[str, Any]:
        """Returns a copy of all there is to save, by its path."""
        state = get_state_dict(self.model, self.optimizer, options=FULL)
        named = dict(zip(("model", "optimizer"), state, strict=True))
        return copy.deepcopy(dict(leaves(named)))


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict | list | tuple):
        yield path, tree
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield from leaves(value, f"{path}/{key}")


def trained(mesh: DeviceMesh) -> Training:
    """Returns what has moved away from how every model starts."""
    training = Training(mesh)
    for seed in range(2):
        training.step(seed)
    return training


class TestCheckpoint(utils.FSDPProcessTest):
    def check_same(self, actual: dict[str, Any], expected: dict[str, Any]) -> None:
        """In order, type and value; the device may be another."""
        self.assertEqual([*actual], [*expected])
        self.assertEqual(actual, expected, rtol=0, atol=0)

    @parametrize("saved,loaded", [("all", "hsdp"), ("hsdp", "all")])
    def test_loads_over_another_mesh(self, saved: str, loaded: str) -> None:
        training = trained(MESHES[saved]())
        expected = training.full()
        with utils.shared_folder() as folder:
            dcp.save(training.sharded(), checkpoint_id=folder)
            dist.barrier()
            other = Training(MESHES[loaded](), seed=1)
            state = other.sharded()
            dcp.load(state, checkpoint_id=folder)
            other.load(state)
        self.check_same(other.full(), expected)

    def test_full_state_dict_loads_from_the_first_rank(self) -> None:
        training = trained(utils.shard_mesh())
        expected = training.full()
        parts = get_state_dict(training.model, training.optimizer, options=FULL_ON_CPU)
        other = Training(utils.hybrid_mesh(utils.WORLD_SIZE // 2), seed=1)
        of_model, of_optimizer = parts if self.rank == 0 else ({}, {})
        state_dict.set_model_state_dict(other.model, of_model, options=FROM_FIRST_RANK)
        state_dict.set_optimizer_state_dict(
            other.model, other.optimizer, of_optimizer, options=FROM_FIRST_RANK
        )
        self.check_same(other.full(), expected)

    @parametrize("dtype", [None, FP32])
    def test_full_state_dict_loads_into_a_model_of_the_meta_device(
        self, dtype: torch.dtype | None
    ) -> None:
        """Uniform into mixed and the other way round, from the first rank alone."""
        source = utils.mixed_model(seed=4)
        with torch.device("meta"):
            model = utils.mixed_model()
        (source if dtype else model).to(FP32)
        utils.shard_blocks(model, mesh=utils.shard_mesh())
        model.to_empty(device=self.device)
        dtypes = {name: param.dtype for name, param in model.named_parameters()}
        full = source.state_dict()
        given = dict(full) if self.rank == 0 else {}
        state_dict.set_model_state_dict(model, given, options=FROM_FIRST_RANK)
        cast = {name: tensor.to(dtypes[name]) for name, tensor in full.items()}
        self.check_same(state_dict.get_model_state_dict(model, options=FULL), cast)


if __name__ == "__main__":
    run_tests()
