# Owner(s): ["oncall: distributed"]
"""``tools/series.py``: edits become commits. `make series` runs the tests of each."""

import os
import unittest
from unittest import mock

import pytest

from fsdp_helpers.build import REPOSITORY
from fsdp_helpers.build.utils import git, ScratchTestCase, write

from tools import series
from tools.releases import NEWEST, ToolError
from torch.testing._internal.common_utils import run_tests


pytestmark = pytest.mark.tools


CODE = "torch/_fully_shard/group.py"
OLD = "class Group:\n" + "".join(f"    theirs = {number}\n" for number in range(30))
TEST = f"{series.TESTS}/test_fully_shard_comm.py"
MESSAGES = [
    "[FSDP2] Change a line\n\nWhy.\n\n=== indented\n@@ -1 +1 @@",
    "[FSDP2] Add, change and remove\n\n# no comment",
]
RELEASE = REPOSITORY / "build" / NEWEST / "base"


class TestSeries(ScratchTestCase):
    """Two changes of a file, one of which brings a file of tests, too."""

    def setUp(self) -> None:
        super().setUp()
        self.tree, edits = self.scratch / "tree", self.scratch / "edits"
        edits.mkdir(parents=True)
        self.release = self.scratch / "build" / NEWEST / "base"
        write(self.release, {CODE: OLD})
        places = {"ROOT": self.scratch, "TREE": self.tree, "EDITS": edits}
        patcher = mock.patch.multiple(series, **places)
        patcher.start()
        self.addCleanup(patcher.stop)
        series.make("--untested")
        git(self.tree, "config", "user.name", "a")
        git(self.tree, "config", "user.email", "a@b")
        code = OLD.replace("    theirs = 7\n", "    ours = 7\n\n    -- x\n")
        self.commit(MESSAGES[0], {CODE: code})
        code = code.replace("    theirs = 9\n", "").replace("0\n", "0\n++ y\n")
        self.commit(MESSAGES[1], {CODE: code + "a last line\n", TEST: "a test\n"})

    def commit(self, message: str, files: dict[str, str]) -> None:
        write(self.tree, files)
        git(self.tree, "add", "--all")
        git(self.tree, "commit", "--quiet", "--cleanup=verbatim", "-m", message)

    def test_made_again_and_saved_again_are_the_same(self):
        contents = ("rev-parse", f"{series.BRANCH}^{{tree}}")
        before = git(self.tree, *contents)
        series.save()
        edits = series.stored_edits()
        self.assertEqual(len(edits), 2)
        self.assertNotIn("theirs", "".join(edits.values()))
        self.assertRegex(edits[min(edits)], r"(?m)^@@ -9 \+9,3 @@ class Group\n\+")
        series.make("--untested")
        self.assertEqual(git(self.tree, *contents), before)
        messages = git(self.tree, "log", "--reverse", "--format=%B%x00")
        self.assertEqual([m.strip() for m in messages.split("\0")[1:-1]], MESSAGES)
        self.assertEqual(series.edits_of(self.tree), edits)
        authors = git(self.tree, "log", "--format=%an", f"{series.RELEASE}..").split()
        self.assertEqual(authors, [series.BRANCH] * 2)

    def test_first_commits_are_laid_over_the_release(self):
        series.save()
        for count, last in ((1, False), (2, True)):
            laid = series.lay_first(count, self.scratch / "laid", self.release)
            text = (laid / CODE).read_text()
            self.assertEqual("a last line" in text, last)
            self.assertIn("ours = 7", text)
            self.assertFalse((laid / TEST).exists())

    def test_commits_that_are_not_saved_stay(self):
        with self.assertRaisesRegex(ToolError, "make series-save"):
            series.make("--untested")
        series.save()
        first = min(series.stored_edits())
        git(self.tree, "reset", "--quiet", "--hard", f"{series.BRANCH}~2")
        self.commit("[FSDP2] Amended", {CODE: OLD + "ours\n"})
        series.save()
        self.assertNotIn(first, series.stored_edits())
        series.make("--untested")
        self.assertEqual((self.tree / CODE).read_text(), OLD + "ours\n")

    def test_a_release_with_other_files_is_refused(self):
        series.save()
        write(self.release, {CODE: OLD + "one more\n"})
        with self.assertRaisesRegex(ToolError, f"0001-.*: {CODE} is .*, and not "):
            series.make("--untested")


@unittest.skipUnless(RELEASE.is_dir(), f"needs `make setup RELEASE={NEWEST}`")
class TestOnRelease(ScratchTestCase):
    def test_what_is_stored_is_what_is_made_of_it(self):
        tree, edits = self.scratch / "tree", series.stored_edits()
        series.make_tree(tree, RELEASE, edits)
        # The stored hashes of files are those that the patches were reviewed with
        self.assertEqual(series.edits_of(tree), edits)


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
