# Owner(s): ["oncall: distributed"]
"""
The operators ``fsdp::*``, which compiled graphs are matched with, and how often a step
looks for observers, for whom alone it calls them. Schemas are in
``test_fully_shard_composition.py``, which calls the release as well.
"""

from typing import Any
from unittest import mock

from fsdp_helpers.common.utils import DeviceFreeTest, FakeGroupTest, shard_blocks

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard import _fsdp_observers as observers
from torch.testing._internal.common_utils import parametrize, run_tests


class TestOperators(DeviceFreeTest):
    @parametrize("device", ["cpu", "meta"])
    def test_operators_fill_their_outputs(self, device: str) -> None:
        """A segment of its rank, columns, and a padded row for each rank."""
        ops = torch.ops.fsdp
        inputs = [torch.arange(1.0, 4.0), torch.arange(4.0, 6.0)]
        inputs = [tensor.to(device) for tensor in inputs]
        output = torch.zeros(15, device=device)
        segment, same = ops.all_gather_copy_in(inputs, output, [3, 2], 5, 1)
        self.assertEqual((segment.size(), segment.storage_offset()), ((5,), 5))
        self.assertEqual((same.size(), same.device.type), ((15,), device))
        columns = [torch.empty(2, size, device=device) for size in (3, 2)]
        rows = torch.arange(10.0).view(2, 5).to(device)
        ops.split_with_sizes_copy(rows, [3, 2], dim=1, out=columns)
        padded = torch.full((2, 3), -1.0, device=device)
        ops.chunk_cat(inputs, dim=0, num_chunks=2, out=padded)
        if device == "cpu":
            self.assertEqual(output.tolist(), [0] * 5 + [1, 2, 3, 4, 5] + [0] * 5)
            self.assertEqual(columns[1].tolist(), [[3, 4], [8, 9]])
            self.assertEqual(padded.tolist(), [[1, 2, 4], [3, 0, 5]])


class TestObservers(FakeGroupTest):
    """Whether operators are called, and how often that is asked."""

    ranks = 2

    def test_devices_of_vendors_get_operators_also_if_nobody_observes(self) -> None:
        """Backends may have replaced the kernels."""
        devices = map(torch.device, ("cpu", "cuda", "meta"))
        found = {each.type: observers.gets_operators(each) for each in devices}
        self.assertEqual(found, {"cpu": False, "cuda": False, "meta": True})

    def looks(self, run: Any) -> int:
        with mock.patch.object(observers, "look_for_traces") as look:
            run(torch.ones(1, self.ranks))
        return look.call_count

    def test_who_observes_is_asked_once_a_forward(self) -> None:
        # Units in a root that has no parameters
        model = nn.Sequential(*(nn.Linear(self.ranks, self.ranks) for _ in range(5)))
        shard_blocks(model, mesh=self.mesh)(torch.ones(1, self.ranks))
        model.set_is_last_backward(False)  # as in all microbatches but the last
        for _ in range(2):
            self.assertEqual(self.looks(lambda x: model(x).sum().backward()), 1)
        with torch.no_grad():
            for run in (model, model, model[:3]):
                self.assertEqual(self.looks(run), 1)
            self.assertEqual(self.looks(model[3:]), 0)  # the rest of that forward
            self.assertEqual(self.looks(model[:2]), 1)


if __name__ == "__main__":
    run_tests()
