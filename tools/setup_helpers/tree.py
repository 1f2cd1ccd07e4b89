"""Which files are ours, and the tree of links that lays them over a release."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tools.setup_helpers.report import SetupError


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


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


def parents_of(paths: Iterable[str]) -> set[str]:
    """Returns every folder above any of ``paths``, up to below the root."""
    parents = set()
    for path in paths:
        while "/" in path:
            path = path.rpartition("/")[0]
            parents.add(path)
    return parents


def files_under(root: Path, top: str) -> set[str]:
    """Returns the files under ``root/top``, by path from ``root``.

    Bytecode is nobody's source.
    """
    found = (root / top).rglob("*")
    return {
        path.relative_to(root).as_posix()
        for path in found
        if path.is_file() and "__pycache__" not in path.parts
    }


def own_files(root: Path) -> set[str]:
    """Returns the files that take the place of the release's, or are new."""
    return files_under(root, "torch")


def released_files(root: Path, *tops: str) -> set[str]:
    """Returns the files under ``tops`` that a wheel or a source checkout gets from us.

    With git they are the tracked ones alone, and under ``torch`` there must be no
    other that git would add: left out it would be missed, taken in it may be a draft.
    """
    if not has_git(root):
        return {path for top in tops for path in files_under(root, top)}

    def listed(*arguments: str) -> set[str]:
        output = demand_git(root, "list our files", "ls-files", "-z", *arguments)
        return set(filter(None, output.split("\0")))

    drafts = sorted(listed("--others", "--exclude-standard", "--", "torch"))
    if drafts:
        raise SetupError(f"git does not track {', '.join(drafts)}: add or remove it")
    return listed("--", *tops)


def plan_links(release: Path, ours: Path, own: set[str]) -> dict[str, str]:
    """Returns what each link of a tree leads to, by path from the tree's root.

    A folder of the ``release`` that holds none of our ``own`` files is one link.
    """
    real_folders = parents_of(own)
    targets = {path: str(ours / path) for path in own}
    pending = [""]
    while pending:
        folder = pending.pop()
        with os.scandir(release / folder) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name == "__pycache__" or path in own:
                    continue
                if path not in real_folders:
                    targets[path] = entry.path
                elif entry.is_dir():
                    pending.append(path)
    return targets


def laid_links(tree: Path) -> dict[str, str]:
    """Returns the links of a tree as ``plan_links`` does; it may not be there yet.

    Refuses one in which somebody wrote a file, which the next set-up would drop.
    """
    links = {}
    for place in _entries(tree):
        path = place.relative_to(tree).as_posix()
        if not place.is_symlink():
            what = "is no link, as all files there: move it to its place in the clone"
            raise SetupError(f"{place} {what}")
        links[path] = os.readlink(place)
    return links


def _entries(tree: Path) -> Iterator[Path]:
    """Yields the links of a tree, and what lies in it that is neither that nor folder."""
    for parent, folders, files in os.walk(tree):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        yield from (Path(parent, name) for name in [*links, *files])
        folders[:] = [name for name in folders if name != "__pycache__"]


def lay_links(tree: Path, targets: dict[str, str]) -> None:
    """Makes a new tree of links."""
    for path, target in targets.items():
        place = tree / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)
