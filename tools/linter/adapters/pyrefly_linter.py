"""Type errors in our files, found by pyrefly against the linked tree.

pyrefly follows imports into the base, but reports only on the files named to
it: the base's own findings are none of ours.  ``LINT_TREE`` is the tree whose base
is meant: our files are there under the same names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess

from lintrunner_adapters import LintMessage, LintSeverity


CODE = "PYREFLY"
TREE = os.environ.get("LINT_TREE", ".")


def check(filenames: list[str]) -> list[LintMessage]:
    command = ["pyrefly", "check", "--config=pyproject.toml", "--output-format=json"]
    result = subprocess.run(
        [*command, "--progress-bar=no", "--", *map(os.path.relpath, filenames)],
        cwd=TREE,
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
        path=os.path.relpath(os.path.join(TREE, error["path"]), TREE),
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
