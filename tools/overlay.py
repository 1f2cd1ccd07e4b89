#!/usr/bin/env python3
"""Lays the branch over an installed torch, and takes it off again.

    python3 tools/overlay.py                  over the torch of this interpreter
    python3 tools/overlay.py --python PATH    over that of another one
    python3 tools/overlay.py --link           by links into this clone, not by copies
    python3 tools/overlay.py --status         tells what is there
    python3 tools/overlay.py --undo           gives back every byte
    python3 tools/overlay.py --to DIR         makes a folder for PYTHONPATH instead, where
                                              torch itself is read-only
    python3 tools/overlay.py CHECKOUT         as a commit on a source checkout of a release
                                              (--check: writes nothing; --list: the files)
    python3 tools/overlay.py --record         writes down what this release's own files are

It takes any build (CPU, CUDA, ROCm) of a release that the branch fits, and writes Python
files alone. Each file that it replaces, or that ours are written for, must be that
release's own: nobody's changes are overwritten. pip's RECORD stays true, so that pip
uninstalls and upgrades torch as before. Needs only Python and git, and no network.
"""

from __future__ import annotations

import argparse
import base64
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.checkout import commit_branch, files_to_lay  # noqa: E402
from tools.releases import (  # noqa: E402
    DIGESTS,
    files_under,
    known,
    listing,
    locked,
    refuse_changed,
    release_of,
    RELEASES,
    sha256,
    ToolError,
    tracked_files,
)


FOLDER = "torch/.mixed_dtype"  # what torch's own files are links into
MANIFEST = "manifest.json"  # the digests of the branch's form of each file, by path
RELEASE, BRANCH = "release", "branch"
FIND = (
    "import importlib.util, json; spec = importlib.util.find_spec('torch'); "
    "print(json.dumps(spec and spec.origin))"
)


