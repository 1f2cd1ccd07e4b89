# Owner(s): ["oncall: distributed"]
"""
Random models, meshes, policies and schedules against what the gradients must be, see
``fsdp_helpers/random/exact.py``. ``FSDP_RANDOM_CASES`` and ``FSDP_RANDOM_SEED`` choose
another run than the one that is the same every time.
"""

import os
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, HealthCheck, Phase, seed, settings, strategies

from fsdp_helpers.common.utils import (
    DEVICE_TYPE,
    FSDPProcessTest,
    on_first_rank,
    WORLD_SIZE,
)
from fsdp_helpers.random.cases import Case, draw_case
from fsdp_helpers.random.exact import check_case

from torch.distributed.fsdp._fully_shard import _fsdp_layout as layouts
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.testing._internal.common_utils import run_tests, TestCase


pytestmark = pytest.mark.timeout(600)
# Else no parameter here would be copied in pieces
in_pieces = mock.patch.object(layouts, "_MIN_PIECE_NBYTES", 0)


DEFAULT_CASES = 300 if os.environ.get("CI") else 50
CASES = int(os.environ.get("FSDP_RANDOM_CASES", DEFAULT_CASES))
SEED = int(os.environ.get("FSDP_RANDOM_SEED", "0"))


def on_cases(count: int, *ranks: int, **kwargs: Any) -> Any:
    """Runs a test on so many cases, each for one of these numbers of ranks."""
    randoms = strategies.randoms(use_true_random=False)
    cases = randoms.map(lambda rng: draw_case(rng, ranks))
    chosen = settings(
        max_examples=max(count, 1),
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
        **kwargs,
    )
    return lambda test: seed(SEED)(chosen(given(cases)(test)))


@on_first_rank
class TestThreads(TestCase):
    @in_pieces
    @on_cases(CASES, 1, 2, 3, 4, 8)
    def test_random_case_has_the_exact_gradients(self, case: Case):
        @spawn_threads_and_init_comms(world_size=case.ranks)
        def run(self: TestCase) -> None:
            check_case(case, "cpu")

        run(self)


class TestProcesses(FSDPProcessTest):
    # Without shrinking, so that all ranks draw the same cases
    @in_pieces
    @on_cases(CASES // 5, WORLD_SIZE, phases=[Phase.generate])
    def test_random_case_has_the_exact_gradients(self, case: Case):
        check_case(case, DEVICE_TYPE)


if __name__ == "__main__":
    run_tests()
