# Owner(s): ["oncall: distributed"]
"""
Runs every program in ``docs/recipes``: each asserts what it says, and ends with the
processes of its group in step.
"""

import runpy
from pathlib import Path
from unittest import mock

from fsdp_common.utils import DEVICE_TYPE, FSDPProcessTest

import torch.distributed as dist
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)


# Not where torch is: this file may be run on another one
FOLDER = Path(__file__).parents[4] / "docs" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))


class TestRecipes(FSDPProcessTest):
    @parametrize("name", RECIPES)
    def test_runs(self, name: str) -> None:
        if DEVICE_TYPE != "cpu":
            self.skipTest("recipes make groups of CPUs")
        # The processes have a group already, and keep it
        with (
            mock.patch.object(dist, "init_process_group"),
            mock.patch.object(dist, "destroy_process_group"),
        ):
            runpy.run_path(str(FOLDER / f"{name}.py"))
        dist.barrier()


instantiate_parametrized_tests(TestRecipes)


if __name__ == "__main__":
    run_tests()
