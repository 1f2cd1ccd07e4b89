# Owner(s): ["oncall: distributed"]
"""
Tests ``make gpu``: what of it runs on a CPU, and that no part loses what another found.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import unittest
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsdp_common.utils import (
    DeviceFreeTest,
    RELEASE_ROOT,
    REPO_ROOT,
    run_python,
    TREE_ROOT,
)

from torch.distributed.fsdp._fully_shard._fsdp_release import FOLLOWS_GRAD_DTYPE
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = [pytest.mark.tools, pytest.mark.long]


FOLDER = REPO_ROOT / "benchmarks" / "distributed" / "fsdp"
# Run from anywhere, as `gpu.py` itself does
IMPORTS = f"import sys; sys.path[:0] = [{str(FOLDER)!r}, {str(REPO_ROOT)!r}]\n"


# Since 2.15 gradients of one unit may be bf16 and fp32. On a CPU the branch then copies
# them in by three operators, where the release has one in C++; on CUDA it has the same.
OTHERWISE_SINCE_2_15 = {
    "launches.llama_grad_comm_dtype",
    "launches.llama_reduced_in_fp32",
    "memory.nemotron_h",
    "memory.nemotron_h_backward_post",
}


class ImportingTest(DeviceFreeTest):
    """Imports the modules of the script as they do each other."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        for folder in (str(FOLDER), str(REPO_ROOT)):
            sys.path.insert(0, folder)
            cls.addClassCleanup(sys.path.remove, folder)


@unittest.skipUnless(RELEASE_ROOT.is_dir(), "needs the release beside the branch")
class OnCpuTest(ImportingTest):
    """Runs all of it, where there is no device."""

    lines: list[dict[str, Any]]
    page: str

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        with tempfile.TemporaryDirectory() as folder:
            args = ("--device", "cpu", "--output", folder)
            # Its status is 1 if a line is wrong: which ones may be is tested below
            with contextlib.suppress(AssertionError):
                run_python(str(FOLDER / "gpu.py"), *args)
            found = json.loads((Path(folder) / "report.json").read_text())
            cls.page = (Path(folder) / "report.md").read_text()
        cls.lines, cls.header = found["lines"], found["header"]

    def test_what_needs_a_device_is_not_run(self) -> None:
        runs = {"right_threads", "right_processes", "memory", "launches", "host"}
        for line in self.lines:
            with self.subTest(line=line):
                is_run = line["part"] in runs and line["case"] != "offload_pinned"
                self.assertEqual(line["verdict"] == "not run", not is_run)
                self.assertEqual(line["value"] is None, not is_run)
                self.assertTrue(line["detail"])

    def test_all_is_as_expected_but_for_times(self) -> None:
        otherwise = set()
        for line in self.lines:
            case, verdict = f"{line['part']}.{line['case']}", line["verdict"]
            with self.subTest(line=line):
                if FOLLOWS_GRAD_DTYPE and case in OTHERWISE_SINCE_2_15:
                    self.assertIn(
                        verdict, ("as expected", "slower than expected", "wrong")
                    )
                    if verdict == "wrong":
                        otherwise.add(case)
                elif line["part"] == "host":
                    self.assertIn(verdict, ("as expected", "slower than expected"))
                else:
                    self.assertIn(verdict, ("as expected", "not run"))
        self.assertEqual(
            otherwise, OTHERWISE_SINCE_2_15 if FOLLOWS_GRAD_DTYPE else set()
        )

    def test_every_case_is_in_the_report(self) -> None:
        from _gpu_part import Where
        from _gpu_parts import all_parts

        cases = {(p.name, c.name) for p in all_parts(Where("cpu", 0)) for c in p.cases}
        self.assertEqual({(line["part"], line["case"]) for line in self.lines}, cases)
        for line in self.lines:
            self.assertIn(f"--only {line['part']}.{line['case']}", line["command"])
            self.assertIn(line["command"], self.page)

    def test_header(self) -> None:
        self.assertEqual(self.header["device"], "CPU only")
        self.assertEqual(
            {*self.header}, {"device", "torch", "python", "commit", "date"}
        )
        self.assertNotIn(str(REPO_ROOT), self.page)


# Answers what it is asked for, or hangs, or dies
WORKER = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)["request"]
    print("asked for", asked, file=sys.stderr, flush=True)
    if asked["does"] == "hang":
        time.sleep(600)  # unless it is ended
    if asked["does"] == "die":
        os.abort()
    print(json.dumps(asked), flush=True)
