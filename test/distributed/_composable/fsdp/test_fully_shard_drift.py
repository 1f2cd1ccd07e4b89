# Owner(s): ["oncall: distributed"]
"""
One rank does something else than the others: each of them sees what its case says
(``fsdp_drift/cases.py``), and no rank goes on with a wrong gradient.
"""

from __future__ import annotations

import json
import re
import sys
import unittest
from typing import Any

import pytest

from fsdp_common.run_forked import run_forked
from fsdp_common.utils import DeviceFreeTest, LAUNCHED_RANK
from fsdp_drift.cases import (
    ALL_RAISE,
    CASES,
    FINE,
    MODES,
    NOT_SEEN,
    ODD,
    OTHERS_RAISE,
    OUTCOMES,
    RANKS,
    SHORT_TIME_LIMIT,
    TIME_OUT,
)

from torch.testing._internal.common_utils import run_tests


pytestmark = pytest.mark.long


OTHER = 1 - ODD

DISAGREE = r"Ranks disagree about the (gradients|parameters) of unit|Ranks have drifted"
NOTE = (
    r"Raised while (gathering|reducing the gradients of) unit '(\(root\)|layers\.\d)'"
)
LEFT = r"Connection closed by peer|Connection reset by peer"
TIMED_OUT = f"Timed out waiting {SHORT_TIME_LIMIT.seconds * 1000}ms"

# What the message names, by words of the case: on all ranks, if all raise
NAMED = {
    "of the same size, from": (
        r"unit 'layers.2':\s+layers.2.gate: gets no gradient on rank 0, gets a "
        r"gradient on rank 1\s+layers.2.up: gets a gradient on rank 0, gets no "
        r"gradient on rank 1\n.*set_reduce_scatter_unused_params"
    ),
    "of another size": r"layers.2.scale: gets a gradient .* no gradient on rank 1",
    "in a dtype that": r"layers.2.shift: gets a gradient on rank 0, gets no gradient on",
    "has frozen": r"layers.2.gate: gets a gradient .* gets no gradient on rank 1",
    "stored in": r"layers.0.gate: computes in .*32 on rank 0, computes in .*16 on",
    "another policy": r"layers.\d.scale: reduces in torch.float32 on rank 0, reduces in",
    "unit of one block": (
        r"'layers.0', which is resharded to 2 ranks after forward, on rank 0"
        r".*'\(root\)', which stays unsharded after forward, on rank 1"
    ),
}
# The same where only `always` has all of them raise
NAMED_ALWAYS = {
    "it unfreezes": r"layers.2.gate: gets no gradient on rank 0, gets a gradient on",
    "skips a parameter": r"layers.2.up: gets a gradient .* gets no gradient on rank 1",
    "parameters of a dtype": r"layers.2.shift: gets a gradient .* no gradient on rank 1",
    "skips a unit, ": r"'layers.1' as number 2 on rank 0, .*'layers.2' as number 3 on",
    "a unit of `rep": r"'layers.1' as number 2 on rank 0, .*'layers.0' as number 3",
    "a microbatch": r"with earlier gradients .* on rank 0, .* without earlier .* rank 1",
    "sync off": r"reduces unit 'layers.2' .* on rank 0, gathers unit 'layers.0' .* rank",
    "gives up": r"gathers unit 'layers.2' .* on rank 0, gathers unit 'layers.0' as",
}
# What the odd rank's note names, below what the backend says
NOTED = {
    "skips a parameter": r"reducing the gradients of unit 'layers.2', without a gradient of layers.2.up\.",
    "parameters of a dtype": r"without a gradient of layers.2.shift\.",
}


def patterns_for(case: str, *tables: dict[str, str]) -> list[str]:
    return [text for table in tables for words, text in table.items() if words in case]


