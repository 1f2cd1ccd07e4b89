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

from fsdp_common import kept
from fsdp_common.run_forked import run_forked
from fsdp_common.utils import RELEASE_ROOT, run_anew


# What each rank found
Results = list[dict[str, Any]]


def check_torch(path: str, on_release: bool) -> None:
    """Raises if ``path`` is not of the torch that was meant."""
    if Path(path).is_relative_to(RELEASE_ROOT) != on_release:
        raise AssertionError(f"ran another torch than meant: {path}")


def read_results(folder: str | Path) -> Results:
    results = [
        pickle.loads(path.read_bytes()) for path in sorted(Path(folder).iterdir())
    ]
    if not results:
        raise AssertionError("no rank wrote what it found")
    return results


def run_on(
    module: str, *args: str, on_release: bool, env: dict[str, str] | None = None
) -> Results:
    """
    Runs a module of a package beside the tests. It takes ``--out``. On the release it
    returns what that gave before, if nothing has changed.
    """

    def run() -> Results:
        with tempfile.TemporaryDirectory() as out:
            command = (module, "--out", out, *args)
            if on_release or env is not None:
                printed = run_anew("-m", *command, on_release=on_release, env=env)
            else:
                printed = run_forked(*command)
            check_torch(printed.splitlines()[-1], on_release)
            return read_results(out)

    what = ("-m", module, *args)
    return kept.of_release(RELEASE_ROOT, what, env, run) if on_release else run()


def run_on_both(module: str, *, only_branch: tuple[str, ...] = ()) -> list[Results]:
    """
    Returns the release's results and the branch's.

    Args:
        only_branch: Arguments that the module gets on the branch alone.
    """
    with ThreadPoolExecutor() as pool:
        release = pool.submit(run_on, module, on_release=True)
        branch = pool.submit(run_on, module, *only_branch, on_release=False)
    return [release.result(), branch.result()]
