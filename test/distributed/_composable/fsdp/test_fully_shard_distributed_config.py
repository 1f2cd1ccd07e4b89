# Owner(s): ["oncall: distributed"]

"""
``DistributedConfig`` of transformers, which makes a unit for each dtype, and the same
with one unit for each layer: what they send, as the page says, and what they compute.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from fsdp_clients.real_models import EXAMPLES
from fsdp_common.utils import (
    DeviceFreeTest,
    FSDPProcessTest,
    LAUNCHED_RANK,
    REPO_ROOT,
    run_python,
    WORLD_SIZE,
)

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import run_tests


pytestmark = pytest.mark.long


PAGE = REPO_ROOT / "docs" / "migration.md"
SCRIPT = EXAMPLES / "count_distributed_config.py"


def told() -> list[list[str]]:
    """Returns the cells of the page's table, but for names and the last column."""
    table = PAGE.read_text().split("| tiny DeepSeek-V4")[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in cells[1:6]] for cells in rows]


class TestDistributedConfig(FSDPProcessTest):
    world_size = 2 if LAUNCHED_RANK is None else WORLD_SIZE

    @pytest.mark.quick
    def test_sends_what_the_page_says(self) -> None:
        from count_distributed_config import count

        found = [way.row()[1:-1] for way in count(1, self.device)]
        self.assertEqual([[str(cell) for cell in row] for row in found], told())

    def test_units_for_each_layer_compute_the_same(self) -> None:
        """The same bits forward; gradients add up by unit, so bf16 ones are rounded."""
        from _real_model import causal_loss, token_batches
        from count_distributed_config import TINY, ways

        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        if self.rank == 0:
            torch.manual_seed(0)
            TINY.build_model().save_pretrained(folders[0])
        dist.barrier()
        split, whole, _ = (way.load(folders[0]) for way in ways())
        batch = next(token_batches(1, 2 * self.world_size, self.device))
        tokens = batch.chunk(self.world_size)[self.rank]
        losses = [causal_loss(model, tokens) for model in (split, whole)]
        for loss in losses:
            loss.backward()
        self.assertTrue(torch.equal(*losses))
        pairs = zip(split.named_parameters(), whole.parameters(), strict=True)
        for (name, one), other in pairs:
            self.assertEqual(one.dtype, other.dtype, name)
            self.assertEqual(one.grad is None, other.grad is None, name)
            if one.grad is not None:
                grads = [p.grad.full_tensor().double() for p in (one, other)]
                apart = (grads[0] - grads[1]).norm()
                # Some are sums of nothing but rounding
                self.assertLessEqual(apart, 2**-4 * grads[1].norm() + 2**-12, name)
        self.assertEqual(len({param.dtype for param in whole.parameters()}), 2)


class TestPage(DeviceFreeTest):
    def test_the_lines_of_the_page_are_those_that_are_counted(self) -> None:
        block = PAGE.read_text().split("```python\nimport re\n")[1].split("```")[0]
        lines = block.strip().splitlines()
        self.assertIn(f"    {lines[-1]}\n", SCRIPT.read_text())

    def test_the_page_names_all_tests_of_clients(self) -> None:
        named = {*re.findall(r"`fsdp_clients/(with_\w+\.py)`", PAGE.read_text())}
        clients = Path(__file__).with_name("fsdp_clients").glob("with_*.py")
        self.assertEqual(named, {path.name for path in clients})

    def test_release_refuses_all_but_fp32(self) -> None:
        args = ("--nproc", "2", "--steps", "1", "--device", "cpu")
        printed = run_python(str(SCRIPT), *args, on_release=True)
        self.assertEqual(
            len(re.findall(r"layer +5 +refused|dtype +25 +refused", printed)), 2
        )
        self.assertIn("refused: AssertionError: FSDP expects uniform", printed)
        (fp32,) = (line for line in printed.splitlines() if line.startswith("upcast"))
        self.assertEqual(fp32.split()[3:-1], told()[2])


if __name__ == "__main__":
    run_tests()
