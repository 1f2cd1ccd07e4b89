# Owner(s): ["oncall: distributed"]
"""
What scripts on the release gave is kept until something that it comes from changes, and
forks of this process end as interpreters do.
"""

from __future__ import annotations

import itertools
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
    def test_runs_again_once_where_something_changed(self) -> None:
        has_device, runs = mock.Mock(return_value=False), itertools.count()

        def ran(*args: str, **env: str) -> bool:
            before = next(runs)
            return kept.of_release(release, args, env, lambda: next(runs)) > before

        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(kept, "SOURCES", [root := Path(folder) / "tests"]),
            mock.patch.dict(os.environ),
            mock.patch.object(torch.accelerator, "is_available", has_device),
        ):
            os.environ.pop("CI", None)
            release = Path(folder) / "release"
            record = release / "torch-1.0.dist-info" / "RECORD"
            for path in (record, root / "script.py", root / "package" / "beside.py"):
                path.parent.mkdir(parents=True)
                path.write_text("")
            ran()
            for path in (record, root / "script.py", root / "package" / "beside.py"):
                path.write_text("changed")
                self.assertEqual([ran(), ran()], [True, False], path)
            with mock.patch.dict(os.environ, {"ATEN_CPU_CAPABILITY": "default"}):
                self.assertTrue(ran())
            self.assertEqual([ran("other"), ran("other")], [True, False])
            self.assertEqual([ran(SEED="1"), ran(SEED="2")], [True, True])
            with mock.patch.dict(os.environ, {"CI": "true"}):
                self.assertEqual([ran(), ran()], [True, True])
            self.assertFalse(ran())  # as the last run is kept
            has_device.return_value = True
            self.assertTrue(ran())  # whose kernels may add in any order


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
