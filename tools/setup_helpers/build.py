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

from tools.setup_helpers import tree, wheel
from tools.setup_helpers.assemble import assemble_wheel
from tools.setup_helpers.digests import recorded
from tools.setup_helpers.environment import Environment, Pip, Stamp
from tools.setup_helpers.releases import DEFAULT
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
# Names in the clone of what the default release has in its folder
SHORT = (".venv", "build/base")
CACHES = (".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "*.egg-info")


@contextlib.contextmanager
def locked(root: Path, progress: Progress) -> Iterator[None]:
    """Lets one set-up at a time work on ``root``; the lock is the folder itself.

    Children that write inherit it: of a set-up that is killed, pip lives on.
    """
    descriptor = os.open(root, os.O_RDONLY)
    try:
        os.set_inheritable(descriptor, True)
        # Some network file systems lock no folders: there it is up to the user.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.phase("waiting for another set-up of this clone")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_place(root: Path) -> None:
    """Refuses a clone whose path environments cannot hold, or whose torch/ is whole."""
    path = str(root)
    for problem, is_so in (
        (f"a {os.pathsep!r}, which separates the folders of PATH", os.pathsep in path),
        ("a line break", len(path.splitlines()) != 1),
        ("bytes that are no UTF-8", not _is_utf8(path)),
    ):
        if is_so:
            raise SetupError(
                f"the path of this clone has {problem} in it: {path!r}; "
                "move it to another folder"
            )
    if (root / "torch/__init__.py").exists():
        raise SetupError(
            "torch/__init__.py is there, and would hide the release from what runs in "
            "this folder: remove it; if it is a link, which set-up laid formerly, by "
            "`git clean -dfX`, and the names of such links from .git/info/exclude"
        )


def _is_utf8(path: str) -> bool:
    return path == os.fsencode(path).decode("utf-8", errors="replace")


class Build:
    """What set-up keeps of one release, under ``build/VERSION`` in the clone.

    ``base`` there is the release as it came, and ``branch`` the tree of links that
    lays ours over it.
    """

    def __init__(
        self,
        root: Path,
        progress: Progress,
        release: Release = DEFAULT,
        *,
        make_pip: Callable[[Path, Progress], Pip] = Pip,
        venv_has_pip: bool = True,
    ) -> None:
        self.root = root
        self.release = release
        self.progress = progress
        self.make_pip = make_pip
        self.venv_has_pip = venv_has_pip
        self.home = root / "build" / release.version
        self.unpacked = self.home / "base"
        self.branch = self.home / "branch"
        self.wheels = self.home / "wheel"
        self.staging = self.home / ".staging"
        self.environment = Environment(self.home / ".venv")
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
        with self._working() as environment:
            self._check_links(*SHORT)
            chosen = self._check_given(given)
            changed = self._ensure_environment()
            pip = self.make_pip(environment.python, self.progress)
            changed |= self._ensure_release(chosen, pip)
            distribution = wheel.unpacked_distribution(self.unpacked)
            environment.point_at(self.branch)
            environment.add_scripts(wheel.console_scripts(distribution))
            requirements = distribution.requires or []
            changed |= self._ensure_requirements(requirements, pip)
            if with_models or with_clients:
                changed |= self._ensure_models(requirements, pip)
            if with_clients:
                changed |= self._ensure_clients(requirements)
            return self._ensure_links(*SHORT) or changed

    def lay_under(self, python: Path, given: Path | None) -> None:
        """Brings the tree alone up to date, for an environment of the user's own."""
        with self._working():
            self._check_links("build/base")
            chosen = self._check_given(given)
            self._ensure_release(chosen, self.make_pip(python, self.progress))
            self._ensure_links("build/base")

    def clean(self) -> None:
        """Removes what set-up made for the release."""
        with locked(self.root, self.progress):
            if self._has_release():
                self._check_written()
            for name in SHORT if self.release == DEFAULT else ():
                if not _is_foreign(self.root / name):
                    (self.root / name).unlink(missing_ok=True)
            # By one rename: a part that is left would be taken for the whole.
            for part in (self.unpacked, self.environment.folder):
                self._move_aside(part)
            if self.home.exists():
                shutil.rmtree(self.home)
            with contextlib.suppress(OSError):
                self.home.parent.rmdir()

    def clean_rest(self) -> None:
        """Removes what tests, lint and benchmarks leave in the clone."""
        with locked(self.root, self.progress):
            shutil.rmtree(self.root / "build", ignore_errors=True)
            for pattern in CACHES:
                for path in self.root.glob(pattern):
                    shutil.rmtree(path, ignore_errors=True)
            for parent, folders, _ in os.walk(self.root):
                if "__pycache__" in folders:
                    cache = os.path.join(parent, "__pycache__")
                    shutil.rmtree(cache, ignore_errors=True)
                folders[:] = [name for name in folders if name != ".git"]

    def make_wheel(self, given: Path | None) -> Path:
        """Writes the release's wheel with our files in it; returns its path.

        A ``given`` wheel may be for another Python or machine, and need not be
        the one in place.
        """
        with self._working():
            if given is None:
                found = self._wheel_in_place()
            else:
                found = self._inspect(given, for_this_python=False)
            known = recorded(self.root, self.release)
            return assemble_wheel(
                found,
                self.root,
                tree.released_files(self.root, "torch"),
                self.root / "build" / "dist",
                self.progress,
                known and known["sha256"],
            )

    # The steps.  Each returns whether there was anything to do.

    def _inspect(
        self, path: Path, *, for_this_python: bool = True
    ) -> wheel.ReleaseWheel:
        return wheel.inspect_wheel(path, self.release, for_this_python=for_this_python)

    def _check_given(self, given: Path | None) -> wheel.ReleaseWheel | None:
        """Checks a wheel that the user named, before anything is made.

        Returns None where there is no such wheel, or it is the one in place.
        """
        if given is None or (
            self._has_release() and self._stamp().get("source") == _identity(given)
        ):
            return None
        return self._inspect(given)

    def _ensure_environment(self) -> bool:
        if self.environment.is_current:
            return False
        folder = self.environment.folder
        self.progress.phase(f"making the Python environment {self._named(folder)}")
        self._set_aside(folder)
        self.environment.create(with_pip=self.venv_has_pip)
        return True

    def _ensure_release(self, chosen: wheel.ReleaseWheel | None, pip: Pip) -> bool:
        """Unpacks the ``chosen`` wheel, or whichever fits if none is in place."""
        stamp = self._stamp()
        if self._has_release():
            self._check_written()
            if chosen is None:
                return self._ensure_branch()
            if chosen.digest == stamp.get("digest"):
                stamp.put("source", _identity(chosen.path))
                return self._ensure_branch()
        chosen = chosen or self._find_wheel(pip)
        where = self._named(self.unpacked)
        self.progress.phase(f"unpacking torch {chosen.version} into {where}")
        fresh = self.staging / "fresh"
        wheel.unpack_wheel(chosen, fresh, self.progress)
        for path in (stamp.path, self.unpacked):
            self._set_aside(path)
        os.rename(fresh, self.unpacked)
        stamp = self._stamp()
        stamp.put("source", _identity(chosen.path))
        stamp.put("digest", chosen.digest)
        stamp.put("python", wheel.python_tag())
        self._ensure_branch()
        return True

    def _ensure_branch(self) -> bool:
        """Lays the tree anew, as a whole, where it is not as it should be."""
        targets = tree.plan_links(self.unpacked, self.root, tree.own_files(self.root))
        if self.branch.is_dir() and tree.laid_links(self.branch) == targets:
            return False
        where = self._named(self.branch)
        self.progress.phase(f"{where}: {len(targets)} links to the release and to ours")
        fresh = self.staging / "links"
        shutil.rmtree(fresh, ignore_errors=True)
        tree.lay_links(fresh, targets)
        self._set_aside(self.branch)
        os.rename(fresh, self.branch)
        return True

    def _check_written(self) -> None:
        """Refuses to go on where somebody wrote what no set-up lays."""
        tree.laid_links(self.branch)
        for path in wheel.strays_in(self.unpacked):
            where = self._named(self.unpacked / path)
            raise SetupError(f"{where} is no file of the release: move it to {path}")

    def _find_wheel(self, pip: Pip) -> wheel.ReleaseWheel:
        """Returns the wheel used before, where it still fits, or a new one."""
        source = self._stamp().get("source") or []
        for path in [*map(Path, source[:1]), *self.wheels.glob("*.whl")]:
            with contextlib.suppress(SetupError):
                return self._inspect(path)
        release = self.release
        total = megabytes(release.disk_nbytes)
        self.progress.phase(
            f"fetching {release.requirement} with pip: at least "
            f"{megabytes(release.wheel_nbytes)}, and {total} on the disk with what it "
            "requires"
        )
        what = f"torch {release.version} with what it requires"
        remedy = "; a build for CPUs takes less: TORCH_WHEEL=PATH"
        demand_space(self.root, release.disk_nbytes, what, remedy)
        folder = self.staging / "wheel"
        folder.mkdir(parents=True)
        pip.download(release.requirement, folder)
        fetched = self._inspect(next(folder.glob("*.whl")))
        self._set_aside(self.wheels)
        os.rename(folder, self.wheels)
        return dataclasses.replace(fetched, path=self.wheels / fetched.path.name)

    def _wheel_in_place(self) -> wheel.ReleaseWheel:
        """Returns the wheel that ``base`` was unpacked from."""
        stamp = self._stamp()
        source = stamp.get("source") or []
        held = [*map(Path, source[:1]), *self.wheels.glob("*.whl")]
        path = next(filter(Path.is_file, held), None)
        if path is None:
            pip = self.make_pip(self.environment.python, self.progress)
            found = self._find_wheel(pip)
        else:
            found = self._inspect(path)
        if found.digest != stamp.get("digest"):
            raise SetupError(
                f"{found.path} is not the wheel that {self._named(self.unpacked)} was "
                "unpacked from: name that one with TORCH_WHEEL=PATH"
            )
        return found

    def _ensure_requirements(self, requirements: list[str], pip: Pip) -> bool:
        files = [self.root / name for name in REQUIREMENTS]
        if self.environment.has_installed("requirements", requirements, *files):
            return False
        size = ""
        if any(name.startswith(CUDA_PACKAGES) for name in requirements):
            nbytes = self.release.cuda_nbytes
            size = f": about {megabytes(nbytes)} on the disk"
            demand_space(self.root, nbytes, "what torch requires")
        self.progress.phase(f"installing the release's requirements and ours{size}")
        self.environment.install("requirements", pip, requirements, *files)
        return True

    def _ensure_models(self, requirements: list[str], pip: Pip) -> bool:
        # All files again, so that pip keeps to the bounds of each.
        files = [self.root / name for name in (*REQUIREMENTS, MODELS)]
        if self.environment.has_installed("models", requirements, *files):
            return False
        self.progress.phase(f"installing {MODELS}")
        self.environment.install("models", pip, requirements, *files)
        return True

    def _ensure_clients(self, requirements: list[str]) -> bool:
        """Installs what the clients want otherwise than tests do, beside it.

        What lies in ``.venv`` counts as installed: no second torch is fetched.
        """
        over = Environment(self.environment.folder / "clients")
        # Made of what it lies over, too: that changed, it is made anew.
        made_of = [*requirements, *self.environment.installed()]
        file = self.root / CLIENTS
        if over.is_current and over.has_installed("clients", made_of, file):
            return False
        self.progress.phase(f"installing {CLIENTS}")
        if over.folder.exists():
            shutil.rmtree(over.folder)
        over.create(with_pip=False)
        over.point_at(self.environment.site_packages, self.branch)
        pip = self.make_pip(over.python, self.progress)
        over.install("clients", pip, requirements, file, made_of=made_of)
        return True

    def _check_links(self, *names: str) -> None:
        for name in names if self.release == DEFAULT else ():
            if _is_foreign(self.root / name):
                what = f"{name} was not made by set-up: move it out of the way"
                raise SetupError(what)

    def _ensure_links(self, *names: str) -> bool:
        """Gives what the default release has the short names as well."""
        changed = False
        for name in names if self.release == DEFAULT else ():
            place, target = self.root / name, self.home / Path(name).name
            target = Path(os.path.relpath(target, place.parent))
            if place.is_symlink() and place.readlink() == target:
                continue
            place.unlink(missing_ok=True)
            place.symlink_to(target)
            self._undo.callback(place.unlink, missing_ok=True)
            changed = True
        return changed

    # Undoing.

    @contextlib.contextmanager
    def _working(self) -> Iterator[Environment]:
        """Undoes the steps taken if one of them fails; keeps them if cut off."""
        check_place(self.root)
        with locked(self.root, self.progress):
            # Its stamp, as those left it that were waited for
            self.environment = Environment(self.environment.folder)
            if self.staging.exists():
                what = "an earlier set-up was cut off: going on from there"
                self.progress.phase(what)
                shutil.rmtree(self.staging)
            try:
                yield self.environment
            except (SetupError, OSError):
                self._undo.close()
                raise
            finally:
                self._undo.pop_all()
                shutil.rmtree(self.staging, ignore_errors=True)
                # A run that failed leaves no folder.
                for folder in (self.home, self.home.parent):
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

    # Small things.

    def _has_release(self) -> bool:
        """Whether the release, for this Python, was unpacked to the end."""
        is_for_us = self._stamp().get("python") == wheel.python_tag()
        return is_for_us and self.unpacked.is_dir()

    def _stamp(self) -> Stamp:
        return Stamp(self.home / "base.json")

    def _named(self, path: Path) -> str:
        """Returns ``path`` as it is told of: as seen from the clone."""
        return path.relative_to(self.root).as_posix()


def _is_foreign(place: Path) -> bool:
    """Whether somebody else made what is in the place of a link of ours."""
    if place.is_symlink():
        return os.path.isabs(os.readlink(place))
    return place.exists()


def _identity(path: Path) -> list[object]:
    """Tells one wheel on the disk from another without reading it."""
    if not path.exists():
        return [str(path)]
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
