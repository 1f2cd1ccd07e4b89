# Owner(s): ["oncall: distributed"]
"""
Random models, meshes, policies and schedules against what the gradients must be, see
``fsdp_random/cases.py``. ``FSDP_RANDOM_CASES`` and ``FSDP_RANDOM_SEED`` choose a longer
run than the one that is the same every time.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, HealthCheck, Phase, seed, settings

from fsdp_common.utils import (
    DEVICE_TYPE,
    FSDPProcessTest,
    on_first_rank,
    WORLD_SIZE,
)
from fsdp_random.cases import Case, cases, cases_of_replicas, run_case

import torch.distributed as dist
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.testing._internal.common_utils import run_tests, TestCase


pytestmark = pytest.mark.long


CASES = int(os.environ.get("FSDP_RANDOM_CASES", "300"))
SEED = os.environ.get("FSDP_RANDOM_SEED")
PROCESS_CASES = max(CASES // 10, 1)


def chosen_settings(**kwargs: Any) -> settings:
    return settings(
        deadline=None,
        database=None,
        derandomize=SEED is None,
        suppress_health_check=[*HealthCheck],
        **kwargs,
    )


def seeded(test: Any) -> Any:
    return test if SEED is None else seed(int(SEED))(test)


@on_first_rank
class TestThreads(TestCase):
    @seeded
    @chosen_settings(max_examples=CASES)
    @given(cases((1, 2, 3, 4, 8)))
    def test_gradients(self, case: Case):
        self.run_on_threads(case)

    @seeded
    @chosen_settings(max_examples=max(CASES // 5, 1))
    @given(cases_of_replicas((2, 4, 8)))
    def test_replicas_in_opposite_order(self, case: Case):
        self.run_on_threads(case)

    def run_on_threads(self, case: Case) -> None:
        @spawn_threads_and_init_comms(world_size=case.ranks)
        def run(self: TestCase) -> None:
            run_case(case, dist.get_rank(), "cpu")

        run(self)


class TestProcesses(FSDPProcessTest):
    # Without shrinking, so that all ranks draw the same cases
    @seeded
    @chosen_settings(max_examples=PROCESS_CASES, phases=[Phase.generate])
    @given(cases((WORLD_SIZE,)))
    def test_gradients(self, case: Case):
        run_case(case, self.rank, DEVICE_TYPE)


if __name__ == "__main__":
    run_tests()
