"""Misspelt words, found by codespell; its settings are in pyproject.toml."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from lintrunner_adapters import LintMessage, LintSeverity


CODE = "CODESPELL"
_FINDING = re.compile(r"^(?P<path>.*):(?P<line>\d+): (?P<text>.* ==> .*)$")


def check(filenames: list[str]) -> list[LintMessage]:
    result = subprocess.run(
        [sys.executable, "-m", "codespell_lib", "--disable-colors", "--", *filenames],
        capture_output=True,
        text=True,
        check=False,
    )
    findings = [_FINDING.match(line) for line in result.stdout.splitlines()]
    messages = [
        _message(found["path"], int(found["line"]), "misspelling", found["text"])
        for found in findings
        if found
    ]
    if result.returncode != 0 and not messages:
        return [_message(None, None, "command-failed", result.stderr)]
    return messages


def _message(
    path: str | None, line: int | None, name: str, description: str
) -> LintMessage:
    return LintMessage(
        path=path,
        line=line,
        char=None,
        code=CODE,
        severity=LintSeverity.ERROR,
        name=name,
        original=None,
        replacement=None,
        description=description,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    parser.add_argument("filenames", nargs="+")
    for message in check(parser.parse_args().filenames):
        message.display()
