# Owner(s): ["oncall: distributed"]

"""
Every row of the tables in ``docs/feature_parity.md``, and of the table of models and
tools in ``README.md``, names tests, which are there.
"""

import fnmatch
import functools
import importlib
import re
from pathlib import Path

from fsdp_test_utils import DeviceFreeTest

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


# Not where torch is: this file may be run on another one
ROOT = Path(__file__).parents[4]
# The columns of the tables on each page that name tests
PARITY = "docs/feature_parity.md"
COLUMNS = {
    PARITY: ["feature", "base", "fork, uniform", "fork, mixed", "test"],
    "README.md": ["model or tool", "the release", "this branch", "test"],
}


def rows(page: str) -> list[list[str]]:
    """Returns the cells of all rows of the tables that have a column of tests."""
    found, columns = [], []
    for line in (ROOT / page).read_text().splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
        elif columns == COLUMNS[page] and set(line) != {"|", "-"}:
            found.append(cells)
    return found


@functools.cache
def names_in(file: str, class_name: str) -> list[str]:
    module = importlib.import_module(f"test_fully_shard_{file}")
    names = dir(getattr(module, class_name, None))
    return [name for name in names if name.startswith("test_")]


class TestTables(DeviceFreeTest):
    @parametrize("page,at_least", [(PARITY, 80), ("README.md", 5)])
    def test_every_row_names_tests_that_are_there(
        self, page: str, at_least: int
    ) -> None:
        self.assertGreaterEqual(len(rows(page)), at_least)
        for cells in rows(page):
            with self.subTest(cells[0]):
                self.assertEqual(len(cells), len(COLUMNS[page]))
                self.assertTrue(all(cells))
                named = re.findall(r"`(\w+)::(\w+)::([^`]+)`", cells[-1])
                self.assertGreater(len(named), 0)
                self.assertEqual(len(named), cells[-1].count("`") // 2)
                for file, class_name, pattern in named:
                    tests = names_in(file, class_name)
                    self.assertTrue(fnmatch.filter(tests, pattern), pattern)

    def test_every_feature_is_one_row(self) -> None:
        features = [cells[0] for cells in rows(PARITY) if not cells[0].startswith("…")]
        self.assertEqual(len(features), len({*features}))


instantiate_parametrized_tests(TestTables)


if __name__ == "__main__":
    run_tests()
