# Owner(s): ["oncall: distributed"]
"""What ``tools/contract_diff.py`` tells of two releases, each of a few lines."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path

import pytest

from fsdp_build.utils import write

from tools import contract_diff
from torch.testing._internal.common_utils import run_tests, TestCase


pytestmark = pytest.mark.tools

GROUP, USER = "_fully_shard/_group.py", "_fully_shard/user.py"
OLD = "class Group:\n    def wait(self, dim): pass\n    def _gone(self): pass\n"
NEW = (
    "class Group:\n    def __init__(self): self.stream = 1; self.own = 2\n"
    "    def wait(self, dim, op): pass\nclass _Context: pass\n"
)
OURS = "class Group:\n    def __init__(self): self.own = 1\n"


class TestContractDiff(TestCase):
    def test_what_is_gone_changed_new_and_lacking(self):
        with tempfile.TemporaryDirectory() as folder:
            build = Path(folder) / "größe und mehr"
            for release, theirs in {"1.0": OLD, "2.0": NEW}.items():
                for tree, group in {"base": theirs, "branch": OURS}.items():
                    root = build / release / tree / contract_diff.PACKAGE
                    files = {"__init__.py": "", "_fully_shard/__init__.py": ""}
                    write(root, files | {GROUP: group, USER: "user = 1"})
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                contract_diff.main(["1.0", "2.0"], build)
            with (
                contextlib.redirect_stderr(printed),
                self.assertRaises(SystemExit),
            ):
                contract_diff.main(["1.0", "3.0"], build)
        files, *sections, error = printed.getvalue().split("\n\n")
        self.assertIn("make setup RELEASE=3.0", error)
        self.assertRegex(files, r"_group\.py\S* +\| +\d")
        self.assertNotIn("user.py", files)
        found = {title: rows for title, *rows in map(str.splitlines, sections)}
        self.assertEqual(
            found["Gone or changed"],
            [
                "  _group - `Group.wait(op)`: *Parameter was added as required*",
                "  _group - `Group._gone`: *Public object was removed*",
            ],
        )

        def names(title: str) -> set[str]:
            return {row.split("`")[1] for row in found[title]}

        new = {"Group.__init__", "Group.stream", "Group.own", "_Context"}
        self.assertEqual(names("New"), new)
        # Not `Group.wait`, which ours lacked on OLD, too
        self.assertEqual(names("Lacking in ours"), {"Group.stream", "_Context"})


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
