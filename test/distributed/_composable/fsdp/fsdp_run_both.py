"""
Runs a script on the base release and on this branch, at the same time, for tests
that compare what came of it.
"""

from __future__ import annotations

import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsdp_test_utils import BASE_ROOT, BYTECODE_CACHE, run_python


HERE = Path(__file__).parent

# What each rank found
Results = list[dict[str, Any]]


def run_on(script: str, *args: str, on_base: bool) -> Results:
    """Runs a script that lies beside this file and that takes ``--out``."""
    with tempfile.TemporaryDirectory() as out:
        command = (str(HERE / script), "--out", out, *args)
        printed = run_python(*command, on_base=on_base, env=BYTECODE_CACHE)
        imported = printed.strip().splitlines()[-1]
        if Path(imported).is_relative_to(BASE_ROOT) != on_base:
            raise AssertionError(f"ran another torch than meant: {imported}")
        return [pickle.loads(p.read_bytes()) for p in sorted(Path(out).iterdir())]


def run_on_both(script: str, *, only_branch: tuple[str, ...] = ()) -> list[Results]:
    """
    Returns the base's results and the branch's.

    Args:
        only_branch: Arguments that the script gets on the branch alone.
    """
    with ThreadPoolExecutor() as pool:
        base = pool.submit(run_on, script, on_base=True)
        branch = pool.submit(run_on, script, *only_branch, on_base=False)
    return [base.result(), branch.result()]
