"""Runs scenarios on the release and this branch at once, to compare them."""

import functools
import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from fsdp_helpers.common import kept
from fsdp_helpers.common.parity_layers import Record
from fsdp_helpers.common.utils import DeviceFreeTest, RELEASE_ROOT, run_python


# Results by rank
Results = list[dict[str, Any]]


def run_on(module: str, *, on_release: bool, in_halves: bool = False) -> Results:
    """
    Runs a module of a package beside the tests. In halves, every other rank is in another
    interpreter, with other hashes of dtypes and strings, and so sets in another order.
    """

    def run() -> Results:
        with tempfile.TemporaryDirectory() as out:
            if in_halves:
                printed = _run_halves(module, "--out", out)
            else:
                printed = run_python("-m", module, "--out", out, on_release=on_release)
            path = printed.splitlines()[-1]
            if Path(path).is_relative_to(RELEASE_ROOT) != on_release:
                raise AssertionError(f"ran another torch than meant: {path}")
            files = sorted(Path(out).iterdir())
            return [pickle.loads(file.read_bytes()) for file in files]

    return kept.of_release(RELEASE_ROOT, module, run) if on_release else run()


def _run_halves(*command: str) -> str:
    with tempfile.TemporaryDirectory() as met, ThreadPoolExecutor() as pool:

        def run(half: str) -> str:
            args = ("-m", *command, "--half", half, "--store", f"{met}/store")
            return run_python(*args, env={"PYTHONHASHSEED": half})

        return "".join(pool.map(run, ("1", "0")))


@functools.cache  # for all classes of a file that ask for the same script
def run_on_both(module: str, in_halves: bool) -> list[Results]:
    """Returns the release's results and the branch's, see `run_on`."""
    with ThreadPoolExecutor() as pool:
        release = pool.submit(run_on, module, on_release=True)
        branch = pool.submit(run_on, module, on_release=False, in_halves=in_halves)
    return [release.result(), branch.result()]


class ScenarioTest(DeviceFreeTest):
    """Each scenario of a script under the release and under this branch."""

    script: ClassVar[str]  # the module
    in_halves: ClassVar[bool] = False  # see `run_on`
    release: Results
    branch: Results

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.release, cls.branch = run_on_both(cls.script, cls.in_halves)

    def records_of(self, results: Results, name: str) -> list[Record]:
        """Returns what each rank found that ran it, and did not fail."""
        records = [found[name] for found in results if name in found]
        self.assertGreater(len(records), 0)
        self.assertEqual([r["error"] for r in records if "error" in r], [])
        return records

    def results_of(self, name: str) -> list[Record]:
        return self.records_of(self.branch, name)

    def check(self, name: str) -> Record:
        """Returns what the first rank of the release found, if the branch found it."""
        sides = (self.records_of(r, name) for r in (self.release, self.branch))
        first, *_ = pairs = [*zip(*sides, strict=True)]
        for expected, actual in pairs:
            self.assertGreater(len(expected), 0)
            self.check_same(name, actual, expected)
        return first[0]

    def check_same(self, key: str, actual: Any, expected: Any) -> None:
        """Names what differs alone."""
        if isinstance(actual, dict) and isinstance(expected, dict):
            self.assertEqual([*actual], [*expected], key)
            for name, value in expected.items():
                self.check_same(f"{key}, {name}", actual[name], value)
        else:
            self.assertTrue(actual == expected, f"{key}: {actual} != {expected}"[:3000])
