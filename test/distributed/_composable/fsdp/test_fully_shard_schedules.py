# Owner(s): ["oncall: distributed"]

"""
Random schedules of training steps: a unit of one dtype has the bits, the collectives
and the warnings of the release in each of them.

What is run is in ``fsdp_helpers/random/beside_release.py``, under both torches. And many
steps of one schedule leave nothing behind: ``FSDP_GROWTH_STEPS`` chooses a longer run.

[Note: What may be compared]
Ranks may compare what they are about to do, with gathers of a few bytes, in the first
two steps. From the third step on they may only for what they have not done before: a
unit that reduces other parameters than ever, or one that starts anew after
``reset_iter_state``.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_helpers.common.scenario_test import ScenarioTest
from fsdp_helpers.common.utils import FakeGroupTest
from fsdp_helpers.random.beside_release import CASES, draw
from fsdp_helpers.random.growth import MODES, run_mode

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.timeout(600)


# Of one rank: what it sends at most to be compared
MOST_COMPARED_NBYTES = 64
FREE_STEPS = 2

Call = tuple[Any, ...]


def is_comparison(call: Call) -> bool:
    """Whether a call of a collective is a gather of a few bytes."""
    name, _, *arguments = call
    if "gather" not in name:
        return False
    tensors = [each for each in arguments if isinstance(each, tuple)]
    numels = [numel for dtype, numel in tensors if dtype == "torch.uint8"]
    return len(numels) == len(tensors) > 0 and min(numels) <= MOST_COMPARED_NBYTES


def new_patterns(number: int, steps: list[dict[str, Any]]) -> Iterator[int]:
    """
    Yields for each step how many gathers and reductions are there that no earlier
    one had, since the beginning or since the state was reset.
    """
    seen: set[Any] = set()
    gathers = blocks = len(draw(number).blocks)
    for step in steps:
        if "fail" in step["actions"]:
            seen.clear()
            gathers = blocks
        fresh = {*step["patterns"]} - seen
        seen |= fresh
        yield len(fresh) + gathers
        gathers = 0


@instantiate_parametrized_tests
class TestSchedules(ScenarioTest):
    """Each schedule under the release and under this branch."""

    script = "fsdp_helpers.random.beside_release"

    @parametrize("number", range(CASES))
    def test_is_as_with_the_release(self, number: int) -> None:
        sides = (self.records_of(r, f"{number}") for r in (self.release, self.branch))
        for expected, actual in zip(*sides, strict=True):
            self.assertEqual(actual["warnings"], expected["warnings"])
            self.check_collectives(number, expected["steps"][:-1], actual["steps"][:-1])
            steps = zip(expected["steps"], actual["steps"], strict=True)
            for i, (of_release, of_branch) in enumerate(steps):
                self.assertEqual(of_branch.keys(), of_release.keys())
                for name in of_release.keys() - {"collectives", "patterns"}:
                    place = f"schedule {number}, step {i}, {name}"
                    self.assertEqual(of_branch[name], of_release[name], place)

    def check_collectives(self, number: int, release: Any, branch: Any) -> None:
        """See [Note: What may be compared]."""
        # Later steps may leave out all parameters
        self.assertNotEqual(release[0]["collectives"], [], draw(number))
        fresh = [*new_patterns(number, release)]
        for i, (expected, actual) in enumerate(zip(release, branch, strict=True)):
            place = f"schedule {number}, step {i}: {draw(number)}"
            calls = actual["collectives"]
            kept = itertools.filterfalse(is_comparison, calls)
            self.assertEqual([*kept], expected["collectives"], place)
            # Over the shards, and over the replicas
            compared = sum(map(is_comparison, calls))
            if i >= FREE_STEPS:
                self.assertLessEqual(compared, 2 * fresh[i], place)


@instantiate_parametrized_tests
class TestGrowth(FakeGroupTest):
    """A model that is gone takes everything with it."""

    # Less than two hundred bytes for each unit in each of the fewest steps, and more
    # than tables and caches of the interpreter's come and go by
    MAX_GROWTH_NBYTES = 16 * 2**10
    # Less than one for each of the fewest steps. Other threads of this process may
    # make some too
    MAX_GROWTH_OBJECTS = 15

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        run_mode([*MODES.values()][-1], 1)  # what is made once for a process
        gc.collect()
        gc.freeze()

    @parametrize("mode", [*MODES])
    def test_steps_and_models_leave_nothing_behind(self, mode: str) -> None:
        steps = int(os.environ.get("FSDP_GROWTH_STEPS", "60"))
        before, few, half, last, after = run_mode(MODES[mode], steps)
        for what in ("tensors", "bytes", "events"):
            self.assertEqual(last[what], few[what], what)
        growth = {what: last[what] - half[what] for what in last}
        self.assertLess(growth["objects"], self.MAX_GROWTH_OBJECTS)
        self.assertLess(growth["allocated_bytes"], self.MAX_GROWTH_NBYTES)
        for what in ("units", "tensors"):
            self.assertEqual(after[what], before[what], what)


if __name__ == "__main__":
    run_tests()
