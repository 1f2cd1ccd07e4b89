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

from fsdp_build import REPOSITORY
from fsdp_common.utils import RELEASE_ROOT

from tools import apply_to_checkout
from tools.setup_helpers import wheel
from tools.setup_helpers.releases import RELEASES
from torch.testing._internal.common_utils import run_tests, TestCase


pytestmark = pytest.mark.tools


TESTS = apply_to_checkout.TESTS
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

    def listed_tests(self) -> tuple[list[str], dict[str, str]]:
        """Returns the command that sets up, and where each test file is run."""
        # `--show-only=json-v1` tells more than names: what each one runs.
        command = ("ctest", "--test-dir", self.build, "--show-only=json-v1")
        status, output = self.run_tool(*command)
        self.assertEqual(status, 0, output)
        setup, *tests = json.loads(output[output.index("{\n") :])["tests"]
        folders = {}
        for test in tests:
            properties = {p["name"]: p["value"] for p in test["properties"]}
            # Before its set-up ctest does not find the Python, and names no command.
            folders[test["name"]] = properties["WORKING_DIRECTORY"]
        return setup["command"], folders

    def checkout(self) -> Path:
        """Makes a git tree of the release's files, with a build that takes no time."""
        if not RELEASE_ROOT.is_dir():
            raise unittest.SkipTest("needs the release")
        checkout = self.scratch / "checkout"
        version = wheel.unpacked_version(RELEASE_ROOT).partition("+")[0]
        digests = json.loads((REPOSITORY / apply_to_checkout.DIGESTS).read_text())
        for path in digests[version]["sha256"]:
            (checkout / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(RELEASE_ROOT / path, checkout / path)
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

    def assert_refused(self, option: str, text: str) -> None:
        status, output = self.configure(option)
        self.assertEqual(status, 1)
        self.assertIn(text, " ".join(output.split()))

    def test_release_has_an_entry_for_each_test_file(self):
        self.assert_refused("-DRELEASE=1.0", "RELEASE=1.0 is no release that this")
        other = RELEASES[-1].version
        status, output = self.configure(f"-DRELEASE={other}")
        self.assertEqual(status, 0, output)
        setup, folders = self.listed_tests()
        self.assertIn(f"RELEASE={other}", setup)
        files = [path.stem for path in (REPOSITORY / TESTS).glob("test_*.py")]
        self.assertEqual(folders, dict.fromkeys(files, str(REPOSITORY)))

    def test_checkout_is_laid_over_and_listed(self):
        text = "is not a PyTorch source tree"
        self.assert_refused(f"-DPYTORCH_SOURCE_DIR={self.scratch}", text)
        checkout = self.checkout()
        status, output = self.configure(f"-DPYTORCH_SOURCE_DIR={checkout}")
        self.assertEqual(status, 0, output)
        laid = apply_to_checkout.files_to_lay(REPOSITORY)
        tests = {Path(path).stem for path in laid if "/test_" in path}
        self.assertEqual(self.listed_tests()[1], dict.fromkeys(tests, str(checkout)))
        command = ("cmake", "--build", self.build, "--target", "lay")
        status, output = self.run_tool(*command)
        self.assertEqual(status, 0, output)
        for path, ours in laid.items():
            # Whole: torch's own comparison goes through them byte by byte
            self.assertTrue((checkout / path).read_bytes() == ours.read_bytes(), path)


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
