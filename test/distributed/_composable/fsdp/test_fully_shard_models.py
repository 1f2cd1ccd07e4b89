# Owner(s): ["oncall: distributed"]

"""
The examples of real models: what ``transformers`` and ``peft`` build, in bf16 but for
what their checkpoints keep in fp32, sharded by layer with plain ``fully_shard``. More
models, without a script each, are in ``test_fully_shard_tiny_models.py``.

``examples/_one_process.py`` says what of each step must equal one process without
FSDP, and how closely. The release is run too: it refuses each of these models.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_clients.real_models import example_of, EXAMPLES
from fsdp_common.tiers import quick_alone
from fsdp_common.utils import (
    Collective,
    DEVICE_TYPE,
    DeviceFreeTest,
    FSDPProcessTest,
    record_collectives,
    run_python,
    WORLD_SIZE,
)

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, MixedPrecisionPolicy
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.long


MODELS = ["nemotron_h", "mamba2", "llama_peft"]
STEPS = 3
BF16, FP32 = torch.bfloat16, torch.float32
# What is fp32 beside bf16, by the ends of names, as in the models' checkpoints
FP32_NAMES = {
    "nemotron_h": {"A_log", "D", "dt_bias", "gate.weight"},
    "mamba2": {"A_log", "D", "dt_bias"},
    "llama_peft": {
        "lora_A.default.weight",
        "lora_B.default.weight",
        "lora_embedding_A.default",
        "lora_embedding_B.default",
    },
}
# Multiplies in each way, with and without the kernels that the examples put in place
PRODUCTS = """
import json, sys, torch
sys.path.append({examples!r})
from _half_products import widen_half_products
widen_half_products(frozenset({{torch.float16}}))
torch.manual_seed(0)
found = {{}}
for dtype in (torch.float16, torch.float32):
    a, b = (torch.randn(2, 4, 4).to(dtype) for _ in range(2))
    wide = [a.float(), b.float()]
    scaled = dict(beta=0.5, alpha=2.0)
    products = {{
        "mm": lambda x, y: torch.mm(x[0], y[0]),
        "bmm": torch.bmm,
        "addmm": lambda x, y: torch.addmm(x[0], x[1], y[1], **scaled),
        "baddbmm": lambda x, y: torch.baddbmm(y, x, y, **scaled),
        "linear": lambda x, y: torch.nn.functional.linear(x, y[0]),
        "backward": lambda x, y: torch.autograd.functional.vjp(torch.matmul, (x, y), x)[1][0],
    }}
    for name, product in products.items():
        rounded_once = product(*wide).to(dtype)
        found[f"{{name}} {{dtype}}"] = torch.equal(product(a, b), rounded_once)
try:
    torch.mm(torch.ones(2, 2).half(), torch.ones(2, 2))
except RuntimeError as error:
    found["several dtypes are refused"] = "dtype" in str(error)
print(json.dumps(found))
"""

# A rank whose work ends in one way or another
ENDING = """
import atexit, sys
sys.path.append({examples!r})
from _launch import as_rank
for stream in (sys.stdout, sys.stderr):
    atexit.register(print, "finalized", file=stream)
def work():
    print("worked")
    {ending}
as_rank(work)
"""


def managed_parameters(unit: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of ``unit`` that no unit inside of it has."""
    inner = [m for m in unit.modules() if m is not unit and isinstance(m, FSDPModule)]
    theirs = {id(param) for module in inner for param in module.parameters()}
    return [param for param in unit.parameters() if id(param) not in theirs]


def padded_nbytes(param: nn.Parameter, ranks: int) -> int:
    """Returns what a rank sends of a parameter: rows, shared out evenly."""
    rows, *rest = param.size()
    return math.ceil(rows / ranks) * math.prod(rest) * param.element_size()


