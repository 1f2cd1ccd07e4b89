"""The in-place build: the order of its steps, and undoing them on an error.

A run that fails puts back what it found.  A run that is cut off leaves finished
steps and one staging folder; the next run drops the folder and goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tools.setup_helpers import links, tree, wheel
from tools.setup_helpers.assemble import assemble_wheel, compare_wheel
from tools.setup_helpers.environment import Environment, Pip, Stamp
from tools.setup_helpers.report import SetupError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.setup_helpers.report import Progress


# Each version range is in one of these files alone: `setup.py` reads them, too.
EXAMPLES = "requirements-examples.txt"
MODELS = "requirements-models.txt"
REQUIREMENTS = (EXAMPLES, "requirements.txt")
CACHES = (".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache")


@contextlib.contextmanager
def locked(root: Path, progress: Progress) -> Iterator[None]:
    """Lets one set-up at a time work on ``root``; the lock is the folder itself.

    Children that write inherit it: of a set-up that is killed, pip lives on.
    """
    descriptor = os.open(root, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        # Some network file systems lock no folders: there it is up to the user.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.phase("waiting for another set-up of this tree")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_place(root: Path) -> None:
    """Refuses a path that environments and path files cannot hold."""
    path = str(root)
    for problem, is_so in (
        (f"a {os.pathsep!r}, which separates the folders of PATH", os.pathsep in path),
        ("a line break", len(path.splitlines()) != 1),
        ("bytes that are no UTF-8", not _is_utf8(path)),
    ):
        if is_so:
            raise SetupError(
                f"the path of this tree has {problem} in it: {path!r}; "
                "move it to another folder"
            )


def _is_utf8(path: str) -> bool:
    return path == os.fsencode(path).decode("utf-8", errors="replace")


class InPlaceBuild:
    """One tree, and what set-up keeps under its ``build`` folder."""

    def __init__(
        self,
        root: Path,
        progress: Progress,
        *,
        make_pip: Callable[[Path, Progress], Pip] = Pip,
        venv_has_pip: bool = True,
    ) -> None:
        self.root = root
        self.progress = progress
        self.make_pip = make_pip
        self.venv_has_pip = venv_has_pip
        self.base = root / tree.BASE
        self.wheels = root / "build" / "wheel"
        self.staging = root / "build" / ".staging"
        self.requirements_files = [root / name for name in REQUIREMENTS]
        self.models_file = root / MODELS
        self.with_git = tree.has_git(root)
        self._undo = contextlib.ExitStack()

    def set_up(self, given: Path | None, *, with_models: bool = False) -> bool:
        """Brings tree and ``.venv`` up to date; returns whether that took work.

        Only ``with_models`` brings the packages that hold other people's models:
        they are large, and few commands need them.
        """
        check_place(self.root)
        with locked(self.root, self.progress), self._transaction():
            chosen = self._check_given(given)
            environment = Environment(self.root)
            changed = self._ensure_environment(environment)
            pip = self.make_pip(environment.python, self.progress)
            changed |= self._ensure_base(chosen, pip)
            changed |= self._ensure_links()
            base = wheel.unpacked_distribution(self.base)
            environment.point_at_tree(wheel.console_scripts(base))
            requirements = base.requires or []
            changed |= self._ensure_requirements(environment, requirements, pip)
            if with_models:
                changed |= self._ensure_models(environment, requirements, pip)
            return changed

    def lay_under(self, python: Path, given: Path | None) -> None:
        """Brings the tree alone up to date, for an environment of the user's own."""
        check_place(self.root)
        with locked(self.root, self.progress), self._transaction():
            pip = self.make_pip(python, self.progress)
            self._ensure_base(self._check_given(given), pip)
            self._ensure_links()

    def clean(self) -> None:
        """Removes all that set-up, tests and lint leave in the tree."""
        with locked(self.root, self.progress):
            if self._has_base() and wheel.strays_in(self.base):
                self._ensure_links()  # which brings them out of the base
            links.remove_links(self.root)
            if self.with_git:
                tree.ExcludeBlock(self.root).write([])
            self._remove_folders()
            self._remove_caches()

    def fork(self, path: str) -> str:
        """Makes the base's file at ``path`` ours, or starts a new one there.

        Returns what was done.
        """
        relative = Path(os.path.relpath(self.root / path, self.root)).as_posix()
        if relative.partition("/")[0] not in tree.top_folders(self.root):
            raise SetupError(f"{path} is not in a folder of the base, such as torch/")
        source = self.base / relative
        if source.is_dir():
            raise SetupError(f"{path} is a folder: fork one file of it")
        with locked(self.root, self.progress), self._transaction():
            own = tree.own_files(self.root, self._tracked())
            if relative in own:
                tail = "" if relative in self._tracked() else "; git add it to keep it"
                raise SetupError(f"{path} is ours already{tail}")
            target = self.root / relative
            self._undo.callback(self._ensure_links)
            self._lay(own | {relative})
            # Not before: below a link it would be the base's.
            self._undo.callback(target.unlink, missing_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            # Not written beside it: what a fork that is killed leaves would be ours.
            fresh = self.staging / "forked"
            self.staging.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(source.read_bytes() if source.exists() else b"")
            os.rename(fresh, target)
            if self.with_git:
                tree.demand_git(self.root, f"add {path}", "add", "--", relative)
        kind = "a copy of the base's" if source.exists() else "a new, empty file"
        return f"{relative} is ours now: {kind}"

    def make_wheel(self, given: Path | None) -> Path:
        """Writes the base wheel with our files in it; returns its path.

        A ``given`` wheel may be for another Python or machine, and need not be
        the base in place.
        """
        with locked(self.root, self.progress), self._transaction():
            if given is None:
                base = self._wheel_of_base()
            else:
                base = wheel.inspect_wheel(given, for_this_python=False)
            return assemble_wheel(
                base,
                self.root,
                tree.released_files(self.root, self._tracked()),
                self.root / "build" / "dist",
                self.progress,
                is_known=self._base_stamp().get("source") == _identity(base.path),
            )

    # The steps.  Each returns whether there was anything to do.

    def _check_given(self, given: Path | None) -> wheel.BaseWheel | None:
        """Checks a wheel that the user named, before anything is made.

        Returns None where there is no such wheel, or it is the base in place.
        """
        if given is None or (
            self._has_base() and self._base_stamp().get("source") == _identity(given)
        ):
            return None
        return wheel.inspect_wheel(given)

    def _ensure_environment(self, environment: Environment) -> bool:
        if environment.is_foreign:
            raise SetupError(".venv was not made by set-up: move it out of the way")
        if environment.is_current:
            return False
        self.progress.phase("making the Python environment .venv")
        self._set_aside(environment.folder)
        environment.create(with_pip=self.venv_has_pip)
        return True

    def _ensure_base(self, chosen: wheel.BaseWheel | None, pip: Pip) -> bool:
        """Unpacks the ``chosen`` wheel, or whichever fits if there is no base."""
        stamp = self._base_stamp()
        if self._has_base():
            if chosen is None:
                return False
            if chosen.digest == stamp.get("digest"):
                # What is in place is right, but `make_wheel` trusts its source.
                compare_wheel(chosen, self.progress)
                stamp.put("source", _identity(chosen.path))
                return False
            self._ensure_links()
        chosen = chosen or self._find_wheel(pip)
        self.progress.phase(f"unpacking torch {chosen.version} into {tree.BASE}")
        fresh = self.staging / "fresh"
        wheel.unpack_wheel(chosen, fresh, self.progress)
        self._undo.callback(self._fit_links_to_base)
        self._set_aside(stamp.path)
        self._set_aside(self.base)
        os.rename(fresh, self.base)
        stamp = self._base_stamp()
        stamp.put("source", _identity(chosen.path))
        stamp.put("digest", chosen.digest)
        stamp.put("python", wheel.python_tag())
        return True

    def _find_wheel(self, pip: Pip) -> wheel.BaseWheel:
        """Returns the wheel used before, where it still fits, or a new one."""
        source = self._base_stamp().get("source") or []
        for path in [*map(Path, source[:1]), *self.wheels.glob("*.whl")]:
            with contextlib.suppress(SetupError):
                return wheel.inspect_wheel(path)
        self.progress.phase(f"fetching {wheel.BASE_REQUIREMENT} with pip")
        folder = self.staging / "wheel"
        folder.mkdir(parents=True)
        pip.download(wheel.BASE_REQUIREMENT, folder)
        fetched = wheel.inspect_wheel(next(folder.glob("*.whl")))
        self._set_aside(self.wheels)
        os.rename(folder, self.wheels)
        return dataclasses.replace(fetched, path=self.wheels / fetched.path.name)

    def _wheel_of_base(self) -> wheel.BaseWheel:
        """Returns the wheel that ``build/base`` was unpacked from."""
        stamp = self._base_stamp()
        source = stamp.get("source") or []
        held = [*map(Path, source[:1]), *self.wheels.glob("*.whl")]
        path = next(filter(Path.is_file, held), None)
        if path is None:
            pip = self.make_pip(Environment(self.root).python, self.progress)
            found = self._find_wheel(pip)
        else:
            found = wheel.inspect_wheel(path)
        if found.digest != stamp.get("digest"):
            raise SetupError(
                f"{found.path} is not the wheel that {tree.BASE} was unpacked from: "
                "name that one with TORCH_BASE_WHEEL=PATH"
            )
        return found

    def _ensure_links(self) -> bool:
        tree.uncover_tracked(self.root, self._tracked())
        # A file created in a linked folder lies in the base: it belongs here.
        strays = wheel.strays_in(self.base)
        own = tree.own_files(self.root, self._tracked())
        changed = self._lay(own | set(strays))
        for path in strays:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            if not (self.root / path).exists():
                os.rename(self.base / path, self.root / path)
                self.progress.phase(f"{path} is ours now: it lay in {tree.BASE}")
        return changed

    def _lay(self, own: set[str]) -> bool:
        targets = links.plan_links(self.root, own)
        # Hidden before they are there, so that git never sees one of them.
        rewritten = self.with_git and tree.ExcludeBlock(self.root).write(targets)
        changes = links.apply_plan(self.root, targets)
        if changes and not self.with_git and (self.root / ".git").exists():
            self.progress.phase("git does not hide the links: `git status` says why")
        if changes:
            self.progress.phase(
                f"links into {tree.BASE}: {changes.laid} laid, "
                f"{changes.removed} removed, {len(targets)} in all"
            )
        return bool(changes) or rewritten

    def _ensure_requirements(
        self, environment: Environment, requirements: list[str], pip: Pip
    ) -> bool:
        files = self.requirements_files
        if environment.has_installed("requirements", requirements, *files):
            return False
        self.progress.phase("installing the base's requirements and ours")
        environment.install("requirements", pip, requirements, *files)
        return True

    def _ensure_models(
        self, environment: Environment, requirements: list[str], pip: Pip
    ) -> bool:
        # All files again, so that pip keeps to the bounds of each.
        files = [*self.requirements_files, self.models_file]
        if environment.has_installed("models", requirements, *files):
            return False
        self.progress.phase(f"installing {self.models_file.name}")
        environment.install("models", pip, requirements, *files)
        return True

    # Undoing.

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Undoes the steps taken if one of them fails; keeps them if cut off."""
        if self.staging.exists():
            self.progress.phase("an earlier set-up was cut off: going on from there")
            shutil.rmtree(self.staging)
        try:
            yield
        except (SetupError, OSError):
            self._undo.close()
            raise
        finally:
            self._undo.pop_all()
            shutil.rmtree(self.staging, ignore_errors=True)
            with contextlib.suppress(OSError):
                (self.root / "build").rmdir()

    def _set_aside(self, path: Path) -> None:
        """Moves ``path`` into the staging folder; an undo puts it back."""
        aside = self._move_aside(path)

        def put_back() -> None:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
            if aside.exists():
                os.rename(aside, path)

        self._undo.callback(put_back)

    def _move_aside(self, path: Path) -> Path:
        """Moves ``path``, if it is there, to where the next run drops it."""
        aside = self.staging / f"old-{path.name}"
        if path.exists():
            self.staging.mkdir(parents=True, exist_ok=True)
            os.rename(path, aside)
        return aside

    def _fit_links_to_base(self) -> None:
        """Lays the links of the base that an undo put back, or takes them up."""
        if self._has_base():
            self._ensure_links()
        else:
            links.remove_links(self.root)
            if self.with_git:
                tree.ExcludeBlock(self.root).write([])

    # Small things.

    def _has_base(self) -> bool:
        """Whether a base for this Python was unpacked to the end."""
        is_for_this_python = self._base_stamp().get("python") == wheel.python_tag()
        return self.base.is_dir() and is_for_this_python

    def _base_stamp(self) -> Stamp:
        return Stamp(self.root / "build" / "base.json")

    def _tracked(self) -> set[str]:
        return tree.tracked_files(self.root) if self.with_git else set()

    def _remove_folders(self) -> None:
        """Removes .venv and build.

        Both are renamed first: a part that is left would be taken for the whole.
        """
        environment = Environment(self.root)
        build = self.root / "build"
        if self.staging.exists():
            shutil.rmtree(self.staging)
        if environment.is_foreign:
            self.progress.phase(".venv is kept: it was not made by set-up")
        else:
            self._move_aside(environment.folder)
        self._move_aside(self.base)
        if build.exists():
            shutil.rmtree(build)

    def _remove_caches(self) -> None:
        for pattern in (*CACHES, "*.egg-info"):
            for path in self.root.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        for parent, folders, _ in os.walk(self.root):
            if "__pycache__" in folders:
                shutil.rmtree(os.path.join(parent, "__pycache__"), ignore_errors=True)
            folders[:] = [f for f in folders if f not in (".git", ".venv")]


def _identity(path: Path) -> list[object]:
    """Tells one wheel on the disk from another without reading it."""
    if not path.exists():
        return [str(path)]
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
