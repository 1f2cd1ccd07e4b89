"""Which files of the tree are the fork's own, and what git must not pick up."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tools.setup_helpers.files import write_whole
from tools.setup_helpers.report import SetupError


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


BASE = Path("build/base")
# In the tree of another base than the default: what its set-up copied there.
MIRROR_STAMP = Path("build/mirror.json")
_REGULAR_FILE_MODES = ("100644", "100755")


def run_git(root: Path, *arguments: str) -> str | None:
    """Returns git's output, or None where there is no git or it declines."""
    try:
        return demand_git(root, "", *arguments)
    except SetupError:
        return None


def demand_git(root: Path, task: str, *arguments: str, given: str | None = None) -> str:
    """Returns git's output; an error tells that it cannot do ``task``, and why.

    ``given`` is what git reads from its standard input.
    """
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments],
            input=given,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except FileNotFoundError:
        raise SetupError(f"git cannot {task}: it is not installed") from None
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["it gives no reason"])[0]
        raise SetupError(f"git cannot {task}: {reason.removeprefix('fatal: ')}")
    return result.stdout


def has_git(root: Path) -> bool:
    """Whether ``root`` is the top of a git work tree.

    A release archive unpacked somewhere inside another repository is not.
    """
    top = run_git(root, "rev-parse", "--show-toplevel")
    return top is not None and Path(top.rstrip("\n")).resolve() == root.resolve()


def clone_of(root: Path) -> Path:
    """Returns the clone whose files the tree at ``root`` has; mostly ``root`` itself.

    The tree of another base lies in the clone, in ``build/VERSION``.
    """
    return root.parents[1] if (root / MIRROR_STAMP).is_file() else root


def known_to_git(root: Path) -> set[str]:
    """Returns the tracked files, or none where there is no git to ask."""
    clone = clone_of(root)
    return tracked_files(clone) if has_git(clone) else set()


def is_base_link(path: Path | os.DirEntry[str], root: Path) -> bool:
    """Whether ``path`` is a link that set-up laid: one into ``build/base``."""
    if not path.is_symlink():
        return False
    target = os.path.join(os.path.dirname(os.fspath(path)), os.readlink(path))
    base = os.path.join(root, BASE)
    return os.path.normpath(target).startswith(os.path.normpath(base) + os.sep)


def tracked_files(root: Path) -> set[str]:
    """Returns the regular files in git's index, as paths from the root."""
    listing = demand_git(root, "list the tracked files", "ls-files", "--stage", "-z")
    files = set()
    for record in filter(None, listing.split("\0")):
        entry, path = record.split("\t", 1)
        if entry.split(" ", 1)[0] in _REGULAR_FILE_MODES:
            files.add(path)
    return files


def top_folders(root: Path) -> set[str]:
    """Returns the folders at the root that the base shares with the fork."""
    tops = {"torch", "torchgen", "functorch"}
    if (root / BASE).is_dir():
        tops.update(entry.name for entry in os.scandir(root / BASE) if entry.is_dir())
    return tops


def parents_of(paths: Iterable[str]) -> set[str]:
    """Returns every folder above any of ``paths``, up to below the root."""
    parents = set()
    for path in paths:
        while "/" in path:
            path = path.rpartition("/")[0]
            parents.add(path)
    return parents


def files_on_disk(root: Path, top: str) -> Iterator[str]:
    """Yields what lies under ``root/top`` and is no link into the base.

    Bytecode is nobody's source; links are not followed.
    """
    pending = [top]
    while pending:
        folder = pending.pop()
        if os.path.islink(root / folder) or not os.path.isdir(root / folder):
            continue
        with os.scandir(root / folder) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}"
                if entry.name == "__pycache__" or is_base_link(entry, root):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                else:
                    yield path


def own_files(root: Path, tracked: set[str]) -> set[str]:
    """Returns the files that take the place of the base's.

    They are the ``tracked`` ones and the regular ones on the disk.  Without
    git there are only the latter.  With git, a regular file that is not
    tracked yet is somebody's work, to be kept until it is tracked or gone.
    """
    tops = top_folders(root)
    own = {path for top in tops for path in files_on_disk(root, top)}
    return own | {path for path in tracked if path.partition("/")[0] in tops}


def released_files(root: Path, tracked: set[str]) -> set[str]:
    """Returns the files that a wheel or a source checkout gets from us.

    With git they are the ``tracked`` ones alone, and there must be no other
    that git would add: left out it would be missed, taken in it may be a draft.
    """
    own = own_files(root, tracked)
    if not tracked:
        return own
    untracked = own - tracked
    asked = ("ls-files", "--others", "--exclude-standard", "-z")
    listing = run_git(clone_of(root), *asked) or ""
    drafts = sorted(untracked & set(listing.split("\0")))
    if drafts:
        raise SetupError(f"git does not track {', '.join(drafts)}: add or remove it")
    return own - untracked


def uncover_tracked(root: Path, tracked: set[str]) -> list[str]:
    """Writes the tracked files anew that have a link of ours in their place.

    That is so after a file was put into git's index alone, below a folder or at
    a path that was a link until now.
    """
    covered = []
    for path in sorted(tracked):
        places = [path, *parents_of([path])]
        if any(is_base_link(root / place, root) for place in places):
            covered.append(path)
    if covered:
        task = f"restore {', '.join(covered)} from its index"
        demand_git(root, task, "checkout-index", "-f", "--", *covered)
    return covered


class ExcludeBlock:
    """The marked lines of ``info/exclude`` that hide the links from git.

    They name each link exactly.  A pattern such as ``/torch/*`` would also
    hide the files that the fork is going to add.
    """

    def __init__(self, root: Path) -> None:
        question = ("rev-parse", "--git-path", "info/exclude")
        where = demand_git(root, "tell where its exclude file is", *question)
        self.path = root / where.rstrip("\n")
        # Work trees of one repository share the file: each has its own block.
        self._begin = f"# begin: links of the in-place build in {root.resolve()}"
        self._end = f"# end: links of the in-place build in {root.resolve()}"

    def write(self, links: Iterable[str]) -> bool:
        """Makes the block name exactly ``links``; returns whether it changed."""
        before = self._read()
        after = self._without_block(before)
        patterns = [_as_pattern(link) for link in sorted(links)]
        if patterns:
            if after and not after.endswith("\n"):
                after += "\n"
            after += "\n".join([self._begin, *patterns, self._end]) + "\n"
        if after == before:
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, os.fsencode(after))
        return True

    def _read(self) -> str:
        return os.fsdecode(self.path.read_bytes()) if self.path.exists() else ""

    def _without_block(self, text: str) -> str:
        kept, inside = [], False
        for line in text.splitlines(keepends=True):
            if line.rstrip("\n") == self._begin:
                inside = True
            elif line.rstrip("\n") == self._end:
                inside = False
            elif not inside:
                kept.append(line)
        return "".join(kept)


def _as_pattern(path: str) -> str:
    escaped = "".join(f"\\{c}" if c in "\\*?[ " else c for c in path)
    return f"/{escaped}"
