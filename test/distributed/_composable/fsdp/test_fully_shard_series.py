# Owner(s): ["oncall: distributed"]
"""The series of edits for upstream: how an edit is made, and what a tree becomes.

Most of it is about a few small files.  ``make series`` makes the series itself on a tree
of the release that it is for, and runs at each change the tests that it brings.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest

from fsdp_build import REPOSITORY
from fsdp_build.utils import digest_of
from fsdp_common.utils import RELEASE_ROOT

from tools import apply_to_checkout
from tools.setup_helpers import tree, wheel
from tools.setup_helpers.report import SetupError
from tools.upstream import apply
from tools.upstream.edits import apply_edit, Change, Edit
from tools.upstream.series import RELEASE, SERIES
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)


pytestmark = pytest.mark.tools


# How many lines of source each change adds and removes at most
LIMITS = (40, 250, 300, 250)
GROUP = "torch/distributed/group.py"
OTHER = "torch/distributed/other.py"
ADDED = "torch/testing/größe/added.py"
ADDED_TEST = "test/distributed/test_added.py"
SOURCE = '''\
# Owner: nobody
import os
from sys import path


class Group:
    """Has parameters.

    They have one dtype.
    """

    size: int = 1  # of größe

    @property
    def dtype(self):
        return self.dtypes[0]

    def reduce(
        self,
        grads,  # one for each parameter
    ):
        # All have one dtype
        # as they must
        dtype = self.dtype

        total = "größe", sum(grad.to(self.dtype) for grad in grads)
        if self.size > 1:
            total = scale(total)
        elif self.size == 1:
            path.clear()
            total = (
                total
                / self.count
            )

        def hook(grads):
            dtype = self.dtype
            try:
                return f"{self.size + 2}"
            except ValueError:
                return 0

        if not grads: return None
        return total


def scale(x):
    return x
'''


def row(title: str, old: str, new: str, do, scope, anchor, code="", **options):
    edit = Edit(GROUP, scope, do, anchor, code, **options)
    return subtest((edit, old, new), name=title)


# How an edit is made: with it, the second is where the first was
EDITS = [
    row(
        "a statement before",
        "        if self.size > 1:\n",
        "        a = 1\n\n        b = 2\n        if self.size > 1:\n",
        "before",
        "Group.reduce",
        "if self.size > 1:",
        "a = 1\n\nb = 2\n",
    ),
    row(
        "a statement before one with a comment",
        "        # All have",
        "        a = 1\n        # All have",
        "before",
        "Group.reduce",
        "dtype = self.dtype",
        "a = 1",
    ),
    row(
        "a statement after one of several lines",
        "            )\n",
        "            )\n            if total:\n                a = 1\n",
        "after",
        "Group.reduce",
        "total = (",
        """
        if total:
            a = 1
        """,
    ),
    row(
        "a statement after a block",
        "            )\n",
        "            )\n\n        a = 1\n",
        "after",
        "Group.reduce",
        "if self.size > 1:",
        "\n\na = 1",
    ),
    row(
        "a field after another",
        "  # of größe\n",
        "  # of größe\n    width: int = 2\n",
        "after",
        "Group",
        "size: int = 1  # of größe",
        "width: int = 2",
    ),
    row(
        "an import of the module",
        "import os\n",
        "import os\nimport re\n",
        "after",
        "",
        "import os",
        "import re",
    ),
    row(
        "a statement replaced",
        "        dtype = self.dtype\n\n",
        "        dtype = widest(\n            self\n        )\n\n",
        "replace",
        "Group.reduce",
        "dtype = self.dtype",
        "dtype = widest(\n    self\n)",
    ),
    row(
        "a statement with its comment replaced",
        "        # All have one dtype\n        # as they must\n        dtype = self.dtype\n\n",
        "        # Any\n        dtype = None\n\n",
        "replace",
        "Group.reduce",
        "dtype = self.dtype",
        "# Any\ndtype = None",
        with_comment=True,
    ),
    row(
        "several statements removed",
        '        dtype = self.dtype\n\n        total = "größe", sum(grad.to(self.dtype) '
        "for grad in grads)\n",
        "",
        "remove",
        "Group.reduce",
        (
            "dtype = self.dtype",
            'total = "größe", sum(grad.to(self.dtype) for grad in grads)',
        ),
    ),
    row(
        "a function with its decorators removed",
        "    @property\n    def dtype(self):\n        return self.dtypes[0]\n\n",
        "",
        "remove",
        "Group",
        "def dtype(self):",
    ),
    row(
        "a statement of a nested function",
        "            dtype = self.dtype\n            try",
        "            dtype = None\n            try",
        "replace",
        "Group.reduce.hook",
        "dtype = self.dtype",
        "dtype = None",
    ),
    row(
        "a statement of a handler",
        "                return 0\n",
        "                return 1\n",
        "replace",
        "Group.reduce.hook",
        "return 0",
        "return 1",
    ),
    row(
        "a statement within another",
        "            path.clear()\n",
        "",
        "remove",
        "Group.reduce",
        "path.clear()",
        within="elif self.size == 1:",
    ),
    row(
        "an expression behind wide characters",
        "sum(grad.to(self.dtype) for",
        "sum(grad.to(widest(self)) for",
        "expression",
        "Group.reduce",
        "self.dtype",
        "\nwidest(self)\n",
        within='total = "größe", sum(grad.to(self.dtype) for grad in grads)',
    ),
    row(
        "an expression of several lines",
        "                total\n                / self.count\n",
        "                f(\n                    total\n                )\n",
        "expression",
        "Group.reduce",
        "total / self.count",
        "f(\n    total\n)",
    ),
    row(
        "an expression in another layout",
        "self.size > 1",
        "self.sizes",
        "expression",
        "Group.reduce",
        "(self . size>1)",
        "self.sizes",
    ),
    row(
        "a function replaced",
        "    @property\n    def dtype(self):\n        return self.dtypes[0]\n",
        "    def dtype(self):\n        '''Is\n\n        one.\n        '''\n",
        "function",
        "Group",
        "dtype",
        "def dtype(self):\n    '''Is\n\n    one.\n    '''\n",
    ),
    row(
        "a method added",
        "        return self.dtypes[0]\n",
        "        return self.dtypes[0]\n\n    @property\n    def width(self):\n        return 2\n",
        "new function",
        "Group",
        "dtype",
        "@property\ndef width(self):\n    return 2\n",
    ),
    row(
        "a function added to a module",
        "        return total\n",
        "        return total\n\n\ndef widest(x):\n    return x\n",
        "new function",
        "",
        "Group",
        "def widest(x):\n    return x\n",
    ),
    row(
        "a function added at the end",
        "    return x\n",
        "    return x\n\n\ndef widest(x):\n    return x\n",
        "new function",
        "",
        "scale",
        "def widest(x):\n    return x\n",
    ),
    row(
        "a function in two",
        "\n        def hook(grads):",
        "\n        return self.reduced(total)\n\n    def reduced(self, total):\n"
        "        def hook(grads):",
        "split",
        "Group.reduce",
        "def hook(grads):",
        "    return self.reduced(total)\n\ndef reduced(self, total):",
    ),
    row(
        "lines of a docstring",
        "    They have one dtype.\n",
        "    They have any dtypes.\n\n    So.\n",
        "lines",
        "Group",
        "They have one dtype.",
        "They have any dtypes.\n\nSo.",
    ),
    row(
        "lines before a line of a docstring",
        "    They have one dtype.\n",
        "    Or none.\n\n    They have one dtype.\n",
        "lines before",
        "Group",
        "They have one dtype.",
        "Or none.\n\n",
    ),
    row(
        "a parameter",
        "        grads,  # one for each parameter\n",
        "        grads,  # one for each parameter\n        key=None,\n",
        "lines after",
        "Group.reduce",
        "grads,  # one for each parameter",
        "key=None,",
    ),
    row(
        "a comment removed",
        "        # All have one dtype\n        # as they must\n",
        "",
        "lines",
        "Group.reduce",
        ("# All have one dtype", "# as they must"),
    ),
]


def bad(title: str, told: str, do, scope, anchor, code="a = 1", file=GROUP, **options):
    return subtest((Edit(file, scope, do, anchor, code, **options), told), name=title)


# What an edit is refused for
REFUSED = [
    bad("no file", "there is no such file", "after", "", "import os", file="torch/no.py"),
    bad("no class", "'Unit' is not there", "after", "Unit.reduce", "return total"),
    bad("no function", "'gather' is not there", "after", "Group.gather", "return total"),
    bad("no statement", "'x = 1' is not there", "replace", "Group.reduce", "x = 1"),
    bad("a part of a line", "'dtype =' is not there", "after", "Group.reduce", "dtype ="),
    bad(
        "a statement of a function within",
        "'return x' is not there",
        "after",
        "",
        "return x",
    ),
    bad(
        "a statement behind another on the line",
        "'return None' is not there",
        "after",
        "Group.reduce",
        "return None",
    ),
    bad(
        "no second statement",
        "'dtype = self.dtype', behind 'if self.size > 1:' is not there",
        "replace",
        "Group.reduce",
        ("if self.size > 1:", "dtype = self.dtype"),
    ),
    bad(
        "twice",
        "'self.size' is there 2 times, in lines 27, 29, and must be once",
        "expression",
        "Group.reduce",
        "self.size",
    ),
    bad("no expression", "'self.sizes' is not there", "expression", "Group", "self.sizes"),
    bad(
        "a part of an f-string",
        "'self.size + 2' is not there",
        "expression",
        "Group.reduce.hook",
        "self.size + 2",
    ),
    bad("no line", "'They' is not there", "lines", "Group", "They"),
    bad(
        "a line twice",
        "'dtype = self.dtype' is there 2 times, in lines 24, 37, and must be once",
        "lines",
        "Group",
        "dtype = self.dtype",
    ),
    bad("no Python", "line 25 would be no Python", "after", "Group.reduce", "dtype = self.dtype", "a ="),
    bad("return outside", "'return' outside function", "after", "", "import os", "return"),
    bad("no anchor that can be read", "invalid syntax", "expression", "Group.reduce", "a +"),
]  # fmt: skip


@instantiate_parametrized_tests
class TestEdits(TestCase):
    @parametrize("edit,old,new", EDITS)
    def test_edits_nothing_else(self, edit, old, new):
        self.assertEqual(SOURCE.count(old), 1)
        expected = SOURCE.replace(old, new)
        compile(expected, "", "exec")
        self.assertEqual(apply_edit(SOURCE, edit), expected)

    def test_finds_anchors_in_what_was_edited_before(self):
        first = Edit(GROUP, "scale", "before", "return x", "y = x")
        second = Edit(GROUP, "scale", "replace", ("y = x", "return x"), "return 2 * x")
        edited = apply_edit(apply_edit(SOURCE, first), second)
        self.assertEqual(edited, SOURCE.replace("return x", "return 2 * x"))

    def test_keeps_line_ends_that_are_not_its_own(self):
        source = "a = 1\r\nb = '\x0c'\r\nc = 3"
        edited = apply_edit(source, Edit(GROUP, "", "after", "b = '\x0c'", "d = 4"))
        self.assertEqual(edited, "a = 1\r\nb = '\x0c'\r\nd = 4\nc = 3")

    def test_statements_that_share_a_line(self):
        edit = Edit(GROUP, "", "remove", "a = 1; b = 2")
        with self.assertRaisesRegex(SetupError, "line 1 has more than the end of"):
            apply_edit("a = 1; b = 2\n", edit)


def change(*edits: Edit, title: str = "[FSDP2] Change", added=()) -> Change:
    return Change(title, f"Why {title}.\n\nTest plan:\n\n    none\n", edits, added)


SAMPLE = (
    change(
        Edit(GROUP, "Group.reduce", "remove", "dtype = self.dtype"),
        Edit(OTHER, "", "after", "import os", "import re"),
        title="[FSDP2] First",
        added=((ADDED, "LICENSE"), (ADDED_TEST, "Makefile")),
    ),
    change(
        Edit(GROUP, "scale", "replace", "return x", "return 2 * x"),
        Edit(OTHER, "", "remove", "import re"),
        title="[FSDP2] Second",
        added=((ADDED_TEST, "LICENSE"),),
    ),
)
RECORD = "torch-2.15.0+vendor.dist-info/RECORD"


class TreeTestCase(TestCase):
    """A tree of a few files, which ``SAMPLE`` fits."""

    def setUp(self) -> None:
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.tree = Path(scratch.name).resolve() / "a tree of größe"
        self.series = SAMPLE
        self.put(GROUP, SOURCE)
        self.put(OTHER, "import os\r\n")
        (self.tree / OTHER).chmod(0o755)

    def put(self, path: str, text: str) -> None:
        (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
        (self.tree / path).write_bytes(text.encode())

    def apply(self, *options: str) -> tuple[int, str, str]:
        stdout, stderr = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
            mock.patch.object(apply_to_checkout, "SERIES", self.series),
        ):
            arguments = ["--series", *options, str(self.tree)]
            status = apply_to_checkout.main(arguments, REPOSITORY)
        return status, stdout.getvalue(), stderr.getvalue()

    def assert_done(self, *options: str) -> str:
        status, stdout, stderr = self.apply(*options)
        self.assertEqual((status, stderr), (0, ""))
        return stdout

    def assert_refused(self, told: str, *options: str) -> None:
        before = self.state()
        for more in ((), ("--check",)):
            status, stdout, stderr = self.apply(*options, *more)
            self.assertEqual((status, stdout), (1, ""))
            self.assertEqual(stderr.count("\n"), 1)
            self.assertIn(told, stderr)
            self.assertEqual(self.state(), before)

    def state(self) -> dict[str, object]:
        """Returns what is in the tree: modes and digests, without git's own."""
        return {
            path.relative_to(self.tree).as_posix(): (
                path.stat().st_mode,
                hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            )
            for path in self.tree.rglob("*")
            if ".git" not in path.parts
        }

    def text(self, path: str) -> str:
        return (self.tree / path).read_bytes().decode()


