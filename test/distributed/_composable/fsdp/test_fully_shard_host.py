# Owner(s): ["oncall: distributed"]

"""
What the host does around a step: it looks for observers, and adds notes to errors.
"""

from __future__ import annotations

import sys
import unittest
from typing import Any
from unittest import mock

from fsdp_common.utils import FakeGroupTest, shard_blocks

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, set_reduce_bucket_cap
from torch.distributed.fsdp._fully_shard import (
    _fsdp_agreement as agreement,
)
from torch.distributed.fsdp._fully_shard import (
    _fsdp_param_group as group_file,
)
from torch.testing._internal.common_utils import run_tests


RANKS = 2


class TestObservers(FakeGroupTest):
    """Who observes is asked once for each forward, whatever the number of units."""

    ranks = RANKS

    def looks(self, run: Any) -> int:
        with mock.patch.object(group_file.observers, "look_for_traces") as look:
            run(torch.ones(1, RANKS))
        return look.call_count

    def test_who_observes_is_asked_once_a_forward(self) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        # Units in a root that has no parameters
        model = nn.Sequential(*(nn.Linear(RANKS, RANKS) for _ in range(5)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)(torch.ones(1, RANKS))
        model.set_is_last_backward(False)  # as in all microbatches but the last
        for _ in range(2):
            self.assertEqual(self.looks(lambda x: model(x).sum().backward()), 1)
        with torch.no_grad():
            for run in (model, model, model[:3]):
                self.assertEqual(self.looks(run), 1)
            self.assertEqual(self.looks(model[3:]), 0)  # the rest of that forward
            self.assertEqual(self.looks(model[:2]), 1)


@unittest.skipIf(sys.version_info < (3, 11), "exceptions take no notes")
class TestNotes(FakeGroupTest):
    ranks = RANKS

    def test_only_errors_about_other_ranks_speak_of_them(self) -> None:
        model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (RANKS,)))
        model(torch.ones(1, 2))
        group = model._get_fsdp_state()._fsdp_param_group
        for error, is_about_them in (
            (torch.OutOfMemoryError("CUDA out of memory"), False),
            (RuntimeError("[gloo/transport/tcp/pair.cc:1] Timed out waiting"), True),
            (dist.DistBackendError("NCCL error: remote process exited"), True),
            (RuntimeError("expected all tensors on one device"), False),
            (ValueError("a user's own"), False),
        ):
            group._agreement.add_note(error)
            (note,) = error.__notes__
            self.assertIn("Raised while gathering unit '(root)'.", note)
            self.assertEqual(agreement._HANG_ADVICE in note, is_about_them, error)

    def test_errors_in_joined_reductions_name_their_parameters(self) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
        shard_blocks(model, mesh=init_device_mesh("cpu", (RANKS,)))
        set_reduce_bucket_cap(model)
        fails = mock.patch.object(dist, "reduce_scatter_single", side_effect=ValueError)
        with fails, self.assertRaises(ValueError) as caught:
            model(torch.ones(1, 2)).sum().backward()
        (note,) = caught.exception.__notes__
        text = "reducing the gradients of 2.weight, 1.weight, 0.weight in torch.float32"
        self.assertIn(text, note)


if __name__ == "__main__":
    run_tests()