@unittest.skipIf(LAUNCHED_RANK is not None, "starts ranks of its own")
@unittest.skipIf(sys.version_info < (3, 11), "exceptions take no notes")
class TestDrift(DeviceFreeTest):
    found: dict[str, dict[str, list[dict[str, Any]]]]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        printed = run_forked("fsdp_drift.cases", *MODES, "0")
        cls.found = json.loads(printed.splitlines()[-1])

    def outcomes(self, outcome: str) -> list[tuple[str, str, list[dict[str, Any]]]]:
        """Returns mode, case and what each rank saw, where the case says so."""
        chosen = [
            (mode, case, self.found[mode][case])
            for case, expected in OUTCOMES.items()
            for mode, of_mode in zip(MODES, expected, strict=True)
            if of_mode == outcome
        ]
        self.assertGreater(len(chosen), 0)
        return chosen

    def test_every_case_has_an_outcome_and_was_run(self) -> None:
        self.assertEqual([*OUTCOMES], [*CASES])
        said = {outcome for outcomes in OUTCOMES.values() for outcome in outcomes}
        self.assertEqual(said, {ALL_RAISE, TIME_OUT, OTHERS_RAISE, NOT_SEEN, FINE})
        for mode in MODES:
            self.assertEqual({*self.found[mode]}, {*CASES})

    def test_all_raise(self) -> None:
        checked = []
        for mode, case, ranks in self.outcomes(ALL_RAISE):
            tables = [NAMED] if mode == "1" else [NAMED, NAMED_ALWAYS]
            for found in ranks:
                self.assertRegex(found["error"], DISAGREE, (mode, case))
                for pattern in patterns_for(case, *tables):
                    self.assertRegex(found["error"], f"(?s){pattern}", (mode, case))
                    checked.append(pattern)
            self.assertEqual(ranks[0]["error"], ranks[1]["error"])
        self.assertEqual({*checked}, {*NAMED.values(), *NAMED_ALWAYS.values()})

    def test_time_limit(self) -> None:
        checked = []
        for mode, case, ranks in self.outcomes(TIME_OUT):
            errors = [found["error"] for found in ranks]
            self.assertTrue(any(re.search(TIMED_OUT, e) for e in errors), (mode, case))
            for error in errors:
                self.assertRegex(error, f"{TIMED_OUT}|{LEFT}", (mode, case))
                self.assertRegex(error, NOTE, (mode, case))
            for pattern in patterns_for(case, NOTED):
                self.assertRegex(errors[ODD], pattern, (mode, case))
                checked.append(pattern)
        self.assertEqual({*checked}, {*NOTED.values()})

    def test_others_raise(self) -> None:
        for mode, case, ranks in self.outcomes(OTHERS_RAISE):
            self.assertRegex(ranks[OTHER]["error"], f"{LEFT}", (mode, case))
            self.assertRegex(ranks[OTHER]["error"], NOTE, (mode, case))

    def test_no_step_ends_with_a_wrong_gradient_but_where_nothing_is_seen(self) -> None:
        """What skips a microbatch ends that step alone, and is stopped in the next."""
        for mode, column in zip(MODES, zip(*OUTCOMES.values()), strict=True):
            for case, outcome in zip(OUTCOMES, column, strict=True):
                found = self.found[mode][case]
                steps = [rank.get("steps", 0) for rank in found]
                self.assertEqual(len(steps), RANKS)
                if outcome == FINE or "fewer steps" in case:
                    self.assertEqual(steps, [1, 1], (mode, case))
                elif outcome == NOT_SEEN:
                    # Until the odd rank has no step left
                    self.assertEqual(steps, [1, 2], (mode, case))
                    self.assertRegex(found[OTHER]["error"], LEFT)
                    self.assertRegex(found[OTHER]["error"], NOTE)
                elif "skips a microbatch" in case:
                    self.assertEqual(steps, [0, 1], (mode, case))
                else:
                    self.assertEqual(steps, [0, 0], (mode, case))

    def test_without_comparing_nobody_notices(self) -> None:
        """So it is the comparison that finds these."""
        self.assertEqual(len(self.found["0"]), 2)
        for case, ranks in self.found["0"].items():
            self.assertEqual(ranks, [{"steps": 2}] * RANKS, case)


if __name__ == "__main__":
    run_tests()
