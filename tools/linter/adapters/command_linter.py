"""What codespell, rumdl, cog and pyrefly find, as lintrunner's messages.

pyrefly follows imports into the release that is installed, but reports only on the files
named to it. Those under ``torch/`` are named as the tree of links has them, as which
others import them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys

from lintrunner_adapters import LintMessage, LintSeverity


spec = importlib.util.find_spec("torch")
origin = spec.origin if spec and spec.origin else "torch/__init__.py"
TREE = os.path.relpath(os.path.join(origin, "../.."))  # which `torch` is imported from
# All but the first are what a script finds its neighbours by
TESTS = "test/distributed/_composable/fsdp"
SEARCH_PATH = (TREE, TESTS, ".", "examples", "benchmarks/distributed/fsdp")
COMMANDS = {
    "CODESPELL": [sys.executable, "-m", "codespell_lib", "--disable-colors", "--"],
    # Parts of pages that are made of the code: `cog -r -I docs docs/*.md` makes them
    "COG": [sys.executable, "-m", "cogapp", "--check", "--diff", "-I", "docs"],
    # Links lead to anchors, references and files that are there
    "LINKS": [
        "rumdl", "check", "--no-cache", "--enable", "MD051,MD052,MD053,MD057", "--",
    ],
    "PYREFLY": [
        "pyrefly", "check", "--config=pyproject.toml", "--output-format=min-text",
        "--progress-bar=no", *(f"--search-path={each}" for each in SEARCH_PATH), "--",
    ],
}  # fmt: skip
FINDING = re.compile(r"(?m)^(?:ERROR )?([^:\n]+):(\d+):(?:(\d+)\S*)? (.*)$")


def message(
    code: str, path: str | None, line: str, char: str, description: str
) -> LintMessage:
    return LintMessage(
        path=path and os.path.relpath(path).removeprefix(f"{TREE}/"),
        line=int(line) if line else None,
        char=int(char) if char else None,
        code=code,
        severity=LintSeverity.ERROR,
        name="finding" if path else "command-failed",
        original=None,
        replacement=None,
        description=description,
    )


def check(code: str, files: list[str]) -> list[LintMessage]:
    if code == "PYREFLY":
        files = [f"{TREE}/{f}" if f.startswith("torch/") else f for f in files]
    command = [*COMMANDS[code], *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [message(code, *row) for row in FINDING.findall(done.stdout)]
    if done.returncode != 0 and not found:
        return [message(code, None, "", "", done.stdout + done.stderr)]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    parser.add_argument("code", choices=COMMANDS)
    parser.add_argument("files", nargs="+")
    parsed = parser.parse_args()
    for each in check(parsed.code, [os.path.relpath(file) for file in parsed.files]):
        each.display()