@instantiate_parametrized_tests
class TestRefusals(TreeTestCase):
    """Of all edits of all changes, one does not fit: nothing is written."""

    @parametrize("edit,told", REFUSED)
    def test_names_change_edit_file_and_scope(self, edit, told):
        good = Edit(GROUP, "scale", "before", "return x", "y = x")
        first = change(Edit(OTHER, "", "after", "import os", "import re"))
        self.series = (first, change(good, edit, title="[FSDP2] Second"))
        where = f"{edit.file}, in {edit.scope or 'the module'}"
        self.assert_refused(f"error: [FSDP2] Second: edit 2 ({edit.do}) of {where}: ")
        self.assert_refused(told)
        self.assert_done("--upto", "1")

    def test_a_file_that_is_no_python(self):
        self.put(OTHER, "import os\nimport\n")
        self.assert_refused(f"edit 2 (after) of {OTHER}, in the module: invalid syntax")
        (self.tree / OTHER).write_bytes(b"import os # \xff\n")
        self.assert_refused(f"edit 2 (after) of {OTHER}, in the module: 'utf-8' codec")

    def test_a_file_to_add_that_is_there(self):
        self.put(ADDED, "theirs\n")
        self.assert_refused(f"[FSDP2] First: {ADDED} is there already")

    @parametrize("place", [OTHER, "torch/distributed"])
    def test_links(self, place):
        elsewhere = self.tree.parent / "elsewhere"
        (self.tree / place).rename(elsewhere)
        (self.tree / place).symlink_to(elsewhere)
        self.assert_refused("would go through a link")

    def test_no_torch(self):
        shutil.rmtree(self.tree / "torch")
        self.assert_refused("has no folder torch/")

    @parametrize("number", ["0", "3", "-1"])
    def test_a_number_of_changes_that_there_is_not(self, number):
        self.assert_refused(
            f"--upto {number}: the series has 2 changes", "--upto", number
        )


