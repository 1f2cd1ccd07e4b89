"""Type errors in our files, found by pyrefly against the release that is installed.

pyrefly follows imports into the release, but reports only on the files named to
it: the release's own findings are none of ours.  Those under ``torch/`` are named as
the tree of links has them, as which others import them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess

from lintrunner_adapters import LintMessage, LintSeverity


CODE = "PYREFLY"
# All but the first are what a script finds its neighbours by.
SEARCH_PATH = (".", "examples", "benchmarks/distributed/fsdp")


def find_tree() -> str:
    """Returns the folder that `torch` is imported from."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "."
    return os.path.relpath(os.path.join(found.origin, "..", ".."))


TREE = find_tree()


def in_tree(filename: str) -> str:
    path = os.path.relpath(filename)
    return os.path.join(TREE, path) if path.startswith("torch/") else path


def check(filenames: list[str]) -> list[LintMessage]:
    command = ["pyrefly", "check", "--config=pyproject.toml", "--output-format=json"]
    command += [f"--search-path={folder}" for folder in (TREE, *SEARCH_PATH)]
    result = subprocess.run(
        [*command, "--progress-bar=no", "--", *map(in_tree, filenames)],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        errors = json.loads(result.stdout)["errors"]
    except (ValueError, KeyError):
        return [_failure(result.stderr)]
    if result.returncode != 0 and not errors:
        return [_failure(result.stderr)]
    return [_as_message(error) for error in errors]


def _as_message(error: dict) -> LintMessage:
    return LintMessage(
        path=os.path.relpath(error["path"]).removeprefix(f"{TREE}/"),
        line=error["line"],
        char=error["column"],
        code=CODE,
        severity=LintSeverity.ERROR,
        name=error["name"],
        original=None,
        replacement=None,
        description=error["description"],
    )


def _failure(stderr: str) -> LintMessage:
    return LintMessage(
        path=None,
        line=None,
        char=None,
        code=CODE,
        severity=LintSeverity.ERROR,
        name="command-failed",
        original=None,
        replacement=None,
        description=f"pyrefly did not run:\n{stderr}",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    parser.add_argument("filenames", nargs="+")
    for message in check(parser.parse_args().filenames):
        message.display()
