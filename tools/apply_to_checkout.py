#!/usr/bin/env python3
"""Lays the branch's files over a PyTorch source checkout at one of its releases.

    python3 tools/apply_to_checkout.py PATH
    python3 tools/apply_to_checkout.py --check PATH     only tells what it would do
    python3 tools/apply_to_checkout.py --list PATH      the files that have a place there
    python3 tools/apply_to_checkout.py --series PATH    edits PATH's own files instead

Everything is checked before anything is written: that PATH is a git checkout of
a release that the branch fits, which version.txt there tells, that each file to be
replaced is that release's own, and that none of these places has changes that are not committed.  What follows, the
source build and the pull requests, is printed.  Needs only Python and git.

With --series PATH may be of any version, and is an installed tree, too: any folder with
torch/, if all edits of tools/upstream/ find their places.  In a git checkout each change
becomes a commit.  Elsewhere --undo takes them back.  --upto N makes the first N changes.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.setup_helpers import tree  # noqa: E402
from tools.setup_helpers.digests import (  # noqa: E402
    difference,
    DIGESTS,  # noqa: F401
    notes,
    recorded,
    sha256,
)
from tools.setup_helpers.releases import known, RELEASES  # noqa: E402
from tools.setup_helpers.report import explain, SetupError  # noqa: E402
from tools.upstream.apply import apply_series  # noqa: E402
from tools.upstream.series import SERIES  # noqa: E402


if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any

    from tools.setup_helpers.releases import Release
    from tools.upstream.edits import Change


TESTS = "test/distributed/_composable/fsdp"
BRANCH = "fsdp2-mixed-dtype"
# Tests of what is here alone, by what that is, and the packages that only they need;
# CONTRIBUTING.md names it in this order. Tests of anything else are laid with what
# they test.
STAYS_OF = {
    "build": (
        "fsdp_build",
        "test_fully_shard_build",
        "test_fully_shard_runner",
        "test_fully_shard_setup_faults",
        "test_fully_shard_superbuild",
        "test_fully_shard_wheel",
    ),
    "tools": (
        "test_fully_shard_checkout",
        "test_fully_shard_contract",
        "test_fully_shard_overlay",
        "test_fully_shard_series",
    ),
    "benchmarks": ("test_fully_shard_bench",),
    "examples": (
        "fsdp_clients",
        "test_fully_shard_accelerate",
        "test_fully_shard_distributed_config",
        "test_fully_shard_models",
        "test_fully_shard_same_bits",
        "test_fully_shard_tiny_models",
        "test_fully_shard_tools",
    ),
    "pages": (
        "test_fully_shard_architecture",
        "test_fully_shard_docs",
        "test_fully_shard_drift_page",
        "test_fully_shard_recipes",
    ),
}
STAY_HERE = {name for names in STAYS_OF.values() for name in names}
# The release has a test of this name, which its wheel does not hold. It stays, and
# ours stands beside it.
LAID_AS = {
    f"{TESTS}/test_fully_shard_comm.py": f"{TESTS}/test_fully_shard_mixed_comm.py",
}


@dataclass(frozen=True)
class Plan:
    """What laying our files over a checkout comes to, by path there."""

    replaced: list[str]
    added: list[str]
    in_place: list[str]
    """Files that are there already, byte for byte."""
    refusals: list[str]
    notes: list[str]

    @property
    def laid(self) -> list[str]:
        return sorted(self.replaced + self.added)


def stays_here(path: str) -> bool:
    """Says whether a file, or the folder beside the tests that it is in, stays."""
    name, _, _ = path.removeprefix(f"{TESTS}/").partition("/")
    return name.removesuffix(".py") in STAY_HERE


def files_to_lay(root: Path) -> dict[str, Path]:
    """Returns our files that have a place in a checkout, by their path there.

    They are the sources and their tests.
    """
    files = sorted(tree.released_files(root, "torch", "test"))
    return {LAID_AS.get(p, p): root / p for p in files if not stays_here(p)}


def check_tree(checkout: Path) -> Release:
    """Sees to it that ``checkout`` is a git tree of a release; returns which."""
    if not checkout.is_dir():
        raise SetupError(f"there is no folder {checkout}")
    version_file = checkout / "version.txt"
    if not version_file.is_file() or not (checkout / "torch").is_dir():
        raise SetupError(
            f"{checkout} is not a PyTorch source tree: it lacks version.txt or torch/; "
            "git clone --branch a release of the PyTorch repository, which can be "
            f"{known('or')}, and name that folder"
        )
    found = version_file.read_text().strip()
    for release in RELEASES:
        # A release's own tree says a0 behind its version: the build is told the rest.
        if re.fullmatch(rf"{re.escape(release.version)}(a0|rc\d+)?(\+.*)?", found):
            break
    else:
        raise SetupError(
            f"{checkout} is PyTorch {found}; this branch is for {known('or')}: "
            "git checkout the tag of one of them there"
        )
    if not tree.has_git(checkout):
        raise SetupError(f"{checkout} is not the top folder of a git checkout")
    return release


def make_plan(root: Path, checkout: Path) -> Plan:
    release = check_tree(checkout)
    theirs = recorded(root, release)
    ours = files_to_lay(root)
    plan = Plan([], [], [], [], notes_on(checkout, theirs, ours))
    changed = uncommitted(checkout, [*ours])
    for path, source in ours.items():
        target = checkout / path
        if target.is_file() and target.read_bytes() == source.read_bytes():
            plan.in_place.append(path)
        elif problem := refusal(checkout, path, theirs["sha256"].get(path), changed):
            plan.refusals.append(f"{path} {problem}")
        else:
            (plan.replaced if path in theirs["sha256"] else plan.added).append(path)
    return plan


def uncommitted(checkout: Path, paths: list[str]) -> set[str]:
    """Returns which of ``paths`` git does not have as they are."""
    arguments = ["--porcelain", "-z", "--no-renames", "--ignored"]
    arguments += ["--untracked-files=all", "--", *paths]
    listing = tree.run_git(checkout, "--literal-pathspecs", "status", *arguments)
    if listing is None:
        raise SetupError(f"git cannot tell what is changed in {checkout}")
    return {record[3:] for record in listing.split("\0") if record}


def refusal(
    checkout: Path, path: str, digest: str | None, changed: set[str]
) -> str | None:
    """Says why ``path`` cannot be laid; None where it can."""
    target = checkout / path
    if path in changed:
        return "has changes that are not committed"
    for place in (path, *tree.parents_of([path])):
        if (checkout / place).is_symlink():
            return f"would go through a link, {place}"
    for parent in tree.parents_of([path]):
        if (checkout / parent).exists() and not (checkout / parent).is_dir():
            return f"needs a folder where {parent} is a file"
    return difference(digest, sha256(target))


def notes_on(checkout: Path, theirs: dict[str, Any], ours: Container[str]) -> list[str]:
    """Returns what may go wrong in spite of the checks."""
    found = notes(theirs["sha256"], ours, lambda path: sha256(checkout / path))
    ancestor = ("merge-base", "--is-ancestor", theirs["commit"], "HEAD")
    if tree.run_git(checkout, *ancestor) is None:
        found.insert(
            0, f"HEAD does not follow the release's commit, {theirs['commit']}"
        )
    return found


def lay(checkout: Path, sources: dict[str, Path]) -> None:
    for path, source in sources.items():
        target = checkout / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        try:
            shutil.copyfile(source, partial)
            partial.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)


def report(plan: Plan, checkout: Path, *, only_check: bool) -> None:
    would = "would be " if only_check else ""
    for path in plan.laid:
        print(f"  {'replaced' if path in plan.replaced else 'added   '}  {path}")
    print(
        f"{checkout}: {len(plan.replaced)} files {would}replaced, "
        f"{len(plan.added)} {would}added, {len(plan.in_place)} in place already"
    )
    for note in plan.notes:
        print(f"note: {note}")


def print_commands(checkout: Path) -> None:
    print(f"""
