"""
Runs each case with whatever torch is imported, and saves what came of it: every step's
loss and sharded gradients, the final parameters, the order of profiler ranges, the
collectives, and what was held; or the error that it raised.

The cases lie in a file for each family of features. Of those that take two ranks two
run at a time, one on either half of the four.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

# Each adds its cases
import fsdp_parity.comms
import fsdp_parity.params
import fsdp_parity.refusals  # noqa: F401
from fsdp_common.run_ranks import run_rank, run_ranks
from fsdp_parity.cases import CASES, Place

import torch._dynamo  # noqa: F401  the first hook would, in each rank anew
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh


RANKS = 4
KINDS = ("uniform", "mixed", "override")


def cases_to_run(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yields the kind of each case that is asked for, and its name."""
    for name in args.only or CASES:
        for kind in CASES[name].kinds:
            # What the release would say to other units is no matter
            is_moot = kind != "uniform" and args.by_dtype and CASES[name].refusal
            if kind in args.kinds and not is_moot:
                yield kind, name


def run_all(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    names = ("replicate", "shard")
    world = init_device_mesh("cpu", (RANKS,))
    pairs = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=names)
    singles = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=names)
    results: dict[str, Any] = {}
    turns = itertools.cycle(range(2))
    for kind, name in cases_to_run(args):
        case = CASES[name]
        if case.takes_turns and next(turns) != rank // 2:
            continue  # the other half's
        place = Place(
            kind,
            by_dtype=args.by_dtype and kind != "uniform",
            rank=rank % case.ranks,
            mesh=world if case.ranks == RANKS else pairs["shard"],
            pairs=pairs,
            singles=singles,
            is_first=rank % case.ranks == 0,
        )
        try:
            found = case.run(place) or {}
        except Exception as error:
            # All ranks do the same, so that they also fail alike
            found = {"error": (type(error).__name__, str(error))}
        results[f"{kind} {name}"] = found
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for a file of each rank")
    parser.add_argument("--by-dtype", action="store_true", help="as the release wants")
    parser.add_argument("--only", nargs="*", help="run these cases alone")
    parser.add_argument("--kinds", nargs="*", default=KINDS, help="of units")
    parser.add_argument("--half", type=int, help="be every other rank, from this one")
    parser.add_argument("--store", help="file by which the halves meet")
    args = parser.parse_args()
    if args.half is None:
        run_ranks(run_all, args, RANKS)
    else:
        mp.start_processes(run_of_half, (args,), RANKS // 2, start_method="fork")


def run_of_half(index: int, args: argparse.Namespace) -> None:
    run_rank(2 * index + args.half, run_all, args, args.store, RANKS)


if __name__ == "__main__":
    sys.exit(main())
