# Owner(s): ["oncall: distributed"]

"""
The examples of real models with the compiler, activation checkpointing, the profiler
and ``CommDebugMode``. Towers of test modules are compared with the release in
``test_fully_shard_composition.py``; here each step is compared with one process, to
which the tool is not applied.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


pytestmark = pytest.mark.long


STEPS = 2
Shard = Callable[[nn.Module, DeviceMesh], object]


def compiled_blocks(model: nn.Module, mesh: DeviceMesh, shard: Shard) -> None:
    for layer in layers_of(model):
        layer.compile(backend="aot_eager")
    shard(model, mesh)


def checkpointed(model: nn.Module, mesh: DeviceMesh, shard: Shard) -> None:
    """As transformers' trainer does it."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    shard(model, mesh)


# Operators that were asked about
SELECTED: Counter[str] = Counter()


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps what matrix products give, and computes all else again."""
    SELECTED[str(op)] += 1
    if op is torch.ops.aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selectively_checkpointed(model: nn.Module, mesh: DeviceMesh, shard: Shard) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": contexts}
    )
    model.train()
    shard(model, mesh)


TOOLS: dict[str, tuple[Callable[[nn.Module, DeviceMesh, Shard], None], str]] = {
    "compiled_blocks": (compiled_blocks, "llama_peft"),
    "checkpointed": (checkpointed, "nemotron_h"),
    "selectively_checkpointed": (selectively_checkpointed, "qwen3_next"),
}


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(m for n, m in model.named_modules() if n.split(".")[-1] == "layers")


class TestTools(FSDPProcessTest):
    def batches(self) -> Any:
        from _real_model import token_batches

        return token_batches(STEPS, 2 * WORLD_SIZE, self.device)

    def mesh(self) -> DeviceMesh:
        from _real_model import make_mesh

        return make_mesh(DEVICE_TYPE)

    def sharded(self, name: str) -> nn.Module:
        torch.manual_seed(0)
        model = example_of(name).build_model().to(self.device)
        example_of(name).shard(model, self.mesh())
        return model

    def run_step(self, model: nn.Module) -> None:
        from _real_model import causal_loss

        causal_loss(model, next(self.batches()).chunk(WORLD_SIZE)[self.rank]).backward()

    @parametrize("tool", list(TOOLS))
    def test_each_step_equals_one_process(self, tool: str) -> None:
        from _real_model import train

        apply, name = TOOLS[tool]
        example = example_of(name)
        models = []

        def shard(model: nn.Module, mesh: DeviceMesh) -> None:
            models.append(model)
            apply(model, mesh, example.shard)

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        SELECTED.clear()
        for step in train(
            example.build_model, shard, self.mesh(), self.batches(), self.device
        ):
            wrong = [each for each in step.differences if not each.ok]
            self.assertEqual(wrong, [])
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self.assertEqual(graphs > 0, tool.startswith("compiled"))
        is_selective = tool == "selectively_checkpointed"
        self.assertEqual("aten.mm.default" in SELECTED, is_selective)
        dtypes = {param.dtype for param in models[0].parameters()}
        self.assertEqual(dtypes, {torch.bfloat16, torch.float32})

    def test_trace_names_units(self) -> None:
        """Ranges in a trace tell what is done, and of which module."""
        model = self.sharded("mamba2")
        self.run_step(model)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            self.run_step(model)
        with shared_folder() as folder:
            file = folder / f"{self.rank}.json"
            profile.export_chrome_trace(str(file))
            events = json.loads(file.read_text())["traceEvents"]
        ranges = Counter(e["name"] for e in events if "FSDP::" in e.get("name", ""))
        for layer in ("backbone.layers.0", "backbone.layers.1"):
            for what in ("pre_forward", "post_forward", "pre_backward"):
                self.assertEqual(ranges[f"FSDP::{what} ({layer})"], 1, ranges)
            for what in ("post_backward_reduce", "all_gather"):
                self.assertGreaterEqual(ranges[f"FSDP::{what} ({layer})"], 1, ranges)

    def test_comm_debug_mode_counts(self) -> None:
        """One gather for each unshard, one reduction for each unit and dtype."""
        model = self.sharded("nemotron_h")
        with CommDebugMode() as mode:
            self.run_step(model)
        counts = {str(op): count for op, count in mode.get_comm_counts().items()}
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.assertEqual(len(units), 5)
        # All but the root once more in backward; Mamba and MoE have two dtypes
        expected = {"c10d._allgather_base_": 9, "c10d._reduce_scatter_base_": 7}
        self.assertEqual(counts, expected)


instantiate_parametrized_tests(TestTools)


if __name__ == "__main__":
    run_tests()
