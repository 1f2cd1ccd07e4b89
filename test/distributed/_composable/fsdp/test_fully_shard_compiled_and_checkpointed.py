# Owner(s): ["oncall: distributed"]

"""
Real models with the compiler, and with activation checkpointing as ``transformers`` does
it: around units, whose collectives it may run again. Each step is compared with one
process, without either. Towers are compared with the release in
``test_fully_shard_composition.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fsdp_clients.real_models import example_of, needs
from fsdp_common.utils import DEVICE_TYPE, FSDPProcessTest, WORLD_SIZE

import torch
import torch.nn as nn
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


pytestmark = pytest.mark.timeout(600)


STEPS = 2
# Operators that were asked about
SELECTED: Counter[str] = Counter()


def compiled_blocks(model: nn.Module) -> None:
    layers = [m for n, m in model.named_modules() if n.split(".")[-1] == "layers"]
    for layer in layers[0]:
        layer.compile(backend="aot_eager")


def checkpointed(model: nn.Module, **kwargs: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False, **kwargs})
    model.train()


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps what matrix products give, and computes all else again."""
    SELECTED[str(op)] += 1
    if op is torch.ops.aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS = partial(create_selective_checkpoint_contexts, keep_products)
TOOLS: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "compiled": (compiled_blocks, "llama_peft"),
    "checkpointed": (checkpointed, "nemotron_h"),
    "selective": (partial(checkpointed, context_fn=CONTEXTS), "qwen3_next"),
}


@needs("transformers", "peft", "accelerate")
@instantiate_parametrized_tests
class TestCompiledAndCheckpointed(FSDPProcessTest):
    @parametrize("tool", list(TOOLS))
    def test_each_step_equals_one_process(self, tool: str) -> None:
        from fsdp_clients.real_models import make_mesh, token_batches, train

        apply, name = TOOLS[tool]
        example = example_of(name)
        models = []

        def shard(model: nn.Module, mesh: Any) -> None:
            models.append(model)
            apply(model)
            example.shard(model, mesh)

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        SELECTED.clear()
        batches = token_batches(STEPS, 2 * WORLD_SIZE, self.device)
        mesh = make_mesh(DEVICE_TYPE)
        for step in train(example.build_model, shard, mesh, batches, self.device):
            self.assertEqual([each for each in step if not each.ok], [])
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self.assertEqual(graphs > 0, tool == "compiled")
        self.assertEqual("aten.mm.default" in SELECTED, tool == "selective")
        dtypes = {param.dtype for param in models[0].parameters()}
        self.assertEqual(dtypes, {torch.bfloat16, torch.float32})


if __name__ == "__main__":
    run_tests()
