# Owner(s): ["oncall: distributed"]
"""CMakeLists.txt, over the release and over a tree shaped as a source checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import pytest

from tools import apply_to_checkout
from tools.setup_helpers import tree, wheel
from tools.setup_helpers.releases import known, RELEASES
from torch.testing._internal.common_utils import run_tests, TestCase


pytestmark = pytest.mark.tools


REPOSITORY = apply_to_checkout.ROOT
TESTS = apply_to_checkout.TESTS
BASE = REPOSITORY / "build" / "base"
# A package that builds at once, in PyTorch's place.
SETUP = """
import pathlib, setuptools
pathlib.Path("built").write_text("")
setuptools.setup(name="torch", version="1.0", packages=[])
"""


@unittest.skipUnless(shutil.which("cmake"), "needs CMake: pip install cmake")
class TestSuperbuild(TestCase):
    def setUp(self) -> None:
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = Path(scratch.name).resolve() / "größe und mehr"
        self.scratch.mkdir()
        self.build = self.scratch / "build"

    def run_tool(self, *command: str | Path) -> tuple[int, str]:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def configure(self, *options: str) -> tuple[int, str]:
        return self.run_tool("cmake", "-S", REPOSITORY, "-B", self.build, *options)

    def listed_tests(self) -> set[str]:
        # `--show-only=json-v1` tells more than names: what each one runs.
        command = ("ctest", "--test-dir", self.build, "--show-only=json-v1")
        status, output = self.run_tool(*command)
        self.assertEqual(status, 0, output)
        tests = json.loads(output[output.index("{\n") :])["tests"]
        self.assertEqual(tests[0]["name"], "setup")
        return {test["command"][-1] for test in tests[1:]}

    def checkout(self) -> Path:
        """Makes a git tree of the base's files, with a build that takes no time."""
        if not BASE.is_dir():
            raise unittest.SkipTest("needs the base release")
        checkout = self.scratch / "checkout"
        version = wheel.unpacked_version(BASE).partition("+")[0]
        digests = json.loads((REPOSITORY / apply_to_checkout.DIGESTS).read_text())
        for path in digests[version]["sha256"]:
            (checkout / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(BASE / path, checkout / path)
        (checkout / "version.txt").write_text(f"{version}a0\n")
        (checkout / "setup.py").write_text(SETUP)
        for command in (
            "init --quiet",
            "add --all",
            "-c user.name=a -c user.email=a@b commit --quiet --message release",
        ):
            status, output = self.run_tool("git", "-C", checkout, *command.split())
            self.assertEqual(status, 0, output)
        return checkout

    def test_release_has_an_entry_for_each_test_file(self):
        status, output = self.configure()
        self.assertEqual(status, 0, output)
        files = (REPOSITORY / TESTS).glob("test_*.py")
        self.assertEqual(self.listed_tests(), {f"{TESTS}/{f.name}" for f in files})

    def test_another_base_has_the_same_tests_in_its_own_tree(self):
        other = RELEASES[-1].version
        status, output = self.configure(f"-DBASE={other}")
        self.assertEqual(status, 0, output)
        command = ("ctest", "--test-dir", self.build, "--show-only=json-v1")
        _, output = self.run_tool(*command)
        setup, *tests = json.loads(output[output.index("{\n") :])["tests"]
        self.assertIn(f"BASE={other}", setup["command"])
        place = tree.clone_of(REPOSITORY) / "build" / other
        for test in tests:
            # Before its set-up ctest does not find the Python, and names no command.
            folder = {p["name"]: p["value"] for p in test["properties"]}
            self.assertEqual(folder["WORKING_DIRECTORY"], str(place))
        self.assertEqual(len(tests), len([*(REPOSITORY / TESTS).glob("test_*.py")]))

    def test_checkout_is_laid_over_and_listed(self):
        checkout = self.checkout()
        status, output = self.configure(f"-DPYTORCH_SOURCE_DIR={checkout}")
        self.assertEqual(status, 0, output)
        laid = apply_to_checkout.files_to_lay(REPOSITORY)
        tests = {path for path in laid if "/test_" in path}
        self.assertFalse(any((checkout / path).exists() for path in tests))
        self.assertEqual(self.listed_tests(), tests)
        command = ("cmake", "--build", self.build, "--target", "lay")
        status, output = self.run_tool(*command)
        self.assertEqual(status, 0, output)
        for path, ours in laid.items():
            # Whole: torch's own comparison goes through them byte by byte
            self.assertTrue((checkout / path).read_bytes() == ours.read_bytes(), path)

    def test_wrong_trees_are_told_at_once(self):
        other = self.checkout()
        (other / "version.txt").write_text("2.12.0\n")
        for option, text in (
            (f"-DPYTORCH_SOURCE_DIR={self.scratch / 'none'}", "there is no folder"),
            (f"-DPYTORCH_SOURCE_DIR={self.scratch}", "is not a PyTorch source tree"),
            (f"-DPYTORCH_SOURCE_DIR={other}", f"branch is for {known('or')}"),
            ("-DTORCH_BASE_WHEEL=/none.whl", "there is no wheel at /none.whl"),
            ("-DBASE=1.0", "BASE=1.0 is no release that this branch is for: these"),
        ):
            shutil.rmtree(self.build, ignore_errors=True)
            status, output = self.configure(option)
            self.assertEqual(status, 1)
            self.assertIn(text, " ".join(output.split()))


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
