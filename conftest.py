"""
How `make test` runs the tests: files side by side, the longest first, and with
``--quick`` one test of each kind.

Nothing here belongs to the tests themselves. Each file also runs without this one,
with python, torchrun or over a checkout.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest


# Files, by what follows `test_fully_shard_`, that take more than half a minute: a
# process that starts one of these last is waited for. Others follow as they come.
LONGEST_FIRST = ("composition", "features", "mixed_dtype", "streams", "hsdp")

# Of each file, the tests that `--quick` runs: the ends of their names. Of a file
# that is not here it is the first test, so that a new one takes part.
QUICK: dict[str, tuple[str, ...]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run one test of each kind")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A test with ranks keeps two cores busy by itself, and one without ranks one."""
    return max(2, len(os.sched_getaffinity(0)) // 2)


def concern(path: Path) -> str:
    return path.stem.removeprefix("test_fully_shard_")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.getoption("quick"):
        chosen = set(map(id, quick_tests(items)))
        left_out = [item for item in items if id(item) not in chosen]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if id(item) in chosen]
    elif config.getoption("dist", "no") == "loadfile":
        items.sort(key=lambda item: rank_of(concern(item.path)))


def rank_of(name: str) -> int:
    if name in LONGEST_FIRST:
        return LONGEST_FIRST.index(name)
    return len(LONGEST_FIRST)


def quick_tests(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests of the table, and the first of each file that it lacks."""
    chosen, seen = [], set()
    for item in items:
        name = concern(item.path)
        if name in QUICK:
            wanted = item.nodeid.endswith(QUICK[name])
        else:
            wanted = name not in seen
        seen.add(name)
        if wanted:
            chosen.append(item)
    return chosen
