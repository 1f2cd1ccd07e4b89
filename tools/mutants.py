"""Breaks the product on purpose, one line at a time, and tells which test notices.

Edits a line of each function, always the same ones, in a copy of the clone, and runs
test files, likeliest first, until one fails. build/mutants.json keeps what was found: a
run that was stopped goes on; other --tests are tried on what is still alive.
"""

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.overlay import lay_links, torch_links  # noqa: E402
from tools.releases import files_under  # noqa: E402


COPY, TABLE = ROOT / "build/mutants", ROOT / "build/mutants.json"
TREE, PRODUCT = COPY / "build/tree", "torch/distributed/fsdp/_fully_shard"
TESTS = COPY / "test" / "distributed" / "_composable" / "fsdp"
# What an edit is about, what it replaces, and by what. Capitals are preferred
CALL, PASS = r"^(\s*)[\w.()]*%s\(.*\)$", r"\1pass"
RULES = (
    ("WAIT", CALL % r"\.(wait|record)(_event|_stream)?", PASS),
    ("ORDER", r"\b(sorted|reversed)\(", "(lambda found, **_: [*found])("),
    ("FACTOR", " ([*]|/{1,2}) ", " + "),
    ("DTYPE", r"\.(param|reduce|wire|comm)_dtype\b", ".orig_dtype"),
    ("DTYPE", r"torch\.(float32|bfloat16|uint8)", "torch.float16"),
    ("ALIAS", r"\[\*([\w.]+)\]|\.(?:clone|detach|copy|to)\([\w. =]*\)", r"\1"),
    ("LIFETIME", r"^(\s*)([\w.]+ = None|del .*|.*\.(clear|pop)\(.*\))$", PASS),
    ("call", CALL % "", PASS),
    ("condition", " and ", " or "),
    ("condition", r"\bif (?!not )(.+):$", r"if not (\1):"),
    ("condition", " == ", " != "),
    ("constant", r"\b(True|False|0|1)\b", r"(not \1)"),
    ("return", r"^(\s*)return [^#]+$", r"\1return None"),
)


def mutants_in(path: Path) -> list[dict[str, Any]]:
    """Returns the edits of each function that leave the file one of Python."""
    lines, mutants = (text := path.read_text()).splitlines(), []
    for node in (n for n in ast.walk(ast.parse(text)) if type(n) is ast.FunctionDef):
        body = node.body[bool(ast.get_docstring(node)) :] or node.body
        first, last = body[0].lineno - 1, node.end_lineno or 0
        found = [("body", first, last, " " * body[0].col_offset + "pass")]
        for n, (kind, old, new) in itertools.product(range(first, last), RULES):
            if lines[n].lstrip()[:1] != "#":
                found += [(kind, n, n + 1, re.sub(old, new, lines[n], count=1))]
        for kind, start, end, after in found:
            key = f"{path.name} {node.name}+{start - node.lineno}: {after.strip()}"
            edited = "\n".join([*lines[:start], after, *lines[end:], ""])
            row = {"key": key, "file": path.name, "function": node.name, "kind": kind}
            with contextlib.suppress(SyntaxError):
                if lines[start:end] != [after] and compile(edited, path.name, "exec"):
                    mutants.append(row | {"of": node.lineno, "edited": edited})
    return mutants


def chosen() -> list[dict[str, Any]]:
    found = [m for p in sorted((ROOT / PRODUCT).glob("*.py")) for m in mutants_in(p)]
    random.Random(0).shuffle(found)
    found.sort(key=lambda m: (m["kind"] == "body") - m["kind"].isupper())  # stable
    first = {(m["file"], m["of"]): m for m in reversed(found)}
    more = [m for m in found if first[m["file"], m["of"]] is not m]
    wanted = [*first.values(), *more[: max(250 - len(first), 0)]]
    return random.Random(0).sample(wanted, len(wanted))


