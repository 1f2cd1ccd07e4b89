# Owner(s): ["oncall: distributed"]

"""
Models of ``transformers``, ``peft`` and ``diffusers`` in the dtypes that they themselves
ask for, sharded by layer with plain ``fully_shard``, each step beside one process: the
rows of ``fsdp_clients/tiny_models.py``. ``fsdp_clients/one_process.py`` says what of a
step must equal one process, and how closely. Some also with the compiler, with
activation checkpointing, and with transformers' own ``DistributedConfig``.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
    WORLD_SIZE,
)

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, MixedPrecisionPolicy
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
PAGE = REPO_ROOT / "docs" / "migration.md"
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
@instantiate_parametrized_tests
class TestReplicas(ModelTest):
    world_size = WORLD_SIZE

    def test_each_step_equals_one_process(self) -> None:
        self.check("mamba2", replicas=2)

    @parametrize("fault", ["divided", "bf16_sums"])
    def test_comparison_tells_what_is_wrong(self, fault: str) -> None:
        """Equal steps say nothing if wrong ones were found equal."""

        def shard(model: nn.Module, mesh: DeviceMesh) -> None:
            reduce_dtype = BF16 if fault == "bf16_sums" else None
            policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
            for layer in model.backbone.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            if fault == "divided":
                model.backbone.layers[0].set_gradient_divide_factor(2.0)

        _, (step,), _ = self.train("mamba2", 2, shard, steps=1)
        wrong = {each.what for each in step if not each.ok}
        both = {"bfloat16 gradients", "float32 gradients"}
        self.assertEqual(wrong, {"float32 gradients"} if fault == "bf16_sums" else both)


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


def told() -> list[list[str]]:
    """Returns the cells of the page's table, but for names and the last column."""
    table = PAGE.read_text().split("| tiny DeepSeek-V4")[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in cells[1:6]] for cells in rows]


@contextlib.contextmanager
def unsplit() -> Iterator[None]:
    """Has transformers (5.23) find nothing to make units of because of its dtype.

    Loading looks names up by its own import of the function: dtypes stay as they are.
    """
    from transformers.distributed import mixin

    splits = mixin.build_glob_alternation
    mixin.build_glob_alternation = lambda names: (re.compile("(?!)"), {}, {})
    try:
        yield
    finally:
        mixin.build_glob_alternation = splits


def units_of(model: nn.Module) -> int:
    """Returns how many units there are that have parameters."""
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    units = {id(each._get_fsdp_state()): each._get_fsdp_state() for each in modules}
    return sum(len(unit._fsdp_param_groups) > 0 for unit in units.values())


@needs("transformers", "accelerate")
class TestDistributedConfig(ClientTest):
    """It makes a unit for each dtype. The page says what that sends, beside one a layer."""

    def models(self) -> list[nn.Module]:
        """Loads one checkpoint with a unit for each dtype, for each layer, and upcast."""
        import transformers
        from transformers.distributed import DistributedConfig

        tiny = TINY_MODELS["deepseek_v4"]
        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        if self.rank == 0:
            torch.manual_seed(0)
            tiny.build_model().save_pretrained(folders[0])
        dist.barrier()
        load = getattr(transformers, tiny.architecture[0]).from_pretrained
        ranks = DistributedConfig(fsdp_size=self.world_size)
        split = load(folders[0], dtype=BF16, distributed_config=ranks)
        with unsplit():
            whole = load(folders[0], dtype=BF16, distributed_config=ranks)
        upcast = load(folders[0], dtype=FP32, distributed_config=ranks)
        return [split, whole, upcast]

    def loss_of(self, model: nn.Module) -> torch.Tensor:
        from fsdp_clients.real_models import causal_loss, token_batches

        batch = next(token_batches(1, 2 * self.world_size, self.device))
        return causal_loss(model, batch.chunk(self.world_size)[self.rank])

    @pytest.mark.quick
    def test_sends_what_the_page_says(self) -> None:
        found = []
        for model in self.models():
            with record_collectives() as recorder:
                self.loss_of(model).backward()
            row = [units_of(model)]
            for calls in (recorder.all_gathers, recorder.reduce_scatters):
                row += [len(calls), sum(call.nbytes for call in calls)]
            found.append([f"{cell:,}" for cell in row])
        self.assertEqual(found, told())


class TestPage(DeviceFreeTest):
    def test_names_all_tests_of_clients(self) -> None:
        named = {*re.findall(r"`fsdp_clients/(with_\w+\.py)`", PAGE.read_text())}
        clients = Path(__file__).with_name("fsdp_clients").glob("with_*.py")
        self.assertEqual(named, {path.name for path in clients})


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