def gathered_nbytes(unit: nn.Module, ranks: int) -> int:
    """Returns the size of one gather at the parameters' own width, aligned if mixed."""
    regions: Counter[torch.dtype] = Counter()
    for param in managed_parameters(unit):
        regions[param.dtype] += padded_nbytes(param, ranks)
    alignment = 16 if len(regions) > 1 else 1
    return ranks * sum(-(-n // alignment) * alignment for n in regions.values())


class TestModels(FSDPProcessTest):
    """Every model trains as it does in one process, at the fewest bytes."""

    def train(
        self,
        name: str,
        replicas: int,
        shard: Callable[[nn.Module, DeviceMesh], object] | None = None,
        steps: int = STEPS,
    ) -> tuple[nn.Module, list[Any], list[Collective]]:
        """Returns the model, its steps and what the last one sent."""
        import _real_model

        models, example = [], example_of(name)

        def shard_and_keep(model: nn.Module, mesh: DeviceMesh) -> None:
            models.append(model)
            (shard or example.shard)(model, mesh)

        batches = _real_model.token_batches(steps, 2 * WORLD_SIZE, self.device)
        mesh = _real_model.make_mesh(DEVICE_TYPE, replicas)
        build = example.build_model
        found = []
        with record_collectives() as recorder:
            for step in _real_model.train(
                build, shard_and_keep, mesh, batches, self.device
            ):
                found.append(step)
                if len(found) < steps:
                    recorder.clear()
        # Not the mean of the losses
        sent = [call for call in recorder.calls if call.numel > 1]
        return models[0], found, sent

    @parametrize("name", quick_alone("mamba2", MODELS))
    @parametrize("replicas", [1, 2])
    def test_each_step_equals_one_process(self, name: str, replicas: int) -> None:
        model, steps, sent = self.train(name, replicas)
        for step in steps:
            wrong = [difference for difference in step.differences if not difference.ok]
            self.assertEqual(wrong, [])
            kinds = {difference.what for difference in step.differences}
            self.assertIn("bfloat16 gradients", kinds)
            self.assertIn("float32 gradients", kinds)
        self.assertLess(steps[-1].loss, steps[0].loss)
        self.check_sent(model, sent, replicas)

    def check_sent(
        self, model: nn.Module, sent: list[Collective], replicas: int
    ) -> None:
        """One gather for each unshard, one reduction for each dtype, no more bytes."""
        units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        ranks = WORLD_SIZE // replicas
        gathers: Counter[int] = Counter()
        reductions: Counter[torch.dtype] = Counter()
        for unit in units:
            # All but the root are resharded after forward
            gathers[gathered_nbytes(unit, ranks)] += 1 if unit is model else 2
            trained = [p for p in managed_parameters(unit) if p.requires_grad]
            reductions.update({param.dtype for param in trained})
        self.assertGreater(reductions[BF16] + reductions[FP32], len(units))
        by_name = {n: [c for c in sent if c.name == n] for n in {c.name for c in sent}}
        of_gathers = Counter(call.nbytes for call in by_name["all_gather"])
        self.assertEqual(of_gathers, gathers)
        of_reductions = Counter(call.dtype for call in by_name["reduce_scatter"])
        self.assertEqual(of_reductions, reductions)
        all_reduces = Counter(call.dtype for call in by_name.get("all_reduce", ()))
        self.assertEqual(all_reduces, reductions if replicas > 1 else Counter())

    @parametrize("name", MODELS)
    def test_dtypes_are_those_of_the_checkpoint(self, name: str) -> None:
        model = example_of(name).build_model()
        for fqn, param in model.named_parameters():
            is_fp32 = any(f".{fqn}".endswith(f".{end}") for end in FP32_NAMES[name])
            self.assertEqual(param.dtype, FP32 if is_fp32 else BF16, fqn)

    @parametrize("fault", ["divided", "bf16_sums", "not_synced", "not_all_reduced"])
    def test_comparison_tells_what_is_wrong(self, fault: str) -> None:
        """Equal steps say nothing if wrong ones were found equal."""

        def shard(model: nn.Module, mesh: DeviceMesh) -> None:
            policy = MixedPrecisionPolicy()
            if fault == "bf16_sums":
                policy = MixedPrecisionPolicy(reduce_dtype=BF16)
            for layer in model.backbone.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            if fault == "divided":
                model.backbone.layers[0].set_gradient_divide_factor(2.0)
            elif fault == "not_synced":
                model.set_requires_gradient_sync(False)
            elif fault == "not_all_reduced":
                model.set_requires_all_reduce(False)

        _, (step,), _ = self.train("mamba2", 2, shard, steps=1)
        wrong = {
            difference.what for difference in step.differences if not difference.ok
        }
        both = {"bfloat16 gradients", "float32 gradients"}
        self.assertEqual(wrong, {"float32 gradients"} if fault == "bf16_sums" else both)


instantiate_parametrized_tests(TestModels)


class TestScripts(DeviceFreeTest):
    def test_half_products_are_rounded_once(self) -> None:
        code = PRODUCTS.format(examples=str(EXAMPLES))
        found = json.loads(run_python("-c", code))
        self.assertEqual(len(found), 13)
        self.assertEqual([name for name, right in found.items() if not right], [])

    def test_script_starts_its_processes(self) -> None:
        args = ("--nproc", "2", "--replicas", "2", "--steps", "2", "--device", "cpu")
        printed = run_python(str(EXAMPLES / "train_real_model.py"), "mamba2", *args)
        self.assertEqual(printed.count("in one process"), 2)
        self.assertIn("bytes reduced", printed)

    def test_rank_ends_before_its_interpreter_does(self) -> None:
        """Threads of gloo that want the GIL of one that finalizes abort the process."""
        code = ENDING.format(examples=str(EXAMPLES), ending="return 0")
        self.assertEqual(run_python("-c", code, env={"RANK": "0"}), "worked\n")

    def test_rank_that_fails_says_so_before_its_interpreter_ends(self) -> None:
        for ending, status, said in (
            ("return 3", 3, ""),
            ("raise KeyboardInterrupt", 130, ""),
            ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ):
            code = ENDING.format(examples=str(EXAMPLES), ending=ending)
            with self.assertRaises(AssertionError) as caught:
                run_python("-c", code, env={"RANK": "0"})
            first, *lines = str(caught.exception).splitlines()
            self.assertEqual(first, f"Exit status {status}:")
            self.assertEqual(lines[-1] if lines else "", said)


if __name__ == "__main__":
    run_tests()
