#!/usr/bin/env python3
"""Installs the branch over an installed torch, and removes it again.

    python3 tools/overlay.py                  over the torch of this interpreter
    python3 tools/overlay.py --python PATH    over that of another one
    python3 tools/overlay.py --status         tells what is there
    python3 tools/overlay.py --undo           gives back every byte
    python3 tools/overlay.py --to DIR         makes a folder for PYTHONPATH instead, where
                                              torch itself is read-only
    python3 tools/overlay.py CHECKOUT         as a commit on a source checkout of a release
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
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import releases  # noqa: E402
from tools.releases import git, known, release_of, ToolError, tracked_files  # noqa: E402


DIGESTS = "tools/release_digests.json"
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
    One rename exchanges all files, so that whoever imports FSDP before or after it, also
    after the overlay was killed, has the release or the branch as a whole. No order of
    links could do that for a process that has read some of the files at the rename.

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
        """The manifest of installed files; none once torch was installed anew."""
        manifest = self.manifest
        return manifest if any((self.site / p).is_symlink() for p in manifest) else {}

    def changed(self) -> list[str]:
        """Returns the files that changed since the overlay was installed."""
        return [
            path
            for path, digest in self.laid.items()
            if not (self.site / path).is_symlink() or sha256(self.site / path) != digest
        ]

    def _is_cut_off(self) -> bool:
        return self.current.is_symlink() and os.readlink(self.current) == RELEASE

    def is_up_to_date(self) -> bool:
        """Whether exactly our files, as they are in the clone, are installed."""
        laid = {path for path in self.laid if path.startswith("torch/")}
        return (
            all(sha256(self.site / p) == sha256(self.root / p) for p in self.ours)
            and laid <= {*self.ours}
            and not self.changed()
        )

    def status(self) -> str:
        what = "no overlay"
        if self._is_cut_off():
            what = "the release; an overlay was cut off, run it again"
        elif self.is_up_to_date():
            what = f"the branch, as it is in {self.root}"
            what += "" if self.laid else ", not by an overlay"
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

    def lay(self) -> str:
        """Lays the branch, unless it is there; says what was done."""
        if not self.is_up_to_date():
            self.check()
            if self.laid:
                self.undo()
            self._stage()
            try:
                for path in self.manifest:
                    up = "../" * path.count("/")
                    replace_by_link(self.site / path, f"{up}{FOLDER}/current/{path}")
                replace_by_link(self.current, BRANCH)
            finally:
                self.settle()
        return self.status()

    def _stage(self) -> None:
        """Makes the first step of [Note: An overlay is all or nothing]."""
        release, branch = self.partial / RELEASE, self.partial / BRANCH
        manifest: dict[str, str] = {}
        try:
            release.mkdir(parents=True)
            for path in self.ours:
                if (self.site / path).exists():
                    _copy(self.site / path, release / path)
                _copy(self.root / path, branch / path)
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
        """Returns RECORD with the installed files, and those in ``FOLDER``."""
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

    def lay_to(self, folder: Path) -> str:
        """Makes ``folder`` of links to this torch and of our files."""
        if folder.exists():
            raise ToolError(f"{folder} is there: remove it, or name another")
        self.check()
        lay_links(folder, torch_links(self.site, self.root, self.ours), self.ours)
        return f"{folder}: the branch; before a command, PYTHONPATH={folder}"


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


def lay_links(
    tree: Path, targets: dict[str, str], copies: Collection[str] = ()
) -> None:
    """Makes a tree, unless it is so; ``copies`` are copied, and all else linked."""
    links = {}
    for place in tree.rglob("*"):
        if place.is_symlink():
            links[place.relative_to(tree).as_posix()] = os.readlink(place)
        elif place.is_file() and "__pycache__" not in place.parts:
            raise ToolError(f"{place}: move it to its place in the clone")
    if links == targets:
        return
    partial, old = (tree.with_name(f"{tree.name}.{end}") for end in ("partial", "old"))
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
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


# Which files are whose #


def sha256(path: Path) -> str | None:
    """Returns the digest of a file, None where there is nothing."""
    if not path.is_file():
        return "" if path.exists() else None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def listing(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def refuse_changed(
    where: Path,
    root: Path,
    release: str,
    ours: Iterable[str],
    place: Callable[[str], Path],
) -> None:
    """Refuses a tree where files that ours replace or use are not the release's."""
    theirs, told = json.loads((root / DIGESTS).read_text()).get(release, {}), []
    for path in sorted({*theirs, *ours}):
        digest, found = theirs.get(path), sha256(place(path))
        if place(path).is_symlink():
            told.append(f"{path} is a link to {os.readlink(place(path))}")
        elif digest is None and found is not None:
            told.append(f"{path} is no file of the release, and one of ours")
        elif digest != found:
            is_there = "is not the release's" if found is not None else "is missing"
            told.append(f"{path} {is_there}")
    if told:
        raise ToolError(
            f"{where} is left as it is, because of these files:{listing(told)}\n"
            "take the release itself; or, to keep what was changed, apply the series of "
            "small patches: docs/series.md"
        )


