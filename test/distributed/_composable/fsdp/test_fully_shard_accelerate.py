# Owner(s): ["oncall: distributed"]

"""
``accelerate`` with ``fsdp_version=2``: with mixed precision off it shards a model in
the dtypes that it has.

``accelerate`` chooses FSDP where there is an accelerator, and DDP on a CPU. Here a
CPU run is told to be FSDP, see :func:`make_accelerator`; all that follows, from
``prepare`` to ``save_state``, is the code that runs on an accelerator.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from fsdp_clients.real_models import example_of
from fsdp_common.utils import (
    DEVICE_TYPE,
    FSDPProcessTest,
    shared_folder,
    WORLD_SIZE,
)

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.long


BF16, FP32 = torch.bfloat16, torch.float32
# Example to the class of its blocks
BLOCKS = {"mamba2": "Mamba2Block", "llama_peft": "LlamaDecoderLayer"}
STEPS = 2


def make_accelerator(
    name: str, *, precision: str = "no", loads: bool = False, policy: Any = None
) -> Any:
    """
    Args:
        loads: Whether only the first rank has the weights, and the others get them
            from it.
        policy: What the plugin is given as its ``mixed_precision_policy``.
    """
    from accelerate import (
        Accelerator,
        DistributedType,
        FullyShardedDataParallelPlugin,
        PartialState,
    )

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[BLOCKS[name]],
        cpu_ram_efficient_loading=loads,
        mixed_precision_policy=policy,
        reshard_after_forward=True,
    )
    accelerator = Accelerator(
        cpu=DEVICE_TYPE == "cpu", mixed_precision=precision, fsdp_plugin=plugin
    )
    if DEVICE_TYPE == "cpu":
        # What AcceleratorState does itself where there is an accelerator
        for state in (PartialState(), accelerator.state):
            state.distributed_type = DistributedType.FSDP
        if precision != "no":
            plugin.set_mixed_precision(precision)
        accelerator.state.fsdp_plugin = plugin
    return accelerator


@contextlib.contextmanager
def accelerator_of(rank: int, name: str, **kwargs: Any) -> Iterator[Any]:
    """A new accelerator, which finds this test's processes as torchrun's."""
    from accelerate.state import AcceleratorState

    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": WORLD_SIZE,
        "LOCAL_WORLD_SIZE": WORLD_SIZE,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
        "OMP_NUM_THREADS": 1,
    }
    as_text = {name: str(value) for name, value in environment.items()}
    with mock.patch.dict(os.environ, as_text):
        try:
            yield make_accelerator(name, **kwargs)
        finally:
            # All accelerators of a process share it
            AcceleratorState._reset_state(reset_partial_state=True)


class TestAccelerate(FSDPProcessTest):
    def model_of(self, name: str) -> nn.Module:
        torch.manual_seed(0)
        return example_of(name).build_model()

    def batches(self, steps: int = STEPS) -> list[torch.Tensor]:
        from _real_model import token_batches

        return [*token_batches(steps, WORLD_SIZE, self.device)]

    @parametrize("name", [*BLOCKS])
    @parametrize("loads", [False, True])
    def test_trains_as_one_process(self, name: str, loads: bool) -> None:
        from _one_process import make_optimizer, OneProcess
        from _real_model import causal_loss

        with accelerator_of(self.rank, name, loads=loads) as accelerator:
            model = self.model_of(name)
            reference = OneProcess(copy.deepcopy(model).to(self.device), causal_loss)
            if loads and self.rank > 0:
                for param in model.parameters():
                    param.data.zero_()
            model, optimizer = accelerator.prepare(model, make_optimizer(model))
            for batch in self.batches():
                chunks = batch.chunk(WORLD_SIZE)
                loss = causal_loss(model, chunks[self.rank])
                accelerator.backward(loss)
                expected = reference.backward(chunks)[self.rank]
                self.assertEqual(loss.detach(), expected, rtol=0, atol=0)
                found = [*reference.gradient_differences(model)]
                reference.step(model)
                optimizer.step()
                optimizer.zero_grad()
                found += reference.parameter_differences(model)
                self.assertEqual([each for each in found if not each.ok], [])

    def test_units(self) -> None:
        """A unit for each block, for the embedding, and for the norm and the head."""
        with accelerator_of(self.rank, "mamba2") as accelerator:
            model = self.model_of("mamba2")
            dtypes = {name: param.dtype for name, param in model.named_parameters()}
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        units = {n for n, m in model.named_modules() if isinstance(m, FSDPModule)}
        blocks = {f"backbone.layers.{i}" for i in range(2)}
        others = {"", "backbone.embeddings", "backbone.norm_f", "lm_head"}
        self.assertEqual(units, blocks | others)
        found = {name: param.dtype for name, param in model.named_parameters()}
        self.assertEqual(found, dtypes)
        self.assertEqual({*found.values()}, {BF16, FP32})

    def test_mixed_precision_upcasts(self) -> None:
        """What the docs tell to switch off: all that is trained becomes fp32."""
        with accelerator_of(self.rank, "mamba2", precision="bf16") as accelerator:
            model = self.model_of("mamba2")
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
            self.assertEqual({param.dtype for param in model.parameters()}, {FP32})

    def test_mixed_precision_upcasts_what_is_trained_alone(self) -> None:
        """Units then compute and reduce in the one dtype, and outputs have it."""
        with accelerator_of(self.rank, "llama_peft", precision="bf16") as accelerator:
            model = self.model_of("llama_peft")
            trained = [p for p in model.parameters() if p.requires_grad]
            self.assertEqual({p.dtype for p in trained}, {BF16, FP32})
            model, _ = accelerator.prepare(model, torch.optim.SGD(trained))
            dtypes = {(p.requires_grad, p.dtype) for p in model.parameters()}
            policy = accelerator.state.fsdp_plugin.mixed_precision_policy
        self.assertEqual(dtypes, {(True, FP32), (False, BF16)})
        self.assertEqual(policy, MixedPrecisionPolicy(BF16, BF16, BF16))

    @parametrize("precision", ["no", "bf16"])
    def test_a_policy_by_name_is_kept(self, precision: str) -> None:
        """With mixed precision off nothing is upcast, and the policy holds."""
        from _real_model import causal_loss

        model = self.model_of("mamba2")
        stored = [param.dtype for param in model.parameters()]
        fp32 = MixedPrecisionPolicy(FP32, FP32)
        policy = MixedPrecisionPolicy.by_name(
            model,
            dict.fromkeys(("*.A_log", "*.D", "*.dt_bias"), fp32),
            param_dtype=BF16,
            cast_forward_inputs=False,
        )
        kwargs: Any = {"precision": precision, "policy": policy}
        seen = {}
        with accelerator_of(self.rank, "mamba2", **kwargs) as accelerator:
            optimizer = torch.optim.SGD(model.parameters())
            model, _ = accelerator.prepare(model, optimizer)
            self.assertIs(accelerator.state.fsdp_plugin.mixed_precision_policy, policy)
            shards = [param.dtype for param in model.parameters()]
            upcast = [FP32] * len(stored)
            self.assertEqual(shards, stored if precision == "no" else upcast)
            mixer = model.get_submodule("backbone.layers.0.mixer")
            mixer.register_forward_pre_hook(
                lambda module, _: seen.update(
                    {name: param.dtype for name, param in module.named_parameters()}
                )
            )
            causal_loss(model, self.batches(1)[0])
        self.assertEqual(seen["A_log"], FP32)
        self.assertEqual(seen["in_proj.weight"], BF16)

    def test_clips_all_dtypes_by_one_norm(self) -> None:
        from _real_model import causal_loss

        with accelerator_of(self.rank, "mamba2") as accelerator:
            model = self.model_of("mamba2")
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
            accelerator.backward(causal_loss(model, self.batches(1)[0]))
            grads = [param.grad.full_tensor() for param in model.parameters()]
            expected = torch.stack([grad.double().norm() for grad in grads]).norm()
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            # The norms of bf16 gradients are bf16
            self.assertEqual(norm.full_tensor().double(), expected, rtol=2**-7, atol=0)
            for param, grad in zip(model.parameters(), grads, strict=True):
                scaled = grad.double() * (0.5 / expected)
                actual = param.grad.full_tensor()
                self.assertEqual(actual.dtype, grad.dtype)
                self.assertEqual(actual.double(), scaled, rtol=2**-6, atol=0)

    def test_saves_and_loads_state(self) -> None:
        from _real_model import causal_loss

        with accelerator_of(self.rank, "mamba2") as accelerator:
            model = self.model_of("mamba2")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            model, optimizer = accelerator.prepare(model, optimizer)
            steps = self.batches(3)

            def step(batch: torch.Tensor) -> None:
                loss = causal_loss(model, batch.chunk(WORLD_SIZE)[self.rank])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

            with shared_folder() as folder:
                step(steps[0])
                accelerator.save_state(str(folder))
                step(steps[1])
                expected = accelerator.get_state_dict(model)
                step(steps[2])
                accelerator.load_state(str(folder))
                step(steps[1])
            actual = accelerator.get_state_dict(model)
        self.assertEqual(bool(expected), self.rank == 0)
        self.assertEqual([*actual], [*expected])
        for name, tensor in expected.items():
            self.assertEqual(actual[name].dtype, tensor.dtype)
            self.assertTrue(torch.equal(actual[name], tensor), name)


instantiate_parametrized_tests(TestAccelerate)


if __name__ == "__main__":
    run_tests()
