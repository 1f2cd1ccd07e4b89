"""Measures this branch beside the release that it is based on, in one run.

    python benchmarks/distributed/fsdp/bench.py [--parts host,bytes,...] [--quick]

Each side, release and branch, runs in processes of its own and in turns with the other. The
table is printed; it and all values as JSON go to build/bench/ after each part, or to
build/bench/partial/ if it was not the whole run. A round measures one side after the other
and gives one ratio; the table shows the median ratio and quartiles. Bytes, collectives and
memory are counted and the same in every run. *At most* is the ratio that the branch aims at.
*Gradients promoted* is 2.15.0 without its assertion: the first commit of the series.

- **host**: processor time of a step's forward and backward per unit, of 8 units whose
  parameters have 128 elements each, less that of the same model without `fully_shard`. The
  process group is a fake one of 8 ranks.
- **bytes**: sizes of the collectives of one step, over 8 ranks, of three blocks that are
  resharded after forward.
- **step**: wall-clock time of a training step of four gloo processes that share the cores.
- **memory**: the peak that `FSDPMemTracker` counts on one of 8 ranks in one step, without an
  optimizer.
- **timeline**: simulated milliseconds of a step on a device, and a picture of its streams,
  build/bench/timeline.svg. Only if it is named, as the next.
- **promotion**: over 2.15.0, simulated milliseconds of a step, what it sends, and the error
  of its sums, beside one reduction in the promoted dtype.
- **experts**: what copies of matrices sharded on dim 1 take: bytes, kernels, time, memory.
- **network**: the time of a step on a device whose collectives take as long as over a link of
  200 or 40 GB/s.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[3]
# Benchmarks share helpers with the tests
TESTS = ROOT / "test" / "distributed" / "_composable" / "fsdp"
sys.path += [str(TESTS), str(ROOT)]

try:
    from _ratios import Row, stop, table
    from _sides import find_release, Side, SideError, TREE_ROOT
    from _step_time import PROMOTED, SERIES

    from fsdp_helpers.clients.half_products import slow_dtypes

    import torch
    from tools.releases import NEWEST
    from tools.series import lay_first
except ImportError as missing:
    sys.exit(f"error: {missing}: run `make setup` first, or `make bench`")


# A module and its function. Those of the second line run only if they are named
PARTS = {
    "host": ("_host_time", "run"),
    "bytes": ("_bytes", "run"),
    "step": ("_step_time", "run"),
    "memory": ("_peak_memory", "run"),
}
MORE = {
    "kernels": ("_kernels", "run"),
    "bits": ("_bits", "run"),
    "late": ("_late_kernels", "run"),
    "network": ("_network", "run"),
    "timeline": ("_timeline", "run"),
    "promotion": ("_promotion", "run"),
    "experts": ("_experts", "run"),
    "alignment": ("_device", "run_alignment"),
    "sanitizer": ("_device", "run_sanitizer"),
}
OUTPUT = ROOT / "build" / "bench"


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, names = parser.add_argument, ", ".join([*PARTS, *MORE])
    add("--parts", default=",".join(PARTS), help=f"some of {names}")
    add("--quick", action="store_true", help="few rounds of one block")
    add("--rounds", type=int, metavar="N", help="of each part that measures time")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--output", type=Path, help="another folder for the results")
    add("--release", type=Path, help="folder with the release's torch/")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    for part in args.parts:
        if part not in PARTS | MORE:
            parser.error(f"no part {part!r}: choose from {names}")
    args.release = find_release(args.release)
    if args.release is None:
        parser.error("there is no release: run `make setup`, or give --release")
    is_whole = args.parts == [*PARTS] and not args.quick and args.rounds is None
    args.output = args.output or (OUTPUT if is_whole else OUTPUT / "partial")
    return args


def make_sides(part: str, args: argparse.Namespace) -> dict[str, Side]:
    """Returns release and branch, with the process group that the part wants."""
    options: dict[str, Any] = {"device": args.device}
    devices = torch.cuda.device_count() if args.device == "cuda" else 0
    if part in ("bits", "late") or (part == "step" and devices != 1):
        # Four ranks may share a device
        ranks = 4 if part == "late" or devices < 2 else devices
        backend = "nccl" if devices else "gloo"
        options |= {"backend": backend, "world_size": ranks}
    roots = {"release": args.release, "branch": TREE_ROOT}
    promotes = part in ("bytes", "step", "memory", "network", "promotion")
    if promotes and torch.__version__.startswith(NEWEST):
        roots[PROMOTED] = lay_first(1, OUTPUT / "promoted", args.release)
        if part == "promotion":
            roots[SERIES] = lay_first(9, OUTPUT / "series", args.release)
    return {name: Side(name, root, **options) for name, root in roots.items()}


def describe_machine() -> str:
    """Describes the hardware, on which times depend, and names no machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    cpu = names[0].strip() if names else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    text = f"Measured on {cores} cores of {cpu}, {device}, Python {platform.python_version()}."
    widened = " and ".join(sorted(str(d).removeprefix("torch.") for d in slow_dtypes()))
    return f"{text} In *step*, products of {widened} run in fp32." if widened else text


def save(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    found = {
        "machine": describe_machine(),
        "torch": torch.__version__,
        "rows": [asdict(row) | {"is_met": row.is_met} for row in rows],
    }
    (args.output / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.output / "table.txt").write_text(table(rows) + "\n")


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    rows: list[Row] = []
    for name in args.parts:
        module, function = (PARTS | MORE)[name]
        begun, sides = time.perf_counter(), make_sides(name, args)
        try:
            run = getattr(importlib.import_module(module), function)
            rows += run(sides, quick=args.quick, rounds=args.rounds)
        finally:
            stop(sides)
        print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        save(args, rows)
    print(table(rows), f"\n{describe_machine()}", sep="\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SideError as error:
        sys.exit(f"error: {error}")