To build it and run its tests:
  cd {shlex.quote(str(checkout))}
  git switch --create {BRANCH}
  git submodule update --init --recursive
  python -m pip install --group dev
  python -m pip install --no-build-isolation -v -e .
  python -m pytest {TESTS}

To propose it, send the series of small edits instead, see --series.""")


def first_changes(number: int | None) -> tuple[Change, ...]:
    if number is not None and not 0 < number <= len(SERIES):
        raise SetupError(f"--upto {number}: the series has {len(SERIES)} changes")
    return SERIES[:number]


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Returns the exit status; an error is one line on stderr, a refusal a list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="the checkout")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--list", action="store_true", help="only list what is ours")
    parser.add_argument("--series", action="store_true", help="edit its own files")
    parser.add_argument("--upto", type=int, metavar="N", help="the first N changes")
    parser.add_argument("--undo", action="store_true", help="take the series back")
    parsed = parser.parse_args(arguments)
    if (parsed.undo or parsed.upto is not None) and not parsed.series:
        parser.error("--undo and --upto go with --series")
    checkout = parsed.path.expanduser().absolute()
    try:
        if parsed.list:
            print("\n".join(files_to_lay(root)))
            return 0
        if parsed.series:
            changes = first_changes(parsed.upto)
            only_check, undo = parsed.check, parsed.undo
            apply_series(checkout, root, changes, only_check=only_check, undo=undo)
            return 0
        plan = make_plan(root, checkout)
        if plan.refusals:
            listing = "".join(f"\n  {line}" for line in plan.refusals)
            raise SetupError(
                f"{checkout} is left as it is, because of these files:{listing}"
            )
        if not parsed.check:
            ours = files_to_lay(root)
            lay(checkout, {path: ours[path] for path in plan.laid})
    except (SetupError, OSError) as error:
        text = explain(error) if isinstance(error, OSError) else str(error)
        print(f"error: {text}", file=sys.stderr)
        return 1
    report(plan, checkout, only_check=parsed.check)
    if not parsed.check:
        print_commands(checkout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
