#!/usr/bin/env python3
"""Lays the branch over an installed torch, and takes it off again.

    python3 tools/overlay.py                  over the torch of this interpreter
    python3 tools/overlay.py --python PATH    over that of another one
    python3 tools/overlay.py --status         tells what is there
    python3 tools/overlay.py --undo           gives back every byte
    python3 tools/overlay.py --to DIR         makes a folder for PYTHONPATH instead, where
                                              torch itself is read-only

It takes any build (CPU, CUDA, ROCm) of a release that the branch fits, and writes Python
files alone. Each file that it replaces, or that ours are written for, must be that
release's own: nobody's changes are overwritten. pip's RECORD stays true, so that pip
uninstalls and upgrades torch as before. Needs only Python, and no network.
"""

from __future__ import annotations

import argparse
import csv
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.setup_helpers import tree  # noqa: E402
from tools.setup_helpers.build import locked  # noqa: E402
from tools.setup_helpers.digests import difference, recorded, sha256  # noqa: E402
from tools.setup_helpers.releases import known, RELEASES  # noqa: E402
from tools.setup_helpers.report import explain, Progress, SetupError  # noqa: E402
from tools.setup_helpers.wheel import record_row  # noqa: E402


if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

    from tools.setup_helpers.releases import Release

    # By path: the digests of a file's two forms, None where there is no such file
    Manifest: TypeAlias = dict[str, dict[str, str | None]]


FOLDER = "torch/.mixed_dtype"  # what the overlay replaced, and the manifest
MANIFEST = "manifest.json"
RELEASE, BRANCH = "release", "branch"
SERIES = "python3 tools/apply_to_checkout.py --series"
FIND = (
    "import importlib.util, json; spec = importlib.util.find_spec('torch'); "
    "print(json.dumps(spec and spec.origin))"
)


