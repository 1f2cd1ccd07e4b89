"""A tree of links that lays our files over a torch, which stays as it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tools.releases import ToolError


if TYPE_CHECKING:
    from collections.abc import Iterable


def plan_links(release: Path, ours: Path, own: set[str]) -> dict[str, str]:
    """
    Returns what each link of a tree leads to, by path from the tree's root. A folder of
    the ``release`` that holds none of our ``own`` files is one link.
    """
    real_folders = {str(p) for path in own for p in Path(path).parents}
    targets = {path: str(ours / path) for path in own}
    pending = ["."]
    while pending:
        folder = pending.pop()
        with os.scandir(release / folder) as entries:
            for entry in entries:
                path = os.path.normpath(f"{folder}/{entry.name}")
                if entry.name == "__pycache__" or path in own:
                    continue
                if path not in real_folders:
                    targets[path] = entry.path
                elif entry.is_dir():
                    pending.append(path)
    return targets


def torch_links(site: Path, ours: Path, own: set[str]) -> dict[str, str]:
    """Returns the links for ``torch`` alone, of all that is in ``site``."""
    links = plan_links(site, ours, own).items()
    return {path: to for path, to in links if path.partition("/")[0] == "torch"}


def laid_links(tree: Path) -> dict[str, str]:
    """Returns the links of a tree; refuses one in which somebody wrote a file."""
    links = {}
    for parent, folders, files in os.walk(tree):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in [*folders, *files]:
            place = Path(parent, name)
            if place.is_symlink():
                links[place.relative_to(tree).as_posix()] = os.readlink(place)
            elif name in files:
                raise ToolError(f"{place}: move it to its place in the clone")
    return links


def lay_links(tree: Path, targets: dict[str, str], copies: Iterable[str] = ()) -> None:
    """Makes a tree anew; ``copies`` are copied, and all else linked."""
    partial, old = (tree.with_name(f"{tree.name}.{end}") for end in ("partial", "old"))
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    copies = {*copies}
    for path, target in targets.items():
        place = partial / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if path in copies:
            shutil.copy2(target, place)
        else:
            place.symlink_to(target)
    if tree.exists():
        os.rename(tree, old)
    os.rename(partial, tree)
    shutil.rmtree(old, ignore_errors=True)
