"""Where the links into the base go: a plan first, then the steps to reach it.

A folder that holds none of our files is one link.  A folder that holds some is
a real folder, and its other children are links.  ``torch`` itself is always a
real folder, so that a new file can be put there.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.setup_helpers.tree import BASE, is_base_link, parents_of, top_folders


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Changes:
    """How many links were laid and removed to reach a plan."""

    laid: int
    removed: int

    def __bool__(self) -> bool:
        return bool(self.laid or self.removed)


def plan_links(root: Path, own: set[str]) -> dict[str, str]:
    """Returns what each link points to, by path from the root.

    The plan follows from ``build/base`` as it is and from our files alone, so
    that it can be compared with the tree at every set-up.
    """
    real_folders = parents_of(own) | {"torch"}
    targets: dict[str, str] = {}
    pending = [""]
    while pending:
        folder = pending.pop()
        with os.scandir(root / BASE / folder) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name == "__pycache__" or path in own:
                    continue
                if path not in real_folders:
                    up = "../" * path.count("/")
                    targets[path] = f"{up}{BASE.as_posix()}/{path}"
                elif entry.is_dir():
                    pending.append(path)
    return targets


def laid_links(root: Path) -> Iterator[str]:
    """Yields every link into the base that lies in the tree."""
    tops = top_folders(root)
    pending = [""]
    while pending:
        folder = pending.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if is_base_link(entry, root):
                    yield path
                elif entry.is_dir(follow_symlinks=False) and (folder or path in tops):
                    pending.append(path)


def apply_plan(root: Path, targets: dict[str, str]) -> Changes:
    """Makes the tree match ``targets``; touches only links that set-up laid."""
    present = {path: os.readlink(root / path) for path in laid_links(root)}
    stale = [path for path in present if targets.get(path) != present[path]]
    missing = [path for path in targets if targets[path] != present.get(path)]
    for path in stale:
        os.unlink(root / path)
    for path in sorted(missing):
        place = root / path
        if place.is_dir():
            _remove_empty_folder(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(targets[path], place)
    return Changes(laid=len(missing), removed=len(stale))


def remove_links(root: Path) -> None:
    """Removes every link, and the folders that then hold nothing else."""
    apply_plan(root, {})
    for top in top_folders(root):
        if (root / top).is_dir():
            prune_empty_folders(root / top)


def _remove_empty_folder(folder: Path) -> None:
    """Removes a folder that has become a link's place: bytecode at most is left."""
    for parent, _, _ in os.walk(folder, topdown=False):
        shutil.rmtree(os.path.join(parent, "__pycache__"), ignore_errors=True)
        if os.path.isdir(parent):
            os.rmdir(parent)


def prune_empty_folders(folder: Path) -> None:
    """Removes ``folder`` and those in it that hold nothing, or bytecode alone."""
    for parent, _, _ in os.walk(folder, topdown=False):
        shutil.rmtree(os.path.join(parent, "__pycache__"), ignore_errors=True)
        if os.path.isdir(parent) and not os.listdir(parent):
            os.rmdir(parent)
