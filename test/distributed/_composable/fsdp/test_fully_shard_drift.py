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
    NOT_SEEN,
    ODD,
    OTHERS_RAISE,
    SHORT_TIME_LIMIT,
    TIME_OUT,
)

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.timeout(600)


OTHER = 1 - ODD

DISAGREE = r"Ranks disagree about the (gradients|parameters) of unit|Ranks have drifted"
NOTE = (
    r"Raised while (gathering|reducing the gradients of) unit '(\(root\)|layers\.\d)'"
    ".*must run it .* on a dummy input"
)
LEFT = r"Connection closed by peer|Connection reset by peer"
TIMED_OUT = f"Timed out waiting {SHORT_TIME_LIMIT.seconds * 1000}ms"


@unittest.skipIf(LAUNCHED_RANK is not None, "starts ranks of its own")
@unittest.skipIf(sys.version_info < (3, 11), "exceptions take no notes")
@instantiate_parametrized_tests
class TestDrift(DeviceFreeTest):
    # Name of a case, mode, and what each rank saw
    found: list[tuple[str, str, list[dict[str, Any]]]]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.found = json.loads(run_forked("fsdp_drift.cases").splitlines()[-1])

    @parametrize("outcome", [ALL_RAISE, TIME_OUT, OTHERS_RAISE, NOT_SEEN, FINE])
    def test_ranks_see(self, outcome: str) -> None:
        checked = 0
        for name, mode, ranks in self.found:
            if CASES[name].outcomes[mode] == outcome:
                with self.subTest(name, mode=mode, ranks=ranks):
                    self.check(name, outcome, ranks)
                    checked += 1
        self.assertGreater(checked, 0)

    def check(self, name: str, outcome: str, ranks: list[dict[str, Any]]) -> None:
        errors = [rank.get("error", "") for rank in ranks]
        steps = [rank.get("steps", 0) for rank in ranks]
        if outcome == ALL_RAISE:
            self.assertRegex(errors[0], DISAGREE)
            self.assertRegex(errors[0], f"(?s){CASES[name].says}")
            self.assertEqual(errors[0], errors[1])
        elif outcome == TIME_OUT:
            self.assertTrue(any(re.search(TIMED_OUT, error) for error in errors))
            for error in errors:
                self.assertRegex(error, f"{TIMED_OUT}|{LEFT}")
                self.assertRegex(error, NOTE)
            if name == "parameter_later":
                text = (
                    "gradients of unit 'layers.2', without a gradient of layers.2.gate."
                )
                self.assertIn(text, errors[ODD])
        elif outcome in (OTHERS_RAISE, NOT_SEEN):
            self.assertRegex(errors[OTHER], LEFT)
            self.assertRegex(errors[OTHER], NOTE)
        # What is not seen goes on until the odd rank has no step left. What skips a
        # microbatch ends that step alone, and is stopped in the next
        expected = {FINE: [1, 1], NOT_SEEN: [1, 2]}.get(outcome, [0, 0])
        if name == "fewer_steps":
            expected = [1, 1]
        elif name == "microbatch" and outcome == ALL_RAISE:
            expected = [0, 1]
        self.assertEqual(steps, expected)


if __name__ == "__main__":
    run_tests()