class Overlay:
    """The branch over the torch in ``site``, the folder that holds ``torch/``.

    [Note: An overlay is all or nothing]
    One rename exchanges all files, so that whoever imports torch meanwhile, or after the
    overlay was killed, has the release or the branch as a whole:

    1. ``FOLDER`` gets both forms of each file, and a link ``current`` to the release's.
    2. Each file becomes a link through ``current``. One that only the branch has leads
       nowhere as yet.
    3. ``current`` is replaced by a link to the branch's.

    Undoing goes back from step 3, and so does ``settle`` after a run that was cut off.
    What takes space on the disk is all in step 1.
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
            raise ToolError(f"{path} does not say which torch this is")
        return found[1]

    @cached_property
    def ours(self) -> list[str]:
        return tracked_files(self.root, "torch")

    @property
    def manifest(self) -> dict[str, str]:
        path = self.folder / MANIFEST
        return json.loads(path.read_text()) if path.is_file() else {}

    @property
    def laid(self) -> dict[str, str]:
        """What of the manifest holds: nothing once torch was installed anew."""
        manifest = self.manifest
        return manifest if any((self.site / p).is_symlink() for p in manifest) else {}

    def _is_linked(self, path: str) -> bool:
        """Whether a file is laid as a link into the clone."""
        return (self.folder / BRANCH / path).is_symlink()

    @property
    def is_by_links(self) -> bool:
        """Whether ``--to`` made this torch."""
        return self.folder.exists() and not (self.folder / RELEASE).exists()

    def changed(self) -> list[str]:
        """Returns the files that are not as the overlay laid them."""
        return [
            path
            for path, digest in self.laid.items()
            if not (self.site / path).is_symlink()
            or (not self._is_linked(path) and sha256(self.site / path) != digest)
        ]

    def _is_cut_off(self) -> bool:
        return self.current.is_symlink() and os.readlink(self.current) == RELEASE

    def has_ours(self) -> bool:
        """Whether torch has each of our files as it is in the clone."""
        return all(sha256(self.site / p) == sha256(self.root / p) for p in self.ours)

    def is_up_to_date(self) -> bool:
        """Whether nothing but our files as they are in the clone is laid."""
        laid = {path for path in self.laid if path.startswith("torch/")}
        return self.has_ours() and laid <= {*self.ours} and not self.changed()

    def status(self) -> str:
        what = "no overlay"
        if self._is_cut_off():
            what = "the release; an overlay was cut off, run it again"
        elif self.is_up_to_date():
            what = f"the branch, as it is in {self.root}"
            if not self.laid:
                what += ", made by --to" if self.is_by_links else ", not by an overlay"
        elif changed := self.changed():
            what = f"the branch, and changed since:{listing(changed)}"
        elif self.laid:
            what = f"the branch, as it is not in {self.root}"
        return f"torch {self.version} in {self.site}: {what}"

    def check(self) -> None:
        """Refuses a torch that is not the release's own."""
        laid = self.laid
        refuse_changed(
            self.site,
            self.root,
            release_of(self.version),
            self.ours,
            # What an earlier overlay replaced counts as it will be given back
            lambda p: (self.folder / RELEASE if p in laid else self.site) / p,
        )

    # Laying.

    def lay(self, *, link: bool = False) -> str:
        """Lays the branch, unless it is there; says what was done."""
        is_so = self.is_up_to_date() and (
            not self.laid or all(self._is_linked(path) == link for path in self.ours)
        )
        if not is_so:
            self.check()
            if self.laid:
                self.undo()
            self._stage(link)
            try:
                for path in self.manifest:
                    up = "../" * path.count("/")
                    replace_by_link(self.site / path, f"{up}{FOLDER}/current/{path}")
                replace_by_link(self.current, BRANCH)
            finally:
                self.settle()
        return self.status()

    def _stage(self, link: bool) -> None:
        """Makes the first step of [Note: An overlay is all or nothing]."""
        release, branch = self.partial / RELEASE, self.partial / BRANCH
        manifest: dict[str, str] = {}
        try:
            release.mkdir(parents=True)
            for path in self.ours:
                if (self.site / path).exists():
                    _copy(self.site / path, release / path)
                _copy(self.root / path, branch / path, link)
                manifest[path] = str(sha256(branch / path))
            for record in self.site.glob("torch-*.dist-info/RECORD"):
                path = record.relative_to(self.site).as_posix()
                _copy(record, release / path)
                _copy(record, branch / path)
                (branch / path).write_text(self._record_of(record, manifest))
                manifest[path] = str(sha256(branch / path))
            (self.partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
            (self.partial / "current").symlink_to(RELEASE)
            if self.folder.exists():  # of a torch that was there before
                shutil.rmtree(self.folder)
            os.rename(self.partial, self.folder)
        except BaseException:
            shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def _record_of(self, record: Path, laid: dict[str, str]) -> str:
        """Returns RECORD with what is laid, and what ``FOLDER`` holds."""
        lines = record.read_text().split("\n")
        rows = [line for line in lines if line and line.partition(",")[0] not in laid]
        for path, digest in laid.items():
            encoded = base64.urlsafe_b64encode(bytes.fromhex(digest)).decode()
            nbytes = (self.root / path).stat().st_size
            rows.append(f"{path},sha256={encoded.rstrip('=')},{nbytes}")
        held = [path for path in self.partial.rglob("*") if not path.is_dir()]
        names = [path.relative_to(self.partial).as_posix() for path in held]
        # Without digests, as pip lists bytecode
        rows.extend(f"{FOLDER}/{name},," for name in (*names, MANIFEST, "current"))
        return "\n".join(rows) + "\n"

    # Undoing.

    def undo(self) -> str:
        """Gives back what was replaced; says what is there then."""
        if changed := self.changed():
            raise ToolError(
                f"{self.site} is left as it is, because files of the branch were changed "
                f"there:{listing(changed)}\nmove these changes elsewhere, copy the files "
                f"from {self.root}, and then undo"
            )
        if self.laid:
            replace_by_link(self.current, RELEASE)
            self.settle()
        return self.status()

    def settle(self) -> None:
        """Gives back each file, unless ``current`` leads to the branch."""
        if self.partial.exists():
            shutil.rmtree(self.partial)
        if not self._is_cut_off():
            return
        for path in self.manifest:
            place, kept = self.site / path, self.folder / RELEASE / path
            _partial_of(place).unlink(missing_ok=True)
            if place.is_symlink() and kept.exists():
                os.replace(kept, place)
            elif place.is_symlink():
                place.unlink()
                for code in place.parent.glob(f"__pycache__/{place.stem}.*.pyc"):
                    code.unlink()
        os.rename(self.folder, self.partial)
        shutil.rmtree(self.partial)

    # Where torch is read-only.

    def lay_to(self, folder: Path, *, link: bool = False) -> str:
        """Makes ``folder`` of links to this torch and of our files; says so."""
        if self.is_by_links or self.laid or self.has_ours():
            raise ToolError(
                f"{self.status()}: nothing else is needed; to have a folder instead, "
                "--undo first"
            )
        self.check()
        other = Overlay(folder, self.root)
        if folder.exists() and [*folder.iterdir()]:
            other.check_folder()
        links = torch_links(self.site, self.root, self.ours)
        # So that it is known whose folder this is
        links[f"{FOLDER}/{MANIFEST}"] = os.devnull
        lay_links(folder, links, copies=() if link else self.ours)
        return f"{other.status()}\nbefore a command: PYTHONPATH={folder}"

    def check_folder(self) -> None:
        """Refuses a folder with anything in it that ``lay_to`` did not make."""
        if not self.is_by_links:
            raise ToolError(f"{self.site} is there, and was not made by --to")
        if strays := {path.name for path in self.site.iterdir()} - {"torch"}:
            raise ToolError(
                f"{self.site} has {', '.join(sorted(strays))}, which --to did not put "
                "there: move it away first"
            )


# Trees of links #


def torch_links(site: Path, ours: Path, own: Iterable[str]) -> dict[str, str]:
    """
    Returns what each link of a tree leads to, by path from the tree's root: the torch in
    ``site``, but for our ``own`` files. A folder without any of these is one link.
    """
    targets = {path: str(ours / path) for path in own}
    folders = {str(parent) for path in own for parent in Path(path).parents}
    pending = ["torch"]
    for path in pending:  # grows
        if path in folders and (site / path).is_dir():
            names = os.listdir(site / path)
            pending += [f"{path}/{name}" for name in names if name != "__pycache__"]
        elif path not in folders:
            targets.setdefault(path, str(site / path))
    return targets


def laid_links(tree: Path) -> dict[str, str]:
    """Returns the links of a tree; refuses one in which somebody wrote a file."""
    links = {}
    for place in tree.rglob("*"):
        if place.is_symlink():
            links[place.relative_to(tree).as_posix()] = os.readlink(place)
        elif place.is_file() and "__pycache__" not in place.parts:
            raise ToolError(f"{place}: move it to its place in the clone")
    return links


def lay_links(tree: Path, targets: dict[str, str], copies: Iterable[str] = ()) -> None:
    """Makes a tree anew; ``copies`` are copied, and all else linked."""
    partial, old = (tree.with_name(f"{tree.name}.{end}") for end in ("partial", "old"))
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    copies = {*copies}
    for path, target in targets.items():
        _copy(Path(target), partial / path, path not in copies)
    if tree.exists():
        os.rename(tree, old)
    os.rename(partial, tree)
    shutil.rmtree(old, ignore_errors=True)


def _copy(source: Path, target: Path, link: bool = False) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        target.symlink_to(source)
    else:
        shutil.copy2(source, target)


def _partial_of(place: Path) -> Path:
    return place.with_name(f".{place.name}.partial")


def replace_by_link(place: Path, target: str) -> None:
    partial = _partial_of(place)
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    os.replace(partial, place)


# The command #


def find_site(python: str) -> Path:
    """Returns the folder from which ``python`` imports torch."""
    try:
        # Elsewhere than in the clone, whose own torch/ is no package
        found = subprocess.run(
            [python, "-c", FIND], cwd="/", capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolError(f"{python} is no Python that runs: {error}") from None
    origin = json.loads(found.stdout.splitlines()[-1])
    if origin is None:
        raise ToolError(
            f"{python} has no torch: install {known('or')} there first, or name another "
            "Python with --python"
        )
    site = Path(origin).parents[1]
    if (site / "version.txt").exists() and (site / "setup.py").exists():
        raise ToolError(f"{site} is a source checkout: python3 tools/overlay.py {site}")
    return site


def record(site: Path, root: Path = ROOT) -> str:
    """
    Writes down the digests of the files that ours replace, and of those beside them,
    which they are written for. ``__init__.py`` only exports what is beside it.
    """
    overlay = Overlay(site, root)
    if overlay.laid:
        raise ToolError(f"{overlay.status()}: --undo first")
    release, files = release_of(overlay.version), set()
    for path in files_under(root, "torch"):
        if (site / path).is_file():
            folder, _, name = path.rpartition("/")
            beside = (site / folder).glob("*.py") if name != "__init__.py" else ()
            files |= {path, *(f"{folder}/{file.name}" for file in beside)}
    entries = json.loads((root / DIGESTS).read_text())
    entries[release] = {path: sha256(site / path) for path in sorted(files)}
    entries = {each: entries[each] for each in RELEASES if each in entries}
    (root / DIGESTS).write_text(json.dumps(entries, indent=2) + "\n")
    return f"{DIGESTS}: {len(files)} files of {release}"


def run(parsed: argparse.Namespace) -> str:
    if parsed.list:
        return "\n".join(files_to_lay(ROOT))
    if parsed.checkout:
        checkout = parsed.checkout.expanduser().absolute()
        return commit_branch(checkout, ROOT, only_check=parsed.check)
    # Absolute, but not resolved: in an environment it is a link
    python = shutil.which(parsed.python) or parsed.python
    if Path(python).is_dir():
        raise ToolError(f"{python} is a folder: name its bin/python")
    overlay = Overlay(find_site(python))
    if folder := parsed.to and parsed.to.expanduser().absolute():
        laid = Overlay(folder)
        if parsed.status:
            return laid.status()
        if not parsed.undo:
            return overlay.lay_to(folder, link=parsed.link)
        if not folder.exists():
            return f"{folder} does not exist: there is nothing to undo"
        laid.check_folder()
        shutil.rmtree(folder)
        return f"{folder}: removed"
    if parsed.record:
        return record(overlay.site)
    if parsed.status:
        return overlay.status()
    if overlay.is_by_links:
        raise ToolError(f"{overlay.site} was made by --to: run that again instead")
    with locked(overlay.site / "torch"):
        overlay.settle()
        return overlay.undo() if parsed.undo else overlay.lay(link=parsed.link)


def main(arguments: list[str]) -> int:
    """Returns the exit status; an error is one line on stderr, a refusal a list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", nargs="?", type=Path, metavar="CHECKOUT")
    parser.add_argument("--python", default=sys.executable, metavar="PATH")
    parser.add_argument("--to", type=Path, metavar="DIR")
    parser.add_argument("--link", action="store_true", help="by links into the clone")
    what = parser.add_mutually_exclusive_group()
    for option, text in {
        "status": "write nothing",
        "undo": "take the branch off again",
        "record": f"write {DIGESTS}",
        "check": "only say whether the branch fits a checkout",
        "list": "only list what a checkout gets",
    }.items():
        what.add_argument(f"--{option}", action="store_true", help=text)
    parsed = parser.parse_args(arguments)
    try:
        print(run(parsed))
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        text = f"{error.strerror or error}: {error.filename}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text = f"{error.filename} cannot be written: --to DIR leaves it as it is"
        print(f"error: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
