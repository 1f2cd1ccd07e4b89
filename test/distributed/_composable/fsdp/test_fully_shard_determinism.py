# Owner(s): ["oncall: distributed"]
"""
The same seed gives the same bits: in a second run, whichever process is which rank,
in whatever order they start, and whatever their hashes are.

Different interpreters hold dtypes at different addresses, by which
these hash: a set of dtypes has another order in each.
"""

from __future__ import annotations

import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fsdp_common.utils import on_first_rank, run_python
from fsdp_mixed_dtype.rounds import INTERPRETERS, MODES, RANKS, ROUNDS

from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


pytestmark = pytest.mark.long


# By rank, by mode: what `train` of `fsdp_mixed_dtype/parity.py` recorded
Results = list[dict[str, Any]]


def run_rounds() -> list[Results]:
    """Runs all rounds in one set of processes, half of them with another hash seed."""
    with tempfile.TemporaryDirectory() as folder:

        def run_interpreter(number: int) -> None:
            env = {"PYTHONHASHSEED": str(200 + number)}
            module = "fsdp_mixed_dtype.rounds"
            run_python("-m", module, str(number), folder, env=env)

        with ThreadPoolExecutor(INTERPRETERS) as pool:
            list(pool.map(run_interpreter, range(INTERPRETERS)))
        return [read_round(Path(folder) / f"round{i}") for i in range(len(ROUNDS))]


def read_round(folder: Path) -> Results:
    paths = (folder / f"rank{rank}" for rank in range(RANKS))
    return [pickle.loads(path.read_bytes()) for path in paths]


@on_first_rank
class TestSameBits(TestCase):
    rounds: list[Results]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.rounds = run_rounds()

    def check_round(self, mode: str, number: int) -> None:
        compared = 0
        for first, other in zip(self.rounds[0], self.rounds[number]):
            self.assertEqual(mode in first, mode in other)
            if mode in first:
                self.assertEqual(list(first[mode]), list(other[mode]))
                different = [k for k, v in first[mode].items() if other[mode][k] != v]
                self.assertEqual(different, [])
                compared += 1
        self.assertIn(compared, (2, RANKS))

    @parametrize("mode", MODES)
    def test_second_run(self, mode: str) -> None:
        """By the same processes, which were other ranks in between."""
        self.assertEqual(ROUNDS[2], ROUNDS[0])
        self.check_round(mode, 2)

    @parametrize("mode", MODES)
    def test_processes_that_start_in_another_order(self, mode: str) -> None:
        """The first one to come is the last rank, or the first."""
        self.assertEqual(ROUNDS[1], ROUNDS[0][::-1])
        self.check_round(mode, 1)

    @parametrize("mode", MODES)
    def test_what_is_compared_trained(self, mode: str) -> None:
        """Each step gave other bits, and each rank holds bits of its own."""
        records = [results[mode] for results in self.rounds[0] if mode in results]
        for record in records:
            self.assertNotEqual(record["step 0 loss"], record["step 2 loss"])
            kinds = {name.split()[0] for name in record}
            self.assertEqual(kinds, {"step", "final"})
            self.assertTrue(any("gradient" in name for name in record))
        self.assertNotEqual(records[0]["step 0 loss"], records[1]["step 0 loss"])


instantiate_parametrized_tests(TestSameBits)


if __name__ == "__main__":
    run_tests()
