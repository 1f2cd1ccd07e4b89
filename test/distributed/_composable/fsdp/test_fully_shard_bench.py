# Owner(s): ["oncall: distributed"]
"""
Tests what ``make bench`` counts, and how it compares. Times are never asserted.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
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

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = [pytest.mark.tools, pytest.mark.long]


FOLDER = REPO_ROOT / "benchmarks" / "distributed" / "fsdp"
MIXED = ("Nemotron-H-like", "fp32 adapters")


@unittest.skipUnless(RELEASE_ROOT.is_dir(), "needs the release beside the branch")
class BenchCountsTest(DeviceFreeTest):
    """Runs the parts that count, on release and branch."""

    results: dict[str, Any]
    table: str
    pictures: list[str]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        with tempfile.TemporaryDirectory() as folder:
            args = ("--quick", "--parts", "bytes,memory", "--output", folder)
            cls.table = run_python(str(FOLDER / "bench.py"), *args)
            found = json.loads((Path(folder) / "results.json").read_text())
            cls.pictures = sorted(path.name for path in Path(folder).glob("*.png"))
        cls.results = found["parts"]

    def ways(self, block: str) -> dict[str, dict[str, int]]:
        ways = self.results["bytes"]["data"]["blocks"][block]["ways"]
        return {way["way"]: way for way in ways}

    def test_branch_sends_the_parameters_own_bytes(self) -> None:
        blocks = self.results["bytes"]["data"]["blocks"]
        self.assertEqual({*blocks}, {"Llama-like", *MIXED})
        for block, found in blocks.items():
            with self.subTest(block=block):
                branch = self.ways(block)["branch"]
                self.assertEqual(found["least_nbytes"], found["own_nbytes"])
                self.assertEqual(
                    branch["gathered_nbytes"] + branch["reduced_nbytes"],
                    found["own_nbytes"],
                )

    def test_collectives(self) -> None:
        # Three blocks: gathered for forward and for backward, and reduced
        branch = {"Llama-like": 3 * (2 + 1)} | dict.fromkeys(MIXED, 3 * (2 + 2))
        for block, collectives in branch.items():
            with self.subTest(block=block):
                ways = self.ways(block)
                self.assertEqual(ways["branch"]["collectives"], collectives)
                self.assertEqual(ways["release, all fp32"]["collectives"], 9)
        for block in MIXED:
            per_dtype = self.ways(block)["release, one unit per dtype"]
            self.assertEqual(per_dtype["collectives"], 2 * 9)

    def test_promoted_gradients(self) -> None:
        """Computed: bf16 gradients take twice their bytes, what is gathered does not."""
        name = "gradients promoted (computed)"
        for block in MIXED:
            ways = self.ways(block)
            branch, promoted = ways["branch"], ways[name]
            upcast = ways["release, all fp32"]
            self.assertEqual(promoted["gathered_nbytes"], branch["gathered_nbytes"])
            self.assertEqual(promoted["reduced_nbytes"], upcast["reduced_nbytes"])

    def test_peak_of_uniform_blocks_is_the_release_s(self) -> None:
        rows = self.results["memory"]["rows"]
        as_it_is, late = [row for row in rows if row["versus"] == "release"]
        self.assertLessEqual(as_it_is["branch"], as_it_is["other"])
        self.assertLess(late["branch"], as_it_is["branch"])

    def test_report(self) -> None:
        self.assertEqual(self.pictures, ["bytes.png", "memory.png"])
        self.assertIn("the parameters' own bytes", self.table)
        self.assertNotIn(str(REPO_ROOT), self.table)


@unittest.skipUnless(RELEASE_ROOT.is_dir(), "needs the release beside the branch")
class WhereTest(DeviceFreeTest):
    def test_all_points_are_there_on_both_sides(self) -> None:
        """And a step calls what each line names."""
        with tempfile.TemporaryDirectory() as folder:
            args = ("--quick", "--parts", "where", "--output", folder)
            printed = run_python(str(FOLDER / "bench.py"), *args)
            results = json.loads((Path(folder) / "results.json").read_text())
        tables = results["parts"]["where"]["data"]["tables"]
        self.assertEqual([*tables], ["4 parameters", "16 parameters"])
        for lines in tables.values():
            *points, sums = lines
            self.assertEqual(sums[0], "sum")
            for column, total in enumerate(sums[1:], 1):
                found = [line[column] for line in points if line[column] is not None]
                self.assertAlmostEqual(sum(found), total)
            for label, *values in points:
                self.assertIn(label, printed)
                for side in range(3):  # forward or backward of each calls it
                    passes = values[2 * side : 2 * side + 2]
                    self.assertNotEqual(passes, [None, None], label)


class ImportingTest(DeviceFreeTest):
    """Imports the modules of the benchmarks as they do each other."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        sys.path.insert(0, str(FOLDER))
        cls.addClassCleanup(sys.path.remove, str(FOLDER))


