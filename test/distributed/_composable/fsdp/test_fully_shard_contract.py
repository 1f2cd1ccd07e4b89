# Owner(s): ["oncall: distributed"]
"""What ``tools/contract_diff.py`` tells of two releases, each of a few lines."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path

import pytest

import fsdp_build  # noqa: F401

from tools import contract_diff
from torch.testing._internal.common_utils import run_tests, TestCase


pytestmark = pytest.mark.tools

GROUP = "torch/fsdp/group.py"
OLD = {
    "torch/__init__.py": "",
    "torch/fsdp/beside.py": "class Param:\n    def shard(self, dim): pass\n",
    GROUP: "class Group:\n    def wait(self): pass\n    def _hidden(self, a): pass\n",
    "torch/user.py": "from torch.fsdp.group import Group\n",
    "torch/elsewhere.py": "def wait(): stream\n",
}
OURS = "class Group:\n    def __init__(self): self.own, self.wait = 1, 2\n"


class TestContractDiff(TestCase):
    def setUp(self) -> None:
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = Path(scratch.name) / "größe und mehr"

    def put(self, name: str, files: dict[str, str]) -> Path:
        for path, text in files.items():
            file = self.scratch / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return self.scratch / name

    def sections(
        self,
        changes: dict[str, str],
        ours: str = OURS,
        before: dict[str, str] | None = None,
    ) -> dict[str, list[str]]:
        """Returns the lines below each title, for a new release with ``changes``."""
        root = self.put("ours", {GROUP: ours})
        old = self.put("old", OLD | (before or {}))
        new = self.put("new", OLD | (before or {}) | changes)
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            status = contract_diff.main([str(old), str(new)], root)
        self.assertEqual(status, 0)
        parts = stdout.getvalue().strip().split("\n\n")
        found = {part.splitlines()[0]: part.splitlines()[1:] for part in parts}
        self.assertEqual([*found], [*contract_diff.SECTIONS])
        command, *files = found["Files"]
        folders = (old / "torch/fsdp", new / "torch/fsdp")
        for word in ("git diff --no-index --function-context", *map(str, folders)):
            self.assertIn(word, command)
        return found | {"Files": files}

    def test_nothing_changed(self):
        """Nor by annotations, comments, and in files of other folders."""
        changes = {
            GROUP: OLD[GROUP]
            .replace("(self)", "(self) -> None")
            .replace("a)", "a: C)"),
            "torch/elsewhere.py": "def other(): pass\n",
        }
        for changed in ({}, changes):
            found = self.sections(changed)
            self.assertEqual(found.pop("Definitions"), ["  none"])
            self.assertEqual(found.pop("Names that ours do not provide"), ["  none"])

    def test_files(self):
        files = self.sections({"torch/fsdp/beside.py": "", "torch/fsdp/new.py": "a\n"})
        text = "\n".join(files["Files"])
        self.assertRegex(text, r"beside\.py\S* +\| 2 --")
        self.assertRegex(text, r"new\.py\S* +\| 1 \+")
        self.assertNotIn("group.py", text)

    def test_definitions(self):
        changes = {
            "torch/fsdp/beside.py": "class Param:\n    def shard(self, dim=0): pass\n"
            "    @property\n    def grad(self): pass\n",
            GROUP: "class Group:\n    own: int = 1\n    def wait(self, a, /): pass\n"
            "    def __init__(self): self.stream = 1\n"
            "def wait(*, b=1): pass\nclass Context: pass\n",
            "torch/fsdp/new.py": "def made(): pass\n",
        }
        self.assertEqual(
            self.sections(changes)["Definitions"],
            [
                "  + Param.grad property: beside ours",
                "  - Param.shard(dim)",
                "    + Param.shard(dim=0)",
                "  + Context: OURS LACK IT",
                "  + Group.__init__(): ours have it",
                "  - Group._hidden is gone",
                "  + Group.own : int = 1: ours have it",
                "  + Group.stream: OURS LACK IT",
                "  - Group.wait()",
                "    + Group.wait(a, /)",
                "  + wait(*, b=1): OURS LACK IT",
                "  + made(): beside ours",
            ],
        )

    def test_property_that_lost_its_setter(self):
        beside = "torch/fsdp/beside.py"
        get = "class Param:\n    @property\n    def grad(self): return 1\n"
        both = get + "    @grad.setter\n    def grad(self, value): pass\n"
        found = self.sections({beside: get}, before={beside: both})["Definitions"]
        lines = ["  - Param.grad property writable", "    + Param.grad property"]
        self.assertEqual(found, lines)

    def test_names_that_ours_do_not_provide(self):
        """What others mention of a replaced file: by import, or of some object."""
        ours = "from .beside import Base\nclass Group(Base): pass\nclass Base:\n"
        ours += "    def wait(self): pass\n"
        group = (
            OLD[GROUP] + "    def lost(self): self.stream = 1\nclass Context: pass\n"
        )
        user = "from torch.fsdp.group import Group, Context\nGroup().wait().stream\n"
        found = self.sections({GROUP: group, "torch/user.py": user}, ours)
        self.assertEqual(
            found["Names that ours do not provide"],
            [
                "  Context: mentioned in torch/user.py",
                "  Group.stream: mentioned in torch/user.py",
            ],
        )

    def test_error_is_one_line(self):
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            status = contract_diff.main([str(self.scratch)] * 2, self.scratch)
        error = f"error: {self.scratch} does not hold torch/__init__.py\n"
        self.assertEqual((status, stderr.getvalue()), (1, error))


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
