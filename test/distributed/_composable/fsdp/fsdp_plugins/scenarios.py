"""
Does with sharded models what plugins and trainers outside of torch do, with whatever
torch is imported, and saves what came of it: names that they read, write, call and
replace, and what their replacements then see.

The tests run it on the release and on this branch and compare. A scenario that
raises is saved as its error, so that each of them is told apart. With ``--mixed``
scenarios whose units have several dtypes are run too, which the release refuses.

The scenarios lie in a file for each part of torch that plugins reach into.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

# Each adds its scenarios
import fsdp_plugins.collectives
import fsdp_plugins.groups
import fsdp_plugins.modules
import fsdp_plugins.since  # noqa: F401
from fsdp_common.run_ranks import run_ranks
from fsdp_plugins.runs import MIXED, Place, RANKS, SCENARIOS

from torch.distributed.device_mesh import init_device_mesh


def run_all(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (RANKS,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    place = Place(rank, mesh, pairs)
    results: dict[str, Any] = {}
    for name, run in {**SCENARIOS, **(MIXED if args.mixed else {})}.items():
        if args.only and name not in args.only:
            continue
        try:
            results[name] = run(place)
        except Exception as error:
            # All ranks do the same, so that they also fail alike
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for a file of each rank")
    parser.add_argument("--mixed", action="store_true", help="run mixed units too")
    parser.add_argument("--only", nargs="+", help="scenarios to run, default all")
    run_ranks(run_all, parser.parse_args(), RANKS)


if __name__ == "__main__":
    sys.exit(main())
