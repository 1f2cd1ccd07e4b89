# Owner(s): ["oncall: distributed"]

"""
Every row of the tables in ``docs/feature_parity.md`` names tests, which are there.
"""

import fnmatch
import functools
import importlib
import re
from pathlib import Path

from fsdp_test_utils import DeviceFreeTest

from torch.testing._internal.common_utils import run_tests


# Not where torch is: this file may be run on another one
PAGE = Path(__file__).parents[4] / "docs" / "feature_parity.md"
COLUMNS = ["feature", "base", "fork, uniform", "fork, mixed", "test"]


def rows() -> list[list[str]]:
    """Returns the cells of all rows of the tables that have a column of tests."""
    found, columns = [], []
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
        elif columns == COLUMNS and set(line) != {"|", "-"}:
            found.append(cells)
    return found


@functools.cache
def names_in(file: str, class_name: str) -> list[str]:
    module = importlib.import_module(f"test_fully_shard_{file}")
    names = dir(getattr(module, class_name, None))
    return [name for name in names if name.startswith("test_")]


class TestFeatureParity(DeviceFreeTest):
    def test_every_row_names_tests_that_are_there(self) -> None:
        self.assertGreater(len(rows()), 80)
        for cells in rows():
            with self.subTest(cells[0]):
                self.assertEqual(len(cells), len(COLUMNS))
                self.assertTrue(all(cells))
                named = re.findall(r"`(\w+)::(\w+)::([^`]+)`", cells[-1])
                self.assertGreater(len(named), 0)
                self.assertEqual(len(named), cells[-1].count("`") // 2)
                for file, class_name, pattern in named:
                    tests = names_in(file, class_name)
                    self.assertTrue(fnmatch.filter(tests, pattern), pattern)

    def test_every_feature_is_one_row(self) -> None:
        features = [cells[0] for cells in rows() if not cells[0].startswith("…")]
        self.assertEqual(len(features), len({*features}))


if __name__ == "__main__":
    run_tests()
