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
from tools.setup_helpers.digests import recorded
from tools.setup_helpers.environment import Environment, Pip, Stamp
from tools.setup_helpers.releases import DEFAULT, RELEASES
from tools.setup_helpers.report import demand_space, megabytes, SetupError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.setup_helpers.releases import Release
    from tools.setup_helpers.report import Progress


# Each version range is in one of these files alone: `setup.py` reads them, too.
EXAMPLES = "requirements-examples.txt"
MODELS = "requirements-models.txt"
CLIENTS = "requirements-clients.txt"
REQUIREMENTS = (EXAMPLES, "requirements.txt")
# How what a build for CUDA requires is called; the rest takes little.
CUDA_PACKAGES = ("nvidia", "cuda")
CACHES = (".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache")


@contextlib.contextmanager
def locked(root: Path, progress: Progress) -> Iterator[None]:
    """Lets one set-up at a time work on ``root``; the lock is the folder itself.

    Children that write inherit it: of a set-up that is killed, pip lives on.
    """
    while True:
        if not root.is_dir():
            root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root, os.O_RDONLY)
        try:
            os.set_inheritable(descriptor, True)
            _wait_for(descriptor, progress)
            # Who held it may have removed the folder, and a third one made another.
            if root.is_dir() and os.path.samestat(os.fstat(descriptor), root.stat()):
                yield
                return
        finally:
            os.close(descriptor)


