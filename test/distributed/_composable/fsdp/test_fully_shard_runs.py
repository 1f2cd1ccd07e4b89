# Owner(s): ["oncall: distributed"]
"""
How tests run scripts. What the release gave is kept until something that it comes from
changes, and the branch runs each time: in a fork, as an interpreter would.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from fsdp_common import kept, run_both, utils
from fsdp_common.run_forked import run_forked
from fsdp_common.utils import DeviceFreeTest, run_python, TREE_ROOT

import torch
from torch.testing._internal.common_utils import run_tests


SCRIPT = ("-m", "fsdp_first.script", "argument")
RECORD = "release/torch-1.0.dist-info/RECORD"


class KeptTest(DeviceFreeTest):
    """Of packages of its own: the first imports the second by a computed name."""

    def setUp(self) -> None:
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        self.release = self.root / "release"
        self.put(RECORD, "torch/__init__.py,sha256=a,1\n")
        self.put("fsdp_first/script.py", "import_module('fsdp_second' + '.helper')")
        self.put("fsdp_second/deep/helper.py", "fsdp_first, fsdp_second")
        self.put("fsdp_third/other.py", "fsdp_first")
        self.put("examples/example.py", "")
        folders = {folder.name: folder for folder in self.root.glob("[fe]*")}
        environ = {name: v for name, v in os.environ.items() if name != "CI"}
        environ.pop(kept.FRESH, None)
        for patch in (
            mock.patch.object(kept, "FOLDERS", folders),
            mock.patch.dict(os.environ, environ, clear=True),
            mock.patch.object(torch.accelerator, "is_available", lambda: False),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.runs = 0

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def ran(
        self,
        *args: str,
        env: dict[str, str] | None = None,
        run: Callable[[], object] | None = None,
    ) -> bool:
        """Asks for the result, and returns whether that took a run."""

        def count() -> int:
            self.runs += 1
            return self.runs

        before = self.runs
        kept.surroundings.cache_clear()
        result = kept.of_release(self.release, args or SCRIPT, env, run or count)
        self.assertEqual(result, self.runs)
        return self.runs > before

    def files(self) -> list[Path]:
        return [*(self.root / "kept").iterdir()]


class TestKept(KeptTest):
    def test_runs_once_where_nothing_changes(self) -> None:
        self.assertEqual([self.ran() for _ in range(3)], [True, False, False])

    def test_a_changed_module_runs_it_again_once(self) -> None:
        for path, text in (
            ("fsdp_first/script.py", "fsdp_second  # changed"),
            ("fsdp_first/beside.py", "a new file"),
            ("fsdp_second/deep/helper.py", "of an imported package"),
            ("fsdp_second/table.json", "not of Python"),
            (RECORD, "torch/__init__.py,sha256=b,1\n"),
        ):
            self.ran()
            self.put(path, text)
            self.assertEqual([self.ran(), self.ran()], [True, False], path)
        self.assertEqual(len(self.files()), 1)

    def test_a_module_that_is_gone_runs_it_again(self) -> None:
        self.ran()
        (self.root / "fsdp_second/deep/helper.py").unlink()
        self.assertTrue(self.ran())

    def test_a_package_that_nothing_names_does_not_matter(self) -> None:
        self.ran()
        self.put("fsdp_third/other.py", "changed")
        self.put("examples/example.py", "changed")
        self.assertFalse(self.ran())

    def test_a_script_is_known_by_what_it_holds(self) -> None:
        script = str(self.root / "alone.py")
        self.put("alone.py", "EXAMPLES")
        self.assertEqual([self.ran(script), self.ran(script)], [True, False])
        for path in ("examples/example.py", "alone.py"):
            self.put(path, "changed")
            self.assertEqual([self.ran(script), self.ran(script)], [True, False])

    def test_arguments_and_variables_have_results_of_their_own(self) -> None:
        for args, env in (
            (SCRIPT, {"PYTHONHASHSEED": "1"}),
            (SCRIPT, {"PYTHONHASHSEED": "2"}),
            (SCRIPT[:-1], None),
            (("-c", "import fsdp_first"), None),
            (("-c", "import fsdp_first "), None),
        ):
            self.assertTrue(self.ran(*args, env=env), (args, env))
        self.assertEqual(len(self.files()), 5)

    def test_surroundings_matter(self) -> None:
        cpuinfo = "model name : A\nflags : avx2\n"
        for patch in (
            mock.patch.dict(os.environ, {"ATEN_CPU_CAPABILITY": "default"}),
            mock.patch.dict(os.environ, {"TORCH_LOGS": "+fsdp"}),
            mock.patch("sys.version", "3.99"),
            mock.patch("sys.path", [str(self.root)]),
            mock.patch.object(platform, "machine", lambda: "another"),
            mock.patch.object(Path, "read_text", lambda path: cpuinfo),
        ):
            self.ran()
            with patch:
                self.assertTrue(self.ran(), patch)

    def test_a_damaged_result_runs_it_again(self) -> None:
        self.ran()
        (file,) = self.files()
        whole = file.read_bytes()
        for damaged in (b"", whole[:-1], whole[:64], b"0" + whole, whole[:-1] + b"?"):
            file.write_bytes(damaged)
            self.assertEqual([self.ran(), self.ran()], [True, False], damaged)

    def test_nothing_is_kept_of_a_run_that_fails(self) -> None:
        def fail() -> None:
            raise AssertionError("Exit status 1")

        with self.assertRaisesRegex(AssertionError, "Exit status 1"):
            self.ran(run=fail)
        self.assertFalse((self.root / "kept").exists())

    def test_nothing_is_kept_of_a_run_during_which_a_file_changes(self) -> None:
        def edit() -> int:
            self.put("fsdp_second/deep/helper.py", "edited")
            self.runs += 1
            return self.runs

        self.assertTrue(self.ran(run=edit))
        self.put("fsdp_second/deep/helper.py", "fsdp_first, fsdp_second")
        self.assertTrue(self.ran())

    def test_who_asks_for_it_gets_a_new_run_which_is_kept(self) -> None:
        for variable in ("CI", kept.FRESH):
            self.ran()
            with mock.patch.dict(os.environ, {variable: "true"}):
                self.assertEqual([self.ran(), self.ran()], [True, True])
            self.assertFalse(self.ran())

    def test_nothing_is_kept_beside_an_accelerator(self) -> None:
        self.ran()
        with mock.patch.object(torch.accelerator, "is_available", lambda: True):
            self.assertTrue(self.ran())


class TestWhoKeeps(KeptTest):
    """By the doors that tests use, and no interpreter but the fake one."""

    def setUp(self) -> None:
        super().setUp()
        for module in (utils, run_both):
            patch = mock.patch.object(module, "RELEASE_ROOT", self.release)
            patch.start()
            self.addCleanup(patch.stop)
        self.started: list[bool] = []

    def start(self, *args: str, on_release: bool, **options: object) -> str:
        self.started.append(on_release)
        if "--out" in args:
            out = Path(args[args.index("--out") + 1])
            (out / "rank0").write_bytes(b"\x80\x04K\x01.")  # a pickled 1
        return str(self.release if on_release else self.root)

    def fork(self, module: str, *args: str) -> str:
        return self.start("-m", module, *args, on_release=False)

    def test_the_release_runs_once_and_the_branch_each_time(self) -> None:
        with (
            mock.patch.object(utils, "run_anew", self.start),
            mock.patch.object(run_both, "run_anew", self.start),
            mock.patch.object(run_both, "run_forked", self.fork),
        ):
            for _ in range(2):
                run_python(*SCRIPT)
                run_python(*SCRIPT, on_release=True)
                both = run_both.run_on_both(SCRIPT[1])
                self.assertEqual(both, [[1], [1]])
        self.assertEqual(self.started.count(True), 2)
        self.assertEqual(self.started.count(False), 4)
        self.assertEqual(len(self.files()), 2)


PROBE = """
import json, os, sys, torch
if __name__ == "__main__":
    found = [__name__, sys.argv[1:], os.getcwd(), torch.__file__, os.environ.get("RANK")]
    print(json.dumps([*found, "torch._dynamo" in sys.modules]), flush=True)
    os.system("echo of a process of its own")
    print("said", file=sys.stderr)
    exec(sys.argv[-1])