def text_of(test: str) -> str:  # with the packages that it names
    text = (TESTS / test).read_text()
    for folder in {*re.findall(r"\bfsdp_\w+", text)} - {"fsdp_common"}:
        text += "".join(p.read_text() for p in (TESTS / folder).glob("*.py"))
    return text


def failure_of(test: str, seconds: float, *, caches: bool = False) -> str:
    """Returns the first test of a file that fails, or that it hung; "" if all pass."""
    env = os.environ | {"PYTHONPATH": str(TREE), "PYTHONPYCACHEPREFIX": f"{COPY}.pyc"}
    env["PYTHONDONTWRITEBYTECODE"] = "" if caches else "1"  # but none of an edit
    command = ["timeout", "--kill-after=5", str(seconds)]  # all its processes
    command += [sys.executable, "-m", "pytest", "-qx", "--tb=no", str(TESTS / test)]
    done = subprocess.run(command, cwd=COPY, env=env, capture_output=True, text=True)
    failed = re.findall(r"(?m)^(?:FAILED|ERROR) \S*?(\w+)(?: - .*)?$", done.stdout)
    return {0: "", 124: "hung", 137: "hung"}.get(
        done.returncode, (failed or ["did not start"])[0]
    )


def try_on(mutant: dict[str, Any], tests: list[str], table: dict[str, Any]) -> None:
    rows, seconds = table["mutants"], table["seconds"]
    edited, name = mutant.pop("edited"), mutant["function"].strip("_")
    row = rows.setdefault(mutant["key"], {**mutant, "tried": [], "killed_by": ""})
    near = [r for r in rows.values() if r["file"] == row["file"] and r["killed_by"]]
    likely = Counter(r["tried"][-1] for r in near)
    likely.update({t: 2 * min(text_of(t).count(name), 5) for t in tests})
    tests.sort(key=lambda t: (-likely[t], seconds.get(t, 30)))
    whole = (path := COPY / PRODUCT / row["file"]).read_text()
    for test in tests:
        if row["killed_by"] or test in row["tried"]:
            continue
        if test not in seconds:  # 0 if it fails without any mutant, and is left out
            begun, failed = time.monotonic(), failure_of(test, 1200, caches=True)
            seconds[test] = 0 if failed else time.monotonic() - begun
        if seconds[test]:
            path.write_text(edited)
            row["killed_by"] = failure_of(test, 60 + 4 * seconds[test])
            path.write_text(whole)
            row["tried"].append(test)
        TABLE.write_text(json.dumps(table, indent=1))
    print(f"{row['key']}: {row['killed_by'] or 'ALIVE'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", nargs="+", default=["test_fully_shard_*.py"])
    parser.add_argument("--limit", type=int, help="try so many; 0 shows the table")
    args = parser.parse_args()
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT, COPY, ignore=shutil.ignore_patterns("build", ".git", ".venv"))
    release = Path(sys.prefix).resolve().parent / "base"
    lay_links(TREE, torch_links(release, COPY, files_under(COPY, "torch")))
    (TREE.parent / "base").symlink_to(release)
    empty: dict[str, dict[str, Any]] = {"seconds": {}, "mutants": {}}
    table = json.loads(TABLE.read_text()) if TABLE.exists() else empty
    found = {path for each in args.tests for path in TESTS.glob(each)}
    tests = [p.name for p in sorted(found) if "mark.tools" not in p.read_text()]
    for mutant in chosen()[: args.limit]:
        try_on(mutant, tests, table)
    rows = table["mutants"].values()
    first = Counter(row["tried"][-1] for row in rows if row["killed_by"])
    left_out = [test for test, took in table["seconds"].items() if not took]
    alive = [row["key"] for row in rows if not row["killed_by"]]
    print(f"{len(rows)} tried, {first}; left out {left_out}", *alive, sep="\n  ALIVE ")


if __name__ == "__main__":
    main()