# One of two ranks ends, and the other waits for it in vain
WORKER = """
import json, os, sys, time
rank = json.loads(sys.argv[1])["rank"]
print("of rank", rank, file=sys.stderr)
if rank != {rank}:
    time.sleep(120)  # unless it is ended
{end}
"""
ENDS = {
    "at the start": "sys.exit('it broke')",
    "when asked": "sys.stdin.readline(); sys.exit('it broke')",
    "after its reply": "sys.stdin.readline(); print('{}'); sys.exit('it broke')",
}


class SideTest(ImportingTest):
    def ask(self, rank: int, end: str) -> tuple[str, list[Any]]:
        """Returns the error of asking a side of such ranks, and its processes."""
        import _sides

        side = _sides.Side("branch", TREE_ROOT, backend="gloo", world_size=2)
        self.addCleanup(side.stop)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "_worker.py").write_text(WORKER.format(rank=rank, end=end))
            with mock.patch.object(_sides, "HERE", Path(folder)):
                side.start()
            processes = [*side._processes]
            if "stdin" not in end:
                processes[rank].wait()  # so that nobody reads what it is asked
            with self.assertRaises(_sides.SideError) as raised:
                side.ask("bytes", {})
        return str(raised.exception), processes

    @parametrize("rank", [0, 1])
    @parametrize("when", [*ENDS])
    def test_rank_that_ends_ends_the_side(self, rank: int, when: str) -> None:
        error, processes = self.ask(rank, ENDS[when])
        first, *said = error.splitlines()
        self.assertEqual(first, f"branch, rank {rank}: ended with status 1")
        self.assertEqual(said, [f"of rank {rank}", "it broke"])
        statuses = [process.poll() for process in processes]
        self.assertEqual(statuses[rank], 1)
        self.assertEqual(statuses[1 - rank], -signal.SIGKILL)

    def test_only_the_last_lines_are_shown(self) -> None:
        from _sides import LAST_LINES

        end = (
            "print(*range(99), sep=os.linesep, file=sys.stderr, flush=True); os.abort()"
        )
        error, _ = self.ask(1, end)
        first, *said = error.splitlines()
        self.assertIn(f"ended with status {-signal.SIGABRT}", first)
        self.assertEqual(said, [str(n) for n in range(99 - LAST_LINES, 99)])


