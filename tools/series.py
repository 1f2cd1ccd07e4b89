"""The series for upstream: small edits of the release's own functions, as git has them.

``tools/upstream/000N-*.edit`` is a change: its commit's message, and what it does to each
file, as ``git diff -U0`` tells but without the lines that go: those are not ours. A file
has a line ``=== PATH BLOB BLOB``, which name it before and after, and each place in it a
line ``@@ LINE,COUNT``, which says how many old lines go there (``LINE,0``: behind LINE).

    make series                 build/series/tree: a git repository with a commit for each
                                change; runs the tests of each; build/series/*.patch
    make series CHECKOUT=PATH   and makes these commits on a branch of that git checkout
    make series-save            writes the changes anew from the commits, once you have
                                amended or rebased them in build/series/tree
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.overlay import lay_links, torch_links
from tools.releases import git, has_git, NEWEST, ROOT, ToolError


EDITS = ROOT / "tools/upstream"
HOME = ROOT / "build/series"
TREE = HOME / "tree"
BRANCH, RELEASE = "fsdp2-series", "release"
NOTHING = "0" * 40


# Edits #


def edit_of(commit: str, tree: Path) -> str:
    """Returns the text of a change, from a commit."""
    parts = [git(tree, "log", "-1", "--format=%B", commit).strip(), ""]
    options = ("-p", "-U0", "--full-index", "--diff-algorithm=histogram")
    path, in_hunk = "", False
    for row in git(tree, "diff-tree", *options, commit).split("\n"):
        if row.startswith("diff --git "):
            path, in_hunk = row.rpartition(" b/")[2], False
        elif found := re.match(r"index (\w+)\.\.(\w+)", row):
            parts.append(f"=== {path} {found[1]} {found[2]}")
        elif found := re.match(r"@@ -(\d+)(?:,(\d+))? ", row):
            parts.append(f"@@ {found[1]},{found[2] or 1}")
            in_hunk = True
        elif in_hunk and row.startswith("+"):
            parts.append(row)
    return "\n".join(parts) + "\n"


def edits_of(tree: Path) -> dict[str, str]:
    """Returns the texts of a tree's changes, by the names of their files."""
    log = git(tree, "log", "--reverse", "--format=%h-%f", f"{RELEASE}..{BRANCH}")
    edits = {}
    for number, line in enumerate(log.split(), 1):
        commit, _, title = line.partition("-")
        edits[f"{number:04}-{title}.edit"] = edit_of(commit, tree)
    return edits


def stored_edits(folder: Path = EDITS) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*.edit"))}


def with_hunks(text: str, hunks: str) -> str:
    """Returns a file's text with its places edited."""
    lines = text.split("\n")
    done: list[str] = []
    at = 0
    for hunk in hunks.split("\n@@ ")[1:]:
        place, *rows = hunk.split("\n")
        start, count = map(int, place.split(","))
        begin = start - 1 if count else start
        done += lines[at:begin] + [row[1:] for row in rows if row.startswith("+")]
        at = begin + count
    return "\n".join(done + lines[at:])


def commit_edit(tree: Path, name: str, edit: str, **env: str) -> None:
    """Makes the commit of a change, on the files that it was written for."""

    def blob(place: Path) -> str:
        return git(tree, "hash-object", place).strip() if place.exists() else NOTHING

    message, *files = edit.split("\n=== ")
    for file in files:
        head, _, _ = file.partition("\n")
        path, old, new = head.split(" ")
        place = tree / path
        if (found := blob(place)) != old:
            raise ToolError(f"{name}: {path} is {found}, and not {old} as it was")
        text = place.read_text() if place.exists() else ""
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(with_hunks(text, file.removesuffix("\n")))
        if new == NOTHING:
            place.unlink()
        if (found := blob(place)) != new:
            raise ToolError(f"{name}: {path} is then {found}, and not {new}")
    git(tree, "add", "--all")
    commit = ("commit", "--quiet", "--cleanup=verbatim", "--message")
    git(tree, *commit, message.strip(), **env)


# The repository #


