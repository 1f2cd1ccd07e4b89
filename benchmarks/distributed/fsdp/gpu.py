"""Checks correctness, memory and speed on a CUDA device, and writes a report.

    python3 benchmarks/distributed/fsdp/gpu.py [--device cpu] [--only tests,late,...]

Runs the tests file by file, and parts of bench.py, each in a process with a limit of time:
one that hangs or dies loses nothing of the others. build/gpu/report.md and report.json are
written after each; every line has a command that repeats it. It needs no network.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple


ROOT = Path(__file__).resolve().parents[3]
TESTS = "test/distributed/_composable/fsdp"
BENCH = "benchmarks/distributed/fsdp/bench.py"
# Correctness comes first
PARTS = ("tests", "bits", "alignment", "sanitizer", "late", "kernels", "memory")
PARTS = (*PARTS, "host", "step", "network")
ON_CPU = "test_fully_shard_way.py"  # `make test` runs the other tests there
AS_EXPECTED, WRONG, SLOWER = "as expected", "wrong", "slower than expected"
DIED, HUNG, NOT_RUN = "died", "timed out", "not run"
SECONDS = 300  # of each process
# Exit statuses of pytest, and that of `timeout`
STATUSES = {0: AS_EXPECTED, 5: AS_EXPECTED, 1: WRONG, 124: HUNG}


class Line(NamedTuple):
    """A result: its value, what was expected, and the verdict."""

    part: str
    case: str
    value: str
    expected: str
    verdict: str
    command: str


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--only", default=",".join(PARTS), help="default: %(default)s")
    add("--release", help="folder with the release's torch/")
    add("--output", type=Path, default=ROOT / "build" / "gpu")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if unknown := {*args.only} - {*PARTS}:
        parser.error(f"no part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    return args


def finished(*command: str, **variables: str) -> tuple[int, str]:
    """Runs Python; returns its exit status and the last line it wrote."""
    limit = ["timeout", "--kill-after=5", str(SECONDS)]  # with all its processes
    done = subprocess.run(
        [*limit, sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode, (done.stdout.strip().splitlines() or [""])[-1]


def run_file(file: Path) -> Line:
    """Runs the tests of a file, and says how many of them ran where."""
    command = ("-m", "pytest", "-q", os.path.relpath(file, ROOT))
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder, "counts.json")
        paths = os.pathsep.join([str(ROOT / "benchmarks/distributed/fsdp"), *sys.path])
        variables = {"FSDP_TESTS_RAN": str(counts), "PYTHONPATH": paths}
        status, last = finished(*command, "-p", "_where", **variables)
        found = json.loads(counts.read_text()) if counts.exists() else {}
    texts = [f"{count} {what}" for what, count in sorted(found.items())]
    verdict = STATUSES.get(status, DIED)
    if verdict != AS_EXPECTED:
        texts.append(last)
    elif not any(what.startswith("on ") for what in found):
        verdict = NOT_RUN
    shell = f"python3 {' '.join(command)}"
    return Line("tests", file.stem, ", ".join(texts), "all pass", verdict, shell)


def run_tests(args: argparse.Namespace) -> Iterator[Line]:
    """Yields a line for each file, several at a time."""
    pattern = "test_fully_shard_*.py" if args.device == "cuda" else ON_CPU
    files = sorted((ROOT / TESTS).glob(pattern))
    files = [file for file in files if "mark.tools" not in file.read_text()]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 4)) as pool:
        yield from pool.map(run_file, files)


def run_bench(part: str, args: argparse.Namespace) -> Iterator[Line]:
    """Yields a line for each row of which something is expected."""
    options = ["--parts", part, "--device", args.device]
    if args.release:
        options += ["--release", args.release]
    command = " ".join(["python3", BENCH, *options])
    folder = args.output / part
    (folder / "results.json").unlink(missing_ok=True)
    quick = ["--quick"] if args.device == "cpu" else []
    status, last = finished(BENCH, *options, *quick, "--output", str(folder))
    if status != 0:
        verdict = HUNG if status == 124 else DIED
        yield Line(part, "", last, "", verdict, command)
        return
    for row in json.loads((folder / "results.json").read_text())["rows"]:
        if row["is_met"] is not None:
            is_time = row["quantity"].startswith(("us", "ms"))
            verdict = SLOWER if is_time else WRONG
            case = f"{row['case']}: {row['quantity']}, beside {row['versus']}"
            value, bar = f"{row['ratio']:.3f}", f"at most {row['bar']:.4g}"
            verdict = AS_EXPECTED if row["is_met"] else verdict
            yield Line(part, case, value, bar, verdict, command)


def header_of(device: str) -> dict[str, Any]:
    """Returns what the report begins with; a process looks at the device."""
    code = f"import sys, json; sys.path[:0] = {sys.path!r}; import _device as d; "
    code += f"print(json.dumps(d.about({device!r})))"
    status, last = finished("-c", code)
    if status != 0:
        sys.exit(f"error: no {device} device can be used: {last}")
    described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(described, capture_output=True, text=True).stdout.strip()
    date = datetime.datetime.now(datetime.timezone.utc)
    return json.loads(last) | {"commit": commit, "date": f"{date:%Y-%m-%d %H:%M} UTC"}


def page_of(header: dict[str, Any], lines: list[Line]) -> str:
    texts = ["# On this device", "", *(f"- {k}: {v}" for k, v in header.items()), ""]
    counts = Counter(line.verdict for line in lines)
    texts += [f"- **{count}** {verdict}" for verdict, count in counts.items()]
    for part in dict.fromkeys(line.part for line in lines):
        of_part = [line for line in lines if line.part == part]
        commands = dict.fromkeys(line.command for line in of_part)
        texts += ["", f"## {part}", "", *(f"`{command}`" for command in commands)]
        texts += ["", "| case | value | expected | verdict |", "|---|---|---|---|"]
        for line in of_part:
            cells = (line.case, line.value, line.expected, line.verdict)
            texts.append(f"| {' | '.join(c.replace('|', '/') for c in cells)} |")
    return "\n".join([*texts, ""])


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    header, lines = header_of(args.device), []
    args.output.mkdir(parents=True, exist_ok=True)
    for part in (p for p in PARTS if p in args.only):
        before = len(lines)
        if part == "sanitizer" and args.device != "cuda":
            lines.append(Line(part, "", "it needs CUDA", "", NOT_RUN, ""))
        else:
            lines += run_tests(args) if part == "tests" else run_bench(part, args)
        found = {"header": header, "lines": [line._asdict() for line in lines]}
        (args.output / "report.json").write_text(json.dumps(found, indent=1) + "\n")
        (args.output / "report.md").write_text(page_of(header, lines))
        print(f"{part}: {len(lines) - before} lines", flush=True)
        for line in lines[before:]:
            if line.verdict not in (AS_EXPECTED, NOT_RUN):
                print(f"  {line.verdict}: {line.case}: {line.value}", flush=True)
    print(args.output / "report.md")
    return any(line.verdict in (WRONG, DIED, HUNG) for line in lines)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / TESTS), str(ROOT)]
    sys.exit(main(sys.argv[1:]))
