"""
Uses one feature of ``fully_shard`` at a time with whatever torch is imported, and
saves what came of it: every step's loss and sharded gradients, the final
parameters, the order of profiler ranges, the collectives, and what was held.

The tests run it on the release and on this branch and compare:

- uniform units are cut alike in both;
- mixed units are blocks of three dtypes with ``--units block``, and one unit for
  each dtype with ``--units dtype``, as the release wants them;
- with ``--units block`` what should leave no trace in the numbers also runs on
  four ranks, beside the default settings.

The cases lie in a file for each family of features.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

# Each adds its cases
import fsdp_features.comms
import fsdp_features.extensions
import fsdp_features.order
import fsdp_features.refusals  # noqa: F401
from fsdp_common.run_ranks import run_ranks
from fsdp_features.cases import Case, CASES, Place, STEPS
from fsdp_mixed_dtype import parity

from torch.distributed.device_mesh import init_device_mesh


def cases_to_run(args: argparse.Namespace) -> Iterator[tuple[str, Case, str, int]]:
    """Yields each case's name, the case, how units are cut and the ranks."""
    for name, case in CASES.items():
        if args.only and args.only not in name:
            continue
        for size in case.uniform:
            yield f"uniform {name} {size}", case, "uniform", size
        if args.units == "dtype" and name.startswith("error_"):
            continue  # what the release would say to other units
        sizes = {*case.mixed}
        if args.units == "block" and case.is_plain:
            sizes.add(4)
        for size in sorted(sizes):
            yield f"mixed {name} {size}", case, args.units, size


def run_all(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    names = ("replicate", "shard")
    world = init_device_mesh("cpu", (4,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    singles = init_device_mesh("cpu", (4, 1), mesh_dim_names=names)
    results: dict[str, Any] = {}
    turns = itertools.cycle(range(2))
    for name, case, units, size in cases_to_run(args):
        if case.takes_turns(size) and next(turns) != rank // 2:
            continue  # the other half's
        mesh = pairs["shard"] if size == 2 else world
        place = Place(
            units,
            rank=rank % size,
            mesh=mesh,
            pairs=pairs,
            singles=singles,
            device="cpu",
            is_profiled=rank % size == 0 and size == min(case.uniform),
        )
        try:
            results[name] = case.run(place)
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for a file of each rank")
    parser.add_argument("--units", required=True, choices=("dtype", "block"))
    parser.add_argument("--only", help="only cases whose name has this in it")
    args = parser.parse_args()
    parity.STEPS = STEPS
    run_ranks(run_all, args, 4)


if __name__ == "__main__":
    sys.exit(main())