def make_tree(tree: Path, release: Path, edits: dict[str, str]) -> None:
    """Makes a repository of a release's Python files, and a commit for each change."""
    shutil.rmtree(tree, ignore_errors=True)
    for source in (release / "torch").rglob("*.py"):
        target = tree / source.relative_to(release)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    git(tree, "init", "--quiet", f"--initial-branch={BRANCH}")
    try:
        git(tree, "var", "GIT_AUTHOR_IDENT")
    except ToolError:  # as for continuous integration
        git(tree, "config", "user.name", BRANCH)
        git(tree, "config", "user.email", f"{BRANCH}@localhost")
    env = {}
    if has_git(ROOT):  # the same commits from the same changes
        date = git(ROOT, "log", "-1", "--format=%cI").strip()
        env = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", f"PyTorch {NEWEST}", **env)
    git(tree, "tag", RELEASE)
    for name, edit in edits.items():
        commit_edit(tree, name, edit, **env)


def check_saved(tree: Path, edits: dict[str, str]) -> None:
    """Refuses to go on where commits would be lost."""
    is_there = (tree / ".git").exists()
    if is_there and (git(tree, "status", "--porcelain") or edits_of(tree) != edits):
        raise ToolError(
            f"{tree} differs from {EDITS.relative_to(ROOT)}: make series-save keeps "
            f"what was committed there, rm -rf {tree} drops it"
        )


def test_each(tree: Path, release: Path) -> None:
    """Runs at each commit the tests that the series has brought by then."""
    for commit in git(tree, "rev-list", "--reverse", f"{RELEASE}..{BRANCH}").split():
        git(tree, "switch", "--quiet", "--detach", commit)
        files = git(tree, "diff", "--name-only", f"{RELEASE}..{commit}").split()
        own = {file for file in files if file.startswith("torch/")}
        branch = tree.parent / "branch"
        lay_links(branch, torch_links(release, tree, own))
        print(git(tree, "log", "-1", "--format=%n%s", "--stat", commit), flush=True)
        env = os.environ | {"PYTHONPATH": str(branch)}
        env.pop("CI", None)  # torch's tests would want a package that writes reports
        for file in sorted({*files} - own):
            if subprocess.run([sys.executable, tree / file], env=env).returncode:
                raise ToolError(f"{file} fails at {commit}, where {tree} is now")
    git(tree, "switch", "--quiet", BRANCH)


def write_patches(tree: Path) -> list[str]:
    """Writes the commits beside the tree; returns the paths of the patches."""
    for patch in tree.parent.glob("*.patch"):
        patch.unlink()
    options = ("--zero-commit", "--full-index", f"--output-directory={tree.parent}")
    return git(tree, "format-patch", *options, RELEASE).splitlines()


def commit_series(checkout: Path, tree: Path) -> None:
    """Makes the commits on a branch of a checkout, as ``git am`` does."""
    if git(checkout, "status", "--porcelain", "--untracked-files=no"):
        raise ToolError(f"{checkout} has changes that are not committed")
    # The release's files, for a merge of three sides where a checkout lacks them
    git(checkout, "fetch", "--quiet", str(tree), BRANCH)
    git(checkout, "switch", "--create", BRANCH)
    patches = write_patches(tree)
    print(git(checkout, "am", "--3way", "--keep-non-patch", *patches), end="")


def make(release: Path, checkout: Path | None, *, untested: bool) -> None:
    edits = stored_edits()
    check_saved(TREE, edits)
    make_tree(TREE, release, edits)
    write_patches(TREE)
    if not untested:
        test_each(TREE, release)
    print(f"{HOME.relative_to(ROOT)}: {len(edits)} patches; commits in {TREE}")
    if checkout:
        commit_series(checkout, TREE)


def save(tree: Path = TREE, folder: Path = EDITS) -> None:
    edits = edits_of(tree)
    for name in stored_edits(folder).keys() - edits.keys():
        (folder / name).unlink()
    for name, edit in edits.items():
        (folder / name).write_text(edit)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("make", "save"))
    parser.add_argument("--checkout", type=Path, metavar="PATH")
    parser.add_argument("--untested", action="store_true", help="run no tests")
    parsed = parser.parse_args(arguments)
    try:
        if parsed.command == "save":
            save()
        else:
            checkout = parsed.checkout and parsed.checkout.expanduser().absolute()
            release = ROOT / "build" / NEWEST / "base"
            make(release, checkout, untested=parsed.untested)
    except (ToolError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