@instantiate_parametrized_tests
class TestInPlace(TreeTestCase):
    def setUp(self) -> None:
        super().setUp()
        rows = [f"{p},sha256={digest_of(self.text(p))},9" for p in (GROUP, OTHER)]
        others = ["torch/no.py,,", f"{RECORD},,"]
        self.put(RECORD, "\r\n".join([*rows, *others, ""]))
        self.before = self.state()

    def test_check_only_says_whether_it_fits(self):
        self.assertIn("2 changes fit\n", self.assert_done("--check"))
        self.assertEqual(self.state(), self.before)

    def test_makes_all_changes_and_takes_them_back(self):
        told = self.assert_done()
        self.assertIn("2 changes in place", told)
        self.assertIn("1   3 files  [FSDP2] First\n", told)
        expected = SOURCE.replace("        dtype = self.dtype\n\n", "\n", 1)
        self.assertEqual(self.text(GROUP), expected.replace("return x", "return 2 * x"))
        self.assertEqual(self.text(OTHER), "import os\r\n")
        self.assertEqual(self.text(ADDED), (REPOSITORY / "LICENSE").read_text())
        made = self.state()
        told = self.assert_done("--undo", "--check")
        self.assertIn("4 files would be as they were", told)
        self.assertEqual(self.state(), made)
        self.assertIn("4 files are as they were", self.assert_done("--undo"))
        self.assertEqual(self.state(), self.before)

    def test_twice_is_once(self):
        self.assert_done()
        once = self.state()
        self.assert_done()
        self.assertEqual(self.state(), once)
        for _ in range(2):
            self.assert_done("--undo")
            self.assertEqual(self.state(), self.before)

    def test_more_and_fewer_changes(self):
        self.assert_done()
        all_changes = self.state()
        self.assert_done("--upto", "1")
        self.assertEqual(self.text(OTHER), "import os\r\nimport re\n")
        self.assertIn("return x", self.text(GROUP))
        self.assert_record_is_true()
        self.assert_done("--upto", "2")
        contents = {p: s for p, s in self.state().items() if p != apply.JOURNAL}
        self.assertEqual(contents | all_changes, all_changes | contents)
        self.assert_done("--undo")
        self.assertEqual(self.state(), self.before)

    def test_what_is_installed_gets_no_tests(self):
        self.put("test/theirs.py", "")
        self.assert_done()
        self.assertFalse((self.tree / ADDED_TEST).exists())
        self.assert_done("--undo")
        self.put("test/distributed/theirs.py", "")
        before = self.state()
        self.assert_done()
        self.assertTrue((self.tree / ADDED_TEST).exists())
        self.assert_done("--undo")
        self.assertEqual(self.state(), before)

    def test_bytecode_of_added_files_goes(self):
        self.assert_done()
        self.put(f"{Path(ADDED).parent}/__pycache__/added.pyc", "")
        self.assert_done("--undo")
        self.assertEqual(self.state(), self.before)

    def assert_record_is_true(self) -> None:
        rows = wheel.parse_record(self.text(RECORD))
        for path in rows.keys() - {RECORD, apply.JOURNAL, "torch/no.py"}:
            data = (self.tree / path).read_bytes()
            self.assertEqual(rows[path][0], f"sha256={digest_of(data.decode())}", path)
        self.assertEqual([*rows][:4], [GROUP, OTHER, "torch/no.py", RECORD])
        self.assertEqual({*[*rows][4:]}, {apply.JOURNAL, ADDED})
        self.assertEqual(self.text(RECORD).count("\r\n"), len(rows))

    def test_record_stays_true(self):
        for options in (("--upto", "1"), ()):
            self.assert_done(*options)
            self.assert_record_is_true()
            rows = wheel.parse_record(self.text(RECORD))
            self.assertEqual(rows[GROUP][1], str((self.tree / GROUP).stat().st_size))
        self.assertEqual(rows[OTHER][1], "9")  # as it was, since the file is

    def test_without_a_record(self):
        shutil.rmtree((self.tree / RECORD).parent)
        before = self.state()
        self.assert_done()
        self.assert_done("--undo")
        self.assertEqual(self.state(), before)

    def test_what_was_changed_by_hand_elsewhere_stays(self):
        self.put(GROUP, SOURCE.replace("total = scale(total)", "total = theirs(total)"))
        before = self.state()
        self.assert_done()
        self.assertIn("total = theirs(total)", self.text(GROUP))
        self.assertIn("return 2 * x", self.text(GROUP))
        self.assert_done("--undo")
        self.assertEqual(self.state(), before)

    def test_what_was_changed_by_hand_in_an_anchor(self):
        self.put(GROUP, SOURCE.replace("    return x\n", "    return +x\n"))
        self.assert_refused(
            "[FSDP2] Second: edit 1 (replace) of torch/distributed/group"
        )

    def test_what_was_changed_by_hand_since(self):
        self.assert_done()
        edited = self.text(GROUP)
        self.put(GROUP, edited + "# more\n")
        self.assert_refused("group.py was changed after the series was applied")
        self.assert_refused("group.py was changed after the series", "--undo")
        self.put(GROUP, edited)
        self.assert_done("--undo")
        self.assertEqual(self.state(), self.before)

    def run_killed(self, number: int, *options: str) -> bool:
        """Returns whether a run that ends at its write of this number came to its end."""
        left = iter(range(number))

        def until_killed(real):
            def call(*args, **kwargs):
                # The next one fails as well: what is being written stays
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return real(*args, **kwargs)

            return call

        with (
            mock.patch("os.replace", until_killed(os.replace)),
            mock.patch.object(Path, "unlink", until_killed(Path.unlink)),
            contextlib.suppress(KeyboardInterrupt),
        ):
            self.assert_done(*options)
            return True
        return False

    @parametrize("made_before", [False, True])
    def test_killed_at_any_write(self, made_before: bool):
        """Whatever is done by then, it can be finished, and it can be undone."""
        for number in itertools.count():
            for options in ((), ("--undo",)):
                if made_before:
                    self.assert_done("--upto", "1")
                is_at_end = self.run_killed(number)
                self.assert_done(*options)
                if not options:
                    self.assertIn("return 2 * x", self.text(GROUP))
                    self.assert_record_is_true()
                    self.assert_done("--undo")
                self.assertEqual(self.state(), self.before)
            if is_at_end:
                break
        self.assertGreater(number, 3)

    def test_killed_at_any_write_of_undo(self):
        for number in itertools.count():
            self.assert_done()
            is_at_end = self.run_killed(number, "--undo")
            self.assert_done("--undo")
            self.assertEqual(self.state(), self.before)
            if is_at_end:
                break
        self.assertGreater(number, 3)


