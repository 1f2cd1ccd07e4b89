# Owner(s): ["oncall: distributed"]
"""
What scripts on the release gave is kept until something that it comes from changes, and
forks of this process end as interpreters do.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from fsdp_helpers.common import kept
from fsdp_helpers.common.run_forked import run_forked
from fsdp_helpers.common.utils import DeviceFreeTest

import torch
from torch.testing._internal.common_utils import run_tests


class TestKept(DeviceFreeTest):
    def setUp(self) -> None:
        super().setUp()
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        self.release = self.root / "release"
        self.put("release/torch-1.0.dist-info/RECORD", "torch/__init__.py,sha256=a,1\n")
        self.put("tests/script.py", "")
        environ = {name: v for name, v in os.environ.items() if name != "CI"}
        for patch in (
            mock.patch.object(kept, "SOURCES", [self.root / "tests"]),
            mock.patch.dict(os.environ, environ, clear=True),
            mock.patch.object(torch.accelerator, "is_available", lambda: False),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.runs = 0

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def ran(self, *args: str, **env: str) -> bool:
        """Asks for the result, and returns whether that took a run."""

        def run() -> int:
            self.runs += 1
            return self.runs

        before = self.runs
        self.assertEqual(kept.of_release(self.release, args, env, run), self.runs)
        return self.runs > before

    def test_runs_again_once_where_something_changed(self) -> None:
        for path, text in (
            ("tests/script.py", "changed"),
            ("tests/package/beside.py", "new"),
            ("release/torch-1.0.dist-info/RECORD", "torch/__init__.py,sha256=b,1\n"),
        ):
            self.ran()
            self.put(path, text)
            self.assertEqual([self.ran(), self.ran()], [True, False], path)
        with mock.patch.dict(os.environ, {"ATEN_CPU_CAPABILITY": "default"}):
            self.assertTrue(self.ran())
        self.assertEqual([self.ran("other"), self.ran("other")], [True, False])
        self.assertEqual([self.ran(SEED="1"), self.ran(SEED="2")], [True, True])

    def test_who_asks_for_it_gets_a_new_run_which_is_kept(self) -> None:
        self.ran()
        with mock.patch.dict(os.environ, {"CI": "true"}):
            self.assertEqual([self.ran(), self.ran()], [True, True])
        self.assertFalse(self.ran())
        with mock.patch.object(torch.accelerator, "is_available", lambda: True):
            self.assertTrue(self.ran())  # whose kernels may add in any order


@unittest.skipIf(torch.accelerator.is_available(), "no fork could use it")
class TestForks(DeviceFreeTest):
    def test_failures_are_told(self) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch("sys.path", [*sys.path, folder]),
        ):
            (Path(folder) / "probe.py").write_text("import sys; exec(sys.argv[-1])")
            self.assertEqual(run_forked("probe", "print(1); sys.exit(0)"), "1\n")
            for ending, told in (
                ("sys.exit(3)", "Exit status 3:"),
                ("sys.exit('why')", "Exit status 1:\nwhy"),
                ("raise ValueError('wrong')", "(?s)Exit status 1:.*ValueError: wrong"),
                ("import os; os.kill(os.getpid(), 9)", "Exit status -9:"),
            ):
                with self.assertRaisesRegex(AssertionError, told):
                    run_forked("probe", ending)
            with self.assertRaisesRegex(TimeoutError, "probe was not done"):
                run_forked("probe", "import time; time.sleep(600)", timeout=1)


if __name__ == "__main__":
    run_tests()