def _wait_for(descriptor: int, progress: Progress) -> None:
    # Some network file systems lock no folders: there it is up to the user.
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.phase("waiting for another set-up of this tree")
            fcntl.flock(descriptor, fcntl.LOCK_EX)


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
        release: Release = DEFAULT,
        make_pip: Callable[[Path, Progress], Pip] = Pip,
        venv_has_pip: bool = True,
    ) -> None:
        self.root = root
        # Of another base, the tree is not where our own files are: see mirror.py.
        self.main: InPlaceBuild = self
        self.clone = root
        self.release = release
        self.progress = progress
        self.make_pip = make_pip
        self.venv_has_pip = venv_has_pip
        self.base = root / tree.BASE
        self.wheels = root / "build" / "wheel"
        self.staging = root / "build" / ".staging"
        self.dist = root / "build" / "dist"
        self.requirements_files = [root / name for name in REQUIREMENTS]
        self.models_file = root / MODELS
        self.with_git = tree.has_git(root)
        self._undo = contextlib.ExitStack()

    def set_up(
        self,
        given: Path | None,
        *,
        with_models: bool = False,
        with_clients: bool = False,
    ) -> bool:
        """Brings tree and ``.venv`` up to date; returns whether that took work.

        Only ``with_models`` brings the packages that hold other people's models:
        they are large, and few commands need them.  ``with_clients`` brings those
        that train with FSDP2, too, into an environment over ``.venv``.
        """
        check_place(self.root)
        with locked(self.root, self.progress), self._transaction():
            chosen = self._check_given(given)
            environment = Environment(self.root)
            changed = self._ensure_ours()
            changed |= self._ensure_environment(environment)
            pip = self.make_pip(environment.python, self.progress)
            changed |= self._ensure_base(chosen, pip)
            changed |= self._ensure_links()
            base = wheel.unpacked_distribution(self.base)
            environment.point_at_tree(wheel.console_scripts(base))
            requirements = base.requires or []
            changed |= self._ensure_requirements(environment, requirements, pip)
            if with_models or with_clients:
                changed |= self._ensure_models(environment, requirements, pip)
            if with_clients:
                changed |= self._ensure_clients(environment, requirements)
            return changed

    def lay_under(self, python: Path, given: Path | None) -> None:
        """Brings the tree alone up to date, for an environment of the user's own."""
        check_place(self.root)
        with locked(self.root, self.progress), self._transaction():
            chosen = self._check_given(given)
            self._ensure_ours()
            self._ensure_base(chosen, self.make_pip(python, self.progress))
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

    def fork(self, path: str, base: Path | None = None) -> str:
        """Makes the base's file at ``path`` ours, or starts a new one there.

        ``base`` is where another base lies, whose file is meant.  Returns what was
        done.
        """
        relative = Path(os.path.relpath(self.root / path, self.root)).as_posix()
        if relative.partition("/")[0] not in tree.top_folders(self.root):
            raise SetupError(f"{path} is not in a folder of the base, such as torch/")
        source = (base or self.base) / relative
        if source.is_dir():
            raise SetupError(f"{path} is a folder: fork one file of it")
        with locked(self.root, self.progress), self._transaction():
            own = tree.own_files(self.root, self._tracked())
            if relative in own:
                tail = "" if relative in self._tracked() else "; git add it to keep it"
                raise SetupError(f"{path} is ours already{tail}")
            target = self.root / relative
            self._undo.callback(self._fit_links_to_base)
            self._make_way(own | {relative})
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

    def take(self, path: str, source: Path) -> None:
        """Moves a file that was written elsewhere to its place here."""
        with locked(self.root, self.progress):
            self._make_way(tree.own_files(self.root, self._tracked()) | {path})
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            os.rename(source, self.root / path)

    def make_wheel(self, given: Path | None) -> Path:
        """Writes the base wheel with our files in it; returns its path.

        A ``given`` wheel may be for another Python or machine, and need not be
        the base in place.
        """
        with locked(self.root, self.progress), self._transaction():
            if given is None:
                base = self._wheel_of_base()
            else:
                base = self._inspect(given, for_this_python=False)
            known = recorded(self.clone, self.release)
            return assemble_wheel(
                base,
                self.clone,
                tree.released_files(self.clone, self._tracked()),
                self.dist,
                self.progress,
                is_known=self._base_stamp().get("source") == _identity(base.path),
                digests=known and known["sha256"],
            )

    # The steps.  Each returns whether there was anything to do.

    def _ensure_ours(self) -> bool:
        """Brings our own files here: they are here already."""
        return False

    def _inspect(self, path: Path, *, for_this_python: bool = True) -> wheel.BaseWheel:
        return wheel.inspect_wheel(path, self.release, for_this_python=for_this_python)

    def _check_given(self, given: Path | None) -> wheel.BaseWheel | None:
        """Checks a wheel that the user named, before anything is made.

        Returns None where there is no such wheel, or it is the base in place.
        """
        if given is None or (
            self._has_base() and self._base_stamp().get("source") == _identity(given)
        ):
            return None
        return self._inspect(given)

    def _ensure_environment(self, environment: Environment) -> bool:
        if environment.is_foreign:
            where = self._named(environment.folder)
            raise SetupError(f"{where} was not made by set-up: move it out of the way")
        if environment.is_current:
            return False
        where = self._named(environment.folder)
        self.progress.phase(f"making the Python environment {where}")
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
        where = self._named(self.base)
        self.progress.phase(f"unpacking torch {chosen.version} into {where}")
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
                return self._inspect(path)
        self._announce_fetching()
        folder = self.staging / "wheel"
        folder.mkdir(parents=True)
        pip.download(self.release.requirement, folder)
        fetched = self._inspect(next(folder.glob("*.whl")))
        self._set_aside(self.wheels)
        os.rename(folder, self.wheels)
        return dataclasses.replace(fetched, path=self.wheels / fetched.path.name)

    def _announce_fetching(self) -> None:
        """Says what is fetched, and how much that is where it is known."""
        release, size = self.release, ""
        if release.disk_nbytes:
            size = (
                f": {megabytes(release.wheel_nbytes)}, and about "
                f"{megabytes(release.disk_nbytes)} on the disk with what it requires"
            )
        self.progress.phase(f"fetching {release.requirement} with pip{size}")
        what = f"torch {release.version} with what it requires"
        remedy = "; a build for CPUs takes less: TORCH_BASE_WHEEL=PATH"
        demand_space(self.root, release.disk_nbytes, what, remedy)

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
            found = self._inspect(path)
        if found.digest != stamp.get("digest"):
            where = self._named(self.base)
            raise SetupError(
                f"{found.path} is not the wheel that {where} was unpacked from: "
                "name that one with TORCH_BASE_WHEEL=PATH"
            )
        return found

    def _ensure_links(self) -> bool:
        if self.with_git:
            tree.uncover_tracked(self.root, self._tracked())
        # A file created in a linked folder lies in the base: it belongs here.
        strays = wheel.strays_in(self.base)
        own = tree.own_files(self.root, self._tracked())
        changed = self._lay(own | set(strays))
        for path in strays:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            if not (self.root / path).exists():
                os.rename(self.base / path, self.root / path)
                where = self._named(self.base)
                self.progress.phase(f"{path} is ours now: it lay in {where}")
        return changed

    def _make_way(self, own: set[str]) -> None:
        """Lays the links as they are with ``own``; the clone may have no base."""
        if self.base.is_dir():
            self._lay(own)

    def _lay(self, own: set[str]) -> bool:
        targets = links.plan_links(self.root, own)
        # Hidden before they are there, so that git never sees one of them.
        rewritten = self.with_git and tree.ExcludeBlock(self.root).write(targets)
        changes = links.apply_plan(self.root, targets)
        if changes and not self.with_git and (self.root / ".git").exists():
            self.progress.phase("git does not hide the links: `git status` says why")
        if changes:
            self.progress.phase(
                f"links into {self._named(self.base)}: {changes.laid} laid, "
                f"{changes.removed} removed, {len(targets)} in all"
            )
        return bool(changes) or rewritten

    def _ensure_requirements(
        self, environment: Environment, requirements: list[str], pip: Pip
    ) -> bool:
        files = self.requirements_files
        if environment.has_installed("requirements", requirements, *files):
            return False
        size = ""
        if any(name.startswith(CUDA_PACKAGES) for name in requirements):
            nbytes = self.release.required_nbytes
            size = f": about {megabytes(nbytes)} on the disk" if nbytes else ""
            demand_space(self.root, nbytes, "what torch requires")
        self.progress.phase(f"installing the base's requirements and ours{size}")
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

    def _ensure_clients(
        self, environment: Environment, requirements: list[str]
    ) -> bool:
        """Installs what the clients want otherwise than tests do, beside it.

        What lies in ``.venv`` counts as installed: no second torch is fetched.
        """
        over = Environment(self.root, self.root / "build" / "clients")
        file = self.root / CLIENTS
        if over.is_current and over.has_installed("clients", requirements, file):
            return False
        self.progress.phase(f"installing {CLIENTS}")
        if over.folder.exists():
            shutil.rmtree(over.folder)
        over.create(with_pip=False)
        over.point_at(environment.site_packages, self.root)
        pip = self.make_pip(over.python, self.progress)
        over.install("clients", pip, requirements, file)
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
            # A run that failed leaves no folder, also not of another base's tree.
            for folder in (self.root / "build", self.root, self.root.parent):
                if folder.is_relative_to(self.clone / "build"):
                    with contextlib.suppress(OSError):
                        folder.rmdir()

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
        """Whether the release, for this Python, was unpacked to the end."""
        if self._base_stamp().get("python") != wheel.python_tag():
            return False
        # After the default became another release, the one in place is not it.
        return self.base.is_dir() and self.release.is_of(
            wheel.unpacked_version(self.base)
        )

    def _base_stamp(self) -> Stamp:
        return Stamp(self.root / "build" / "base.json")

    def _tracked(self) -> set[str]:
        return tree.known_to_git(self.clone)

    def _named(self, path: Path) -> str:
        """Returns ``path`` as it is told of: as seen from the clone."""
        return path.relative_to(self.clone).as_posix()

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
        for path in build.iterdir() if build.exists() else ():
            if path.name in {release.version for release in RELEASES}:
                continue  # another base, which has a command of its own
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        with contextlib.suppress(OSError):
            build.rmdir()

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
