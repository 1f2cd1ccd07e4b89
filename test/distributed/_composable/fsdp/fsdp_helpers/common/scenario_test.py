"""What the tests of ``fsdp_helpers/common/scenarios.py``'s scenarios share."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from fsdp_helpers.common.parity_layers import Record
from fsdp_helpers.common.run_both import Results, run_on_both
from fsdp_helpers.common.utils import DeviceFreeTest


# Of all classes of a file that ask for the same script
_results_of = functools.cache(run_on_both)


class ScenarioTest(DeviceFreeTest):
    """Each scenario of a script under the release and under this branch."""

    script: ClassVar[str]  # the module
    in_halves: ClassVar[bool] = False  # see `run_on`
    release: Results
    branch: Results

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.release, cls.branch = _results_of(cls.script, in_halves=cls.in_halves)

    def records_of(self, results: Results, name: str) -> list[Record]:
        """Returns what each rank found that ran it, and did not fail."""
        records = [found[name] for found in results if name in found]
        self.assertGreater(len(records), 0)
        self.assertEqual([r["error"] for r in records if "error" in r], [])
        return records

    def results_of(self, name: str) -> list[Record]:
        return self.records_of(self.branch, name)

    def check(self, name: str) -> Record:
        """Returns what the first rank of the release found, if the branch found it."""
        sides = (
            self.records_of(results, name) for results in (self.release, self.branch)
        )
        first, *_ = pairs = [*zip(*sides, strict=True)]
        for expected, actual in pairs:
            self.assertGreater(len(expected), 0)
            self.check_same(name, actual, expected)
        return first[0]

    def check_same(self, key: str, actual: Any, expected: Any) -> None:
        """Names what differs alone."""
        if isinstance(actual, dict) and isinstance(expected, dict):
            self.assertEqual([*actual], [*expected], key)
            for name, value in expected.items():
                self.check_same(f"{key}, {name}", actual[name], value)
        else:
            self.assertTrue(actual == expected, f"{key}: {actual} != {expected}"[:3000])
