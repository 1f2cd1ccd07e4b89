"""The tree of another base than the default: ``build/VERSION``, with our files in it.

It is an in-place build like the clone's, with a base and an environment of its own.
Of our files, those in the base's folders are links to the clone's: an edit counts at
once, and tracebacks show where to edit.  All others are read-only copies, as tests,
examples and benchmarks find their tree by where they are.  Every set-up fits both to
what the clone has.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from typing import TYPE_CHECKING

from tools.setup_helpers import links, tree, wheel
from tools.setup_helpers.environment import Stamp
from tools.setup_helpers.files import write_whole
from tools.setup_helpers.inplace import CACHES, InPlaceBuild, locked
from tools.setup_helpers.releases import RELEASES
from tools.setup_helpers.report import SetupError


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from tools.setup_helpers.releases import Release


# What set-up, tools and Python leave; git would know.
NOT_OURS = {".git", ".venv", "build", "__pycache__", *CACHES}
NOT_OURS_ENDINGS = (".egg-info", ".dist-info")


def build_of(clone: InPlaceBuild, release: Release) -> InPlaceBuild:
    """Returns the build of ``release``: the clone's own, or that of a tree in it."""
    return clone if release == clone.release else MirrorBuild(clone, release)


def clean_all(clone: InPlaceBuild) -> None:
    """Leaves the clone as it was, without the tree of any base."""
    for release in RELEASES:
        if release != clone.release:
            MirrorBuild(clone, release).clean()
    clone.clean()