def record(site: Path, root: Path = ROOT) -> str:
    """
    Writes down the digests of the files that ours replace, and of those beside them,
    which they are written for. ``__init__.py`` only exports what is beside it.
    """
    overlay = Overlay(site, root)
    if overlay.laid or overlay.is_up_to_date():
        raise ToolError(f"{overlay.status()}: --undo first, or name the release's own")
    files = {site / path for path in overlay.ours if (site / path).is_file()}
    for folder in {file.parent for file in files if file.name != "__init__.py"}:
        files |= {*folder.glob("*.py")}
    digests = {f.relative_to(site).as_posix(): sha256(f) for f in sorted(files)}
    entries = json.loads((root / DIGESTS).read_text())
    entries[release := release_of(overlay.version)] = digests
    entries = {each: entries[each] for each in releases.RELEASES if each in entries}
    (root / DIGESTS).write_text(json.dumps(entries, indent=2) + "\n")
    return f"{DIGESTS}: {len(files)} files of {release}"


# A source checkout, in which git is check and undo #


TESTS = "test/distributed/_composable/fsdp"
COMMIT_BRANCH = "fsdp2-mixed-dtype"
# What tests of what is here alone, set-up and tools, examples, pages, have in them
STAYS_HERE = re.compile(r'fsdp_helpers\W(build|clients)\b|REPO_ROOT|"(docs|examples)"')
# Upstream has a test of this name, which stays; ours stands beside it
LAID_AS = "test_fully_shard_comm.py", "test_fully_shard_mixed_comm.py"


def files_to_lay(root: Path = ROOT) -> dict[str, Path]:
    """Returns our sources and their tests, by their path in a checkout."""
    return {
        path.replace(*LAID_AS): root / path
        for path in tracked_files(root, "torch", "test")
        if not re.search("/fsdp_helpers/(build|clients)/", path)
        and not ("/test_" in path and STAYS_HERE.search((root / path).read_text()))
    }


def check_checkout(checkout: Path, ours: dict[str, Path]) -> None:
    """Refuses what is no clean tree of a release's own files."""
    version_file = checkout / "version.txt"
    if not version_file.is_file() or not (checkout / "torch").is_dir():
        raise ToolError(
            f"{checkout} is not a PyTorch source tree: git clone --branch v2.13.0 "
            f"https://github.com/pytorch/pytorch ({known('or')}), and name that folder"
        )
    release = release_of(version_file.read_text().strip())
    if not releases.has_git(checkout):
        raise ToolError(f"{checkout} is not the top folder of a git checkout")
    if changed := git(checkout, "status", "--porcelain", "--untracked-files=all"):
        lines = listing(changed.splitlines())
        raise ToolError(f"{checkout} has changes that are not committed:{lines}")
    refuse_changed(checkout, ROOT, release, ours, lambda path: checkout / path)


def commit_branch(checkout: Path) -> str:
    """Makes a branch with one commit of our files; says what was done."""
    ours = files_to_lay()
    if all(sha256(checkout / path) == sha256(ours[path]) for path in ours):
        return f"{checkout}: all {len(ours)} files are there"
    check_checkout(checkout, ours)
    git(checkout, "var", "GIT_COMMITTER_IDENT")  # or git says who is missing
    start = git(checkout, "rev-parse", "--abbrev-ref", "HEAD").strip()
    git(checkout, "switch", "--create", COMMIT_BRANCH)
    for path, source in ours.items():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, checkout / path)
    git(checkout, "add", "--force", "--", *ours)
    message = "[FSDP2] Units whose parameters have different dtypes"
    git(checkout, "commit", "--quiet", "--message", message)
    return f"""\
{checkout}: {len(ours)} files in one commit on {COMMIT_BRANCH}, which starts at {start}
To build it and run its tests, in that folder:
  git submodule update --init --recursive
  python -m pip install --group dev
  python -m pip install --no-build-isolation -v -e .
  python -m pytest {TESTS}"""


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


def run(parsed: argparse.Namespace) -> str:
    if parsed.checkout:
        return commit_branch(parsed.checkout.expanduser().absolute())
    # Absolute, but not resolved: in an environment it is a link
    python = os.path.abspath(shutil.which(parsed.python) or parsed.python)
    overlay = Overlay(find_site(python))
    if parsed.to:
        return overlay.lay_to(parsed.to.expanduser().absolute())
    if parsed.record:
        return record(overlay.site)
    if parsed.status:
        return overlay.status()
    with releases.locked(overlay.site / "torch"):
        overlay.settle()
        return overlay.undo() if parsed.undo else overlay.lay()


def main(arguments: list[str]) -> int:
    """Returns the exit status; an error is one line on stderr, a refusal a list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", nargs="?", type=Path, metavar="CHECKOUT")
    parser.add_argument("--python", default=sys.executable, metavar="PATH")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--to", type=Path, metavar="DIR")
    for option in ("status", "undo", "record"):
        what.add_argument(f"--{option}", action="store_true")
    parsed = parser.parse_args(arguments)
    try:
        print(run(parsed))
        return 0
    except ToolError as error:
        text = str(error)
    except OSError as error:
        text = f"{error.strerror or error}: {error.filename}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text = f"{error.filename} cannot be written: --to DIR leaves it as it is"
    print(f"error: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