class Overlay:
    """The branch over the torch in ``site``, the folder that holds ``torch/``.

    [Note: An overlay is all or nothing]
    One rename exchanges all files, so that whoever imports torch meanwhile, or after the
    overlay was killed, has the release or the branch as a whole:

    1. ``FOLDER`` gets both forms of each file, and a link ``current`` to one of them.
    2. Each file becomes a link through ``current`` to the form that it has now. One that
       only the branch has leads nowhere as long as ``current`` is the release.
    3. ``current`` is replaced by a link to the other form.
    4. Each link becomes the file that it leads to, and ``current`` goes.

    ``settle`` is the last step, and what a run that was cut off needs. Undoing takes the
    same steps with the forms exchanged. What takes space on the disk is all in step 1.
    """

    def __init__(self, site: Path, root: Path = ROOT) -> None:
        self.site = site
        self.root = root
        self.folder = site / FOLDER
        self.partial = site / f"{FOLDER}.partial"
        self.current = self.folder / "current"

    # What is there.

    @cached_property
    def version(self) -> str:
        path = self.site / "torch/version.py"
        text = path.read_text() if path.is_file() else ""
        found = re.search(r"(?m)^__version__ = ['\"]([^'\"\n]+)", text)
        if not found:
            raise SetupError(f"{path} does not say which torch this is")
        return found[1]

    @property
    def release(self) -> Release:
        for release in RELEASES:
            if release.is_of(self.version):
                return release
        raise SetupError(
            f"torch {self.version} in {self.site} is no release that the branch fits: "
            f"these are {known()}"
        )

    @cached_property
    def ours(self) -> list[str]:
        return sorted(tree.released_files(self.root, "torch"))

    @property
    def manifest(self) -> Manifest:
        path = self.folder / MANIFEST
        return json.loads(path.read_text()) if path.is_file() else {}

    @property
    def laid(self) -> Manifest:
        """What of the manifest holds: nothing once torch was installed anew."""
        manifest = self.manifest
        is_laid = any(
            has[BRANCH] != has[RELEASE] and sha256(self.site / path) == has[BRANCH]
            for path, has in manifest.items()
        )
        return manifest if is_laid else {}

    @property
    def is_by_links(self) -> bool:
        """Whether ``--to`` made this torch."""
        return self.folder.exists() and not (self.folder / RELEASE).exists()

    def changed(self) -> list[str]:
        """Returns the files that are not as the overlay laid them."""
        laid = self.laid.items()
        return [path for path, has in laid if sha256(self.site / path) != has[BRANCH]]

    def has_ours(self) -> bool:
        """Whether torch has each of our files as it is in the clone."""
        return all(sha256(self.site / p) == sha256(self.root / p) for p in self.ours)

    def is_up_to_date(self) -> bool:
        """Whether nothing but our files as they are in the clone is laid."""
        laid = {path for path in self.laid if path.startswith("torch/")}
        return self.has_ours() and laid <= {*self.ours} and not self.changed()

    def status(self) -> str:
        where = f"torch {self.version} in {self.site}"
        if self.current.is_symlink():
            form = os.readlink(self.current)
            return f"{where}: the {form}; an overlay was cut off, run it again"
        if self.is_up_to_date():
            means = ", made by --to" if self.is_by_links else ", laid by other means"
            how = "" if self.laid else means
            return f"{where}: the branch, as it is in {self.root}{how}"
        if changed := self.changed():
            return f"{where}: the branch, and changed since:{_listing(changed)}"
        if self.laid:
            return f"{where}: the branch, as it is not in {self.root}"
        return f"{where}: no overlay"

    # Laying.

    def lay(self) -> str:
        """Lays the branch, unless it is there; says what was done."""
        if self.is_by_links:
            raise SetupError(f"{self.site} was made by --to: run that again instead")
        if not self.is_up_to_date():
            self._check()
            if self.laid:
                self.undo()
            self._stage_both()
            self._switch_to(BRANCH)
        return self.status()

    def _check(self) -> None:
        """Refuses a torch that is not the release's own."""
        known_digests = recorded(self.root, self.release)["sha256"]
        laid, told = self.laid, []
        for path in sorted({*known_digests, *self.ours}):
            # What an earlier overlay replaced counts as it will be given back
            place = (self.folder / RELEASE if path in laid else self.site) / path
            text = difference(known_digests.get(path), sha256(place))
            if place.is_symlink():
                text = f"is a link to {os.readlink(place)}"
            if text:
                told.append(f"{path} {text}")
        if told:
            raise SetupError(
                f"{self.site} is left as it is, because of these files:{_listing(told)}\n"
                "install the release itself; or, to keep what was changed, make the "
                f"series of small edits in these files: {SERIES} {self.site}"
            )

    def _stage_both(self) -> None:
        """Makes the first step of [Note: An overlay is all or nothing]."""
        release, branch = self.partial / RELEASE, self.partial / BRANCH
        manifest: Manifest = {}

        def note_digests(path: str) -> None:
            manifest[path] = {
                RELEASE: sha256(release / path),
                BRANCH: sha256(branch / path),
            }

        try:
            release.mkdir(parents=True)
            for path in self.ours:
                if (self.site / path).exists():
                    _copy(self.site / path, release / path)
                _copy(self.root / path, branch / path)
                note_digests(path)
            for record in self.site.glob("torch-*.dist-info/RECORD"):
                path = record.relative_to(self.site).as_posix()
                _copy(record, release / path)
                _copy(record, branch / path)
                (branch / path).write_text(
                    self._record_of(record, manifest), newline=""
                )
                note_digests(path)
            (self.partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
            (self.partial / "current").symlink_to(RELEASE)
            if self.folder.exists():  # of a torch that was there before
                shutil.rmtree(self.folder)
            os.rename(self.partial, self.folder)
        except BaseException:
            shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def _record_of(self, record: Path, laid: Manifest) -> str:
        """Returns RECORD with what is laid, and what is kept of the release."""
        with record.open(newline="") as file:
            rows = {row[0]: row[1:] for row in csv.reader(file) if row}
        for path in laid:
            data = (self.root / path).read_bytes()
            rows[path] = record_row(bytes.fromhex(str(laid[path][BRANCH])), len(data))
        kept = [path for path, has in laid.items() if has[RELEASE]]
        kept.append(record.relative_to(self.site).as_posix())
        # Without digests, as pip lists bytecode
        for path in (MANIFEST, *(f"{RELEASE}/{path}" for path in kept)):
            rows[f"{FOLDER}/{path}"] = ["", ""]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([path, *row] for path, row in rows.items())
        return text.getvalue()

    # Undoing.

    def undo(self) -> str:
        """Gives back what was replaced; says what is there then."""
        if self.is_by_links:
            raise SetupError(f"{self.site} was made by --to: remove that folder")
        if changed := self.changed():
            raise SetupError(
                f"{self.site} is left as it is, because files of the branch were changed "
                f"there:{_listing(changed)}\nmove these changes elsewhere, copy the files "
                f"from {self.root}, and then undo"
            )
        if self.laid:
            staged = self.folder / BRANCH
            try:
                for path in self.laid:
                    _copy(self.site / path, staged / path)
                self.current.symlink_to(BRANCH)
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
            self._switch_to(RELEASE)
        return self.status()

    # Both.

    def _switch_to(self, form: str) -> None:
        """Makes the other steps of [Note: An overlay is all or nothing]."""
        try:
            for path in self.manifest:
                up = "../" * path.count("/")
                _replace_by_link(self.site / path, f"{up}{FOLDER}/current/{path}")
            _replace_by_link(self.current, form)
        finally:
            self.settle()

    def settle(self) -> None:
        """Gives each file the form that ``current`` leads to, if it is there."""
        if self.partial.exists():
            shutil.rmtree(self.partial)
        if not self.current.is_symlink():
            shutil.rmtree(self.folder / BRANCH, ignore_errors=True)
            return
        form, manifest = os.readlink(self.current), self.manifest
        for path in manifest:
            place, staged = self.site / path, self.folder / form / path
            _partial_of(place).unlink(missing_ok=True)
            if staged.exists():
                os.replace(staged, place)
            elif place.is_symlink():
                place.unlink()
        if form == BRANCH:
            shutil.rmtree(self.folder / BRANCH, ignore_errors=True)
            self.current.unlink()
            return
        for path, has in manifest.items():
            if has[RELEASE] is None:
                place = self.site / path
                for code in place.parent.glob(f"__pycache__/{place.stem}.*.pyc"):
                    code.unlink()
        os.rename(self.folder, self.partial)
        shutil.rmtree(self.partial)

    # Where torch is read-only.

    def lay_to(self, folder: Path) -> str:
        """Makes ``folder`` of links to this torch and of our files; says so."""
        if self.is_by_links or self.laid or self.has_ours():
            raise SetupError(
                f"{self.status()}: nothing else is needed; to have a folder instead, "
                "--undo first"
            )
        self._check()
        other = Overlay(folder, self.root)
        if folder.exists() and [*folder.iterdir()] and not other.is_by_links:
            raise SetupError(f"{folder} is there, and was not made by --to")
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        tops = {"torch", *(path.name for path in self.site.glob("torch-*.dist-info"))}
        links = tree.plan_links(self.site, self.root, {*self.ours})
        try:
            tree.lay_links(
                partial,
                {
                    path: target
                    for path, target in links.items()
                    if path.partition("/")[0] in tops and path not in self.ours
                },
            )
            for path in self.ours:
                _copy(self.root / path, partial / path)
            (partial / FOLDER).mkdir()
            if folder.exists():
                other.remove_folder()
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return f"{other.status()}\nbefore a command: PYTHONPATH={folder}"

    def remove_folder(self) -> None:
        """Removes what ``lay_to`` has made, if nothing has been put beside it since."""
        strays = sorted(
            path.name
            for path in self.site.iterdir()
            if path.name != "torch" and not path.match("torch-*.dist-info")
        )
        if strays:
            raise SetupError(
                f"{self.site} has {', '.join(strays)}, which --to did not put there: "
                "move it away first"
            )
        shutil.rmtree(self.site)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _partial_of(place: Path) -> Path:
    return place.with_name(f".{place.name}.partial")


def _replace_by_link(place: Path, target: str) -> None:
    partial = _partial_of(place)
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    os.replace(partial, place)


def _listing(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def find_site(python: str) -> Path:
    """Returns the folder from which ``python`` imports torch."""
    try:
        # Elsewhere than in the clone, whose own torch/ is no package
        found = subprocess.run(
            [python, "-c", FIND], cwd="/", capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"{python} is no Python that runs: {error}") from None
    origin = json.loads(found.stdout.splitlines()[-1])
    if origin is None:
        raise SetupError(
            f"{python} has no torch: install {known('or')} there first, or name another "
            "Python with --python"
        )
    site = Path(origin).parents[1]
    if (site / "version.txt").exists() and (site / "setup.py").exists():
        raise SetupError(
            f"{site} is a source checkout: python3 tools/apply_to_checkout.py {site}"
        )
    return site


def run(parsed: argparse.Namespace) -> str:
    # Absolute, but not resolved: in an environment it is a link
    python = shutil.which(parsed.python) or parsed.python
    if Path(python).is_dir():
        raise SetupError(f"{python} is a folder: name its bin/python")
    folder = parsed.to and parsed.to.expanduser().absolute()
    if folder and (parsed.status or parsed.undo):
        overlay = Overlay(folder)
        if not folder.exists():
            return f"{folder} does not exist: there is nothing to undo"
        if not overlay.is_by_links:
            raise SetupError(f"{folder} was not made by --to")
        if parsed.status:
            return overlay.status()
        overlay.remove_folder()
        return f"{folder}: removed"
    overlay = Overlay(find_site(python))
    if parsed.status:
        return overlay.status()
    if folder:
        return overlay.lay_to(folder)
    with locked(overlay.site / "torch", Progress()):
        overlay.settle()
        return overlay.undo() if parsed.undo else overlay.lay()


def main(arguments: list[str]) -> int:
    """Returns the exit status; an error is one line on stderr, a refusal a list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, metavar="PATH")
    parser.add_argument("--to", type=Path, metavar="DIR")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="write nothing")
    what.add_argument("--undo", action="store_true", help="take the branch off again")
    parsed = parser.parse_args(arguments)
    try:
        print(run(parsed))
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        text = explain(error)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text = f"{error.filename} cannot be written: --to DIR leaves it as it is"
        print(f"error: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