"""


class LosesNothingTest(ImportingTest):
    def run_cases(
        self, asks: dict[str, dict[str, str]], *, seconds: float = 60
    ) -> list[Any]:
        """
        Runs cases that ask sides to do something. Returns the report's lines, which are
        on the disk whenever a case begins.
        """
        import _sides
        from _gpu_part import Ask, Case, Figure, Part, Where
        from _gpu_report import Report
        from _gpu_run import Runner

        counted: list[int] = []

        def is_wanted(part: str, case: str) -> bool:
            file = Path(folder) / "report.json"
            there = json.loads(file.read_text())["lines"] if file.is_file() else []
            counted.append(len(there))
            return True

        cases = [
            Case(
                name,
                {side: Ask(side, {"does": does}) for side, does in of_sides.items()},
                lambda found: [Figure("found", len(found))],
            )
            for name, of_sides in asks.items()
        ]
        side = {"backend": "gloo", "world_size": 2}
        part = Part("part", "", "", cases, seconds, case_seconds=5, side=side)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "_worker.py").write_text(WORKER)
            report = Report(Path(folder), "cpu")
            roots = {"branch": TREE_ROOT, "release": TREE_ROOT}
            with mock.patch.object(_sides, "HERE", Path(folder)):
                Runner(roots, Where("cpu", 0), report).run(part, is_wanted)
        self.assertEqual(counted, sorted(counted))
        self.assertGreater(counted[-1], 0)
        return report.lines

    def test_case_that_hangs_or_dies_loses_nothing(self) -> None:
        good = {"branch": "answer", "release": "answer"}
        lines = self.run_cases(
            {
                "first": good,
                "hangs": good | {"branch": "hang"},
                "second": good,
                "dies": good | {"branch": "die"},
                "third": good,
            }
        )
        found = [(line.case, line.verdict, line.value) for line in lines]
        self.assertEqual(
            found,
            [
                ("first", "not predicted", 2),
                ("hangs", "timed out", None),
                ("second", "not predicted", 2),
                ("dies", "died", None),
                ("third", "not predicted", 2),
            ],
        )
        self.assertIn("no answer of rank 0, 1 in time", lines[1].detail)
        self.assertIn("{'does': 'hang'}", lines[1].detail)
        self.assertIn("ended with status -6", lines[3].detail)

    @parametrize("does", ["hang", "die"])
    def test_release_that_fails_says_nothing_of_the_branch(self, does: str) -> None:
        lines = self.run_cases(
            {"first": {"branch": "answer", "release": does}, "last": {"branch": "a"}}
        )
        found = [(line.case, line.verdict, line.value) for line in lines]
        self.assertEqual(
            found,
            [
                ("first", "not run", None),
                ("first", "not predicted", 1),  # of the branch alone
                ("last", "not predicted", 1),
            ],
        )
        self.assertIn("nothing to compare with: release", lines[0].detail)

    def test_part_ends_after_its_time(self) -> None:
        asks = {name: {"branch": "hang"} for name in ("first", "second")}
        first, second = self.run_cases(asks, seconds=1)
        self.assertEqual((first.verdict, second.verdict), ("timed out", "not run"))
        self.assertIn("were over", second.detail)


class VerdictTest(ImportingTest):
    def judged(self, *figure: Any) -> tuple[str, str]:
        from _gpu_report import Report

        with tempfile.TemporaryDirectory() as folder:
            report = Report(Path(folder), "cuda")
            report.judge(*figure, "")
            self.assertIn(figure[1], (Path(folder) / "report.md").read_text())
        (line,) = report.lines
        return line.verdict, line.expected

    def test_verdicts(self) -> None:
        bits = ("right_threads", "mixed", "differs")
        self.assertEqual(self.judged(*bits, 0), ("as expected", "= 0"))
        self.assertEqual(self.judged(*bits, 1), ("wrong", "= 0"))
        host = ("host", "uniform", "host_ratio")
        self.assertEqual(self.judged(*host, 0.55), ("as expected", "at most 0.55"))
        self.assertEqual(
            self.judged(*host, 0.56), ("slower than expected", "at most 0.55")
        )
        share = ("copies", "bf16", "copy_in_share")
        self.assertEqual(self.judged(*share, 0.8)[0], "as expected")
        self.assertEqual(self.judged(*share, 0.79)[0], "slower than expected")
        self.assertEqual(self.judged(*share, float("nan"))[0], "slower than expected")

    def test_first_row_that_is_about_a_figure_counts(self) -> None:
        share = ("copies", "bf16_compute", "copy_in_share", 0.6)
        self.assertEqual(self.judged(*share), ("as expected", "at least 0.5"))

    @pytest.mark.quick
    def test_every_row_is_about_a_part(self) -> None:
        from _gpu_expected import EXPECTED
        from _gpu_part import Where
        from _gpu_parts import all_parts

        parts = all_parts(Where("cuda", 4))
        for row in EXPECTED:
            pattern = row.figures.split(".")[0]
            self.assertTrue(any(fnmatchcase(p.name, pattern) for p in parts), pattern)

    def test_bits_that_differ_are_counted(self) -> None:
        from _gpu_right import CASES, figures_of

        ours = {"digests": {"a": ["1", "2"], "b": ["3"]}, "beyond": [], "staged": []}
        theirs = ours | {"digests": {"a": ["1", "0"], "c": ["3"]}}
        figures = figures_of(CASES["mixed"], {"branch": ours, "release": theirs})
        self.assertEqual(
            [figure[:2] for figure in figures], [("beyond_rounding", 0), ("differs", 3)]
        )

    def test_share_of_time_that_is_overlapped(self) -> None:
        from _gpu_steps import overlapped_share

        sent, computed = [(0.0, 10.0), (20.0, 30.0)], [(5.0, 8.0), (6.0, 12.0)]
        self.assertEqual(overlapped_share(sent, computed), 5 / 20)
        self.assertEqual(overlapped_share(sent, []), 0)


class ReleaseTest(ImportingTest):
    def test_release_of_an_overlay(self) -> None:
        """Files that it replaced are the release's, and all others are as they are."""
        import _gpu_release

        with tempfile.TemporaryDirectory() as folder:
            site, made = Path(folder) / "site", Path(folder) / "made"
            files = {
                "torch/a.py": "as it is",
                "torch/fsdp/b.py": "branch",
                "torch/fsdp/new.py": "branch",
                "other/c.py": "",
                f"{_gpu_release.KEPT}/torch/fsdp/b.py": "release",
            }
            for name, text in files.items():
                (site / name).parent.mkdir(parents=True, exist_ok=True)
                (site / name).write_text(text)
            with mock.patch.object(_gpu_release, "MADE", made):
                found = _gpu_release.find_release(None, site)
                again = _gpu_release.find_release(None, site)
            self.assertEqual((found, again), (made, made))
            self.assertEqual((made / "torch/a.py").read_text(), "as it is")
            self.assertEqual((made / "torch/fsdp/b.py").read_text(), "release")
            self.assertFalse((made / "other").exists())

    def test_no_release(self) -> None:
        from _gpu_release import find_release

        with tempfile.TemporaryDirectory() as folder:
            self.assertIsNone(find_release(None, Path(folder)))
            self.assertIsNone(find_release(Path(folder), TREE_ROOT))
        if RELEASE_ROOT.is_dir():
            self.assertEqual(find_release(None, TREE_ROOT), RELEASE_ROOT)


