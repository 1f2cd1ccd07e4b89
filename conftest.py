"""
How `make test` runs the tests: files side by side, the longest first, and with
``--quick`` one test of each kind.

Nothing here belongs to the tests themselves. Each file also runs without this one,
with python, torchrun or over a checkout.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from pathlib import Path

import pytest


# As torchrun has it. Threads of an operator wait for each other by spinning, and beside
# other busy processes that takes more than what they compute. Set before torch asks.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files, by what follows `test_fully_shard_`, that take more than ten seconds: a process
# that starts one of these last is waited for. Those with many ranks and those of one
# process alternate. Others follow as they come.
LONGEST_FIRST = (
    "mixed_dtype",
    "late_device",
    "features",
    "random",
    "composition",
    "streams",
    "growth",
    "schedules",
    "bench",
    "plugins",
    "setup_faults",
    "models",
    "docs",
    "superbuild",
    "undisturbed_hooks",
    "tiny_models",
    "bad_input",
    "grad_comm",
    "faults",
    "drift",
    "tools",
    "distributed_config",
    "undisturbed",
)

# Of each file, the tests that `--quick` runs: the ends of their names. Of a file
# that is not here it is the first test, so that a new file takes part.
QUICK: dict[str, tuple[str, ...]] = {
    # Another test of the same kind takes less, or there is no short one of its kind:
    # whole runs beside the release's, random models, more steps, more of real models
    "accelerate": (),
    "bench": ("::test_row_survives_json",),
    "composition": (),
    "determinism": (),
    "drift": (),
    "features": ("::test_every_input_counts",),
    "growth": (),
    "plugins": (),
    "random": (),
    "schedules": (),
    "superbuild": ("::test_release_has_an_entry_for_each_test_file",),
    "tools": (),
    "undisturbed_hooks": (),
    # The release's own answers
    "divide_factors": ("::test_equal_to_the_base_and_so_are_the_schemas",),
    # What starts no process of its own
    "undisturbed": (
        "::test_an_explicit_unshard_plans_nothing_anew",
        "::test_shards_are_moved_one_at_a_time",
    ),
    # What needs no model, a step in every order, and a race
    "late_device": (
        "::test_reading_what_another_stream_writes_how_not",
        "::test_every_order_name_mixed",
        "::test_published_race_is_found_title_inputs reused between reductions",
    ),
    # Several kinds in one file: threads, processes
    "comm": (
        "::TestOn2Ranks::test_gathers_in_the_compute_dtype",
        "::TestOn2Ranks::test_reduces_each_dtype_by_itself",
        "::test_one_gather_whatever_the_dtypes_and_one_reduction_for_each",
    ),
    "hsdp": ("::test_deferred_all_reduce", "::test_three_microbatches"),
    "mixed_dtype": ("::test_cpu_offload", "::test_hybrid", "::test_replicate"),
    "models": ("::test_each_step_equals_one_process_name_mamba2_replicas_1",),
    "streams": (
        "::test_sites",
        "::test_backward_waits_for_a_part_of_a_unit_kind_uniform",
    ),
}


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


def pytest_collection_finish(session: pytest.Session) -> None:
    # Collections in tests need not look through all that has been imported
    gc.collect()
    gc.freeze()


def rank_of(name: str) -> int:
    if name in LONGEST_FIRST:
        return LONGEST_FIRST.index(name)
    return len(LONGEST_FIRST)


def quick_tests(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Returns the tests of the table, and the first of each file that it lacks."""
    chosen, seen = [], set()
    for item in items:
        name = concern(item.path)
        ends = QUICK.get(name)
        if item.nodeid.endswith(ends) if ends is not None else name not in seen:
            chosen.append(item)
        seen.add(name)
    return chosen
