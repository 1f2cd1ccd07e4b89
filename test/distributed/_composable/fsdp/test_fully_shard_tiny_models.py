# Owner(s): ["oncall: distributed"]

"""
Models of ``transformers`` and ``diffusers`` in the dtypes that they themselves ask for,
over two ranks, each step beside one process: the rows of ``examples/_tiny_models.py``.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections import Counter

import pytest

from fsdp_clients.real_models import EXAMPLES
from fsdp_common.utils import (
    DeviceFreeTest,
    FSDPProcessTest,
    LAUNCHED_RANK,
    record_collectives,
    RELEASE_ROOT,
    run_python,
    WORLD_SIZE,
)

import torch
import torch.nn as nn
from _tiny_models import TINY_MODELS, TinyModel
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.long


# Runs each in one unit per layer, in a group of one rank
REFUSED = """
import json, sys, torch
import torch.distributed as dist
sys.path[:0] = {folders!r}
from _tiny_models import TINY_MODELS
from _launch import end_process
from _real_model import make_mesh, token_batches
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
errors = {{}}
for name, tiny in TINY_MODELS.items():
    model = tiny.build_model()
    tiny.shard(model, make_mesh("cpu"))
    try:
        tiny.loss_of(model, next(token_batches(1, 2, torch.device("cpu"))))
        errors[name] = ""
    except Exception as error:
        errors[name] = f"{{type(error).__name__}}: {{error}}"
print(json.dumps({{"torch": torch.__file__, "errors": errors}}))
end_process(0)
"""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 2
# Those that say themselves what is fp32
LISTING = [n for n, m in TINY_MODELS.items() if not (m.fp32 or m.build)]


class TestTinyModels(FSDPProcessTest):
    world_size = 2 if LAUNCHED_RANK is None else WORLD_SIZE

    # The others are in `test_fully_shard_models.py`
    @parametrize("name", [*TINY_MODELS][3:])
    def test_each_step_equals_one_process(self, name: str) -> None:
        import _real_model

        tiny, models = TINY_MODELS[name], []

        def shard(model: nn.Module, mesh: torch.distributed.DeviceMesh) -> None:
            models.append(model)
            tiny.shard(model, mesh)

        mesh = _real_model.make_mesh(self.device.type)
        batches = _real_model.token_batches(STEPS, 2 * self.world_size, self.device)
        with record_collectives() as recorder:
            for step in _real_model.train(
                tiny.build_model, shard, mesh, batches, self.device, tiny.loss_of
            ):
                wrong = [str(each) for each in step.differences if not each.ok]
                self.assertEqual("; ".join(wrong), "")
                kinds = {each.what for each in step.differences}
                for dtype in (FP32, tiny.dtype):
                    name_of = str(dtype).removeprefix("torch.")
                    self.assertIn(f"{name_of} gradients", kinds)
        self.check_gathers(models[0], len(recorder.all_gathers))

    def check_gathers(self, model: nn.Module, gathers: int) -> None:
        """One for each unit in forward and, but for the root, one in backward."""
        shards = [each for each in model.modules() if isinstance(each, FSDPModule)]
        units = {id(each._get_fsdp_state()): each._get_fsdp_state() for each in shards}
        self.assertEqual(gathers, STEPS * (2 * len(units) - 1))
        groups = [group for unit in units.values() for group in unit._fsdp_param_groups]
        stored = [{p.orig_dtype for p in group.fsdp_params} for group in groups]
        self.assertTrue(any(len(dtypes) > 1 for dtypes in stored), stored)


instantiate_parametrized_tests(TestTinyModels)


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
        from _kept_in_fp32 import kept_in_fp32

        for name, tiny in TINY_MODELS.items():
            # An adapted model's file holds the adapters
            for dtype in (BF16, FP16) if tiny.build is None else ():
                with self.subTest(name, dtype=dtype):
                    model = self.loaded(tiny, dtype)
                    fp32 = {n for n, p in model.named_parameters() if p.dtype == FP32}
                    self.assertEqual(set(kept_in_fp32(model, dtype)), fp32)
                    found = Counter(p.dtype for p in model.parameters())
                    self.assertEqual({*found} - {FP32}, {dtype})
                    if dtype == tiny.dtype:
                        self.assertEqual(bool(fp32), name in LISTING)

    def test_in_fp32_nothing_is_kept(self) -> None:
        from _kept_in_fp32 import kept_in_fp32

        model = TINY_MODELS["deepseek_v4"].build_model()
        self.assertEqual(kept_in_fp32(model, FP32), [])
        self.assertEqual(kept_in_fp32(nn.Linear(2, 2)), [])

    def test_diffusers_lists_whole_components(self) -> None:
        from _kept_in_fp32 import kept_in_fp32

        model = nn.ModuleDict({name: nn.Linear(2, 2, False) for name in ("up", "ups")})
        model._keep_in_fp32_modules = ["up"]
        for dtype in (BF16, FP16):
            self.assertEqual(kept_in_fp32(model, dtype), ["up.weight"])
        model._keep_in_fp32_modules_strict = None
        self.assertEqual(kept_in_fp32(model, BF16), [])
        self.assertEqual(kept_in_fp32(model, FP16), ["up.weight", "ups.weight"])

    def test_policies_are_what_by_name_takes(self) -> None:
        from _kept_in_fp32 import fp32_policies, kept_in_fp32

        for name in LISTING:
            model = TINY_MODELS[name].build_model().float()
            dtype = TINY_MODELS[name].dtype
            policies = fp32_policies(model, dtype)
            policy = MixedPrecisionPolicy.by_name(model, policies, param_dtype=dtype)
            override = policy.param_dtype_override_fn
            assert override is not None
            names = [name for name, _ in model.named_parameters()]
            found = {name for name in names if override.look_up(name, True) == FP32}
            self.assertEqual(found, set(kept_in_fp32(model, dtype)))


class TestRelease(DeviceFreeTest):
    def test_release_refuses_each_model(self) -> None:
        folders = [str(EXAMPLES)]
        code = REFUSED.format(folders=folders)
        printed = run_python("-c", code, on_release=True)
        found = json.loads(printed.splitlines()[-1])
        self.assertTrue(found["torch"].startswith(str(RELEASE_ROOT)))
        self.assertEqual([*found["errors"]], [*TINY_MODELS])
        refusal = (
            "AssertionError: FSDP expects uniform original parameter dtype but got"
        )
        for name, error in found["errors"].items():
            self.assertTrue(error.startswith(refusal), (name, error))


if __name__ == "__main__":
    run_tests()
