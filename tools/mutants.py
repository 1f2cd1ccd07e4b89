"""
Breaks the product on purpose, one line at a time, and tells which test notices.

Edits a line of each function, always the same ones, in copies of the clone. The test
files that run this line, nearest and quickest first, run until one fails. What is found
goes to build/mutants.json, from which a run that was stopped goes on. Those that nothing
can notice belong in alive_mutants.txt.
"""

import argparse
import ast
import contextlib
import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from coverage import CoverageData, CoverageException


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.overlay import lay_links, torch_links  # noqa: E402
from tools.releases import files_under  # noqa: E402


TABLE = ROOT / "build/mutants.json"
ALIVE = Path(__file__).with_name("alive_mutants.txt")
PRODUCT = Path("torch/distributed/fsdp/_fully_shard")
TESTS = Path("test/distributed/_composable/fsdp")
# What an edit is about, what it replaces, and by what: those that go on with wrong values,
# and do not crash at once. The first that a function has are preferred
PASS = r"\1pass"
RULES = (
    ("wait", r"^(\s*)[\w.()]*\.(wait|record)(_event|_stream)?\(.*\)$", PASS),
    ("order", r"\b(sorted|reversed)\(", "(lambda found, **_: [*found])("),
    ("factor", " ([*]|/{1,2}) ", " + "),
    ("dtype", r"\.(param|reduce|wire|comm)_dtype\b", ".orig_dtype"),
    ("dtype", r"torch\.(float32|bfloat16|uint8)", "torch.float16"),
    ("alias", r"\[\*([\w.]+)\]|\.(?:clone|detach|copy|to)\([\w. =]*\)", r"\1"),
    ("lifetime", r"^(\s*)([\w.]+ = None|del .*|.*\.(clear|pop)\(.*\))$", PASS),
    ("boundary", " (<|>)= ", r" \1 "),
    ("boundary", " (<|>) ", r" \1= "),
    ("boundary", r" [+-] 1\b", ""),
    ("condition", " and ", " or "),
    ("condition", r"\bif (?!not )(.+):$", r"if not (\1):"),
    ("condition", " == ", " != "),
    ("constant", r"\b(True|False|0|1)\b", r"(not \1)"),
)
COVERAGE = """[run]
include = */_fully_shard/*
parallel = true
data_file = {}/data
patch = subprocess, fork, _exit
"""
lock, copies = threading.Lock(), queue.Queue()


def mutants_in(path: Path) -> list[dict[str, Any]]:
    """Returns the edits of each function that leave the file one of Python."""
    lines, mutants = (text := path.read_text()).splitlines(), []
    for node in (n for n in ast.walk(ast.parse(text)) if type(n) is ast.FunctionDef):
        body = node.body[bool(ast.get_docstring(node)) :] or node.body
        first, last = body[0].lineno - 1, node.end_lineno or 0
        parts = [s for s in ast.walk(node) if isinstance(s, ast.stmt)]
        for n, (kind, old, new) in itertools.product(range(first, last), RULES):
            after = re.sub(old, new, lines[n], count=1)
            # Not all lines of a statement count as run
            around = [s for s in parts if s.lineno <= n + 1 <= (s.end_lineno or 0)]
            whole = max(around, key=lambda s: s.lineno, default=node)
            # No comments, and no texts of errors
            says = isinstance(whole, ast.Raise) or re.match(r"\s*(#|f?[\"'])", lines[n])
            key = f"{path.name} {node.name}+{n + 1 - node.lineno}: {after.strip()}"
            edited = "\n".join([*lines[:n], after, *lines[n + 1 :], ""])
            row = {"key": key, "file": path.name, "function": node.name, "kind": kind}
            with contextlib.suppress(SyntaxError):
                if lines[n] != after and not says and compile(edited, "", "exec"):
                    span = {"of": node.lineno, "lines": [whole.lineno, n + 1]}
                    mutants.append(row | span | {"edited": edited})
    return mutants


def chosen() -> list[dict[str, Any]]:
    """Returns one of each function, the same ones whatever changes elsewhere."""
    found = [m for p in sorted((ROOT / PRODUCT).glob("*.py")) for m in mutants_in(p)]
    found.sort(key=lambda m: zlib.crc32(m["key"].encode()))
    kinds = [kind for kind, *_ in RULES]
    found.sort(key=lambda m: kinds.index(m["kind"]))  # stable
    return [*{(m["file"], m["of"]): m for m in reversed(found)}.values()]


def text_of(test: str) -> str:  # with the packages that it names
    text = (ROOT / TESTS / test).read_text()
    for name in {*re.findall(r"\bfsdp_helpers\W(\w+)", text)} - {"common"}:
        helpers = ROOT / TESTS / "fsdp_helpers"
        files = [*helpers.glob(f"{name}.py"), *helpers.glob(f"{name}/*.py")]
        text += "".join(path.read_text() for path in files)
    return text


def copy_of_clone(number: int) -> Path:
    copy, release = ROOT / f"build/mutants/{number}", Path(sys.prefix).resolve().parent
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("build", ".git", ".venv"))
    tree = copy / "build/tree"
    lay_links(tree, torch_links(release / "base", copy, files_under(copy, "torch")))
    # No link itself: what runs there compares paths
    base = {path.name: os.readlink(path) for path in (release / "base").iterdir()}
    lay_links(copy / "build/base", base)
    return copy


