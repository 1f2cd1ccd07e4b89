# Owner(s): ["oncall: distributed"]

"""
``accelerate`` with ``fsdp_version=2``: with mixed precision off it shards a model in
the dtypes that it has.

``accelerate`` chooses FSDP where there is an accelerator, and DDP on a CPU. Here a
CPU run is told to be FSDP, see ``fsdp_helpers/clients/common.py``; all that follows, from
``prepare`` to the optimizer step, is the code that runs on an accelerator.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_helpers.clients.common import as_launched, ClientTest, fsdp_accelerator
from fsdp_helpers.clients.real_models import (
    causal_loss,
    make_optimizer,
    needs,
    OneProcess,
    token_batches,
)
from fsdp_helpers.clients.tiny_models import TINY_MODELS
from fsdp_helpers.common.utils import DEVICE_TYPE

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.timeout(600)


BF16, FP32 = torch.bfloat16, torch.float32
# Example to the class of its blocks
BLOCKS = {"mamba2": "Mamba2Block", "llama_peft": "LlamaDecoderLayer"}


@needs("accelerate", "transformers", "peft")
@instantiate_parametrized_tests
class TestAccelerate(ClientTest):
    @contextlib.contextmanager
    def accelerator(self, name: str, **kwargs: Any) -> Iterator[Any]:
        """A new accelerator, which finds this test's processes as torchrun's."""
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[BLOCKS[name]],
            reshard_after_forward=True,
            **kwargs,
        )
        with as_launched(self.rank, self.world_size):
            try:
                yield fsdp_accelerator(
                    cpu=DEVICE_TYPE == "cpu",
                    mixed_precision="no",
                    fsdp_plugin=plugin,
                )
            finally:
                # All accelerators of a process share it
                AcceleratorState._reset_state(reset_partial_state=True)

    def model_of(self, name: str) -> nn.Module:
        torch.manual_seed(0)
        return TINY_MODELS[name].build_model()

    def batches(self, steps: int) -> list[torch.Tensor]:
        return [*token_batches(steps, self.world_size, self.device)]

    @parametrize("name", [*BLOCKS])
    def test_trains_as_one_process(self, name: str) -> None:
        """Whether each rank has the weights, or gets them from the first."""
        loads = name == "llama_peft"
        with self.accelerator(name, cpu_ram_efficient_loading=loads) as accelerator:
            model = self.model_of(name)
            reference = OneProcess(copy.deepcopy(model).to(self.device), causal_loss)
            if loads and self.rank > 0:
                for param in model.parameters():
                    param.data.zero_()
            model, optimizer = accelerator.prepare(model, make_optimizer(model))
            for batch in self.batches(2):
                chunks = batch.chunk(self.world_size)
                loss = causal_loss(model, chunks[self.rank])
                accelerator.backward(loss)
                self.check_backward(reference, model, loss, chunks, self.rank)
                self.check_step(reference, model, optimizer)

    def test_a_policy_by_name_is_kept(self) -> None:
        """With mixed precision off nothing is upcast, and the policy holds."""
        model = self.model_of("mamba2")
        stored = [param.dtype for param in model.parameters()]
        fp32 = dict.fromkeys(("*.A_log", "*.D"), MixedPrecisionPolicy(FP32, FP32))
        policy = MixedPrecisionPolicy.by_name(
            model, fp32, param_dtype=BF16, cast_forward_inputs=False
        )
        seen = {}
        with self.accelerator("mamba2", mixed_precision_policy=policy) as accelerator:
            optimizer = torch.optim.SGD(model.parameters())
            model, _ = accelerator.prepare(model, optimizer)
            self.assertEqual([param.dtype for param in model.parameters()], stored)
            mixer = model.get_submodule("backbone.layers.0.mixer")
            mixer.register_forward_pre_hook(
                lambda module, _: seen.update(
                    {name: param.dtype for name, param in module.named_parameters()}
                )
            )
            causal_loss(model, self.batches(1)[0])
        # Of two that are stored in fp32, one is cast
        dtypes = seen["A_log"], seen["dt_bias"], seen["in_proj.weight"]
        self.assertEqual(dtypes, (FP32, BF16, BF16))


if __name__ == "__main__":
    run_tests()
