"""A process of one :class:`_sides.Side`: answers requests with lines of JSON."""

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def join_group(options: dict[str, Any]) -> None:
    """Becomes one rank of many: of real ones, or the first of none but itself."""
    rank, world_size = options["rank"], options["world_size"]
    if options["device"] == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if torch.cuda.device_count() < world_size:
            # NCCL takes ranks that share a device only for those of several hosts
            os.environ["NCCL_HOSTID"] = f"rank{rank}"
    is_fake = (backend := options["backend"]) == "fake"
    store: Any = (
        FakeStore() if is_fake else dist.FileStore(options["store"], world_size)
    )
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store)


def check_root(root: str) -> None:
    """The one mistake that would make every ratio 1: both sides import the same."""
    found = Path(torch.distributed.__file__).absolute()
    if not found.is_relative_to(Path(root).absolute()):
        raise ImportError(f"torch.distributed is {found}, which is not under {root}")


def main() -> None:
    options = json.loads(sys.argv[1])
    # Prints of libraries must not come between the answers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    check_root(options["root"])
    torch.set_num_threads(1)
    join_group(options)
    for line in sys.stdin:
        asked = json.loads(line)
        module = importlib.import_module(asked["module"])
        measured = module.measure(device=options["device"], **asked["request"])
        print(json.dumps(measured), file=answers)


if __name__ == "__main__":
    main()
