# Owner(s): ["oncall: distributed"]
"""What ``tools/contract_diff.py`` tells of two releases, each of a few lines."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from tools import contract_diff, contract_sources
from tools.contract_sources import Release
from torch.testing._internal.common_utils import run_tests, TestCase


pytestmark = pytest.mark.tools


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
        expected = [
            "  torch/fsdp/beside.py (beside ours): +1 -3",
            "    gone, Param: other, shard",
        ]
        self.assertEqual(found.pop(titles[0]), expected)
        used = found.pop("Names that ours use of the base")
        self.assertEqual(used, ["  - Param.shard is gone"])
        gone = ["  - Param.shard is gone", "  - Param.other is gone"]
        self.assertEqual(found.pop("Public names"), sorted(gone))
        for title, lines in found.items():
            self.assertEqual(lines, ["  none"], title)

    def contract(
        self,
        changes: dict[str, str],
        ours: str = OURS,
        before: dict[str, str] | None = None,
    ) -> contract_diff.Contract:
        """Returns the one where the old release has ``before``, the new ``changes``."""
        old = self.put("old", OLD | (before or {}))
        new = self.put("new", OLD | (before or {}) | changes)
        return contract_diff.Contract(
            Release(old), Release(new), {"torch/fsdp/group.py": ours}
        )

    def lines_of(self, section, changes: dict[str, str], **others) -> list[str]:
        return list(section(self.contract(changes, **others)))

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

    def test_what_changed_in_a_file(self):
        before = {
            "torch/fsdp/beside.py": "class Param:\n"
            "    def code(self): return 1\n"
            "    def types(self, a: int): return a\n"
            "    def pages(self):\n        'One.'\n        return 1\n"
            "    def gone(self): pass\n"
        }
        changes = {
            "torch/fsdp/beside.py": "class Param:\n"
            "    def code(self): return 2  # a comment\n"
            "    def types(self, a: float): return a  # another\n"
            "    def pages(self):\n        'Two.'\n        return 1\n"
            "    def come(self): self.inner = 1\n"
        }
        expected = [
            "torch/fsdp/beside.py (beside ours): +4 -4",
            "  new, Param: come, inner",
            "  gone, Param: gone",
            "  other code, Param: code",
            "  other types, Param: types",
            "  other documentation, Param: pages",
        ]
        found = self.lines_of(contract_diff.changed_files, changes, before=before)
        self.assertEqual(found, expected)

    def test_what_a_function_touches(self):
        before = {
            "torch/fsdp/group.py": "class Group:\n"
            "    def end(self):\n        self.events.clear()\n        drop(self.kept, len(a))\n"
            "    def same(self): self.events\n"
        }
        changes = {
            "torch/fsdp/group.py": "class Group:\n"
            "    def end(self):\n        take(self.kept)\n"
            "    def same(self): self.events\n"
        }
        found = self.lines_of(contract_diff.touched, changes, before=before)
        self.assertEqual(found, ["Group.end: +take -drop -events"])

    def test_a_property_that_lost_its_setter(self):
        settable = (
            "class Param:\n    @property\n    def grad(self): return 1\n"
            "    @grad.setter\n    def grad(self, value): pass\n"
        )
        fixed = "class Param:\n    @property\n    def grad(self): return 1\n"
        attribute = "class Param:\n    def __init__(self): self.grad = None\n"
        sets = "from .beside import Param\ndef clear(p): p.grad = None\n"
        reads = "from .beside import Param\ndef clear(p): return p.grad\n"
        without = "\n  + Param.grad [property without a setter]"
        for old, kind in (
            (settable, "property with a setter"),
            (attribute, "attribute"),
        ):
            for ours, mark in ((sets, ": OURS SETS IT"), (reads, "")):
                found = self.lines_of(
                    contract_diff.used_by_ours,
                    {"torch/fsdp/beside.py": fixed},
                    before={"torch/fsdp/beside.py": old},
                    ours=ours,
                )
                self.assertEqual(found, [f"- Param.grad [{kind}]{without}{mark}"])

    def test_new_uses_and_whether_ours_serve_them(self):
        changes = {
            "torch/fsdp/group.py": "class Group:\n    own: int\n"
            "class Context:\n    def __init__(self): self.stream = self.b = 1\n",
            "torch/fsdp/user.py": "from .group import Context\nContext().stream.own\n",
        }
        where = "used in torch/fsdp/user.py"
        expected = [
            f"+ Group.own: ours has it; {where}",
            f"+ Context.stream: OURS LACKS IT; {where}",
            f"+ Context: OURS LACKS IT; {where}",
            "- Group: no longer used",
            "- Group.wait: no longer used",
        ]
        found = self.lines_of(contract_diff.used_by_torch, changes)
        self.assertEqual(sorted(found), sorted(expected))

    def test_a_name_is_used_although_the_user_has_one_of_that_name(self):
        """As ``FSDPState.finalize_backward``, which calls the group's own."""
        user = "from .group import Group\n"
        changes = {
            "torch/fsdp/user.py": f"{user}class State:\n"
            "    def wait(self, group: Group): group.wait()\n"
        }
        self.assertEqual(self.lines_of(contract_diff.used_by_torch, changes), [])
        held = changes["torch/fsdp/user.py"].replace(
            "group.wait()", "self.group.wait()"
        )
        changes = {"torch/fsdp/user.py": held}
        self.assertEqual(self.lines_of(contract_diff.used_by_torch, changes), [])
        # What a class finds in itself is no use of another's
        changes = {
            "torch/fsdp/user.py": f"{user}class State:\n"
            "    def wait(self): pass\n    def all(self): self.wait()\n"
        }
        found = self.lines_of(contract_diff.used_by_torch, changes)
        self.assertEqual(found, ["- Group.wait: no longer used"])

    def test_a_name_that_is_used_as_before_but_moved_into_another_class(self):
        group = "class Group:\n    pass\nclass Context:\n    def wait(self): pass\n"
        found = self.lines_of(
            contract_diff.used_by_torch, {"torch/fsdp/group.py": group}
        )
        expected = "+ Context.wait: OURS LACKS IT; used in torch/fsdp/user.py"
        self.assertEqual(found, [expected])

    def test_a_function_is_not_meant_by_an_attribute(self):
        changes = {
            "torch/fsdp/group.py": OLD["torch/fsdp/group.py"] + "def wait(): pass\n"
        }
        self.assertEqual(self.lines_of(contract_diff.used_by_torch, changes), [])

    def test_ours_have_what_their_bases_and_imports_have(self):
        ours = (
            "from .beside import Context\n"
            "class Kept:\n    def end(self): pass\n"
            "class Group(Kept):\n    def wait(self): pass\n"
        )
        changes = {
            "torch/fsdp/group.py": "class Context: ...\n"
            "class Group:\n    def end(self): pass\n    def wait(self): pass\n",
            "torch/fsdp/user.py": "from .group import Context, Group\n"
            "Group().wait, Group().end\n",
        }
        where = "ours has it; used in torch/fsdp/user.py"
        found = self.lines_of(contract_diff.used_by_torch, changes, ours=ours)
        self.assertEqual(found, [f"+ Group.end: {where}", f"+ Context: {where}"])

    def test_what_the_replaced_files_newly_use(self):
        before = {"torch/nn/__init__.py": "def old(): pass\ndef new(): pass\n"}
        beside = OLD["torch/fsdp/beside.py"] + "    def free(self): pass\n"
        group = (
            "import functools\nimport torch.nn\nfrom torch.nn import new\n"
            "class Group:\n    def __init__(self): self.inner = 1\n"
            "    def step(self, p):\n"
            "        functools.reduce(new, torch.nn.old).inside\n"
            "        torch.nn.old(p).returned\n"
            "        p.free(), p._asked, getattr(p, '_by_name'), p.inner\n"
            "        {}.items(), p.other()\n"
        )
        changes = {"torch/fsdp/beside.py": beside, "torch/fsdp/group.py": group}
        ours = "def other(p): p._asked\n"
        used = "used in Group.step"
        expected = [
            f"+ torch.nn.new: OURS DO NOT USE IT; {used}",
            f"+ torch.nn.old: OURS DO NOT USE IT; {used}",
            f"+ …._asked: ours use it in other; {used}",
            f"+ …._by_name: OURS DO NOT USE IT; {used}",
            f"+ Param.free: OURS DO NOT USE IT; {used}",
            f"+ ….inside: OURS DO NOT USE IT; {used}",
            f"+ Param.other: OURS DO NOT USE IT; {used}",
            f"+ ….returned: OURS DO NOT USE IT; {used}",
        ]
        found = self.lines_of(contract_diff.duties, changes, before=before, ours=ours)
        # The module itself is one of them
        found.remove("+ torch.nn: OURS DO NOT USE IT; used in Group.step")
        self.assertEqual(found, expected)

    def test_what_the_replaced_files_no_longer_use_and_ours_do(self):
        before = {
            "torch/fsdp/group.py": "def f(p): p.shard(), p.other()\n",
        }
        changes = {"torch/fsdp/group.py": ""}
        for use in ("p.shard()", "getattr(p, 'shard')", "attrgetter('a.shard')(p)"):
            found = self.lines_of(
                contract_diff.duties, changes, before=before, ours=f"def g(p): {use}\n"
            )
            expected = ["- Param.shard: no longer used; ours use it in g"]
            self.assertEqual(found, expected, use)

    def test_methods_beside_ours_that_have_other_code(self):
        beside = OLD["torch/fsdp/beside.py"] + "    def unused(self): pass\n"
        before = {
            "torch/fsdp/beside.py": beside,
            "torch/fsdp/group.py": "def f(p): p.shard(), p.other()\n",
        }
        changes = {"torch/fsdp/beside.py": beside.replace("pass", "return 1")}
        ours = "def g(p): p.shard()\n"
        expected = [
            "Param.other: OURS DO NOT USE IT; used in f",
            "Param.shard: ours use it in g; used in f",
        ]
        found = self.lines_of(
            contract_diff.other_code, changes, before=before, ours=ours
        )
        self.assertEqual(found, expected)

    def test_what_the_files_beside_newly_use_of_objects(self):
        beside = OLD["torch/fsdp/beside.py"]
        beside += "    def new(self, t): t._flag, t.own, t.other, self.shard\n"
        found = self.lines_of(
            contract_diff.used_beside, {"torch/fsdp/beside.py": beside}
        )
        expected = ["+ …._flag: used in Param.new", "+ ….own: used in Param.new"]
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
            contract_diff.public_names, {"torch/fsdp/group.py": changed}
        )
        self.assertEqual(found, expected)
        method, mark = "    def wait", "    @staticmethod\n"
        changed = OLD["torch/fsdp/group.py"].replace(method, mark + method)
        found = self.lines_of(
            contract_diff.public_names, {"torch/fsdp/group.py": changed}
        )
        expected = "- Group.wait(self)\n  + Group.wait(self) [staticmethod]"
        self.assertEqual(found, [expected])

    def test_public_names_beside_ours(self):
        changed = OLD["torch/fsdp/beside.py"] + (
            "    def end(self, *, wait=False): pass\n"
            "    @property\n    def size(self): return 1\n"
            "    def _hidden(self): self.attribute = 1\n"
            "class Handle: ...\n"
        )
        expected = [
            "+ Handle: beside ours",
            "+ Param.end(self, *, wait=False): beside ours",
            "+ Param.size [property without a setter]: beside ours",
        ]
        found = self.lines_of(
            contract_diff.public_names, {"torch/fsdp/beside.py": changed}
        )
        self.assertEqual(found, expected)

    def test_an_overload_is_no_signature_where_a_function_follows(self):
        overloads = "@overload\ndef gather(out): ...\n"
        changes = {
            "torch/distributed/c10d.py": overloads + OLD["torch/distributed/c10d.py"]
        }
        self.assertEqual(self.lines_of(contract_diff.used_by_ours, changes), [])
        changes = {
            "torch/_C/_VariableFunctions.pyi": "@overload\n"
            "def cat(tensors): ...\n@overload\ndef cat(a, b): ...\n"
        }
        found = self.lines_of(contract_diff.used_by_ours, changes)
        both = "- torch.cat(tensors, dim=0)\n  + torch.cat(tensors)(a, b)"
        self.assertEqual(found, [both])

    def test_exports(self):
        package = "from .beside import Param\n"
        before = {
            "torch/fsdp/__init__.py": package,
            "torch/all/__init__.py": "from torch.fsdp import Param\n",
        }
        changes = {
            "torch/fsdp/__init__.py": "from .beside import Handle, _hidden\n",
            "torch/all/__init__.py": "from torch.fsdp import Param, Handle\n",
        }
        contract = contract_diff.Contract(
            Release(self.put("old", OLD | before)),
            Release(self.put("new", OLD | before | changes)),
            {"torch/fsdp/group.py": OURS, "torch/fsdp/__init__.py": package},
        )
        expected = [
            "+ torch.all.Handle",
            "+ torch.fsdp.Handle: OURS LACKS IT",
            "- torch.fsdp.Param: ours has it",
        ]
        self.assertEqual([*contract_diff.exports(contract)], expected)

    def test_fields(self):
        before = {
            "torch/fsdp/group.py": "class Sent(NamedTuple):\n"
            "    data: Tensor\n    event: Event | None\n    gone: int\n"
            "@dataclass(frozen=True)\nclass Policy:\n    dtype: int | None = None\n"
            "    def _hidden(self): local = 1\n"
            "class Plain:\n    number: int\n",
            "torch/fsdp/beside.py": "class Mode(Enum):\n    A = auto()\n",
        }
        changes = {
            "torch/fsdp/group.py": "class Sent(NamedTuple):\n"
            "    event: Event | None\n    data: Tensor\n    stream: Stream\n    b: int\n    a: int\n"
            "@dataclass(frozen=True)\nclass Policy:\n    dtype: int | None = 3\n"
            "    fn: Callable | None = field(default=None, kw_only=True)\n"
            "class Plain:\n    number: int\n    other: int\n",
            "torch/fsdp/beside.py": "class Mode(Enum):\n    A = auto()\n    B = auto()\n",
        }
        ours = "class Sent(NamedTuple):\n    data: Tensor\n"
        ours += "@dataclass\nclass Policy:\n    fn: None\n"
        kept = "field(default=None, kw_only=True) (dataclass): ours has it"
        expected = [
            f"+ Policy.fn: Callable | None = {kept}",
            "- Policy.dtype: int | None = None\n  + Policy.dtype: int | None = 3",
            "+ Sent.stream: Stream (NamedTuple): OURS LACKS IT",
            "+ Sent.b: int (NamedTuple): OURS LACKS IT",
            "+ Sent.a: int (NamedTuple): OURS LACKS IT",
            "- Sent.gone is gone",
            "- Sent(data, event)\n  + Sent(event, data)",
            "+ Mode.B = auto() (Enum): beside ours",
        ]
        found = self.lines_of(contract_diff.fields, changes, before=before, ours=ours)
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

    def test_operators_of_other_forms(self):
        forms = (
            'define("ns::name", "(Tensor a) -> ()")\n',
            'torch.library.custom_op("ns::name", mutates_args=())\n',
        )
        shown = ("ns::name(Tensor a) -> ()", "ns::name")
        for form, schema in zip(forms, shown):
            changes = {"torch/fsdp/beside.py": f"lib.{form}"}
            found = self.lines_of(contract_diff.operators, changes)
            self.assertEqual(found, [f"+ {schema}: ours does not register it"])

    def test_operators_in_cpp(self):
        """By their namespace, or by the name that the files call there."""
        before = {
            "torch/fsdp/beside.py": 'lib = Library("ns", "FRAGMENT")\n'
            'lib.define("known(Tensor a) -> ()")\n'
        }
        calls = "import torch\ntorch.ops.ns.cast, torch.ops.ns.known, torch.ops.no.at\n"
        changes = {"torch/fsdp/group.py": OLD["torch/fsdp/group.py"] + calls}
        contract = self.contract(changes, before=before)
        libraries = (
            b"\0ns::kept\0ns::gone\0",
            b"\0ns::kept\0other::new\0_ns::no\0\0ns::mix.out\0\0ns::mix\0"
            b"\0cast(Tensor a, int b) -> ()then\0known(Tensor a)\0at(Tensor a)\0"
            b"a cast(Tensor a)\0",
        )
        for folder, library in zip(("old", "new"), libraries):
            path = self.scratch / folder / "torch/lib/libtorch_cpu.so"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(library)
        contract = contract_diff.Contract(
            Release(contract.old.path), Release(contract.new.path), contract.ours
        )
        expected = ["+ cast: in C++", "- gone: in C++", "+ mix: in C++"]
        self.assertEqual([*contract_diff.operators(contract)], expected)

    def test_libraries_are_read_in_pieces(self):
        """A name is found wherever one piece ends and the next begins."""
        folder = self.put("new", OLD)
        library = folder / "torch/lib/libtorch_cpu.so"
        library.parent.mkdir(parents=True)
        for shift in range(12):
            with mock.patch.object(contract_sources, "_CHUNK_NBYTES", 2048):
                library.write_bytes(b"\1" * (2048 - shift) + b"\0ns::name\0")
                release = Release(folder)
                found = release.operators_in_libraries({"ns"}, set())
                self.assertEqual(found, {"name"}, f"{shift=}")

    def test_without_a_library_nothing_is_said_of_cpp(self):
        contract = self.contract({})
        library = contract.new.path / "torch/lib/libtorch_cpu.so"
        library.parent.mkdir(parents=True)
        library.write_bytes(b"")
        contract = contract_diff.Contract(
            contract.old, Release(contract.new.path), contract.ours
        )
        found = [*contract_diff.operators(contract)]
        self.assertEqual(found, ["of C++ nothing is known: old has no libtorch_cpu"])

    def test_errors_that_are_raised(self):
        before = {"torch/fsdp/beside.py": "raise ValueError('no   one')\n"}
        changes = {
            "torch/fsdp/beside.py": "raise TypeError(f'a {b} c'\n  'd')\nraise\n",
            "torch/fsdp/group.py": OLD["torch/fsdp/group.py"] + "raise E()\n",
        }
        found = self.lines_of(contract_diff.errors, changes, before=before)
        self.assertEqual(found, ["+ E:", "+ TypeError: a … cd", "- ValueError: no one"])

    def test_wheels_and_folders_are_read_alike(self):
        changes = {"torch/fsdp/beside.py": "", "torch/lib/libtorch_cpu.so": "\0ns::a\0"}
        old, new = self.put("old", OLD | changes), self.scratch / "new.whl"
        with zipfile.ZipFile(new, "w") as archive:
            for path, text in (OLD | changes).items():
                archive.writestr(path, text)
        releases = Release(old), Release(new)
        for release in releases:
            self.assertEqual(release.operators_in_libraries({"ns"}, set()), {"a"})
        found = self.put("other", OLD)
        contract = contract_diff.Contract(
            Release(found), releases[1], {"torch/fsdp/group.py": OURS}
        )
        expected = [
            "torch/fsdp/beside.py (beside ours): +0 -3",
            "  gone: Param",
            "  gone, Param: other, shard",
        ]
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
