# Owner(s): ["oncall: distributed"]

"""
``tools/series.py``: edits become commits and commits edits. What each change's own tests
say is for `make series`, which runs them on the release that the edits were written for.
And ``tools/contract_diff.py``: what changed between two releases.
"""

from __future__ import annotations

import os
import shutil
import unittest
from pathlib import Path

import pytest

from fsdp_build import REPOSITORY
from fsdp_build.utils import commit_all, git, run, ScratchTestCase, write

from tools import series
from tools.contract_diff import compare, PACKAGE
from tools.releases import NEWEST, ToolError
from torch.testing._internal.common_utils import run_tests


pytestmark = pytest.mark.tools


CODE, TEST = "torch/fsdp/group.py", "test/test_new.py"
OLD = "".join(f"line {number}\n" for number in range(30))
MESSAGES = [
    "[FSDP2] Change a line\n\nWhy.\n\n    indented\n",
    "[FSDP2] Add, change and remove\n\n# no comment\n",
]
RELEASE = REPOSITORY / "build" / NEWEST / "base"


class TestSeries(ScratchTestCase):
    """Two changes of a file, one of which brings a test and the other changes it."""

    def setUp(self) -> None:
        super().setUp()
        self.home, self.tree = self.scratch, self.scratch / "tree"
        self.edits, self.release = self.scratch / "edits", self.scratch / "release"
        self.edits.mkdir(parents=True)
        write(self.release, {CODE: OLD, "torch/gone.py": "1\n"})
        series.make_tree(self.tree, self.release, {})
        git(self.tree, "config", "user.name", "a")
        git(self.tree, "config", "user.email", "a@b")
        self.commit(MESSAGES[0], {CODE: OLD.replace("line 7\n", "ours\n\n")})
        write(self.tree, {TEST: "a test\n", "torch/sub/new.py": "++ x\n@@ y\n"})
        (self.tree / "torch/gone.py").unlink()
        code = (self.tree / CODE).read_text()
        code = code.replace("line 9\n", "").replace("line 20\n", "line 20\n=== z\n")
        self.commit(MESSAGES[1], {CODE: code})
        self.save()

    def commit(self, message: str, files: dict[str, str]) -> None:
        write(self.tree, files)
        git(self.tree, "add", "--all")
        git(self.tree, "commit", "--quiet", "--cleanup=verbatim", "-m", message)

    def save(self) -> dict[str, str]:
        series.save(self.tree, self.edits)
        return series.stored_edits(self.edits)

    def patches(self) -> list[bytes]:
        return [Path(path).read_bytes() for path in series.write_patches(self.tree)]

    def test_made_again_and_saved_again_are_the_same(self):
        edits = self.save()
        contents = ("rev-parse", f"{series.BRANCH}^{{tree}}")
        before = git(self.tree, *contents)
        series.make_tree(self.tree, self.release, edits)
        self.assertEqual(git(self.tree, *contents), before)
        messages = git(self.tree, "log", "--reverse", "--format=%B%x00")
        found = [text.strip() for text in messages.split("\0")[1:-1]]
        self.assertEqual(found, [text.strip() for text in MESSAGES])
        self.assertEqual(self.save(), edits)
        # Ours alone
        text = "".join(edits.values())
        self.assertNotIn("line ", text.replace("+line 20", ""))
        patches = self.patches()
        series.make_tree(self.tree, self.release, edits)
        self.assertEqual(self.patches(), patches)

    def test_amended_and_reordered(self):
        first, _ = self.save()
        git(self.tree, "switch", "--quiet", "--detach", f"{series.BRANCH}~")
        write(self.tree, {CODE: OLD.replace("line 7\n", "better\n")})
        git(self.tree, "commit", "--quiet", "--all", "--amend", "-m", "[FSDP2] Amended")
        onto = git(self.tree, "rev-parse", "HEAD").strip()
        rebase = ("rebase", "--quiet", "--onto", onto)
        git(self.tree, *rebase, f"{series.BRANCH}~", series.BRANCH)
        with self.assertRaisesRegex(ToolError, "make series-save keeps"):
            series.check_saved(self.tree, series.stored_edits(self.edits))
        edits = self.save()
        self.assertNotIn(first, edits)
        self.assertEqual(len(edits), 2)
        series.check_saved(self.tree, edits)
        series.make_tree(self.tree, self.release, edits)
        self.assertEqual(self.save(), edits)
        self.assertIn("better\n", (self.tree / CODE).read_text())

    def test_a_release_with_other_files_is_refused(self):
        write(self.release, {CODE: OLD + "one more\n"})
        with self.assertRaisesRegex(ToolError, f"0001-.*: {CODE} is .*, and not "):
            series.make_tree(self.tree, self.release, self.save())

    def checkout(self, code: str) -> Path:
        checkout = self.home / "checkout"
        write(checkout, {CODE: code, "torch/gone.py": "1\n", "theirs.py": ""})
        commit_all(checkout)
        return checkout

    def test_a_checkout_that_differs_elsewhere(self):
        checkout = self.checkout("new\n" * 3 + OLD.replace("line 25", "other"))
        series.commit_series(checkout, self.tree)
        subjects = git(checkout, "log", "--reverse", "--format=%s").splitlines()
        self.assertEqual(subjects[1:], [m.partition("\n")[0] for m in MESSAGES])
        code = (checkout / CODE).read_text()
        for line in ("new\n", "ours\n", "other\n", "=== z\n"):
            self.assertIn(line, code)

    def test_a_checkout_that_conflicts(self):
        checkout = self.checkout(OLD.replace("line 7", "theirs"))
        with self.assertRaisesRegex(ToolError, "(?s)git am .*onflict"):
            series.commit_series(checkout, self.tree)
        self.assertIn("<<<<<<<", (checkout / CODE).read_text())
        git(checkout, "am", "--abort")
        self.assertEqual(git(checkout, "status", "--porcelain"), "")

    @unittest.skipUnless(shutil.which("patch"), "needs patch")
    def test_an_installed_tree_by_patch(self):
        patches = series.write_patches(self.tree)
        site = self.home / "site"
        shutil.copytree(self.release, site)
        for options, files in (("", patches), ("--reverse", patches[::-1])):
            for file in files:
                run("patch", "-p1", "-s", *options.split(), "-d", site, "-i", file)
            is_ours = "ours\n" in (site / CODE).read_text()
            self.assertEqual(is_ours, not options)
        self.assertEqual((site / CODE).read_text(), OLD)


