# Owner(s): ["oncall: distributed"]
"""
Files of ``_fully_shard`` import from one another in one direction, and what training
does not need knows no param group. ``docs/architecture.md`` lists them in that order.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import fsdp_helpers.build  # noqa: F401

from torch.testing._internal.common_utils import run_tests, TestCase


ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "docs"))

from generate import imports_of, layers, SOURCES  # noqa: E402


# What training does not need, and what only training needs
BESIDE = ("_fsdp_summary", "_fsdp_agreement", "_fsdp_errors", "_fsdp_policies")
OF_GROUP = {"_fsdp_param_group", "_fsdp_collectives"}


def reached_from(file: str) -> set[str]:
    """Returns which files it imports, and which those do."""
    reached, left = set(), [file]
    while left:
        new = imports_of(SOURCES / f"{left.pop()}.py") - reached
        reached |= new
        left += new
    return reached


class TestArchitecture(TestCase):
    def test_imports_go_one_way(self):
        order = layers()
        self.assertEqual(sorted(order), sorted(p.stem for p in SOURCES.glob("*.py")))
        place = {name: i for i, name in enumerate(order)}
        self.assertIn("_fsdp_layout", imports_of(SOURCES / "_fsdp_collectives.py"))
        for name in order:
            for below in imports_of(SOURCES / f"{name}.py"):
                self.assertGreater(place[below], place[name], f"{name}: {below}")

    def test_what_training_does_not_need_knows_no_group(self):
        self.assertIn("_fsdp_collectives", reached_from("_fsdp_param_group"))
        for name in BESIDE:
            self.assertEqual(reached_from(name) & OF_GROUP, set(), name)


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