class MirrorBuild(InPlaceBuild):
    """The in-place build of another release, in a tree of its own."""

    def __init__(self, main: InPlaceBuild, release: Release) -> None:
        super().__init__(
            main.root / "build" / release.version,
            main.progress,
            release=release,
            make_pip=main.make_pip,
            venv_has_pip=main.venv_has_pip,
        )
        self.main = main
        self.clone = main.root
        # Git ignores the tree as a whole.
        self.with_git = False
        self.dist = main.dist
        self._stamp = Stamp(self.root / tree.MIRROR_STAMP)

    def clean(self) -> None:
        """Removes the tree; what was written in the base's folders is brought home."""
        if not self.root.is_dir():
            return
        with locked(self.root, self.progress):
            if self._has_base() and wheel.strays_in(self.base):
                self._ensure_links()
            self._bring_home()
            self._remove_folders()
            if not (self.root / ".venv").exists():  # it may be somebody's own
                shutil.rmtree(self.root)
        with contextlib.suppress(OSError):
            self.root.parent.rmdir()

    def fork(self, path: str, base: Path | None = None) -> str:
        done = self.main.fork(path, base or self.base)
        with locked(self.root, self.progress), self._transaction():
            self._ensure_ours()
            self._ensure_links()
        return done

    def _ensure_ours(self) -> bool:
        if not self._stamp.path.exists():
            self._undo.callback(shutil.rmtree, self.root, ignore_errors=True)
            self._stamp.path.parent.mkdir(parents=True, exist_ok=True)
            self._stamp.put("copies", {})
        self._undo.callback(self._fit_links_to_base)
        self._bring_home()
        changed = self._link_sources() + self._copy_others()
        if changed:
            where = self._named(self.root)
            self.progress.phase(f"our files in {where}: {changed} brought up to date")
        return bool(changed)

    def _ensure_links(self) -> bool:
        changed = super()._ensure_links()
        # What lay in the base lies in the tree now.
        self._bring_home()
        return bool(self._link_sources()) or changed

    def _bring_home(self) -> None:
        """Moves what somebody wrote in the base's folders here into the clone."""
        written = [
            path
            for top in sorted(tree.top_folders(self.root))
            for path in tree.files_on_disk(self.root, top)
            if not (self.root / path).is_symlink()
        ]
        own = tree.own_files(self.clone, self._tracked()) if written else set()
        for path in written:
            here, there = self.root / path, self.clone / path
            if path not in own:
                self.main.take(path, here)
                where = self._named(self.root)
                self.progress.phase(f"{path} is ours now: it lay in {where}")
            elif here.read_bytes() == there.read_bytes():
                here.unlink()
            else:
                self._refuse(path)

    def _link_sources(self) -> int:
        """Lays a link to each file of ours in the base's folders, and no other."""
        own = tree.own_files(self.clone, self._tracked())
        wanted = {path for path in own if (self.clone / path).is_file()}
        linked = {
            path
            for top in tree.top_folders(self.root)
            for path in tree.files_on_disk(self.root, top)
            if _is_link(self.root / path, path)
        }
        for path in linked - wanted:
            (self.root / path).unlink()
        self._prune(linked - wanted)
        for path in sorted(wanted - linked):
            for place in (path, *tree.parents_of([path])):
                if tree.is_base_link(self.root / place, self.root):
                    (self.root / place).unlink()
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).symlink_to(_target(path))
        return len(linked ^ wanted)

    def _copy_others(self) -> int:
        """Fits the copies to the clone's files; one that was edited is not lost."""
        held = self._stamp.get("copies") or {}
        wanted = {path: _digest(self.clone / path) for path in self._others()}
        present = {
            path: _digest(self.root / path)
            for path in sorted({*held, *wanted})
            if (self.root / path).is_file()
        }
        for path, digest in present.items():
            if digest not in (wanted.get(path), *held.get(path, ())):
                self._refuse(path)
        stale = [path for path in present if path not in wanted]
        changed = [path for path in wanted if wanted[path] != present.get(path)]
        if stale or changed:
            # A run that is cut off leaves copies of now and of before.
            before_and_now = {path: [*held.get(path, ())] for path in {*held, *wanted}}
            for path in wanted:
                before_and_now[path].append(wanted[path])
            self._stamp.put("copies", before_and_now)
        for path in stale:
            (self.root / path).unlink()
        self._prune(stale)
        for path in changed:
            _copy(self.clone / path, self.root / path)
        copies = {path: [digest] for path, digest in wanted.items()}
        if copies != held:
            self._stamp.put("copies", copies)
        return len(stale) + len(changed)

    def _others(self) -> Iterator[str]:
        """Yields our files outside of the base's folders."""
        tops = tree.top_folders(self.clone) | tree.top_folders(self.root)
        if self.main.with_git:
            asked = ("--cached", "--others", "--exclude-standard", "-z")
            task = "list our files"
            listing = tree.demand_git(self.clone, task, "ls-files", *asked).split("\0")
            paths = {path for path in listing if path}
        else:
            paths = set(_files_under(self.clone))
        for path in sorted(paths):
            file = self.clone / path
            is_regular = file.is_file() and not file.is_symlink()
            if is_regular and path.partition("/")[0] not in tops:
                yield path

    def _refuse(self, path: str) -> None:
        where = self._named(self.root / path)
        raise SetupError(
            f"{where} was changed, and is made anew from {path}: "
            "put the change there, and remove the former"
        )

    def _prune(self, paths: Iterable[str]) -> None:
        for top in {path.partition("/")[0] for path in paths if "/" in path}:
            links.prune_empty_folders(self.root / top)


def _target(path: str) -> str:
    """Returns what the link at ``path`` points to: the same path in the clone."""
    # Out of its folder, then out of build/VERSION.
    return "../" * (path.count("/") + 2) + path


def _is_link(place: Path, path: str) -> bool:
    return place.is_symlink() and os.readlink(place) == _target(path)


def _files_under(root: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(root):
        folders[:] = [
            folder
            for folder in folders
            if folder not in NOT_OURS and not folder.endswith(NOT_OURS_ENDINGS)
        ]
        for file in files:
            yield os.path.relpath(os.path.join(parent, file), root)


def _digest(path: Path) -> str:
    """Returns what tells a copy from another: the content, and whether it runs."""
    kind = "x" if os.access(path, os.X_OK) else "-"
    return f"{kind}{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o555 if os.access(source, os.X_OK) else 0o444
    write_whole(target, source.read_bytes(), mode)
