# Owner(s): ["oncall: distributed"]
"""What ``conftest.py`` makes of the tests: a first tier, and an order."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import unittest
from pathlib import Path
from types import ModuleType, SimpleNamespace

from fsdp_build.utils import REPOSITORY

from torch.testing._internal.common_utils import run_tests, TestCase


HERE = Path(__file__).parent


def load_conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own", REPOSITORY / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def item_of(name: str, test: str) -> SimpleNamespace:
    path = HERE / f"test_fully_shard_{name}.py"
    return SimpleNamespace(path=path, nodeid=f"{path.name}::TestIt::{test}")


def ids_of_tests(name: str) -> list[str]:
    """Returns what pytest calls the tests of a file, parametrized ones too."""
    module = importlib.import_module(f"test_fully_shard_{name}")
    suites = unittest.defaultTestLoader.loadTestsFromModule(module)
    tests = (test for suite in suites for test in suite)
    return [f"::{type(test).__name__}::{test._testMethodName}" for test in tests]


class TestTiers(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.conftest = load_conftest()

    def test_quick_takes_the_table_and_the_first_test_of_other_files(self):
        self.conftest.QUICK = {"a": ("::test_2", "::test_3"), "b": ()}
        items = [item_of(name, f"test_{i}") for name in "abc" for i in (1, 2, 3)]
        chosen = self.conftest.quick_tests(items)
        expected = [items[1], items[2], items[6]]
        self.assertEqual([c.nodeid for c in chosen], [e.nodeid for e in expected])

    def test_tables_name_what_is_there(self):
        for name in (*self.conftest.QUICK, *self.conftest.LONGEST_FIRST):
            file = HERE / f"test_fully_shard_{name}.py"
            self.assertTrue(file.is_file(), name)
        for name, ends in self.conftest.QUICK.items():
            tests = ids_of_tests(name) if ends else []
            for end in ends:
                found = [test for test in tests if test.endswith(end)]
                self.assertEqual(len(found), 1, f"{name} has {found} of {end}")

    def test_longest_first_and_others_as_they_come(self):
        last = len(self.conftest.LONGEST_FIRST)
        names = ["z", self.conftest.LONGEST_FIRST[1], "a"]
        ranks = [self.conftest.rank_of(name) for name in names]
        self.assertEqual(ranks, [last, 1, last])

    def test_make_hands_over_what_it_is_told(self):
        """The tiers by the same recipe, and arguments in the place of all files."""
        whole = "--numprocesses=auto --dist=loadfile test"
        for told, asked in (
            ((), f"--durations=10 {whole}"),
            (("QUICK=1",), f"--durations=10 --quick {whole}"),
            (("ARGS=a.py -k b",), "--durations=10 a.py -k b"),
        ):
            command = ["make", "--dry-run", "--no-print-directory", "test", *told]
            printed = subprocess.check_output(command, cwd=REPOSITORY, text=True)
            words = " ".join(printed.replace("\\\n", " ").split())
            self.assertTrue(words.endswith(f"-m pytest {asked}"), words)


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