"""


@unittest.skipIf(torch.accelerator.is_available(), "no fork could use it")
class TestForks(DeviceFreeTest):
    def setUp(self) -> None:
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        (Path(scratch.name) / "probe.py").write_text(PROBE)
        for patch in (
            mock.patch("sys.path", [*sys.path, scratch.name]),
            mock.patch.dict(os.environ, {"RANK": "3"}),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def test_is_as_an_interpreter(self) -> None:
        """But that it has imported torch and its compiler."""
        for ending in ("pass", "sys.exit()", "sys.exit(0)"):
            first, *others = run_forked("probe", "a b", ending).splitlines()
            name, args, folder, torch_file, rank, imported = json.loads(first)
            self.assertEqual((name, args), ("__main__", ["a b", ending]))
            self.assertEqual((folder, torch_file), (str(TREE_ROOT), torch.__file__))
            self.assertEqual((rank, imported), (None, True))
            self.assertEqual(others, ["of a process of its own"])

    def test_failures_are_told(self) -> None:
        for ending, status, text in (
            ("sys.exit(3)", 3, "said\n"),
            ("sys.exit('why')", 1, "said\nwhy\n"),
            ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
            ("os.kill(os.getpid(), 9)", -9, "said\n"),
        ):
            with self.assertRaises(AssertionError) as raised:
                run_forked("probe", ending)
            self.assertTrue(str(raised.exception).startswith(f"Exit status {status}:"))
            self.assertTrue(str(raised.exception).endswith(text), raised.exception)

    def test_what_hangs_is_ended(self) -> None:
        with self.assertRaisesRegex(TimeoutError, "probe was not done"):
            run_forked("probe", "import time; time.sleep(600)", timeout=1)


if __name__ == "__main__":
    run_tests()
