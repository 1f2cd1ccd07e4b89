"""The series for upstream: small edits of the release's own functions, as git commits.

``tools/upstream/000N-*.edit`` is a commit: its message, then its diff as ``git diff -U0``
prints it, but for the text of the lines that it removes. That text is the release's, which
has it: ``make`` fills it in, lets git apply the diff, and writes whole patches.

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
    "test_fully_shard_schedules.py": "is_as_with_the_release",
    "test_fully_shard_parity.py": "(test_has_the_bits and uniform) or uniform_unit",
}
# No wheel has upstream's test files. The series adds to the end of these instead
STAND_INS = ("comm", "mixed_precision", "training")
STAND_IN = """# Owner(s): ["oncall: distributed"]

# Here is the rest of upstream's file.


if __name__ == "__main__":
    run_tests()
"""
# Where a hunk is, its function, and what it removes
HUNK = re.compile(r"(?m)^(@@ -(\d+)(?:,(\d+))? \S+ @@)(.*)\n((?:-.*\n)*)")


def without_text(hunk: re.Match[str]) -> str:
    names = re.findall(r"(?:class|def) \w+", hunk[4])
    return " ".join([hunk[1], *names]) + "\n" + "-\n" * hunk[5].count("\n")


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
        if (found := git(tree, "hash-object", path[0]).strip()) != old[1]:
            raise ToolError(f"{name}: {path[0]} is {found}, and not {old[1]} as it was")
        lines = (tree / path[0]).read_text().splitlines(keepends=True)

        def with_text(hunk: re.Match[str], lines: list[str] = lines) -> str:
            start, count = int(hunk[2]) - 1, int(hunk[3] or 1)
            removed = ["-" + line for line in lines[start : start + count]]
            return "".join([hunk[1], "\n", *removed])

        files[i] = HUNK.sub(with_text, file)
    diff = tree / ".git/edit.diff"
    diff.write_text("".join(files))
    git(tree, "apply", "--unidiff-zero", "--index", diff)
    git(tree, "commit", "--quiet", "--cleanup=verbatim", "-m", message.strip())


def make_tree(tree: Path, release: Path, edits: dict[str, str]) -> None:
    """Makes a repository of a release's Python files, and a commit for each edit."""
    shutil.rmtree(tree, ignore_errors=True)
    for source in (release / "torch").rglob("*.py"):
        target = tree / source.relative_to(release)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    (tree / TESTS).mkdir(parents=True)
    for area in STAND_INS:
        (tree / TESTS / f"test_fully_shard_{area}.py").write_text(STAND_IN)
    git(tree, "init", "--quiet", f"--initial-branch={BRANCH}")
    (tree / ".git/info/attributes").write_text("*.py diff=python\n")
    try:
        git(tree, "var", "GIT_AUTHOR_IDENT")
    except ToolError:  # as for continuous integration
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


def test_each(tree: Path, release: Path) -> None:
    """Runs what each commit tests, uniform units beside the release, then all tests."""
    home = tree.parent
    base = {path.name: os.readlink(path) for path in release.iterdir()}
    lay_links(home / "base", base)  # no link itself, since tests compare paths
    env = {"PYTHONPATH": str(home / "branch"), "FSDP_PARITY_KINDS": "uniform"}
    env = os.environ | env
    env.pop("CI", None)  # torch's tests would want a package that writes reports
    commits = git(tree, "rev-list", "--reverse", f"{RELEASE}..{BRANCH}").split()
    for commit in commits:
        git(tree, "switch", "--quiet", "--detach", commit)
        changed = git(tree, "diff", "--name-only", RELEASE, commit).split()
        ours = {file for file in changed if file.startswith("torch/")}
        lay_links(home / "branch", torch_links(release, tree, ours))
        print(git(tree, "log", "-1", "--format=%n%s", "--stat", commit), flush=True)
        if commit != commits[-1]:
            changed = git(tree, "diff", "--name-only", f"{commit}~", commit).split()
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