def make_git(folder: Path, *paths: str) -> None:
    git(folder, "init", "--quiet")
    git(folder, "config", "user.name", "Größe")
    git(folder, "config", "user.email", "tester@example.com")
    git(folder, "add", "--", *(paths or ["."]))
    git(folder, "commit", "--quiet", "--message", "release")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class TestCheckout(TreeTestCase):
    def setUp(self) -> None:
        super().setUp()
        make_git(self.tree)

    def test_one_commit_for_each_change(self):
        before = self.state()
        self.assertIn(f"2 changes on branch {apply.BRANCH}\n", self.assert_done())
        messages = git(self.tree, "log", "--reverse", "--format=%B%x00").split("\0\n")
        expected = ["release\n"]
        expected += [f"{c.title}\n\n{c.message.strip()}\n" for c in SAMPLE]
        self.assertEqual(messages, [*expected, ""])
        self.assertEqual(git(self.tree, "status", "--short"), "")
        self.assertTrue(os.access(self.tree / OTHER, os.X_OK))
        authors = git(self.tree, "log", "--format=%an <%ae>").splitlines()
        self.assertEqual({*authors}, {"Größe <tester@example.com>"})
        self.assertEqual(self.text(ADDED_TEST), (REPOSITORY / "LICENSE").read_text())
        git(self.tree, "checkout", "--quiet", "HEAD~1")
        self.assertEqual(self.text(OTHER), "import os\r\nimport re\n")
        git(self.tree, "checkout", "--quiet", "HEAD~1")
        self.assertEqual(
            {p: s for p, s in self.state().items() if s[1]},
            {p: s for p, s in before.items() if s[1]},
        )

    def test_commits_of_the_first_changes(self):
        self.assert_done("--upto", "1")
        titles = git(self.tree, "log", "--format=%s").splitlines()
        self.assertEqual(titles, ["[FSDP2] First", "release"])

    def test_check_makes_no_branch(self):
        self.assert_done("--check")
        self.assertNotIn(apply.BRANCH, git(self.tree, "branch"))

    def test_an_anchor_that_is_not_there(self):
        more = change(Edit(GROUP, "scale", "remove", "return x"), title="[FSDP2] Third")
        self.series = (*SAMPLE, more)
        self.assert_refused(f"[FSDP2] Third: edit 1 (remove) of {GROUP}, in scale: ")
        self.assertNotIn(apply.BRANCH, git(self.tree, "branch"))

    def test_changes_that_are_not_committed(self):
        self.put("torch/theirs.py", "")
        self.assert_done("--check")
        git(self.tree, "add", "--all")
        self.assert_refused("has changes that are not committed")

    def test_twice(self):
        self.assert_done()
        self.assert_refused(f"has a branch {apply.BRANCH}")
        git(self.tree, "switch", "--quiet", "-")
        self.assert_refused(f"has a branch {apply.BRANCH}")

    def test_undo(self):
        self.assert_done()
        self.assert_refused("is a git checkout: remove its branch", "--undo")

    def test_nobody_to_commit(self):
        git(self.tree, "config", "user.name", "")
        nowhere = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
        before = git(self.tree, "branch")
        with mock.patch.dict(os.environ, nowhere):
            status, _, stderr = self.apply()
        self.assertEqual(status, 1)
        self.assertIn("error: git cannot tell who commits", stderr)
        self.assertEqual(git(self.tree, "branch"), before)
        self.assertEqual(git(self.tree, "status", "--short"), "")


