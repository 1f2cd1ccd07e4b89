"""
Some of the processes whose results are to be the same whichever of them is which
rank. Each trains several times, in each round as the rank that the round gives it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from fsdp_common.run_ranks import run_rank, TIMEOUT
from fsdp_mixed_dtype import parity

import torch.multiprocessing as mp


RANKS = 4
INTERPRETERS = 2
MODES = (
    "uniform fp32 4",
    "uniform accumulate_reduce_bf16 4",
    "uniform explicit_prefetch 4",
    "uniform hybrid_deferred 4",
    "uniform replicate_bf16_reduce_fp32 4",
    "mixed plain",
    "mixed accumulate",
    "mixed unfrozen_later",
    "override replicate_accumulate",
    "override hybrid_deferred",
)
# By round: of each process, in the order in which they start, its rank
ROUNDS = ((3, 2, 1, 0), (0, 1, 2, 3), (3, 2, 1, 0))


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT.total_seconds()
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the process before this one never came: no {path}")
        time.sleep(0.01)


def run_process(index: int, interpreter: int, folder: Path) -> None:
    # Of each pair of ranks that shard together, one is of either interpreter
    process = INTERPRETERS * index + interpreter
    # Each meets the others only after the one before it has set out to
    if process > 0:
        wait_for(folder / f"started{process - 1}")
        time.sleep(0.1)
    (folder / f"started{process}").touch()
    for number, ranks in enumerate(ROUNDS):
        out = folder / f"round{number}"
        out.mkdir(exist_ok=True)
        options = argparse.Namespace(
            device="cpu",
            modes=MODES,
            only_mixed=False,
            out=str(out),
            ranks=RANKS,
            units="block",
        )
        store = str(folder / f"store{number}")
        run_rank(ranks[process], parity.run_all, options, store, RANKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("interpreter", type=int, help="which one of those that start")
    parser.add_argument("folder", type=Path, help="for a folder of each round")
    args = parser.parse_args()
    # Forks have imported torch already
    mp.start_processes(
        run_process,
        (args.interpreter, args.folder),
        RANKS // INTERPRETERS,
        start_method="fork",
    )


if __name__ == "__main__":
    main()
