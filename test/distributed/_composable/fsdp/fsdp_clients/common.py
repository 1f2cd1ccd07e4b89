"""What the tests of clients share: their ranks, and what the release answers them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from unittest import mock

from fsdp_clients.real_models import EXAMPLES
from fsdp_common.utils import FSDPProcessTest, RELEASE_ROOT, run_python

from _one_process import Step


# Calls what a module has for it, in a group of one rank, and prints the error
ASKED = """
import importlib, json, sys, torch
import torch.distributed as dist
sys.path.append({examples!r})
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
client = importlib.import_module({module!r})
try:
    client.one_step()
    error = ""
except Exception as caught:
    error = f"{{type(caught).__name__}}: {{caught}}"
print(json.dumps([torch.__file__, error]))
"""


def refusal(module: str) -> str:
    """Returns how the release answers ``one_step`` of a module: "" if it does it."""
    code = ASKED.format(examples=str(EXAMPLES), module=module)
    printed = run_python("-c", code, on_release=True)
    file, error = json.loads(printed.splitlines()[-1])
    if not file.startswith(str(RELEASE_ROOT)):
        raise AssertionError(f"not the release: {file}")
    return error


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


class ClientTest(FSDPProcessTest):
    def check_steps(self, steps: Iterable[Step]) -> None:
        """Each is as in one process, with gradients of both dtypes."""
        for step in steps:
            wrong = [str(each) for each in step.differences if not each.ok]
            self.assertEqual(wrong, [])
            kinds = {each.what for each in step.differences}
            self.assertGreaterEqual(kinds, {"bfloat16 gradients", "float32 gradients"})
