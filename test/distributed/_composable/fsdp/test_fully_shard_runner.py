# Owner(s): ["oncall: distributed"]
"""What ``conftest.py`` makes of the tests: a first tier, and an order."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest

from fsdp_build import REPOSITORY

from torch.testing._internal.common_utils import run_tests, TestCase


pytestmark = pytest.mark.tools


HERE = Path(__file__).parent


def load_conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own", REPOSITORY / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Item(NamedTuple):
    path: Path
    test: int
    marks: tuple[str, ...]

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def items_of(name: str, *marks: str, quick: tuple[int, ...] = ()) -> list[Item]:
    """Returns the three tests of a file."""
    return [
        Item(HERE / name, i, (*marks, "quick") if i in quick else marks)
        for i in (1, 2, 3)
    ]


class TestTiers(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.conftest = load_conftest()

    def test_quick_takes_what_is_marked_and_the_first_test_of_other_files(self):
        marked, long = items_of("a", quick=(2, 3)), items_of("b", "long")
        marked_long, other = items_of("c", "long", quick=(3,)), items_of("d")
        chosen = self.conftest.quick_tests([*marked, *long, *marked_long, *other])
        self.assertEqual(chosen, [marked[1], marked[2], marked_long[2], other[0]])

    def test_longest_first_and_others_as_they_come(self):
        config = SimpleNamespace(getoption=lambda name, default=None: False)
        z, b, a = items_of("z"), items_of("b", "long"), items_of("a")
        items = [*z, *b, *a]
        self.conftest.pytest_collection_modifyitems(config, items)
        self.assertEqual(items, [*z, *b, *a])
        config.workerinput = {}  # of one that runs files beside others
        self.conftest.pytest_collection_modifyitems(config, items)
        self.assertEqual(items, [*b, *z, *a])

    def test_unknown_marks_are_refused(self):
        """Or one that is misspelled would choose nothing."""
        command = (sys.executable, "-m", "pytest", "--collect-only", "-c")
        config = REPOSITORY / "pyproject.toml"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "test_it.py"
            file.write_text(
                "import pytest\n@pytest.mark.quickest\ndef test_it(): pass\n"
            )
            done = subprocess.run(
                [*command, config, file], capture_output=True, text=True, check=False
            )
        self.assertIn("'quickest' not found in `markers`", done.stdout)


class TestMake(TestCase):
    """What ``make`` hands over to pytest, in a clone of its own."""

    def setUp(self) -> None:
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.clone = Path(scratch.name)
        shutil.copy(REPOSITORY / "Makefile", self.clone)
        self.put("tools/a.py")
        self.put("torch/a.py")
        self.put("test/test_of_tools.py", "pytestmark = pytest.mark.tools\n")
        self.put("test/test_other.py")
        self.git("init", "--quiet")
        self.commit()
        self.git("update-ref", "refs/remotes/origin/main", "HEAD")

    def put(self, path: str, text: str = "") -> None:
        (self.clone / path).parent.mkdir(exist_ok=True)
        (self.clone / path).write_text(text)

    def git(self, *args: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *args], cwd=self.clone, check=True)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a")

    def asked(self, *told: str, ci: bool = False) -> str:
        """Returns what pytest is asked for, in one line."""
        env = {k: v for k, v in os.environ.items() if k not in ("CI", "TORCH_RELEASE")}
        printed = subprocess.check_output(
            ["make", "--dry-run", "--no-print-directory", *told],
            cwd=self.clone,
            env=env | ({"CI": "true"} if ci else {}),
            text=True,
        )
        words = " ".join(printed.replace("\\\n", " ").split())
        return words.partition("-m pytest --durations=10 ")[2]

    ALL = '--numprocesses=auto --dist=loadfile -m "" test'
    BRANCH = '--numprocesses=auto --dist=loadfile -m "not tools" test'

    def test_tiers_and_arguments_in_the_place_of_all_files(self):
        self.assertEqual(self.asked("test", "QUICK=1"), f"--quick {self.BRANCH}")
        self.assertEqual(self.asked("test", "ARGS=a.py -k b"), "a.py -k b")
        tools = "--numprocesses=auto --dist=loadfile -m tools test"
        self.assertEqual(self.asked("test-tools"), tools)
        self.assertEqual(self.asked("test-tools", "ARGS=a.py -k b"), "a.py -k b")

    def test_tools_are_tested_where_they_have_changed(self):
        self.assertEqual(self.asked("test"), self.BRANCH)
        self.put("torch/a.py", "changed")
        self.put("test/test_other.py", "changed")
        self.assertEqual(self.asked("test"), self.BRANCH)
        for path in ("tools/a.py", "test/test_of_tools.py", "tools/new.py", "setup.py"):
            self.put(path, "pytestmark = pytest.mark.tools  # changed")
            self.assertEqual(self.asked("test"), self.ALL, path)
            self.commit()
            self.assertEqual(self.asked("test"), self.ALL, path)
            self.git("update-ref", "refs/remotes/origin/main", "HEAD")
            self.assertEqual(self.asked("test"), self.BRANCH, path)

    def test_tools_are_tested_where_nobody_knows(self):
        self.git("update-ref", "-d", "refs/remotes/origin/main")
        self.assertEqual(self.asked("test"), self.ALL)

    def test_continuous_integration_runs_all(self):
        self.assertEqual(self.asked("test", ci=True), self.ALL)


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
