#!/usr/bin/env python3
"""Shows what another release means for the files that this branch replaces.

    .venv/bin/python tools/contract_diff.py OLD NEW

compares two releases that were set up (make setup RELEASE=VERSION); nothing is imported.
It tells which files differ, which names and signatures are gone or changed, which are
new, and which of NEW's the branch lacks where it did not lack them on OLD. What functions
newly do is in the diff itself. Whether NEW has what ours use is up to `make lint`.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import griffe


BUILD = Path(__file__).resolve().parents[1] / "build"
PACKAGE = Path("torch/distributed/fsdp")


def loaded(tree: Path) -> griffe.Object | griffe.Alias:
    """Returns the package of a tree, each name of which counts as public."""
    package = griffe.load(PACKAGE.name, search_paths=[tree / PACKAGE.parent])
    pending = [package]
    for each in pending:  # grows
        each.public = True
        pending += [m for m in each.members.values() if not m.is_alias]
    return package


def lost(before: Path, after: Path) -> list[str]:
    """Returns what users of one tree have to change for another."""
    style = griffe.ExplanationStyle.MARKDOWN
    found = griffe.find_breaking_changes(loaded(before), loaded(after))
    return [f"{each.obj.module.name} {each.explain(style)}" for each in found]


def compare(old: Path, new: Path) -> dict[str, list[str]]:
    """Returns lines, by the title of their section."""
    bases = [str(side / "base" / PACKAGE) for side in (old, new)]
    diff = ["git", "diff", "--no-index", "--stat=100", *bases]
    stat = subprocess.run(diff, capture_output=True, text=True).stdout.splitlines()
    known = lost(old / "base", old / "branch")
    return {
        f"git diff --no-index --function-context {' '.join(bases)}": stat,
        "Gone or changed": lost(old / "base", new / "base"),
        "New": [
            line.partition(":")[0]
            for line in lost(new / "base", old / "base")
            if "object was removed" in line
        ],
        "Lacking in ours": [
            line for line in lost(new / "base", new / "branch") if line not in known
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs=2, metavar="VERSION")
    sides = [BUILD / release for release in parser.parse_args().releases]
    for side in sides:
        if not (side / "branch").is_dir():
            parser.error(f"there is no {side}: make setup RELEASE={side.name}")
    for title, lines in compare(*sides).items():
        print(title, *(lines or ["none"]), sep="\n  ", end="\n\n")


if __name__ == "__main__":
    main()
