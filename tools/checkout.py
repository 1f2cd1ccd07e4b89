"""Our files as one commit on a git checkout of a release; git undoes it."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

from tools.releases import (
    git,
    has_git,
    known,
    listing,
    refuse_changed,
    release_of,
    ToolError,
    tracked_files,
)


if TYPE_CHECKING:
    from pathlib import Path


TESTS = "test/distributed/_composable/fsdp"
BRANCH = "fsdp2-mixed-dtype"
# What tests of what is here alone, set-up and tools, examples, pages, have in them
STAYS_HERE = re.compile(r'fsdp_build|fsdp_clients|REPO_ROOT|"(docs|examples)"')
# Upstream has a test of this name, which stays; ours stands beside it
LAID_AS = {
    f"{TESTS}/test_fully_shard_comm.py": f"{TESTS}/test_fully_shard_mixed_comm.py",
}


def files_to_lay(root: Path) -> dict[str, Path]:
    """Returns our sources and their tests, by their path in a checkout."""

    files = {path: root / path for path in tracked_files(root, "torch", "test")}
    return {
        LAID_AS.get(path, path): source
        for path, source in files.items()
        if not re.search("/fsdp_(build|clients)/", path)
        and not ("/test_" in path and STAYS_HERE.search(source.read_text()))
    }


def check_tree(checkout: Path, root: Path) -> None:
    """Refuses what is no clean tree of a release's own files."""
    version_file = checkout / "version.txt"
    if not version_file.is_file() or not (checkout / "torch").is_dir():
        raise ToolError(
            f"{checkout} is not a PyTorch source tree: git clone --branch v2.13.0 "
            f"https://github.com/pytorch/pytorch ({known('or')}), and name that folder"
        )
    release = release_of(version_file.read_text().strip())
    if not has_git(checkout):
        raise ToolError(f"{checkout} is not the top folder of a git checkout")
    if changed := git(checkout, "status", "--porcelain", "--untracked-files=all"):
        raise ToolError(
            f"{checkout} has changes that are not committed:"
            f"{listing(changed.splitlines())}"
        )
    ours = files_to_lay(root)
    refuse_changed(checkout, root, release, ours, lambda path: checkout / path)


def commit_branch(checkout: Path, root: Path, *, only_check: bool = False) -> str:
    """Makes a branch with one commit of our files; says what was done."""
    ours = files_to_lay(root)
    if all(_is_same(checkout / path, source) for path, source in ours.items()):
        return f"{checkout}: all {len(ours)} files are there"
    check_tree(checkout, root)
    if only_check:
        return f"{checkout}: {len(ours)} files fit"
    git(checkout, "var", "GIT_COMMITTER_IDENT")  # or git says who is missing
    start = git(checkout, "rev-parse", "--abbrev-ref", "HEAD").strip()
    git(checkout, "switch", "--create", BRANCH)
    for path, source in ours.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, checkout / path)
    git(checkout, "add", "--force", "--", *ours)
    message = "[FSDP2] Units whose parameters have different dtypes"
    git(checkout, "commit", "--quiet", "--message", message)
    return f"""\
{checkout}: {len(ours)} files in one commit on {BRANCH}, which starts at {start}
To build it and run its tests, in that folder:
  git submodule update --init --recursive
  python -m pip install --group dev
  python -m pip install --no-build-isolation -v -e .
  python -m pytest {TESTS}"""


def _is_same(place: Path, source: Path) -> bool:
    return place.is_file() and place.read_bytes() == source.read_bytes()
