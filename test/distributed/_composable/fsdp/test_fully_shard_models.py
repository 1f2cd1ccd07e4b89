# Owner(s): ["oncall: distributed"]

"""
Models of ``transformers``, ``peft`` and ``diffusers`` in the dtypes that they themselves
ask for, sharded by layer with plain ``fully_shard``, each step beside one process: the
rows of ``fsdp_clients/tiny_models.py``. ``fsdp_clients/one_process.py`` says what of a
step must equal one process, and how closely. Some also with the compiler and with
activation checkpointing, and with transformers' own ``DistributedConfig``.
"""

from __future__ import annotations

import importlib
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest

from fsdp_clients import real_models
from fsdp_clients.common import ClientTest
from fsdp_clients.real_models import needs
from fsdp_clients.tiny_models import TINY_MODELS, TinyModel
from fsdp_common.utils import (
    CollectiveRecorder,
    DeviceFreeTest,
    record_collectives,
    REPO_ROOT,
    shared_folder,
    WORLD_SIZE,
)

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
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


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 2
# Those that say themselves what is fp32
LISTING = [n for n, m in TINY_MODELS.items() if not (m.fp32 or m.build)]


def gathered_nbytes(params: Sequence[nn.Parameter], ranks: int) -> int:
    """
    Returns the size of a unit's gather: of each parameter rows, shared out evenly at
    their own width, aligned if there are several dtypes.
    """
    regions: Counter[torch.dtype] = Counter()
    for param in params:
        rows, *rest = param.size()
        numel = math.ceil(rows / ranks) * math.prod(rest)
        regions[param.dtype] += numel * param.element_size()
    alignment = 16 if len(regions) > 1 else 1
    return ranks * sum(-(-n // alignment) * alignment for n in regions.values())


class ModelTest(ClientTest):
    def train(
        self,
        name: str,
        replicas: int = 1,
        shard: Callable[[nn.Module, DeviceMesh], object] | None = None,
        steps: int = STEPS,
    ) -> tuple[nn.Module, list[Any], CollectiveRecorder]:
        """Returns the model, its steps and what the last one sent."""
        models, tiny, found = [], TINY_MODELS[name], []

        def shard_and_keep(model: nn.Module, mesh: DeviceMesh) -> None:
            models.append(model)
            (shard or tiny.shard)(model, mesh)

        batches = real_models.token_batches(steps, 2 * self.world_size, self.device)
        mesh = real_models.make_mesh(self.device.type, replicas)
        build, loss_of = tiny.build_model, tiny.loss_of
        with record_collectives() as recorder:
            for step in real_models.train(
                build, shard_and_keep, mesh, batches, self.device, loss_of
            ):
                found.append(step)
                if len(found) < steps:
                    recorder.clear()
        return models[0], found, recorder

    def check(self, name: str, replicas: int) -> None:
        model, steps, sent = self.train(name, replicas)
        self.check_steps(steps, dtypes=(FP32, TINY_MODELS[name].dtype))
        self.check_sent(model, sent, replicas)

    def check_sent(
        self, model: nn.Module, sent: CollectiveRecorder, replicas: int
    ) -> None:
        """One gather for each unshard, one reduction for each dtype, no more bytes."""
        units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        groups = {
            id(group): (group, unit is model)
            for unit in units
            for group in unit._get_fsdp_state()._fsdp_param_groups
        }
        gathers: Counter[int] = Counter()
        reductions: Counter[torch.dtype] = Counter()
        stored = []
        for group, is_root in groups.values():
            params = [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
            nbytes = gathered_nbytes(params, self.world_size // replicas)
            # All but the root are resharded after forward
            gathers[nbytes] += 1 if is_root else 2
            stored.append({param.dtype for param in params if param.requires_grad})
            reductions.update(stored[-1])
        self.assertGreater(max(map(len, stored)), 1)
        of_gathers = Counter(call.nbytes for call in sent.all_gathers)
        self.assertEqual(of_gathers, gathers)
        of_reductions = Counter(call.dtype for call in sent.reduce_scatters)
        self.assertEqual(of_reductions, reductions)
        all_reduces = Counter(call.dtype for call in sent.all_reduces)
        self.assertEqual(all_reduces, reductions if replicas > 1 else Counter())


@needs("transformers", "peft", "accelerate", "diffusers")
@instantiate_parametrized_tests
class TestModels(ModelTest):
    """Every model trains as it does in one process, at the fewest bytes."""

    @parametrize("name", TINY_MODELS)
    def test_each_step_equals_one_process(self, name: str) -> None:
        self.check(name, replicas=1)


@needs("transformers")
class TestReplicas(ModelTest):
    world_size = WORLD_SIZE

    def test_each_step_equals_one_process(self) -> None:
        self.check("mamba2", replicas=2)


# With the compiler, and with activation checkpointing as transformers does it #

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
class TestCompiledAndCheckpointed(ModelTest):
    """Around units, whose collectives a recomputed forward may run again."""

    @parametrize("tool", TOOLS)
    def test_each_step_equals_one_process(self, tool: str) -> None:
        apply, name = TOOLS[tool]

        def shard(model: nn.Module, mesh: DeviceMesh) -> None:
            apply(model)
            TINY_MODELS[name].shard(model, mesh)

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        SELECTED.clear()
        _, steps, _ = self.train(name, shard=shard)
        self.check_steps(steps)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self.assertEqual(graphs > 0, tool == "compiled")
        self.assertEqual("aten.mm.default" in SELECTED, tool == "selective")


# What transformers' own sharding sends #


@needs("transformers", "accelerate")
class TestDistributedConfig(ClientTest):
    """It makes a unit for each dtype. The page says what that sends, beside one a layer."""

    def models(self) -> Iterator[nn.Module]:
        """Loads one checkpoint with a unit for each dtype, for each layer, and upcast."""
        import transformers
        from transformers.distributed import DistributedConfig, mixin

        tiny = TINY_MODELS["deepseek_v4"]
        ranks = DistributedConfig(fsdp_size=self.world_size)
        load = getattr(transformers, tiny.architecture[0]).from_pretrained
        # Finds nothing (5.23) to make units of because of its dtype. Loading looks names
        # up by its own import of the function: dtypes stay as they are
        unsplit = mock.patch.object(
            mixin, "build_glob_alternation", lambda _: (re.compile("(?!)"), {}, {})
        )
        with shared_folder() as folder:
            if self.rank == 0:
                torch.manual_seed(0)
                tiny.build_model().save_pretrained(folder)
            dist.barrier()
            yield load(folder, dtype=BF16, distributed_config=ranks)
            with unsplit:
                whole = load(folder, dtype=BF16, distributed_config=ranks)
            yield whole
            yield load(folder, dtype=FP32, distributed_config=ranks)

    @pytest.mark.quick
    def test_sends_what_the_page_says(self) -> None:
        batch = next(real_models.token_batches(1, 2 * self.world_size, self.device))
        found = []
        for model in self.models():
            with record_collectives() as recorder:
                mine = batch.chunk(self.world_size)[self.rank]
                real_models.causal_loss(model, mine).backward()
            units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
            states = {unit._get_fsdp_state() for unit in units}
            row = [sum(len(state._fsdp_param_groups) > 0 for state in states)]
            for calls in (recorder.all_gathers, recorder.reduce_scatters):
                row += [len(calls), sum(call.nbytes for call in calls)]
            found.append([f"{cell:,}" for cell in row])
        page = (REPO_ROOT / "docs" / "migration.md").read_text()
        table = page.split("| tiny DeepSeek-V4")[1].split("\n\n")[0]
        rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
        told = [[cell.strip() for cell in cells[1:6]] for cells in rows]
        self.assertEqual(found, told)


# What is kept in fp32 #


@needs("transformers", "diffusers")
class TestKeptInFP32(DeviceFreeTest):
    """The libraries' own loading is what the function must agree with."""

    def loaded(self, tiny: TinyModel, dtype: torch.dtype) -> nn.Module:
        library = importlib.import_module(tiny.library)
        name = "dtype" if tiny.library == "transformers" else "torch_dtype"
        with tempfile.TemporaryDirectory() as folder:
            tiny.build_model().float().save_pretrained(folder)
            loads = getattr(library, tiny.architecture[0]).from_pretrained
            return loads(folder, **{name: dtype})

    def test_agrees_with_what_is_loaded(self) -> None:
        from kept_in_fp32 import kept_in_fp32

        for name in LISTING:
            for dtype in (BF16, FP16):
                with self.subTest(name, dtype=dtype):
                    model = self.loaded(TINY_MODELS[name], dtype)
                    fp32 = {n for n, p in model.named_parameters() if p.dtype == FP32}
                    self.assertEqual(set(kept_in_fp32(model, dtype)), fp32)
                    if dtype == TINY_MODELS[name].dtype:
                        self.assertNotEqual(fp32, set())
                    self.assertEqual(kept_in_fp32(model, FP32), [])

    def test_diffusers_lists_whole_components(self) -> None:
        from kept_in_fp32 import kept_in_fp32

        model = nn.ModuleDict({name: nn.Linear(2, 2, False) for name in ("up", "ups")})
        model._keep_in_fp32_modules = ["up"]
        for dtype in (BF16, FP16):
            self.assertEqual(kept_in_fp32(model, dtype), ["up.weight"])
        model._keep_in_fp32_modules_strict = None
        self.assertEqual(kept_in_fp32(model, BF16), [])
        self.assertEqual(kept_in_fp32(model, FP16), ["up.weight", "ups.weight"])

    def test_policies_are_what_by_name_takes(self) -> None:
        from kept_in_fp32 import fp32_policies, kept_in_fp32

        model, dtype = TINY_MODELS["deepseek_v4"].build_model().float(), BF16
        policies = fp32_policies(model, dtype)
        policy = MixedPrecisionPolicy.by_name(model, policies, param_dtype=dtype)
        override: Any = policy.param_dtype_override_fn
        names = [name for name, _ in model.named_parameters()]
        found = {name for name in names if override.look_up(name, True) == FP32}
        self.assertEqual(found, set(kept_in_fp32(model, dtype)))


if __name__ == "__main__":
    run_tests()