@unittest.skipUnless(RELEASE.is_dir(), f"needs `make setup RELEASE={NEWEST}`")
class TestOnRelease(ScratchTestCase):
    def test_what_is_stored_is_what_is_made_of_it(self):
        edits = series.stored_edits()
        series.make_tree(self.scratch / "tree", RELEASE, edits)
        self.assertEqual(series.edits_of(self.scratch / "tree"), edits)
        numstat = ("log", "--reverse", "--format=%x00", "--numstat", "release..")
        changes = git(self.scratch / "tree", *numstat, "--", "torch").split("\0")[1:]
        page = (REPOSITORY / "docs/series.md").read_text()
        for number, change in enumerate(changes, 1):
            rows = [line.split()[:2] for line in change.split("\n") if line]
            added, removed = (sum(map(int, column)) for column in zip(*rows))
            self.assertRegex(page, rf"(?m)^\| {number} \|.*\| {added}, {removed} \|")


OF_OLD = "class Group:\n    def wait(self, dim): pass\n    def _gone(self): pass\n"
OF_NEW = (
    "class Group:\n    def __init__(self): self.stream = 1; self.own = 2\n"
    "    def wait(self, dim, op): pass\nclass _Context: pass\n"
)
OF_OURS = "class Group:\n    def __init__(self): self.own = 1\n"


class TestContractDiff(ScratchTestCase):
    def test_what_is_gone_changed_new_and_lacking(self):
        sides = self.scratch / "1.0", self.scratch / "2.0"
        for side, theirs in zip(sides, (OF_OLD, OF_NEW)):
            for tree, group in {"base": theirs, "branch": OF_OURS}.items():
                files = {"__init__.py": "", "_fully_shard/__init__.py": ""}
                files |= {"_fully_shard/_group.py": group, "_fully_shard/user.py": "1"}
                write(side / tree / PACKAGE, files)
        files, *others = compare(*sides).values()
        self.assertRegex(" ".join(files), r"_group\.py\S* +\| +\d")
        self.assertNotIn("user.py", " ".join(files))
        changed, new, lacking = ({row.split("`")[1] for row in rows} for rows in others)
        self.assertEqual(changed, {"Group.wait(op)", "Group._gone"})
        self.assertEqual(
            new, {"_Context", *(f"Group.{n}" for n in ("__init__", "stream", "own"))}
        )
        # Not `Group.wait`, which ours lacked on OF_OLD, too
        self.assertEqual(lacking, {"Group.stream", "_Context"})


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
