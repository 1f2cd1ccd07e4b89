# Owner(s): ["oncall: distributed"]
"""What ``tools/contract_diff.py`` tells of two releases, each of a few lines."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import zipfile
from pathlib import Path

from tools import contract_diff
from torch.testing._internal.common_utils import run_tests, TestCase


OURS = """
import torch
import torch.distributed as dist
from .beside import Param
from torch.nn import Module

class Group:
    def __init__(self): self.own = 1
    def wait(self): dist.gather(torch.cat([])); Param().shard

lib.define("move(Tensor a, "
           "int b) -> ()")
"""
OLD = {
    "torch/__init__.py": "from torch.nn import *\n",
    "torch/_C/_VariableFunctions.pyi": "def cat(tensors: list, dim: int = 0): ...\n",
    "torch/nn/__init__.py": "from .modules import Module\n",
    "torch/nn/modules.py": "class Module: ...\n",
    "torch/distributed/__init__.py": "from .c10d import *\n",
    "torch/distributed/c10d.py": "def gather(out, group: int = None): pass\n",
    "torch/fsdp/beside.py": "class Param:\n"
    "    def shard(self, dim): pass\n"
    "    def other(self): pass\n",
    "torch/fsdp/group.py": "class Group:\n"
    "    def wait(self): pass\n"
    "    def _hidden(self, a): pass\n"
    'lib.define("move(Tensor a, int b) -> ()")\n',
    "torch/fsdp/user.py": "from .group import Group\nGroup().wait\n",
    "torch/elsewhere.py": "def wait(): pass\n",
}


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

    def sections(self, changes: dict[str, str]) -> dict[str, list[str]]:
        """Returns the lines below each title, for a new release with ``changes``."""
        ours = self.put("ours", {"torch/fsdp/group.py": OURS})
        old, new = self.put("old", OLD), self.put("new", OLD | changes)
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            status = contract_diff.main([str(old), str(new)], ours)
        self.assertEqual(status, 0)
        parts = stdout.getvalue().strip().split("\n\n")
        found = {part.splitlines()[0]: part.splitlines()[1:] for part in parts}
        self.assertEqual([*found], [*contract_diff.SECTIONS])
        return found

    def test_same_contract(self):
        annotated = "def gather(out: dict, group: str = None) -> int: pass\n"
        for changes in (
            {},
            {"torch/elsewhere.py": "def changed(): pass\n"},
            {"torch/distributed/c10d.py": annotated},
        ):
            for title, lines in self.sections(changes).items():
                self.assertEqual(lines, ["  none"], title)

    def test_sections(self):
        found = self.sections({"torch/fsdp/beside.py": "class Param: ...\n"})
        titles = [*contract_diff.SECTIONS]
        expected = ["  torch/fsdp/beside.py (beside ours): +1 -3"]
        self.assertEqual(found[titles[0]], expected)
        self.assertEqual(found[titles[1]], ["  - Param.shard is gone"])
        for title in titles[2:]:
            self.assertEqual(found[title], ["  none"])

    def lines_of(self, section, changes: dict[str, str]) -> list[str]:
        old, new = self.put("old", OLD), self.put("new", OLD | changes)
        contract = contract_diff.Contract(
            contract_diff.Release(old),
            contract_diff.Release(new),
            {"torch/fsdp/group.py": OURS},
        )
        return list(section(contract))

    def test_names_gone_and_changed(self):
        changes = {
            "torch/_C/_VariableFunctions.pyi": "def cat(tensors: tuple, dim=1): ...\n",
            "torch/nn/modules.py": "",
            "torch/distributed/c10d.py": "def gather(out: object): pass\n",
            "torch/fsdp/beside.py": "class Param:\n    def shard(self): pass\n",
        }
        expected = [
            "- torch.cat(tensors, dim=0)\n  + torch.cat(tensors, dim=1)",
            "- torch.distributed.gather(out, group=None)\n"
            "  + torch.distributed.gather(out)",
            "- torch.nn.Module is gone",
            "- Param.shard(self, dim)\n  + Param.shard(self)",
        ]
        self.assertEqual(self.lines_of(contract_diff.used_by_ours, changes), expected)

    def test_new_uses_and_whether_ours_serve_them(self):
        changes = {
            "torch/fsdp/group.py": "class Group:\n    own: int\n"
            "class Context:\n    def __init__(self): self.stream = self.b = 1\n",
            "torch/fsdp/user.py": "from .group import Context\nContext().stream.own\n",
        }
        where = "used in torch/fsdp/user.py"
        expected = [
            f"+ Context: OURS LACKS IT; {where}",
            f"+ Context.stream: OURS LACKS IT; {where}",
            f"+ Group.own: ours has it; {where}",
            "- Group: no longer used",
            "- Group.wait: no longer used",
        ]
        found = self.lines_of(contract_diff.used_by_torch, changes)
        self.assertEqual(found, expected)

    def test_public_signatures(self):
        changed = OLD["torch/fsdp/group.py"].replace("wait(self)", "wait(self, a, /)")
        changed = changed.replace("_hidden(self, a)", "_hidden(self)")
        changed += "def new(*, a=1): pass\n"
        expected = [
            "- Group.wait(self)\n  + Group.wait(self, a, /)",
            "+ new(*, a=1): OURS LACKS IT",
        ]
        found = self.lines_of(
            contract_diff.signatures, {"torch/fsdp/group.py": changed}
        )
        self.assertEqual(found, expected)

    def test_operators(self):
        laid_out = 'lib.define("""\n  move(\n  Tensor a, int b,\n  ) -> ()""")\n'
        changes = {"torch/fsdp/group.py": laid_out}
        self.assertEqual(self.lines_of(contract_diff.operators, changes), [])
        changes = {"torch/fsdp/beside.py": 'lib.define("copy(Tensor a) -> ()")\n'}
        expected = ["+ copy(Tensor a) -> (): ours does not register it"]
        self.assertEqual(self.lines_of(contract_diff.operators, changes), expected)
        changes = {"torch/fsdp/group.py": 'lib.define("move(Tensor a) -> ()")\n'}
        expected = [
            "+ move(Tensor a) -> (): ours does not register it",
            "- move(Tensor a, int b) -> (): ours registers it",
        ]
        self.assertEqual(self.lines_of(contract_diff.operators, changes), expected)

    def test_wheels_and_folders_are_read_alike(self):
        changes = {"torch/fsdp/beside.py": ""}
        old, new = self.put("old", OLD), self.scratch / "new.whl"
        with zipfile.ZipFile(new, "w") as archive:
            for path, text in (OLD | changes).items():
                archive.writestr(path, text)
        contract = contract_diff.Contract(
            contract_diff.Release(old),
            contract_diff.Release(new),
            {"torch/fsdp/group.py": OURS},
        )
        expected = ["torch/fsdp/beside.py (beside ours): +0 -3"]
        self.assertEqual(list(contract_diff.changed_files(contract)), expected)

    def test_errors_are_one_line(self):
        empty = self.put("empty", {"torch/nn.py": ""})
        for path, text in (
            (self.scratch / "none", "is neither a folder nor a wheel"),
            (empty, "does not hold torch/__init__.py"),
        ):
            stderr = io.StringIO()
            with contextlib.redirect_stderr(stderr):
                status = contract_diff.main([str(path), str(path)], empty)
            self.assertEqual((status, stderr.getvalue().count("\n")), (1, 1))
            self.assertTrue(stderr.getvalue().startswith("error: "))
            self.assertIn(text, stderr.getvalue())


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
