# Owner(s): ["oncall: distributed"]
"""What ``make`` hands over to pytest."""

from __future__ import annotations

import os

import pytest

from fsdp_build import REPOSITORY
from fsdp_build.utils import run

from torch.testing._internal.common_utils import run_tests, TestCase


pytestmark = pytest.mark.tools


class TestMake(TestCase):
    def asked(self, *told: str, **variables: str) -> str:
        env = {k: v for k, v in os.environ.items() if k not in ("CI", "TORCH_RELEASE")}
        make = ("make", "--dry-run", "--no-print-directory", *told)
        printed = run(*make, cwd=REPOSITORY, env=env | variables)
        words = " ".join(printed.replace("\\\n", " ").split())
        return words.partition("-m pytest --durations=10 ")[2]

    def test_tools_are_tested_by_themselves_and_by_ci(self):
        several = "--numprocesses=auto --dist=loadfile -m"
        for told, expected in (
            (("test",), f'{several} "not tools" test'),
            (("test", "QUICK=1"), f'{several} "quick" test'),
            (("test", "ARGS=a.py -k b"), "a.py -k b"),
            (("test-tools",), f"{several} tools test"),
        ):
            self.assertEqual(self.asked(*told), expected)
        self.assertEqual(self.asked("test", CI="true"), f'{several} "" test')


# Launched on several ranks, one does the work: the tests share no processes.
if __name__ == "__main__" and int(os.environ.get("RANK", "0")) == 0:
    run_tests()
