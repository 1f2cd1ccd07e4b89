# Owner(s): ["oncall: distributed"]
"""
Steps leave nothing behind, and a model that is gone takes everything with it.
``FSDP_GROWTH_STEPS`` chooses a longer run.
"""

from __future__ import annotations

import json
import os

import pytest

from fsdp_helpers.common.utils import DeviceFreeTest, run_python

from torch.testing._internal.common_utils import run_tests


pytestmark = pytest.mark.timeout(600)


STEPS = int(os.environ.get("FSDP_GROWTH_STEPS", "60"))
# Less than two hundred bytes for each unit in each of the fewest steps, and more than
# tables and caches of the interpreter's come and go by
MAX_GROWTH_NBYTES = 16 * 2**10


class TestGrowth(DeviceFreeTest):
    def test_steps_and_models_leave_nothing_behind(self) -> None:
        args = ("-m", "fsdp_helpers.random.growth", str(STEPS))
        printed = run_python(*args, timeout=1200 + 2 * STEPS)
        modes = json.loads(printed.splitlines()[-1])
        self.assertGreater(len(modes), 0)
        for name, found in modes.items():
            with self.subTest(name):
                few, half, last = (found[when] for when in ("few", "half", "all"))
                for what in ("tensors", "bytes", "events"):
                    self.assertEqual(last[what], few[what], what)
                self.assertEqual(last["objects"], half["objects"])
                self.assertEqual(found["left"], {"units": 0, "tensors": 0}, "deleted")
                if half["allocated_bytes"] is not None:
                    growth = last["allocated_bytes"] - half["allocated_bytes"]
                    self.assertLess(growth, MAX_GROWTH_NBYTES)


if __name__ == "__main__":
    run_tests()
