# Owner(s): ["oncall: distributed"]

"""Our files on a git checkout that is shaped as upstream's, and their names there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from fsdp_build import REPOSITORY  # noqa: F401
from fsdp_build.utils import commit_all, git, REPLACED, run, write
from fsdp_common.utils import RELEASE_ROOT

from tools.checkout import BRANCH, commit_branch, files_to_lay, STAYS_HERE, TESTS
from tools.releases import (
    DEFAULT,
    differences,
    recorded,
    RELEASES,
    ROOT,
    ToolError,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.version import __version__ as VERSION


pytestmark = pytest.mark.tools


NAMES = [
    name
    for name in (ROOT / "tools/upstream_test_names.txt").read_text().splitlines()
    if not name.startswith("#")
]


class TestCheckout(TestCase):
    """A clone of some of our files over a tree with all of upstream's test names."""

    def setUp(self) -> None:
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.checkout = Path(scratch.name).resolve() / "größe" / "pytorch"
        release = RELEASE_ROOT if RELEASE_ROOT.is_dir() else None
        if release is None:
            self.skipTest("needs the release's own files")
        version = VERSION.partition("+")[0]
        files = recorded(ROOT, version)["sha256"]
        write(self.checkout, {path: (release / path).read_text() for path in files})
        write(self.checkout, dict.fromkeys((f"{TESTS}/{n}" for n in NAMES), "theirs"))
        write(self.checkout, {"version.txt": f"{version}a0\n", ".gitignore": "build\n"})
        commit_all(self.checkout)
        for key, value in {"user.name": "a", "user.email": "a@b"}.items():
            git(self.checkout, "config", key, value)

    def assert_refused(self, text: str) -> None:
        before = git(self.checkout, "status", "--porcelain", "--branch")
        with self.assertRaisesRegex(ToolError, text):
            commit_branch(self.checkout, ROOT)
        after = git(self.checkout, "status", "--porcelain", "--branch")
        self.assertEqual(after, before)

    def test_one_commit_of_our_files_that_replaces_no_test_of_upstreams(self):
        self.assertIn("fit", commit_branch(self.checkout, ROOT, only_check=True))
        start = git(self.checkout, "rev-parse", "HEAD")
        self.assertIn(f"one commit on {BRANCH}", commit_branch(self.checkout, ROOT))
        self.assertEqual(git(self.checkout, "rev-parse", f"{BRANCH}~"), start)
        self.assertEqual(git(self.checkout, "status", "--porcelain"), "")
        ours = files_to_lay(ROOT)
        changed = git(self.checkout, "diff", "--name-only", "HEAD~").splitlines()
        self.assertEqual({*changed}, {*ours})
        for path, source in ours.items():
            self.assertTrue((self.checkout / path).read_bytes() == source.read_bytes())
        for name in NAMES:
            self.assertEqual((self.checkout / TESTS / name).read_text(), "theirs")
        self.assertIn("files are there", commit_branch(self.checkout, ROOT))

    def test_by_the_command(self):
        tool = (ROOT / "tools/overlay.py", self.checkout)
        self.assertIn("fit", run("python3", *tool, "--check"))
        self.assertIn(BRANCH, run("python3", *tool))
        listed = run("python3", *tool, "--list").splitlines()
        self.assertEqual(listed, [*files_to_lay(ROOT)])

    def test_changes_that_are_not_committed(self):
        write(self.checkout, {"torch/elsewhere.py": ""})
        self.assert_refused("not committed:\n .*torch/elsewhere.py")

    def test_files_that_are_not_the_releases(self):
        path = "torch/distributed/fsdp/__init__.py"
        ours = f"{TESTS}/test_fully_shard_hsdp.py"
        write(self.checkout, {path: "", ours: ""})
        git(self.checkout, "commit", "--quiet", "--all", "--message", "a vendor's")
        git(self.checkout, "add", "--all")
        git(self.checkout, "commit", "--quiet", "--message", "a test of that name")
        self.assert_refused(f"{ours} is no file(.|\n)*{path} is not the release's")

    def test_another_version_and_no_checkout(self):
        write(self.checkout, {"version.txt": "2.12.0a0\n"})
        self.assert_refused(f"torch 2.12.0a0: the branch fits {DEFAULT}")
        (self.checkout / "version.txt").unlink()
        self.assert_refused("is not a PyTorch source tree")


class TestRepository(TestCase):
    def test_no_test_is_named_as_upstreams(self):
        """Nor one of the series. What is laid under another name may be."""
        (patched,) = {
            line.split()[1].removeprefix(f"{TESTS}/")
            for edit in (ROOT / "tools/upstream").glob("*.edit")
            for line in edit.read_text().splitlines()
            if line.startswith(f"=== {TESTS}/")
        }
        laid = {path.removeprefix(f"{TESTS}/") for path in files_to_lay(ROOT)}
        self.assertEqual(({*laid} | {patched}) & {*NAMES}, set())
        ours = {path.name for path in (ROOT / TESTS).glob("*.py")}
        self.assertEqual(ours & {*NAMES}, {"test_fully_shard_comm.py"})
        self.assertNotIn(patched, ours)

    def test_each_test_file_has_its_owner(self):
        for path in (ROOT / TESTS).glob("test_*.py"):
            first, _, _ = path.read_text().partition("\n")
            self.assertEqual(first, '# Owner(s): ["oncall: distributed"]', path.name)

    def test_what_stays_here_is_here_and_nothing_laid_needs_it(self):
        there = {path.name.removesuffix(".py") for path in (ROOT / TESTS).iterdir()}
        self.assertEqual(STAYS_HERE - there, set())
        for path, source in files_to_lay(ROOT).items():
            if path.startswith("test/"):
                for name in ("fsdp_build", "fsdp_clients", "from tools"):
                    self.assertNotIn(f"{name}", source.read_text(), path)

    def test_digests_are_those_of_the_release(self):
        self.assertTrue(all(recorded(ROOT, each)["sha256"] for each in RELEASES))
        if not RELEASE_ROOT.is_dir():
            self.skipTest("needs the release's own files")
        theirs = recorded(ROOT, VERSION.partition("+")[0])["sha256"]
        self.assertTrue({f"{REPLACED[1]}"} <= {*theirs})
        self.assertEqual(differences(theirs, (), lambda path: RELEASE_ROOT / path), [])

    def test_constraints_name_their_torch(self):
        for release in RELEASES:
            lines = (ROOT / f"constraints/{release}.txt").read_text().splitlines()
            self.assertIn(f"torch=={release}", lines)

    def test_each_range_is_in_one_file(self):
        names = [
            line.split(">")[0].split("=")[0]
            for path in ROOT.glob("requirements*.txt")
            for line in path.read_text().splitlines()
            if line and not line.startswith("#")
        ]
        self.assertEqual(sorted({*names}), sorted(names))


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