class BenchComparisonTest(ImportingTest):
    """Compares made-up figures."""

    def test_ratio_is_of_pairs(self) -> None:
        from _ratios import Samples

        samples = Samples()
        # The machine was ten times slower in the second round, for both
        for release, branch in ((10, 5), (100, 60), (10, 7)):
            samples.add("group", "release", {"us": release})
            samples.add("group", "branch", {"us": branch})
        ratio = samples.ratio("group", "branch", "release", "us")
        self.assertAlmostEqual(ratio.median, 0.6)
        self.assertAlmostEqual(ratio.low, 0.55)
        self.assertAlmostEqual(ratio.high, 0.65)
        self.assertEqual(ratio.samples, 3)

    def test_sides_take_turns(self) -> None:
        from _ratios import alternate, Group, Subject

        asked = []

        class Recorder:
            def __init__(self, name: str):
                self.name = name

            def start(self) -> None:
                asked.append(f"start {self.name}")

            def stop(self) -> None:
                pass

            def ask(self, part: str, request: dict[str, int]) -> dict[str, float]:
                asked.append(f"{part} {self.name} {request['params']}")
                return {"us": 1.0}

        groups = [
            Group(
                str(n),
                tuple(Subject(s, s, {"params": n}) for s in ("release", "branch")),
            )
            for n in (4, 16)
        ]
        sides: Any = {name: Recorder(name) for name in ("release", "branch")}
        alternate("host", sides, groups, rounds=2, launches=2)
        launch = ["start release", "start branch"]
        turns = [f"host {side} {n}" for n in (4, 16) for side in ("release", "branch")]
        self.assertEqual(asked, 2 * (launch + turns))

    def test_fit(self) -> None:
        from _growth import fit

        counts = (1, 4, 16, 64, 256)
        intercept, slope = fit(counts, [300 + 20.0 * n for n in counts])
        self.assertAlmostEqual(intercept, 300)
        self.assertAlmostEqual(slope, 20)

    def test_time_of_a_point_is_without_what_it_calls(self) -> None:
        import _where

        watch = _where.Stopwatch()
        inner = watch.timed("inner", lambda: None)
        outer = watch.timed("outer", lambda: (inner(), inner()))
        # Of outer, then of inner and inner, and again of outer
        clock = iter((0, 10, 30, 50, 90, 100))
        with mock.patch.object(_where.time, "perf_counter_ns", clock.__next__):
            outer()
        found = {label: spent for (label, _), spent in watch.spent.items()}
        self.assertEqual((found["inner"].calls, found["inner"].ns), (2, 20 + 40))
        self.assertEqual((found["outer"].called, found["outer"].ns), (2, 100 - 60))
        # A point costs 3 ns in itself and 5 in what calls it
        self.assertEqual(found["inner"].net_ns(3, 5), 60 - 2 * 3)
        self.assertEqual(found["outer"].net_ns(3, 5), 40 - 3 - 2 * 5)

    def test_run_that_is_cut_off_leaves_the_parts_that_it_finished(self) -> None:
        import bench
        from _ratios import Spread
        from _results import Results, UNFINISHED
        from _rows import PartResult, Row

        row = Row("bytes", "block", "bytes", 4.0, "release", 4.0, Spread(1, 1, 1, 1))

        def run_part(name: str) -> Any:
            def run(sides: Any, **options: Any) -> PartResult:
                if name == bench.PARTS["memory"]:
                    raise KeyboardInterrupt
                return PartResult([row], {})

            return SimpleNamespace(run=run)

        with tempfile.TemporaryDirectory() as folder:
            argv = ["--parts", "bytes,memory", "--output", folder]
            with mock.patch.object(bench.importlib, "import_module", run_part):
                with self.assertRaises(KeyboardInterrupt):
                    bench.main(argv)
            found = json.loads((Path(folder) / UNFINISHED).read_text())["parts"]
            self.assertEqual([*found], ["bytes"])
            self.assertEqual(PartResult.of_json(found["bytes"]).rows, [row])
            Results({}, {}).save(Path(folder))
            self.assertFalse((Path(folder) / UNFINISHED).exists())

    @pytest.mark.quick
    def test_pictures_group_by_model_and_color_by_what_is_compared_with(self) -> None:
        from _pictures import by_model, color_of, COLORS

        cases = ["Nemotron", "Llama", "Llama", "Nemotron, late", "Llama, late"]
        grouped = ["Nemotron", "Nemotron, late", "Llama", "Llama, late"]
        self.assertEqual(by_model(cases), grouped)
        self.assertEqual(len({*COLORS.values()}), len(COLORS))
        self.assertNotEqual(color_of("release, all fp32"), color_of("release"))
        self.assertEqual(color_of("release, uniform"), color_of("release"))

    def test_row_survives_json(self) -> None:
        from _ratios import Spread
        from _rows import PartResult, Row, table

        row = Row(
            "host", "uniform", "us", 5.0, "release", 10.0, Spread(0.5, 0.4, 0.6, 9)
        )
        result = PartResult([row], {"seconds": 1.5})
        again = PartResult.of_json(json.loads(json.dumps(result.as_json())))
        self.assertEqual(again, result)
        self.assertEqual(table({"host": again}), table({"host": result}))
        self.assertIn("0.400 to 0.600", table({"host": again}))


instantiate_parametrized_tests(SideTest)


if __name__ == "__main__":
    run_tests()
