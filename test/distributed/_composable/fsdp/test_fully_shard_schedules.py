# Owner(s): ["oncall: distributed"]

"""
Random schedules of training steps: a unit of one dtype has the bits, the collectives
and the warnings of the release in each of them.

What is run is in ``fsdp_random/schedules.py``, under both torches.

[Note: What may be compared]
Ranks may compare what they are about to do, with gathers of a few bytes, in the first
two steps. From the third step on they may only for what they have not done before: a
unit that reduces other parameters than ever, or one that starts anew after
``reset_iter_state``.

Runs with pytest, python or ``torchrun --nproc-per-node 4``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_common.run_both import Results, run_on_both
from fsdp_common.utils import DeviceFreeTest
from fsdp_random.schedules import draw, Schedule, SCHEDULES, STEPS

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


pytestmark = pytest.mark.long


# Of one rank: what it sends at most to be compared
MOST_COMPARED_NBYTES = 64
UNITS = 3
FREE_STEPS = 2

Call = tuple[Any, ...]


def is_comparison(call: Call) -> bool:
    """Whether a call of a collective is a gather of a few bytes."""
    name, *arguments = call
    if not name.startswith("all_gather") or name == "all_gather_object":
        return False
    tensors = [each for each in arguments if len(each) == 3]
    numels = [numel for _, dtype, numel in tensors if dtype == "torch.uint8"]
    return len(numels) == len(tensors) > 0 and min(numels) <= MOST_COMPARED_NBYTES


def new_patterns(steps: list[dict[str, Any]]) -> Iterator[int]:
    """
    Yields for each step how many gathers and reductions are there that no earlier
    one had, since the beginning or since the state was reset.
    """
    seen: set[Any] = set()
    gathers_are_new = True
    for step in steps:
        if "fail" in step["actions"]:
            seen.clear()
            gathers_are_new = True
        fresh = {*step["patterns"]} - seen
        seen |= fresh
        yield len(fresh) + (UNITS if gathers_are_new else 0)
        gathers_are_new = False


@instantiate_parametrized_tests
class TestSchedules(DeviceFreeTest):
    """Each schedule under the release and under this branch."""

    release: Results
    branch: Results

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.release, cls.branch = run_on_both("fsdp_random.schedules")

    def both(self, number: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Returns what the release and this branch saw of a schedule, by rank."""
        key = str(number)
        pairs = zip(self.release, self.branch, strict=True)
        seen = [
            (release[key], branch[key]) for release, branch in pairs if key in release
        ]
        self.assertEqual(len(seen), draw(number).ranks)
        for release, branch in seen:
            self.assertNotIn("error", release)
            self.assertEqual(branch.get("error"), None, draw(number))
        return seen

    @parametrize("number", range(SCHEDULES))
    def test_bits_are_those_of_the_release(self, number: int) -> None:
        for release, branch in self.both(number):
            for i, (expected, actual) in enumerate(
                zip(release["steps"], branch["steps"], strict=True)
            ):
                self.check_bits(f"schedule {number}, step {i}", actual, expected)

    @parametrize("number", range(SCHEDULES))
    def test_collectives_are_those_of_the_release(self, number: int) -> None:
        for release, branch in self.both(number):
            self.check_collectives(number, release["steps"][:-1], branch["steps"][:-1])

    @parametrize("number", range(SCHEDULES))
    def test_warnings_are_those_of_the_release(self, number: int) -> None:
        for release, branch in self.both(number):
            self.assertEqual(branch["warnings"], release["warnings"])

    def check_bits(self, place: str, actual: Any, expected: Any) -> None:
        self.assertEqual(actual.keys(), expected.keys(), place)
        for name, value in expected.items():
            if name not in ("collectives", "patterns"):
                self.assertEqual(actual[name], value, f"{place}, {name}")

    def check_collectives(self, number: int, release: Any, branch: Any) -> None:
        """See [Note: What may be compared]."""
        for i, (expected, actual, fresh) in enumerate(
            zip(release, branch, new_patterns(release), strict=True)
        ):
            place = f"schedule {number}, step {i}: {draw(number)}"
            calls = actual["collectives"]
            kept = [call for call in calls if not is_comparison(call)]
            self.assertEqual(kept, expected["collectives"], place)
            # Over the shards, and over the replicas
            allowed = len(calls) if i < FREE_STEPS else 2 * fresh
            self.assertLessEqual(len(calls) - len(kept), allowed, place)

    def test_steps_that_repeat_compare_nothing(self) -> None:
        steady = 0
        for results in (pair for n in range(SCHEDULES) for pair in self.both(n)):
            release, branch = results[0]["steps"][:-1], results[1]["steps"][:-1]
            for i, fresh in enumerate(new_patterns(release)):
                if i >= FREE_STEPS and fresh == 0:
                    calls = branch[i]["collectives"]
                    self.assertEqual([*filter(is_comparison, calls)], [])
                    steady += 1
        self.assertGreater(steady, SCHEDULES)

    # Whether the schedules are what they are meant to be #

    def test_the_release_compares_nothing(self) -> None:
        for release, _ in (pair for n in range(SCHEDULES) for pair in self.both(n)):
            for step in release["steps"][:-1]:
                self.assertGreater(len(step["collectives"]), 0)
                self.assertFalse(any(map(is_comparison, step["collectives"])))

    def test_schedules_have_everything(self) -> None:
        drawn = [draw(number) for number in range(SCHEDULES)]
        settings: Counter[Any] = Counter()
        for schedule in drawn:
            settings.update(self.settings_of(schedule))
        for name in (
            *("save", "load", "load and assign", "freeze weights", "freeze a block"),
            *("unfreeze", "fail", "evaluate", "unshard", "unshard async"),
            *("reshard by hand", "reshard after forward", "keep after forward"),
            *("parallelism shard", "parallelism hybrid", "parallelism replicate"),
            *("reshard 2", "reshard True", "reshard False", "offloads True"),
            *("shards_columns True", "prefetch both", "input_buffers 2"),
            *("sync none", "sync scatter", "keeps", "not last", "to zero"),
            *("skips a block", "skips a parameter"),
        ):
            self.assertGreaterEqual(settings[name], 2, name)

    def settings_of(self, schedule: Schedule) -> Iterator[str]:
        for name, value in vars(schedule).items():
            yield f"{name} {value}"
        self.assertEqual(len(schedule.steps), STEPS)
        for step in schedule.steps:
            yield from step.actions
            yield "to none" if step.to_none else "to zero"
            for microbatch in step.microbatches:
                yield f"sync {microbatch.sync}"
                yield "reshards" if microbatch.reshards else "keeps"
                yield "last" if microbatch.is_last else "not last"
                yield "skips a block" if microbatch.skip_blocks else "runs all"
                yield "skips a parameter" if microbatch.skip else "uses all"


if __name__ == "__main__":
    run_tests()
