# Owner(s): ["oncall: distributed"]
"""
Steps leave nothing behind, and a model that is gone takes everything with it.
``FSDP_GROWTH_STEPS`` chooses a longer run.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from fsdp_common.utils import DeviceFreeTest, run_python

from torch.testing._internal.common_utils import run_tests


pytestmark = pytest.mark.long


STEPS = int(os.environ.get("FSDP_GROWTH_STEPS", "60"))
# Less than two hundred bytes for each unit in each of the fewest steps, and more than
# tables and caches of the interpreter's come and go by
MAX_GROWTH_NBYTES = 16 * 2**10


class TestGrowth(DeviceFreeTest):
    modes: dict[str, Any]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        args = ("-m", "fsdp_random.growth", str(STEPS))
        printed = run_python(*args, timeout=1200 + 2 * STEPS)
        cls.modes = json.loads(printed.splitlines()[-1])
        if not cls.modes:
            raise AssertionError("no mode was run")

    def test_steps_leave_nothing_behind(self) -> None:
        for name, found in self.modes.items():
            with self.subTest(name):
                few, half, last = (found[when] for when in ("few", "half", "all"))
                for what in ("tensors", "bytes", "events"):
                    self.assertEqual(last[what], few[what], what)
                self.assertEqual(last["objects"], half["objects"])

    def test_allocated_memory_does_not_grow(self) -> None:
        for name, found in self.modes.items():
            with self.subTest(name):
                half, last = (
                    found[when]["allocated_bytes"] for when in ("half", "all")
                )
                if half is None:
                    self.skipTest("the C library does not tell what it has allocated")
                self.assertLess(last - half, MAX_GROWTH_NBYTES)

    def test_deleted_model_is_gone(self) -> None:
        left = {name: found["left"]["objects"] for name, found in self.modes.items()}
        self.assertEqual(left, dict.fromkeys(self.modes, 0))


if __name__ == "__main__":
    run_tests()
