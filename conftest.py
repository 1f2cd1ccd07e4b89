"""
How `make test` runs the tests: files side by side, the longest first, none of them
forever, and with ``--quick`` one test of each kind.

Nothing here belongs to the tests themselves. Each file also runs without this one,
with python, torchrun or over a checkout.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from itertools import groupby

import pytest


# As torchrun has it. Threads of an operator wait for each other by spinning, and beside
# other busy processes that takes more than what they compute. Set before torch asks.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run one test of each kind")
    parser.addoption("--fresh", action="store_true", help="run the release anew, too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("fresh"):
        os.environ["FSDP_TEST_FRESH"] = "1"
    # xdist would start files with many tests first, and those take no longer
    config.option.loadscopereorder = False


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """
    A test with ranks keeps two cores busy while it computes, and none while its
    processes start or wait for one another.
    """
    return max(3, len(os.sched_getaffinity(0)) // 2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    for item in items if config.getoption("timeout") is None else ():
        if item.get_closest_marker("long"):  # pyproject.toml has what others get
            item.add_marker(pytest.mark.timeout(600))
    if config.getoption("quick"):
        chosen = set(map(id, quick_tests(items)))
        left_out = [item for item in items if id(item) not in chosen]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if id(item) in chosen]
    elif hasattr(config, "workerinput"):
        # A process that starts one of these last is waited for
        items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    # Collections in tests need not look through all that has been imported
    gc.collect()
    gc.freeze()


def quick_tests(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """
    Returns the tests that are marked. Of a file without any it is the first, unless the
    file is a long one, whose tests are all of a kind that takes less elsewhere.
    """
    chosen: list[pytest.Item] = []
    for _, group in groupby(items, key=lambda item: item.path):
        of_file = [*group]
        marked = [item for item in of_file if item.get_closest_marker("quick")]
        if not marked and of_file[0].get_closest_marker("long") is None:
            marked = of_file[:1]
        chosen += marked
    return chosen
