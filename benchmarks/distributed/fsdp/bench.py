"""Measures this branch beside the release that it is based on, in one run.

    python benchmarks/distributed/fsdp/bench.py [--parts host,bytes,...] [--quick]

Each side, release and branch, runs in processes of its own and in turns with the other. The
table is printed; it, all values as JSON and pictures go to build/bench/, or to
build/bench/partial/ if it was not the whole run. A run that is cut off leaves the
values of the parts that it finished in unfinished.json there. ``--docs`` also writes
what a whole run found last into docs/.
"""

import argparse
import functools
import importlib
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[3]
# Where _half_products is, which the step benchmark shares with the examples
sys.path += [str(ROOT / "examples"), str(ROOT)]

try:
    from _ratios import stop
    from _results import describe, machine, Results
    from _sides import RELEASE_ROOT, Side, SideError, TREE_ROOT

    import torch
    from tools.releases import DEFAULT
except ImportError as missing:
    sys.exit(f"error: {missing}: run `make setup` first, or `make bench`")


# Each module has a function `run`
PARTS = {
    "host": "_host_time",
    "bytes": "_wire_bytes",
    "step": "_step_time",
    "memory": "_peak_memory",
    "growth": "_growth",
    "where": "_where",
    "cuda": "_cuda_copies",
}
OUTPUT = ROOT / "build" / "bench"
DOCS = ROOT / "docs"


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="default: all, %(default)s")
    add("--quick", action="store_true", help="few rounds, to see that it runs")
    add("--rounds", type=int, metavar="N", help="of each part that measures time")
    add("--output", type=Path, help="another folder for the results")
    add("--docs", action="store_true", help="write docs/benchmarks.md as well")
    add("--no-run", action="store_true", help="take the results of the last whole run")
    add(
        "--release",
        type=Path,
        default=RELEASE_ROOT,
        help="folder with the release's torch/",
    )
    add(
        "--branch", type=Path, default=TREE_ROOT, help="folder with the branch's torch/"
    )
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"no part {part!r}: choose from {', '.join(PARTS)}")
    if not (args.release / "torch").is_dir():
        parser.error(
            f"no torch/ in {args.release}: run `make setup`, or give --release"
        )
    is_whole = args.parts == [*PARTS] and not args.quick and args.rounds is None
    if args.docs and not (is_whole or args.no_run):
        parser.error("--docs needs a whole run: no --parts, --quick or --rounds")
    if args.docs and torch.__version__.partition("+")[0] != DEFAULT:
        parser.error("--docs writes pages on the default release: leave RELEASE= out")
    args.output = args.output or (OUTPUT if is_whole else OUTPUT / "partial")
    return args


def run(args: argparse.Namespace) -> Results:
    """Runs the parts one after the other, and keeps what is there after each."""
    results = Results(machine(), {})
    with ExitStack() as at_end:
        sides_with = functools.cache(functools.partial(make_sides, args, at_end))
        for name in args.parts:
            part = importlib.import_module(PARTS[name])
            start = time.perf_counter()
            sides = sides_with(**getattr(part, "SIDE_OPTIONS", {}))
            result = part.run(sides, quick=args.quick, rounds=args.rounds)
            result.data["seconds"] = seconds = time.perf_counter() - start
            print(result.skipped or f"{name}: {seconds:.0f} s", file=sys.stderr)
            results.parts[name] = result
            results.save_unfinished(args.output)
    return results


def make_sides(
    args: argparse.Namespace, at_end: ExitStack, **options: Any
) -> dict[str, Side]:
    """Returns release and branch, with the process group that a part asks for."""
    roots = {"release": args.release, "branch": args.branch}
    sides = {name: Side(name, root, **options) for name, root in roots.items()}
    at_end.callback(stop, sides)
    return sides


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    if args.no_run:
        results = Results.load(OUTPUT)
    else:
        results = run(args)
        results.save(args.output)
    if args.docs:
        results.document(DOCS)
    print(results.text())
    print(f"\n{describe(results.machine)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SideError as error:
        sys.exit(f"error: {error}")
