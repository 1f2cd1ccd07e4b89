"""What the tests of clients share."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import forkserver
from typing import Any
from unittest import mock

from fsdp_helpers.clients.real_models import Difference, OneProcess
from fsdp_helpers.common import utils
from fsdp_helpers.common.utils import PRELOADED

import torch
from torch import nn


@contextlib.contextmanager
def as_launched(rank: int, ranks: int) -> Iterator[None]:
    """Lets a client find this test's processes as those of torchrun."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
        "OMP_NUM_THREADS": 1,
        "TORCHELASTIC_RUN_ID": "none",
    }
    as_text = {name: str(value) for name, value in environment.items()}
    with mock.patch.dict(os.environ, as_text):
        yield


def fsdp_accelerator(**kwargs: Any) -> Any:
    """Returns an ``accelerate.Accelerator`` that shards, on a CPU as well."""
    from accelerate import Accelerator, DistributedType, PartialState

    accelerator = Accelerator(**kwargs)
    if utils.DEVICE_TYPE == "cpu":
        # What AcceleratorState does itself where there is an accelerator
        for state in (PartialState(), accelerator.state):
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = kwargs["fsdp_plugin"]
    return accelerator


class ClientTest(utils.FSDPProcessTest):
    world_size = 2 if utils.LAUNCHED_RANK is None else utils.WORLD_SIZE

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        packages = ["transformers", "peft", "diffusers"]
        if packages[0] not in PRELOADED:
            PRELOADED.extend(packages)
            forkserver._forkserver._stop()  # it serves tests that import none of these
        super()._spawn_processes(world_size)

    def check_same(self, found: Iterable[Difference]) -> None:
        self.assertEqual([str(each) for each in found if not each.ok], [])

    def check_steps(
        self,
        steps: Iterable[list[Difference]],
        dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    ) -> None:
        """Each is as in one process, with gradients of both dtypes."""
        gradients = {f"{d} gradients".removeprefix("torch.") for d in dtypes}
        for step in steps:
            self.check_same(step)
            self.assertGreaterEqual({each.what for each in step}, gradients)

    def check_backward(
        self,
        reference: OneProcess,
        model: nn.Module,
        loss: torch.Tensor,
        chunks: tuple[torch.Tensor, ...],
        place: int,
    ) -> None:
        """Loss and gradients of chunk ``place`` are as in one process."""
        expected = reference.backward(chunks)
        self.assertEqual(loss.detach(), expected[place], rtol=0, atol=0)
        self.check_same(reference.gradient_differences(model))

    def check_step(
        self, reference: OneProcess, model: nn.Module, optimizer: Any
    ) -> None:
        """Steps both, whose parameters are alike after it."""
        reference.step(model)
        optimizer.step()
        optimizer.zero_grad()
        self.check_same(reference.parameter_differences(model))
