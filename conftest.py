"""
How `make test` runs the tests: files side by side, and those with long tests first.

Nothing here belongs to the tests themselves. Each file also runs without this one,
with python, torchrun or over a checkout.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest


# As torchrun has it. Threads of an operator wait for each other by spinning, and beside
# other busy processes that takes more than what they compute. Set before torch asks.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    # xdist would start files with many tests first, and those take no longer
    config.option.loadscopereorder = False


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A test with ranks keeps two cores busy. Two cores run two faster than three."""
    return max(2, len(os.sched_getaffinity(0)) // 2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A process that starts one with a timeout of its own last is waited for
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    # Collections in tests need not look through all that has been imported
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Each worker imports all files: of quick tests only those that have some."""
    if config.option.markexpr != "quick" or not collection_path.is_file():
        return None
    return "mark.quick" not in collection_path.read_text() or None
