"""
Runs a module on the release and on this branch, at the same time, for tests
that compare what came of it.
"""

from __future__ import annotations

import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsdp_helpers.common import kept
from fsdp_helpers.common.run_forked import run_forked
from fsdp_helpers.common.utils import RELEASE_ROOT, run_anew, run_python


# What each rank found
Results = list[dict[str, Any]]


def check_torch(path: str, on_release: bool) -> None:
    """Raises if ``path`` is not of the torch that was meant."""
    if Path(path).is_relative_to(RELEASE_ROOT) != on_release:
        raise AssertionError(f"ran another torch than meant: {path}")


def run_on(module: str, *, on_release: bool, in_halves: bool = False) -> Results:
    """
    Runs a module of a package beside the tests. It takes ``--out``.

    Args:
        in_halves: Run every other rank in another interpreter. Dtypes, which hash by
            address, and strings have other hashes in each, and sets another order.
    """

    def run() -> Results:
        with tempfile.TemporaryDirectory() as out:
            command = (module, "--out", out)
            if in_halves:
                printed = _run_halves(*command)
            elif on_release:
                printed = run_anew("-m", *command, on_release=True)
            else:
                printed = run_forked(*command)
            check_torch(printed.splitlines()[-1], on_release)
            files = sorted(Path(out).iterdir())
            if not files:
                raise AssertionError("no rank wrote what it found")
            return [pickle.loads(file.read_bytes()) for file in files]

    return (
        kept.of_release(RELEASE_ROOT, ("-m", module), None, run)
        if on_release
        else run()
    )


def _run_halves(*command: str) -> str:
    with tempfile.TemporaryDirectory() as met:

        def run(half: str) -> str:
            args = ("-m", *command, "--half", half, "--store", f"{met}/store")
            return run_python(*args, env={"PYTHONHASHSEED": half})

        with ThreadPoolExecutor() as pool:
            return "".join(pool.map(run, ("1", "0")))


def run_on_both(module: str, *, in_halves: bool = False) -> list[Results]:
    """Returns the release's results and the branch's, see `run_on`."""
    with ThreadPoolExecutor() as pool:
        release = pool.submit(run_on, module, on_release=True)
        branch = pool.submit(run_on, module, on_release=False, in_halves=in_halves)
    return [release.result(), branch.result()]