# The divide factors of sums, as they are and doubled
BROKEN = """
import json
from unittest import mock
import _gpu_right
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
found = []
original = collectives.get_divide_factors
def doubled(key, shard_group, replicate_group, device_type, factor, *args):
    twice = 2 * shard_group.size()
    return original(key, shard_group, replicate_group, device_type, twice, *args)
for function in (original, doubled):
    with mock.patch.object(collectives, "get_divide_factors", function):
        request = {"case": "uniform", "way": "branch", "backend": "threaded"}
        found.append(len(_gpu_right.measure(device="cpu", **request)["beyond"]))
print(json.dumps(found))
"""


class OnDeviceTest(ImportingTest):
    """Runs on a CPU what the script runs on a device alone, and what is broken."""

    def test_wrong_factor_is_beyond_rounding(self) -> None:
        right, wrong = json.loads(run_python("-c", IMPORTS + BROKEN))
        self.assertEqual(right, 0)
        self.assertGreater(wrong, 40)

    def test_schedules_run_outside_of_their_tests(self) -> None:
        import _sides

        side = _sides.Side("branch", TREE_ROOT, backend="gloo", world_size=4)
        self.addCleanup(side.stop)
        side.start()
        for schedule in ("implicit_prefetch", "hsdp_deferred", "offload"):
            found = side.ask("streams", {"schedule": schedule, "kind": "mixed"})
            self.assertGreater(found["tensors"], 10)
            self.assertEqual({*found["differ"].values()}, {0})
            self.assertEqual(found["staged"], [])


instantiate_parametrized_tests(LosesNothingTest)


if __name__ == "__main__":
    run_tests()
