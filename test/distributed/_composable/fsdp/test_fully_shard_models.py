# Owner(s): ["oncall: distributed"]
"""The rows of ``fsdp_helpers/clients/tiny_models.py``, beside one process."""

import importlib
import tempfile
from collections import Counter
from typing import Any

import pytest

from fsdp_helpers.clients import real_models
from fsdp_helpers.clients.common import ClientTest
from fsdp_helpers.clients.real_models import needs
from fsdp_helpers.clients.tiny_models import TINY_MODELS, TinyModel
from fsdp_helpers.common import utils

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.timeout(600)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 2
# Models whose classes say which parameters are fp32
LISTING = [n for n, m in TINY_MODELS.items() if not (m.fp32 or m.build)]


@needs("transformers", "peft", "accelerate", "diffusers")
class TestModels(ClientTest):
    """Every model trains as it does in one process, by the fewest collectives."""

    @parametrize("name", TINY_MODELS)
    def test_each_step_equals_one_process(self, name: str) -> None:
        models, tiny, steps = [], TINY_MODELS[name], []

        def shard_and_keep(model: nn.Module, mesh: DeviceMesh) -> None:
            models.append(model)
            tiny.shard(model, mesh)

        batches = real_models.token_batches(STEPS, 2 * self.world_size, self.device)
        mesh = real_models.make_mesh(self.device.type)
        torch.manual_seed(0)
        model = tiny.build_model().to(self.device)
        with utils.record_collectives() as recorder:
            for step in real_models.train_side_by_side(
                model, shard_and_keep, mesh, tiny.loss_of, batches
            ):
                steps.append(step)
                if len(steps) < STEPS:
                    recorder.calls.clear()
        self.check_steps(steps, dtypes=(FP32, tiny.dtype))
        self.check_sent(models[0], recorder)

    def check_sent(self, model: nn.Module, sent: utils.CollectiveRecorder) -> None:
        """One gather for each unshard, one reduction for each dtype."""
        units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        groups = {
            id(group): group
            for unit in units
            for group in unit._get_fsdp_state()._fsdp_param_groups
        }
        reductions: Counter[torch.dtype] = Counter()
        stored = []
        for group in groups.values():
            params = [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
            stored.append({param.dtype for param in params if param.requires_grad})
            reductions.update(stored[-1])
        self.assertGreater(max(map(len, stored)), 1)
        # All but the root's are resharded after forward
        roots = sum(len(of._get_fsdp_state()._fsdp_param_groups) for of in units[:1])
        self.assertEqual(len(sent.all_gathers), 2 * len(groups) - roots)
        self.assertEqual(Counter(c.dtype for c in sent.reduce_scatters), reductions)
        self.assertEqual(sent.all_reduces, [])


@needs("transformers", "diffusers")
class TestKeptInFP32(utils.DeviceFreeTest):
    """The libraries' own loading is what the function must agree with."""

    def loaded(self, tiny: TinyModel) -> nn.Module:
        library = importlib.import_module(tiny.library)
        name = "dtype" if tiny.library == "transformers" else "torch_dtype"
        with tempfile.TemporaryDirectory() as folder:
            tiny.build_model().float().save_pretrained(folder)
            loads = getattr(library, tiny.architecture[0]).from_pretrained
            return loads(folder, **{name: tiny.dtype})

    def test_agrees_with_what_is_loaded(self) -> None:
        from kept_in_fp32 import kept_in_fp32

        for name in LISTING:
            with self.subTest(name):
                tiny = TINY_MODELS[name]
                model = self.loaded(tiny)
                fp32 = {n for n, p in model.named_parameters() if p.dtype == FP32}
                self.assertEqual(set(kept_in_fp32(model, tiny.dtype)), fp32)
                self.assertNotEqual(fp32, set())
                self.assertEqual(kept_in_fp32(model, FP32), [])

    def test_diffusers_lists_whole_components(self) -> None:
        from kept_in_fp32 import kept_in_fp32

        model = nn.ModuleDict({name: nn.Linear(2, 2, False) for name in ("up", "ups")})
        model._keep_in_fp32_modules = ["up"]
        found = [kept_in_fp32(model, dtype) for dtype in (BF16, FP16)]
        self.assertEqual(found, [["up.weight"]] * 2)
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
