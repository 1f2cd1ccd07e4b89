# Owner(s): ["oncall: distributed"]

"""Our files on a git checkout that is shaped as upstream's, and their names there."""

from __future__ import annotations

import os

import pytest

from fsdp_build.utils import commit_all, git, run, ScratchTestCase, write
from fsdp_common.utils import RELEASE_ROOT

from tools.checkout import BRANCH, commit_branch, files_to_lay, TESTS
from tools.releases import DEFAULT, recorded, refuse_changed, RELEASES, ROOT, ToolError
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.version import __version__ as VERSION


pytestmark = pytest.mark.tools


RELEASE = VERSION.partition("+")[0]
NAMES = [
    name
    for name in (ROOT / "tools/upstream_test_names.txt").read_text().splitlines()
    if not name.startswith("#")
]


class TestCheckout(ScratchTestCase):
    """A clone of some of our files over a tree with all of upstream's test names."""

    def setUp(self) -> None:
        super().setUp()
        self.checkout = self.scratch / "pytorch"
        if not RELEASE_ROOT.is_dir():
            self.skipTest("needs the release's own files")
        files = {p: (RELEASE_ROOT / p).read_text() for p in recorded(ROOT, RELEASE)}
        files |= dict.fromkeys((f"{TESTS}/{name}" for name in NAMES), "theirs")
        files |= {"version.txt": f"{RELEASE}a0\n", ".gitignore": "build\n"}
        write(self.checkout, files)
        commit_all(self.checkout)

    def test_one_commit_of_our_files_that_replaces_no_test_of_upstreams(self):
        tool = ("python3", ROOT / "tools/overlay.py", self.checkout)
        self.assertIn("fit", run(*tool, "--check"))
        start = git(self.checkout, "rev-parse", "HEAD")
        self.assertIn(f"one commit on {BRANCH}", run(*tool))
        self.assertEqual(git(self.checkout, "rev-parse", f"{BRANCH}~"), start)
        self.assertEqual(git(self.checkout, "status", "--porcelain"), "")
        ours = files_to_lay(ROOT)
        self.assertEqual(run(*tool, "--list").splitlines(), [*ours])
        changed = git(self.checkout, "diff", "--name-only", "HEAD~").splitlines()
        self.assertEqual({*changed}, {*ours})
        for path, source in ours.items():
            self.assertTrue((self.checkout / path).read_bytes() == source.read_bytes())
        for name in NAMES:
            self.assertEqual((self.checkout / TESTS / name).read_text(), "theirs")
        self.assertIn("files are there", run(*tool))

    def test_refusals(self):
        def assert_refused(text: str) -> None:
            state = ("status", "--porcelain", "--branch")
            before = git(self.checkout, *state)
            with self.assertRaisesRegex(ToolError, text):
                commit_branch(self.checkout, ROOT)
            self.assertEqual(git(self.checkout, *state), before)

        theirs = "torch/distributed/fsdp/__init__.py"
        ours = f"{TESTS}/test_fully_shard_hsdp.py"
        write(self.checkout, {theirs: "", ours: ""})
        assert_refused(f"not committed:(.|\n)*{ours}")
        git(self.checkout, "add", "--all")
        git(self.checkout, "commit", "--quiet", "--message", "a vendor's")
        assert_refused(f"{ours} is no file(.|\n)*{theirs} is not the release's")
        write(self.checkout, {"version.txt": "2.12.0a0\n"})
        assert_refused(f"torch 2.12.0a0: the branch fits {DEFAULT}")
        (self.checkout / "version.txt").unlink()
        assert_refused("is not a PyTorch source tree")


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

    def test_nothing_laid_needs_what_stays_here(self):
        for path, source in files_to_lay(ROOT).items():
            for name in ("fsdp_build", "fsdp_clients", "from tools"):
                self.assertNotIn(name, source.read_text(), path)

    def test_digests_are_those_of_the_release(self):
        self.assertTrue(all(recorded(ROOT, each) for each in RELEASES))
        if not RELEASE_ROOT.is_dir():
            self.skipTest("needs the release's own files")
        refuse_changed(RELEASE_ROOT, ROOT, RELEASE, (), lambda p: RELEASE_ROOT / p)

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
