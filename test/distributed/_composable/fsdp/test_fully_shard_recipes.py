# Owner(s): ["oncall: distributed"]
"""
Runs the recipes of ``docs/per_parameter_precision.md`` and ``docs/recipes.md``, and
compares what they send, compute in and print with what the pages say.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_common.utils import FakeGroupTest, record_collectives

import torch
from torch.testing._internal.common_utils import run_tests


# Not where torch is: this file may be run on another one
DOCS = Path(__file__).parents[4] / "docs"
PAGE = DOCS / "per_parameter_precision.md"
MORE = DOCS / "recipes.md"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def recipes(page: Path = PAGE) -> tuple[str, dict[str, str]]:
    """Returns what all recipes start with, and the code under each heading."""
    preamble, found, heading = "", {}, ""
    pieces = re.split(
        r"^(#+ [^\n]*|```python\n.*?^```)$", page.read_text(), flags=re.M | re.S
    )
    for piece in pieces:
        if piece.startswith("#"):
            heading = piece.lstrip("# ")
        elif piece.startswith("```python"):
            code = piece.removeprefix("```python").removesuffix("```")
            if heading.startswith("Recipes"):
                preamble = code
            else:
                found[heading] = code
    return preamble, found


def costs(page: Path = PAGE) -> dict[str, list[str]]:
    """Returns the cells of the table of what recipes cost, by recipe."""
    table = page.read_text().split("| recipe |")[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if "|" in line]
    return {cells[0].strip(): [c.strip() for c in cells[1:]] for cells in rows[2:]}


class TestDocs(FakeGroupTest):
    """One of two ranks, whose group sends nothing, runs what the page shows."""

    ranks = 2

    def sent_by(
        self, code: str, page: Path = PAGE, namespace: dict[str, Any] | None = None
    ) -> tuple[str, str]:
        """Runs a recipe; returns the bytes gathered and reduced, as the page does."""
        preamble, _ = recipes(page)
        with record_collectives() as recorder:
            exec(preamble + code, {} if namespace is None else namespace)
        names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
        reduced = {
            names[str(call.dtype).removeprefix("torch.")]: f"{call.nbytes:,}"
            for call in recorder.reduce_scatters
        }
        self.assertEqual(len(reduced), len(recorder.reduce_scatters))
        (gather,) = recorder.all_gathers
        return (
            f"{gather.nbytes:,}",
            " + ".join(f"{name} {nbytes}" for name, nbytes in reduced.items()),
        )

    def test_recipes_run_and_send_what_the_page_says(self) -> None:
        _, codes = recipes()
        others = {"Gradients in another dtype", "See how units are laid out"}
        headings = {*codes} - others
        self.assertEqual({*costs()}, headings)
        self.assertEqual(len(headings), 5)
        for heading, cells in costs().items():
            with self.subTest(heading):
                gathered, before, reduced, before_reduced = cells
                code = codes[heading]
                self.assertEqual(self.sent_by(code), (gathered, reduced))
                # The same without what the patterns set
                plain = re.sub(
                    r"(by_name\(\n    model,\n    )\{.*?\},\n    param_dtype",
                    r"\1{},\n    param_dtype",
                    code,
                    flags=re.S,
                )
                self.assertNotEqual(plain, code)
                self.assertEqual(self.sent_by(plain), (before, before_reduced))

    def run_recipe(self, heading: str) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
        """Returns its names, and what each parameter was computed in."""
        _, codes = recipes(MORE)
        namespace: dict[str, Any] = {}
        seen: dict[str, torch.dtype] = {}
        forward = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            out = forward(module, *args, **kwargs)
            if module is namespace.get("model"):  # whose root unit stays unsharded
                seen.update({n: p.dtype for n, p in module.named_parameters()})
            return out

        with mock.patch.object(torch.nn.Module, "__call__", call):
            sent = self.sent_by(codes[heading], MORE, namespace)
        self.assertEqual([*sent], costs(MORE)[heading])
        return namespace, seen

    def test_more_recipes_are_all_told_of(self) -> None:
        _, codes = recipes(MORE)
        self.assertEqual([*codes], [*costs(MORE)])
        self.assertEqual(len(codes), 7)

    def test_head_in_fp32(self) -> None:
        names, seen = self.run_recipe("A head in fp32")
        fp32 = {"lm_head.weight"}
        self.assertEqual(fp32, {n for n, dtype in seen.items() if dtype == FP32})
        self.assertEqual({*seen.values()}, {BF16, FP32})
        self.assertEqual(names["log_probs"].dtype, FP32)

    def test_fp16_with_bf16_islands(self) -> None:
        names, seen = self.run_recipe("fp16 with bf16 islands")
        island = {"up.weight": FP16, "island.weight": BF16, "down.weight": FP16}
        self.assertEqual(seen, island)
        self.assertEqual({p.dtype for p in names["model"].parameters()}, {FP32})
        self.assertTrue(names["scaler"].is_enabled())

    def test_masters_in_the_optimizer(self) -> None:
        names, seen = self.run_recipe("Masters in the optimizer")
        self.assertEqual(seen, {"0.weight": BF16, "1.weight": FP32})
        for master, param in zip(names["masters"], names["model"].parameters()):
            self.assertEqual((master.dtype, master.grad.dtype), (FP32, FP32))
            shard, stepped = param.to_local(), master.to_local()
            self.assertTrue(torch.equal(shard, stepped.to(shard.dtype)))
            self.assertEqual(len(names["optimizer"].state[master]), 3)

    def test_diffusion_transformer(self) -> None:
        _, seen = self.run_recipe("A diffusion transformer")
        bf16 = {name for name, dtype in seen.items() if dtype == BF16}
        self.assertEqual(bf16, {"proj.weight"})

    def test_stochastic_rounding(self) -> None:
        names, seen = self.run_recipe("Stochastic rounding")
        self.assertEqual(seen, {"0.weight": BF16, "1.weight": FP32})
        # A quarter of the way from 1 to the next of bf16: on average it stays there
        exact = torch.full((4096,), 1 + 2**-9)
        found = names["round_at_random"](exact)
        self.assertEqual({*found.tolist()}, {1.0, 1 + 2**-7})
        self.assertAlmostEqual(found.float().mean().item(), 1 + 2**-9, delta=2**-12)
        negative = names["round_at_random"](-exact)
        self.assertEqual({*negative.tolist()}, {-1.0, -1 - 2**-7})
        kept = names["round_at_random"](torch.tensor([0.0, -2.5, 2.0**100]))
        self.assertEqual(kept.tolist(), [0.0, -2.5, 2.0**100])

    def test_router_behind_bf16_layers(self) -> None:
        names, seen = self.run_recipe("An fp32 router behind bf16 layers")
        self.assertEqual(seen, {"proj.weight": BF16, "router.weight": FP32})
        self.assertEqual(names["scores"].dtype, FP32)
        # Without the cast it is the error that the page quotes, or that of no bias
        _, codes = recipes(MORE)
        code = codes["An fp32 router behind bf16 layers"]
        plain = code.replace("hidden.to(self.router.weight.dtype)", "hidden")
        self.assertNotEqual(plain, code)
        with self.assertRaisesRegex(RuntimeError, "to have the same dtype"):
            self.sent_by(plain, MORE)
        # The hook that the page gives to modules of others does as well
        hook = re.search(r"`(model\.router\.register[^`]*)`", MORE.read_text())[1]
        shard = "model = fully_shard(Routed())\n"
        hooked = plain.replace(shard, shard + " ".join(hook.split()) + "\n")
        self.assertEqual([*self.sent_by(hooked, MORE)], [*self.sent_by(code, MORE)])

    def test_from_the_meta_device(self) -> None:
        torch.manual_seed(0)
        names, seen = self.run_recipe("From the meta device to a loaded model")
        self.assertEqual(seen, {"0.weight": BF16, "1.weight": FP32})
        # Loading replaces the entries of what it is given
        torch.manual_seed(0)
        full = names["make_model"]().state_dict()
        for name, param in names["model"].named_parameters():
            # Loaded, and stepped since: by the learning rate, Adam's first step
            moved = param.to_local() - full[name].chunk(2)[0]
            self.assertAlmostEqual(moved.abs().max().item(), 1e-4, delta=2e-5)
        self.assertEqual(len(names["optimizer"].state), 2)
        self.assertEqual(names["model"][1].scale.tolist(), [0.125] * 8)

    def meta_recipe(self, *edits: tuple[str, str]) -> str:
        """Returns the code of the recipe from the meta device, with edits."""
        code = recipes(MORE)[1]["From the meta device to a loaded model"]
        for old, new in edits:
            self.assertEqual(code.count(old), 1)
            code = code.replace(old, new)
        return code

    def test_from_the_meta_device_without_to_empty(self) -> None:
        # What the page says of a checkpoint that is narrower than the model
        narrow = (".state_dict()  #", ".bfloat16().state_dict()  #")
        names: dict[str, Any] = {}
        self.sent_by(self.meta_recipe(narrow), MORE, names)
        self.assertEqual({p.dtype for p in names["model"].parameters()}, {FP32})

        without = self.meta_recipe(narrow, ('model.to_empty(device="cpu")\n', ""))
        error = "Tensor on device meta is not on the expected device cpu!"
        self.assertIn(error, " ".join(MORE.read_text().split()))
        names = {}
        with self.assertRaisesRegex(RuntimeError, error):
            self.sent_by(without, MORE, names)
        # Of the shards: the model is unsharded
        shards = names["optimizer"].param_groups[0]["params"]
        self.assertEqual({p.dtype for p in shards}, {BF16})
        self.assertEqual({p.device.type for p in shards}, {"cpu"})
        self.assertEqual(names["model"][1].scale.device.type, "meta")

    def test_from_the_meta_device_with_a_key_missing(self) -> None:
        lacking = ("with torch.device", 'del full["0.weight"]\nwith torch.device')
        with self.assertRaises(AssertionError):
            self.sent_by(self.meta_recipe(lacking), MORE)
        # Nothing else tells
        checked = "assert model.state_dict().keys() == full.keys()\n"
        self.sent_by(self.meta_recipe(lacking, (checked, "")), MORE)

    def test_summary_is_what_the_page_shows(self) -> None:
        preamble, codes = recipes()
        namespace: dict[str, Any] = {}
        exec(preamble + codes["Mamba-like models"], namespace)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(codes["See how units are laid out"], namespace)
        self.assertIn(f"```\n{printed.getvalue()}```", PAGE.read_text())

    def test_gradients_in_another_dtype(self) -> None:
        preamble, codes = recipes()
        namespace: dict[str, Any] = {}
        exec(preamble + codes["Gradients in another dtype"], namespace)
        self.assertEqual(namespace["model"].weight.grad.dtype, torch.float32)


if __name__ == "__main__":
    run_tests()