EDITED = {edit.file for change in SERIES for edit in change.edits}
needs_release = unittest.skipIf(
    wheel.unpacked_version(RELEASE_ROOT).partition("+")[0] != RELEASE,
    "needs the release that the series is for",
)


def make_checkout(checkout: Path) -> None:
    """
    Makes a git tree that is shaped like upstream's, of the release, and can be run: the
    files that the series edits, and links to all others.
    """
    links = tree.plan_links(RELEASE_ROOT, RELEASE_ROOT, EDITED)
    tree.lay_links(checkout, {p: links[p] for p in links.keys() - EDITED})
    for path in EDITED:
        (checkout / path).write_bytes((RELEASE_ROOT / path).read_bytes())
    (checkout / ".gitignore").write_text("__pycache__\n")
    # Where the branch's own tests look for the release
    (checkout.parent / "base").symlink_to(RELEASE_ROOT)
    make_git(checkout, ".gitignore", *EDITED)


@needs_release
@instantiate_parametrized_tests
class TestOnRelease(TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        scratch = Path(folder.name).resolve()
        cls.checkout, cls.bytecode = scratch / "checkout", scratch / "bytecode"
        make_checkout(cls.checkout)
        with contextlib.redirect_stdout(io.StringIO()):
            cls.status = apply_to_checkout.main(["--series", str(cls.checkout)])
        log = git(cls.checkout, "log", "--reverse", "--format=%H")
        cls.commits = log.split()[1:]

    def lines_of(self, number: int, folder: str) -> tuple[int, int]:
        """Returns how many lines a change adds to a folder, and removes from it."""
        commit = self.commits[number]
        asked = ("diff", "--numstat", f"{commit}~1", commit, "--", folder)
        rows = [row.split("\t") for row in git(self.checkout, *asked).splitlines()]
        return sum(int(row[0]) for row in rows), sum(int(row[1]) for row in rows)

    def test_each_change_is_small(self):
        self.assertEqual((self.status, len(self.commits)), (0, len(SERIES)))
        print()
        for number, (change, limit) in enumerate(zip(SERIES, LIMITS, strict=True)):
            more, fewer = self.lines_of(number, "torch")
            tests, _ = self.lines_of(number, "test")
            told = f"{number + 1}  +{more} / -{fewer}, tests +{tests}"
            print(f"  {told:28}  {change.title}")
            self.assertLessEqual(more + fewer, limit, change.title)

    def test_messages_say_why_what_and_how_it_was_tested(self):
        for change in SERIES:
            self.assertRegex(change.title, r"^\[FSDP2\] [A-Z].{,60}$")
            for word in ("\nTest plan:", "\nHost time:"):
                self.assertIn(word, change.message, change.title)
            for line in change.message.splitlines():
                is_command = line.startswith("    ")
                self.assertTrue(is_command or len(line) <= 88, line)

    def test_what_is_stored_of_the_release_is_anchors_of_a_line(self):
        for edit in (edit for change in SERIES for edit in change.edits):
            for anchor in (edit.within, *edit.anchor):
                self.assertNotIn("\n", anchor)
            theirs = self.runs_of_lines((RELEASE_ROOT / edit.file).read_text())
            self.assertEqual(self.runs_of_lines(edit.code) & theirs, set(), edit.scope)

    def runs_of_lines(self, text: str, numel: int = 5) -> set[tuple[str, ...]]:
        lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
        return {(*lines[i : i + numel],) for i in range(len(lines) - numel + 1)}

    @parametrize("number", [*range(len(SERIES))])
    def test_passes_what_it_brings(self, number):
        git(self.checkout, "checkout", "--quiet", self.commits[number])
        tests = [path for path, _ in SERIES[number].files if "/test_" in path]
        self.assertGreater(len(tests), 0)
        ours = {
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": str(self.checkout),
            "PYTHONPYCACHEPREFIX": str(self.bytecode),
        }
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *tests],
            cwd=self.checkout,
            env={**os.environ, **ours},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stdout)
        print(f"\n  {number + 1}  {done.stdout.splitlines()[-1]}")


