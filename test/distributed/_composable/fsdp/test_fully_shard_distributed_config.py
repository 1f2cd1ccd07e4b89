# Owner(s): ["oncall: distributed"]

"""
``DistributedConfig`` of transformers, which makes a unit for each dtype, and the same
with one unit for each layer: what they send, as the page says.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_clients.real_models import needs
from fsdp_common.utils import (
    DeviceFreeTest,
    FSDPProcessTest,
    LAUNCHED_RANK,
    record_collectives,
    REPO_ROOT,
    WORLD_SIZE,
)

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.common_utils import run_tests


pytestmark = pytest.mark.timeout(600)


PAGE = REPO_ROOT / "docs" / "migration.md"
BF16, FP32 = torch.bfloat16, torch.float32


def told() -> list[list[str]]:
    """Returns the cells of the page's table, but for names and the last column."""
    table = PAGE.read_text().split("| tiny DeepSeek-V4")[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in cells[1:6]] for cells in rows]


@contextlib.contextmanager
def unsplit() -> Iterator[None]:
    """Has transformers (5.23) find nothing to make units of because of its dtype.

    Loading looks names up by its own import of the function: dtypes stay as they are.
    """
    from transformers.distributed import mixin

    splits = mixin.build_glob_alternation
    mixin.build_glob_alternation = lambda names: (re.compile("(?!)"), {}, {})
    try:
        yield
    finally:
        mixin.build_glob_alternation = splits


def units_of(model: nn.Module) -> int:
    """Returns how many units there are that have parameters."""
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    units = {id(each._get_fsdp_state()): each._get_fsdp_state() for each in modules}
    return sum(len(unit._fsdp_param_groups) > 0 for unit in units.values())


@needs("transformers", "accelerate")
class TestDistributedConfig(FSDPProcessTest):
    world_size = 2 if LAUNCHED_RANK is None else WORLD_SIZE

    def models(self) -> list[nn.Module]:
        """Loads one checkpoint with a unit for each dtype, for each layer, and upcast."""
        import transformers
        from transformers.distributed import DistributedConfig

        from fsdp_clients.tiny_models import TINY_MODELS

        tiny = TINY_MODELS["deepseek_v4"]
        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        if self.rank == 0:
            torch.manual_seed(0)
            tiny.build_model().save_pretrained(folders[0])
        dist.barrier()
        load = getattr(transformers, tiny.architecture[0]).from_pretrained
        ranks = DistributedConfig(fsdp_size=self.world_size)
        split = load(folders[0], dtype=BF16, distributed_config=ranks)
        with unsplit():
            whole = load(folders[0], dtype=BF16, distributed_config=ranks)
        upcast = load(folders[0], dtype=FP32, distributed_config=ranks)
        return [split, whole, upcast]

    def loss_of(self, model: nn.Module) -> torch.Tensor:
        from fsdp_clients.real_models import causal_loss, token_batches

        batch = next(token_batches(1, 2 * self.world_size, self.device))
        return causal_loss(model, batch.chunk(self.world_size)[self.rank])

    @pytest.mark.quick
    def test_sends_what_the_page_says(self) -> None:
        found = []
        for model in self.models():
            with record_collectives() as recorder:
                self.loss_of(model).backward()
            row = [units_of(model)]
            for calls in (recorder.all_gathers, recorder.reduce_scatters):
                row += [len(calls), sum(call.nbytes for call in calls)]
            found.append([f"{cell:,}" for cell in row])
        self.assertEqual(found, told())


class TestPage(DeviceFreeTest):
    def test_the_page_names_all_tests_of_clients(self) -> None:
        named = {*re.findall(r"`fsdp_clients/(with_\w+\.py)`", PAGE.read_text())}
        clients = Path(__file__).with_name("fsdp_clients").glob("with_*.py")
        self.assertEqual(named, {path.name for path in clients})


if __name__ == "__main__":
    run_tests()
