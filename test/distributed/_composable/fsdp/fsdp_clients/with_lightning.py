# Owner(s): ["oncall: distributed"]

"""
Lightning Fabric with its ``ModelParallelStrategy``, whose function shards the model:
steps beside one process, and a checkpoint that is saved, changed and loaded.
"""

from __future__ import annotations

import copy
from typing import Any

from fsdp_clients import real_models
from fsdp_clients.common import as_launched, ClientTest
from fsdp_clients.one_process import make_optimizer, OneProcess
from fsdp_clients.real_models import causal_loss, token_batches
from fsdp_common.utils import shared_folder

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_utils import run_tests


MODEL = real_models.example_of("nemotron_h")


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    MODEL.shard(model, mesh["data_parallel"])
    return model


class TestFabric(ClientTest):
    def fabric(self) -> Any:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(parallelize, self.world_size, 1)
        fabric = Fabric(accelerator="cpu", strategy=strategy, devices=self.world_size)
        fabric.launch()
        return fabric

    def test_trains_saves_and_loads(self) -> None:
        with as_launched(self.rank, self.world_size), shared_folder() as folder:
            fabric = self.fabric()
            torch.manual_seed(0)
            built = MODEL.build_model()
            reference = OneProcess(copy.deepcopy(built), causal_loss)
            model = fabric.setup_module(built)
            optimizer = fabric.setup_optimizers(make_optimizer(model))
            state = {"model": model, "optimizer": optimizer, "steps": 0}
            saved: dict[str, torch.Tensor] = {}
            for batch in token_batches(3, 2 * self.world_size, self.device):
                chunks = batch.chunk(self.world_size)
                loss = causal_loss(model, chunks[self.rank])
                fabric.backward(loss)
                self.check_backward(reference, built, loss, chunks, self.rank)
                self.check_step(reference, built, optimizer)
                state["steps"] += 1
                if state["steps"] == 2:
                    fabric.save(folder / "checkpoint", state)
                    saved = copy.deepcopy(reference.model.state_dict())
            fabric.load(folder / "checkpoint", state)
        self.assertEqual(state["steps"], 2)
        for name, param in built.named_parameters():
            full = param.full_tensor()
            self.assertEqual(full.dtype, saved[name].dtype, name)
            self.assertTrue(torch.equal(full, saved[name]), name)


if __name__ == "__main__":
    run_tests()