def failure_of(test: str, copy: Path, seconds: float, *under: str) -> str:
    """Returns the first test of a file that fails, or that it hung; "" if all pass."""
    env = os.environ | {"PYTHONPATH": f"{copy}/build/tree"}
    env |= {
        "PYTHONPYCACHEPREFIX": f"{ROOT}/build/pycache",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    command = ["timeout", "--kill-after=5", str(seconds)]  # all its processes
    command += [sys.executable, *under, "-m", "pytest", "-q", "--tb=no"]
    command += ["-m", "not tools", str(TESTS / test), *([] if under else ["-x"])]
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    # The test's name ends at the first space
    failed = re.findall(r"(?m)^(?:ERROR|(?:SUB)?FAILED)\b.*? \S+::(\w+)", done.stdout)
    return {0: "", 5: "", 124: "hung", 137: "hung"}.get(
        done.returncode, (failed or ["crashed"])[0]
    )


@contextlib.contextmanager
def one_copy(table: dict[str, Any]) -> Iterator[Path]:
    copy = copies.get()
    try:
        yield copy
    finally:
        copies.put(copy)
        with lock:
            TABLE.write_text(json.dumps(table))


def measure(test: str, table: dict[str, Any]) -> None:
    """Adds the seconds of a test file, and which lines run in any process of it."""
    with one_copy(table) as copy:
        (folder := copy / "build" / test).mkdir()
        (folder / "rc").write_text(COVERAGE.format(folder))
        under = ("-m", "coverage", "run", f"--rcfile={folder / 'rc'}")
        begun = time.monotonic()
        failed, lines = failure_of(test, copy, 1200, *under), {}
        seconds = time.monotonic() - begun
        for path in folder.glob("data*"):
            with contextlib.suppress(CoverageException):  # of a killed process
                (data := CoverageData(path)).read()
                for name in map(Path, data.measured_files()):
                    of_file = lines.setdefault(name.name, set())
                    of_file.update(data.lines(str(name)) or ())
        if failed and failure_of(test, copy, 1200):  # without an edit: it shows nothing
            lines = {}
        lines = {name: sorted(lines[name]) for name in sorted(lines)}
        with lock:
            table["tests"][test] = {"seconds": seconds, "lines": lines}


def try_on(mutant: dict[str, Any], table: dict[str, Any], files: int) -> None:
    """Runs a mutant's tests until one fails, or so many files have passed."""
    edited, name = mutant["edited"], mutant["function"].strip("_")
    rows, tests = table["mutants"], table["tests"]
    with lock:
        new = {**mutant, "edited": None, "tried": [], "killed_by": ""}
        row = rows.setdefault(mutant["key"], new)
        near = [r for r in rows.values() if r["file"] == row["file"] and r["killed_by"]]
    likely = Counter(r["tried"][-1] for r in near)
    span = {*range(row["lines"][0], row["lines"][1] + 1)}
    run = [
        t for t in tests if span.intersection(tests[t]["lines"].get(row["file"], ()))
    ]
    likely.update({t: 3 * min(text_of(t).count(name), 5) for t in run})
    run.sort(key=lambda t: (10 + tests[t]["seconds"]) / (1 + likely[t]))
    with one_copy(table) as copy:
        whole = (path := copy / PRODUCT / row["file"]).read_text()
        for test in [t for t in run if t not in row["tried"]][:files]:
            if row["killed_by"]:
                break
            path.write_text(edited)
            row["killed_by"] = failure_of(test, copy, 120 + 6 * tests[test]["seconds"])
            path.write_text(whole)
            row["tried"].append(test)
    print(f"{row['key']}: {row['killed_by'] or 'ALIVE'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=6, help="so many for each mutant")
    parser.add_argument("--limit", type=int, help="try so many; 0 shows the table")
    parser.add_argument("--only", default="", help="mutants whose key has this")
    args = parser.parse_args()
    shutil.rmtree(ROOT / "build/mutants", ignore_errors=True)
    jobs = len(os.sched_getaffinity(0))
    for number in range(jobs):
        copies.put(copy_of_clone(number))
    empty: dict[str, dict[str, Any]] = {"tests": {}, "mutants": {}}
    table = json.loads(TABLE.read_text()) if TABLE.exists() else empty
    tests, rows = table["tests"], table["mutants"]
    known = [line.partition(" | ")[0] for line in ALIVE.read_text().splitlines()]
    wanted = [m for m in chosen() if args.only in m["key"]]
    wanted = [m for m in wanted if re.sub(r"\+\d+:", ":", m["key"]) not in known]
    wanted = [m for m in wanted if not rows.get(m["key"], {}).get("killed_by")]
    with ThreadPoolExecutor(jobs) as pool:
        new = [p.name for p in (ROOT / TESTS).glob("test_*.py") if p.name not in tests]
        [*pool.map(lambda test: measure(test, table), new)]
        [*pool.map(lambda m: try_on(m, table, args.files), wanted[: args.limit])]
    killed = Counter(r["tried"][-1] for r in rows.values() if r["killed_by"])
    print(f"{len(rows)} tried, {killed.total()} found: {killed}")


if __name__ == "__main__":
    main()
