# Owner(s): ["oncall: distributed"]
"""
Runs the recipes of ``docs/per_parameter_precision.md``, and compares what they send
and print with what the page says.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from fsdp_test_utils import FakeGroupTest, record_collectives

import torch
from torch.testing._internal.common_utils import run_tests


# Not where torch is: this file may be run on another one
PAGE = Path(__file__).parents[4] / "docs" / "per_parameter_precision.md"


def recipes() -> tuple[str, dict[str, str]]:
    """Returns what all recipes start with, and the code under each heading."""
    preamble, found, heading = "", {}, ""
    pieces = re.split(
        r"^(#+ [^\n]*|```python\n.*?^```)$", PAGE.read_text(), flags=re.M | re.S
    )
    for piece in pieces:
        if piece.startswith("#"):
            heading = piece.lstrip("# ")
        elif piece.startswith("```python"):
            code = piece.removeprefix("```python").removesuffix("```")
            if heading == "Recipes":
                preamble = code
            else:
                found[heading] = code
    return preamble, found


def costs() -> dict[str, list[str]]:
    """Returns the cells of the table of what recipes cost, by recipe."""
    table = PAGE.read_text().split("### All recipes")[1].split("## Recipes")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if "|" in line]
    return {cells[0].strip(): [c.strip() for c in cells[1:]] for cells in rows[2:]}


class TestDocs(FakeGroupTest):
    """One of two ranks, whose group sends nothing, runs what the page shows."""

    ranks = 2

    def sent_by(self, code: str) -> tuple[str, str]:
        """Runs a recipe; returns the bytes gathered and reduced, as the page does."""
        preamble, _ = recipes()
        with record_collectives() as recorder:
            exec(preamble + code, {})
        names = {"float32": "fp32", "bfloat16": "bf16"}
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
