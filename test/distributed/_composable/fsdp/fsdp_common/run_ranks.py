"""
Starts the ranks of a script whose results are compared between the release and this
branch. Written so that either runs it.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


TIMEOUT = timedelta(seconds=300)

# From the script's arguments and the rank to what the rank found
Run = Callable[[argparse.Namespace, int], dict[str, Any]]


def run_rank(
    rank: int,
    run: Run,
    args: argparse.Namespace,
    store: str,
    ranks: int,
    device: str = "cpu",
) -> None:
    """Runs this rank, and writes its results to a file of its own in ``args.out``."""
    torch.set_num_threads(1)
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
    )
    results = pickle.dumps(run(args, rank))
    (Path(args.out) / f"rank{rank}").write_bytes(results)
    dist.destroy_process_group()


def run_ranks(
    run: Run, args: argparse.Namespace, ranks: int, device: str = "cpu"
) -> None:
    """Runs all ranks, each in a process, and prints which torch they ran."""
    # A fork has imported torch already, but could not use the accelerator
    method = "fork" if device == "cpu" else "spawn"
    gc.freeze()  # or a collection in a rank would copy all that is imported
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        arguments = (run, args, store, ranks, device)
        mp.start_processes(run_rank, arguments, ranks, start_method=method)
    print(torch.__file__)