@needs_release
class TestOnReleaseInPlace(TreeTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.series = SERIES
        shutil.rmtree(self.tree)
        record = f"{next(RELEASE_ROOT.glob('torch-*.dist-info')).name}/RECORD"
        for path in (*EDITED, record):
            self.put(path, (RELEASE_ROOT / path).read_bytes().decode())
        self.before = self.state()

    def test_undone_byte_for_byte(self):
        for number in range(1, len(SERIES) + 1):
            self.assert_done("--upto", str(number))
            self.assertNotEqual(self.state(), self.before)
        self.assert_done("--undo")
        self.assertEqual(self.state(), self.before)

    def test_files_changed_by_hand_elsewhere(self):
        for path in EDITED:
            more = "\n\ndef _theirs():\n    return None\n"
            self.put(path, f"# theirs\n{self.text(path)}{more}")
        before = self.state()
        self.assert_done()
        for path in EDITED:
            self.assertTrue(self.text(path).startswith("# theirs\n"))
        self.assert_done("--undo")
        self.assertEqual(self.state(), before)

    def test_a_file_changed_by_hand_in_an_anchor(self):
        for change in SERIES:
            edit = next(e for e in change.edits if e.do in ("replace", "remove"))
            anchor = edit.anchor if isinstance(edit.anchor, str) else edit.anchor[0]
            text = self.text(edit.file)
            if anchor not in text:
                continue  # of an earlier change
            self.put(edit.file, text.replace(anchor, f"{anchor}  # theirs"))
            self.assert_refused(
                f"{edit.file}, in {edit.scope}: {anchor!r} is not there"
            )
            self.put(edit.file, text)


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
