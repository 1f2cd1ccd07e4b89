"""Tells what is so on a CUDA device: what is right, what it takes, how fast it is.

    python3 benchmarks/distributed/fsdp/gpu.py [--device cpu] [--only part.case,...]

Runs release and branch in processes, each part within a time of its own, and writes
build/gpu/report.md and report.json after each result. Each line is compared with what
docs/gpu.md expects, and has a command that repeats it alone. It needs no network.
"""

import argparse
import datetime
import fnmatch
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


ROOT = Path(__file__).resolve().parents[3]
# What is shared with examples and tests
TESTS = ROOT / "test" / "distributed" / "_composable" / "fsdp"
sys.path += [str(TESTS), str(ROOT / "examples"), str(ROOT)]

try:
    from _gpu_expected import WRONG
    from _gpu_part import BRANCH, Part, RELEASE, Where
    from _gpu_parts import all_parts
    from _gpu_release import find_release
    from _gpu_report import AS_EXPECTED, DIED, NOT_RUN, Report, TIMED_OUT
    from _gpu_run import Runner
    from _sides import Side, TREE_ROOT
except ImportError as missing:
    sys.exit(f"error: {missing}: run `make setup` first, or `make gpu`")


OUTPUT = ROOT / "build" / "gpu"
QUIET = {AS_EXPECTED, NOT_RUN}
FAILS = {WRONG, DIED, TIMED_OUT}  # a busy machine is slower


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--only", default="*", help="names or patterns of parts or part.case")
    add("--release", type=Path, help="folder with the release's torch/")
    add("--output", type=Path, default=OUTPUT, help="folder for the report")
    add("--list", action="store_true", help="show parts and cases, and run nothing")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if args.release is not None and not (args.release / "torch").is_dir():
        parser.error(f"no torch/ in {args.release}")
    return args


def ask_about(device: str) -> dict[str, str | int]:
    """Returns the report's header; it is a process that looks at the device."""
    side = Side(BRANCH, TREE_ROOT, device=device)
    try:
        side.start()
        found = side.ask("about", {}, seconds=120)
    finally:
        side.stop()
    date = datetime.datetime.now(datetime.timezone.utc)
    return found | {"commit": _commit(), "date": f"{date:%Y-%m-%d %H:%M} UTC"}


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def is_wanted(patterns: Sequence[str], part: str, case: str) -> bool:
    """Whether a pattern names the part or the case."""
    names = (part, f"{part}.{case}")
    return any(fnmatch.fnmatchcase(n, p) for n in names for p in patterns)


def run(args: argparse.Namespace) -> Report:
    header = ask_about(args.device)
    where = Where(args.device, int(header.pop("devices")))
    report = Report(args.output, args.device, header)
    roots = {BRANCH: TREE_ROOT, RELEASE: find_release(args.release, TREE_ROOT)}
    runner = Runner(roots, where, report)
    for part in all_parts(where):
        begun, before = time.monotonic(), len(report.lines)
        runner.run(part, lambda *names: is_wanted(args.only, *names))
        if len(report.lines) > before:
            tell(part, report, before, time.monotonic() - begun)
    return report


def tell(part: Part, report: Report, start: int, seconds: float) -> None:
    lines = report.lines[start:]
    print(f"{part.name}: {len(lines)} lines, {seconds:.0f} s", flush=True)
    for line in lines:
        if line.verdict not in QUIET:
            names = ".".join(filter(None, (line.part, line.case, line.figure)))
            first = line.detail.partition("\n")[0]
            print(f"  {line.verdict}: {names}: {first}", flush=True)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    if args.list:
        for part in all_parts(Where(args.device, 1)):
            print(*(f"{part.name}.{case.name}" for case in part.cases), sep="\n")
        return 0
    report = run(args)
    if not report.lines:
        sys.exit(f"error: no case is named {', '.join(args.only)}: see --list")
    print(f"{args.output / 'report.md'}")
    return any(line.verdict in FAILS for line in report.lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
