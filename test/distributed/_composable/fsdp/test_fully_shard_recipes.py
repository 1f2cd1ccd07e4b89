# Owner(s): ["oncall: distributed"]
"""Runs the examples and ``docs/recipes``, which assert what they say."""

import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_helpers.common.utils import DEVICE_TYPE, FSDPProcessTest

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import parametrize, run_tests


# Not where torch is: this file may be run on another one
ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "docs" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.py"))


@contextlib.contextmanager
def group_is_kept() -> Iterator[None]:
    """Lets a program find the group that its process has already, and leave it."""
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(os, "_exit"),
    ):
        yield
    dist.barrier()


class TestPrograms(FSDPProcessTest):
    def setUp(self) -> None:
        super().setUp()
        if DEVICE_TYPE != "cpu":
            self.skipTest("recipes make groups of CPUs")

    @parametrize("name", RECIPES)
    def test_recipe_runs(self, name: str) -> None:
        with group_is_kept():
            runpy.run_path(str(FOLDER / f"{name}.py"))

    def train(self, steps: int, folder: str) -> dict[str, Any]:
        """Returns what is there after the example has trained."""
        script = str(ROOT / "examples" / "train.py")
        ranks = {"LOCAL_WORLD_SIZE": str(self.world_size)}
        with (
            mock.patch.object(sys, "argv", [script, str(steps), folder]),
            mock.patch.dict(os.environ, ranks),
            group_is_kept(),
        ):
            return runpy.run_path(script)

    def test_example_learns_and_resumes_bit_for_bit(self) -> None:
        folders = [tempfile.mkdtemp() for _ in range(2)]
        dist.broadcast_object_list(folders)
        first, half = self.train(8, folders[0]), self.train(4, folders[1])
        self.assertLess(first["loss"].item(), half["loss"].item())
        resumed = self.train(8, folders[1])
        self.assertEqual(resumed["saved"], 4)
        self.assertEqual(first["norm"], resumed["norm"], rtol=0, atol=0)
        params = zip(first["model"].parameters(), resumed["model"].parameters())
        for param, other in params:
            self.assert_same(param.to_local(), other.to_local())
        dtypes = {param.dtype for param in first["model"][1].parameters()}
        self.assertEqual(dtypes, {torch.bfloat16, torch.float32})


if __name__ == "__main__":
    run_tests()
