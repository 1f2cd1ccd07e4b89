"""The series for upstream: small edits of the release's own functions, as git commits.

``tools/upstream/000N-*.edit`` is a commit: its message, then its diff as ``git diff -U0``
prints it, but for the lines that it removes. They are the release's, which has them:
``make`` fills them in, lets git apply the diff, and writes whole patches.

    make series         build/series/tree: a git repository with a commit for each file;
                        build/series/*.patch; tests over each commit
    make series-save    writes the files anew from the commits, once you have amended or
                        rebased them in build/series/tree
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.overlay import lay_links, torch_links
from tools.releases import git, NEWEST, ROOT, ToolError


EDITS, TREE = ROOT / "tools/upstream", ROOT / "build/series/tree"
BRANCH, RELEASE = "fsdp2-series", "release"
TESTS = "test/distributed/_composable/fsdp"
# Our tests that compare uniform units of a commit with the release's
UNIFORM = {
    "test_fully_shard_schedules.py": "as_with_the_release",
    "test_fully_shard_parity.py": "(test_has_the_bits and uniform) or uniform_unit",
}
# Where a hunk is, its function, and what it removes
HUNK = re.compile(r"(?m)^(@@ -(\d+)(?:,(\d+))? \S+ @@)(.*)\n((?:-.*\n)*)")


def without_text(hunk: re.Match[str]) -> str:
    names = re.findall(r"(?:class|def) \w+", hunk[4])
    return " ".join([hunk[1], *names]) + "\n"


def edits_of(tree: Path) -> dict[str, str]:
    """Returns the texts of a tree's commits, by the names of their files."""
    edits: dict[str, str] = {}
    for commit in git(tree, "rev-list", "--reverse", f"{RELEASE}..{BRANCH}").split():
        log = git(tree, "log", "-1", "--format=%f%n%B", commit)
        name, _, message = log.partition("\n")
        diff = git(
            tree, "diff-tree", "--no-commit-id", "-p", "-U0", "--full-index", commit
        )
        text = f"{message.strip()}\n\n{HUNK.sub(without_text, diff)}"
        edits[f"{len(edits) + 1:04}-{name}.edit"] = text
    return edits


def stored_edits() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(EDITS.glob("*.edit"))}


def save() -> None:
    for path in EDITS.glob("*.edit"):
        path.unlink()
    for name, edit in edits_of(TREE).items():
        (EDITS / name).write_text(edit)


def commit_edit(tree: Path, name: str, edit: str) -> None:
    """Makes a commit, on the files that it was written for."""
    message, *files = re.split(r"(?m)^(?=diff --git )", edit)
    for i, file in enumerate(files):
        path, old = re.findall(r"(?m)^diff --git a/(\S+)|^index (\w+)", file)
        found, lines = "0" * 40, []  # what git says of a new file
        if (source := tree / path[0]).exists():
            found = git(tree, "hash-object", source).strip()
            lines = source.read_text().splitlines(keepends=True)
        if found != old[1]:
            raise ToolError(f"{name}: {path[0]} is {found}, and not {old[1]} as it was")

        def with_text(hunk: re.Match[str], lines: list[str] = lines) -> str:
            start, count = int(hunk[2]) - 1, int(hunk[3] or 1)
            removed = ["-" + line for line in lines[start : start + count]]
            return "".join([hunk[1], "\n", *removed])

        files[i] = HUNK.sub(with_text, file)
    diff = tree / ".git/edit.diff"
    diff.write_text("".join(files))
    git(tree, "apply", "--unidiff-zero", "--index", diff)
    git(tree, "commit", "--quiet", "--cleanup=verbatim", "-m", message.strip())


def make_tree(
    tree: Path, release: Path, edits: dict[str, str], files: str = "*.py"
) -> None:
    """Makes a repository of a release's files of Python, and a commit for each edit."""
    shutil.rmtree(tree, ignore_errors=True)
    for source in (release / "torch").rglob(files):
        target = tree / source.relative_to(release)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    git(tree, "init", "--quiet", f"--initial-branch={BRANCH}")
    (tree / ".git/info/attributes").write_text("*.py diff=python\n")
    # Nobody's: whoever sends the commits becomes their author
    git(tree, "config", "user.name", BRANCH)
    git(tree, "config", "user.email", f"{BRANCH}@localhost")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "-m", f"PyTorch {NEWEST}")
    git(tree, "tag", RELEASE)
    for name, edit in edits.items():
        commit_edit(tree, name, edit)
    for patch in tree.parent.glob("*.patch"):
        patch.unlink()
    git(tree, "format-patch", "--quiet", "--full-index", "-o", tree.parent, RELEASE)


def lay(tree: Path, release: Path) -> Path:
    """Returns a torch of links: the release with the files that are checked out."""
    laid = tree.parent / "branch"
    changed = git(tree, "diff", "--name-only", RELEASE, "--", "torch").split()
    lay_links(laid, torch_links(release, tree, changed))
    return laid


def lay_first(count: int, home: Path, release: Path) -> Path:
    """Returns a release with the first commits alone. The very first promotes gradients."""
    edits = dict(sorted(stored_edits().items())[:count])
    make_tree(home / "tree", release, edits, "_fully_shard/*.py")
    return lay(home / "tree", release)


def test_each(tree: Path, release: Path) -> None:
    """Runs the tests of each commit, and uniform units beside the release."""
    home = tree.parent
    base = {path.name: os.readlink(path) for path in release.iterdir()}
    lay_links(home / "base", base)  # no link itself, since tests compare paths
    env = {"PYTHONPATH": str(home / "branch"), "FSDP_PARITY_KINDS": "uniform"}
    env = os.environ | env
    env.pop("CI", None)  # torch's tests would want a package that writes reports
    for commit in git(tree, "rev-list", "--reverse", f"{RELEASE}..{BRANCH}").split():
        git(tree, "switch", "--quiet", "--detach", commit)
        changed = git(tree, "diff", "--name-only", RELEASE).split()
        lay(tree, release)
        print(git(tree, "log", "-1", "--format=%n%s", "--stat", commit), flush=True)
        runs = [[str(tree / file)] for file in changed if file.startswith("test/")]
        for file, names in UNIFORM.items():
            runs.append(["-m", "pytest", "-q", f"{ROOT}/{TESTS}/{file}", "-k", names])
        # Side by side: threads of a test share one core
        started = [
            subprocess.Popen([sys.executable, *r], cwd=home, env=env) for r in runs
        ]
        failed = [" ".join(r) for r, process in zip(runs, started) if process.wait()]
        if failed:
            raise ToolError(f"{commit}, which is in {tree}:\n" + "\n".join(failed))
    git(tree, "switch", "--quiet", BRANCH)


def make(*options: str) -> None:
    edits, release = stored_edits(), ROOT / "build" / NEWEST / "base"
    is_made = (TREE / ".git").exists()
    if is_made and (git(TREE, "status", "--porcelain") or edits_of(TREE) != edits):
        raise ToolError(f"{TREE} has changes: make series-save, or rm -rf it")
    make_tree(TREE, release, edits)
    if "--untested" not in options:
        test_each(TREE, release)


if __name__ == "__main__":
    try:
        {"make": make, "save": save}[sys.argv[1]](*sys.argv[2:])
    except (ToolError, OSError) as error:
        sys.exit(f"error: {error}")
