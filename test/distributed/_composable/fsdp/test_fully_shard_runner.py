# Owner(s): ["oncall: distributed"]
"""What ``make`` and ``conftest.py`` run of the tests, in which order, and for how long."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from fsdp_build import REPOSITORY
from fsdp_build.utils import run

from torch.testing._internal.common_utils import run_tests, TestCase


pytestmark = pytest.mark.tools


class Item(NamedTuple):
    path: str
    test: int
    marks: tuple[str, ...]
    added: list[pytest.MarkDecorator]

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.added.append(mark)


def items_of(name: str, *marks: str, quick: tuple[int, ...] = ()) -> list[Item]:
    """Returns the three tests of a file."""
    tests = (1, 2, 3)
    return [
        Item(name, i, marks + ("quick",) if i in quick else marks, []) for i in tests
    ]


class TestConftest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        file = REPOSITORY / "conftest.py"
        spec = importlib.util.spec_from_file_location("own", file)
        self.conftest = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.conftest)

    def test_quick_takes_what_is_marked_and_the_first_test_of_other_files(self):
        marked, long = items_of("a", quick=(2, 3)), items_of("b", "long")
        marked_long, other = items_of("c", "long", quick=(3,)), items_of("d")
        chosen = self.conftest.quick_tests([*marked, *long, *marked_long, *other])
        self.assertEqual(chosen, [marked[1], marked[2], marked_long[2], other[0]])

    def test_longest_first_and_others_as_they_come(self):
        config = SimpleNamespace(getoption={"quick": False, "timeout": None}.get)
        z, b, a = items_of("z"), items_of("b", "long"), items_of("a")
        items = [*z, *b, *a]
        self.conftest.pytest_collection_modifyitems(config, items)
        self.assertEqual(items, [*z, *b, *a])
        self.assertEqual([item for item in items if item.added], b)
        config.workerinput = {}  # of one that runs files beside others
        self.conftest.pytest_collection_modifyitems(config, items)
        self.assertEqual(items, [*b, *z, *a])


class TestMake(TestCase):
    """What ``make`` hands over to pytest."""

    def asked(self, *told: str, **variables: str) -> str:
        env = {k: v for k, v in os.environ.items() if k not in ("CI", "TORCH_RELEASE")}
        make = ("make", "--dry-run", "--no-print-directory", *told)
        printed = run(*make, cwd=REPOSITORY, env=env | variables)
        words = " ".join(printed.replace("\\\n", " ").split())
        return words.partition("-m pytest --durations=10 ")[2]

    def test_tools_are_tested_by_themselves_and_by_ci(self):
        several = "--numprocesses=auto --dist=loadfile -m"
        for told, expected in (
            (("test",), f'{several} "not tools" test'),
            (("test", "QUICK=1"), f'--quick {several} "not tools" test'),
            (("test", "ARGS=a.py -k b"), "a.py -k b"),
            (("test-tools",), f"{several} tools test"),
        ):
            self.assertEqual(self.asked(*told), expected)
        self.assertEqual(self.asked("test", CI="true"), f'{several} "" test')


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
