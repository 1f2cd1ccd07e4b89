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
"""

import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_helpers.common.scenario_test import ScenarioTest
from fsdp_helpers.common.utils import FakeGroupTest
from fsdp_helpers.random.beside_release import CASES, draw
from fsdp_helpers.random.cases import (
    BF16,
    Case,
    FP16,
    FP32,
    Microbatch,
    Param,
    run_microbatch,
    shard_model,
    Step,
)

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.testing._internal.common_utils import parametrize, run_tests


pytestmark = pytest.mark.timeout(600)


# What a rank sends at most to be compared
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
    """Yields each step's gathers and reductions that no earlier one had."""
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


class TestSchedules(ScenarioTest):
    """Each schedule under the release and under this branch."""

    script = "fsdp_helpers.random.beside_release"

    @parametrize("number", range(CASES))
    def test_random_schedule_runs_as_with_the_release(self, number: int) -> None:
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


# Many steps of one schedule #

WARM_UP = 20
EVENTS = (torch.Event, torch.cpu.Event)
UNITS = (nn.Module, FSDPParam, param_group.FSDPParamGroup, param_group.FSDPCommContext)
BLOCK = (
    Param((9, 3), FP32),
    Param((16,), BF16, has_two_names=True),
    Param((5, 2), FP16),
    Param((4,), FP32, reduce=BF16),
    Param((3,), BF16, is_trained=False),
)
PARTS = (
    Microbatch("scatter", skipped_params=frozenset([(0, 0), (1, 2)]), is_last=False),
    Microbatch("scatter", skipped_blocks=frozenset([1]), is_last=False),
    Microbatch(),
)
UNREDUCED = (Microbatch("none", is_last=False),) * 2 + (Microbatch(),)


def case(parallelism: str, *microbatches: Microbatch, **changes: Any) -> Case:
    mesh = (2, 4) if parallelism == "hybrid" else (8,)
    step = Step(microbatches or (Microbatch(),))
    return Case((BLOCK,) * 3, parallelism, mesh, (step,), **changes)


MODES = {
    "resharded to 4, prefetched": case("shard", reshard=4, prefetch=(2, 2)),
    "bf16 compute, recomputed, offloaded": case(
        "shard", param_dtype=BF16, reduce_dtype=FP32, recomputes=True, offloads=True
    ),
    "accumulated": case("shard", *UNREDUCED),
    "hsdp, deferred all-reduce": case("hybrid", *PARTS),
}


def living() -> dict[str, int]:
    """Returns how much there is of what could grow."""
    for _ in range(4):  # each leaves out one more level of nested tuples
        gc.collect()
    objects = gc.get_objects()
    # By type: what `isinstance` asks may make things
    tensors = [o for o in objects if issubclass(type(o), torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return {
        "objects": len(objects),
        # Meshes, which live on, have others
        "tensors": sum(tensor.is_floating_point() for tensor in tensors),
        "bytes": sum(storage.nbytes() for storage in storages.values()),
        "units": sum(issubclass(type(o), UNITS) for o in objects),
        "events": sum(issubclass(type(o), EVENTS) for o in objects),
    }


def run_mode(case: Case, steps: int) -> list[dict[str, int]]:
    """Returns what lives before, after a few, half and all steps, and afterwards."""
    found = [living()]
    model = shard_model(case, "cpu")
    for step in range(1, steps + 1):
        for batch in range(len(case.steps[0].microbatches)):
            run_microbatch(model, 0, batch)
        model.zero_grad()
        if step in (WARM_UP, steps // 2, steps):
            found.append(living())
    del model
    return [*found, living()]


class TestGrowth(FakeGroupTest):
    """Many steps on one of eight ranks: a model that is gone takes all with it."""

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
        growth = last["objects"] - half["objects"]
        self.assertLess(growth, self.MAX_GROWTH_OBJECTS)
        for what in ("units", "tensors"):
            self.assertEqual(after[what], before[what], what)


if __name__ == "__main__":
    run_tests()
