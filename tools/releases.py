"""
The releases that the branch fits, and which files are their own and which are ours.

``constraints/VERSION.txt`` makes a release one of them: nothing else lists them. The
oldest is the default. Needs only Python and git.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


ROOT = Path(__file__).resolve().parents[1]
DIGESTS = "tools/release_digests.json"
RELEASES = tuple(
    sorted(
        (path.stem for path in (ROOT / "constraints").glob("*.txt")),
        key=lambda version: [*map(int, version.split("."))],
    )
)
DEFAULT, *_, NEWEST = RELEASES
# What make calls RELEASE: that name is too common for an environment
VARIABLE = "TORCH_RELEASE"


class ToolError(Exception):
    """What the user can act on. Its text is what they see."""


def known(last: str = "and") -> str:
    """Returns the versions as a list in words."""
    return f"{', '.join(RELEASES[:-1])} {last} {NEWEST}"


def release_of(version: str) -> str:
    """Returns the release that a version is of: 2.13.0 of 2.13.0+cpu or 2.13.0a0."""
    found = re.sub(r"(a0|rc\d+)?(\+.*)?$", "", version)
    if found not in RELEASES:
        raise ToolError(f"torch {version}: the branch fits {known('or')}")
    return found


def chosen_release() -> str:
    """Returns the release that the user named, or the default."""
    version = os.environ.get(VARIABLE) or DEFAULT
    if version not in RELEASES:
        raise ToolError(f"RELEASE={version}: the branch fits {known('or')}")
    return version


# Files #


def git(folder: Path, *arguments: str | Path, **env: str) -> str:
    """Returns git's output; an error has git's own words."""
    command = ["git", "-C", folder, *arguments]
    done = subprocess.run(command, capture_output=True, env=os.environ | env)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
        raise ToolError(f"git {arguments[0]} failed in {folder}:\n{said}")
    return done.stdout.decode(errors="surrogateescape")


def has_git(folder: Path) -> bool:
    """Whether ``folder`` is the top of a git work tree, and not only inside of one."""
    try:
        top = git(folder, "rev-parse", "--show-toplevel").rstrip("\n")
    except (ToolError, OSError):
        return False
    return Path(top).resolve() == folder.resolve()


def files_under(root: Path, top: str) -> set[str]:
    """Returns the files under ``root/top``, by path from ``root``; no bytecode."""
    return {
        path.relative_to(root).as_posix()
        for path in (root / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def tracked_files(root: Path, *tops: str) -> list[str]:
    """
    Returns our files under ``tops``, to give to others. With git they are the tracked
    ones, and there must be no draft under ``torch``, which may or may not belong there.
    """
    if not has_git(root):
        return sorted(path for top in tops for path in files_under(root, top))

    def listed(*arguments: str) -> list[str]:
        output = git(root, "ls-files", "-z", *arguments)
        return sorted(filter(None, output.split("\0")))

    if drafts := listed("--others", "--exclude-standard", "--", "torch"):
        raise ToolError(f"git does not track {', '.join(drafts)}: add or remove it")
    return listed("--", *tops)


def sha256(path: Path) -> str | None:
    """Returns the digest of a file, None where there is nothing."""
    if not path.is_file():
        return "" if path.exists() else None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def recorded(root: Path, release: str) -> dict[str, str]:
    """Returns the digests of a release's files, by path."""
    return json.loads((root / DIGESTS).read_text()).get(release, {})


def refuse_changed(
    where: Path,
    root: Path,
    release: str,
    ours: Iterable[str],
    place: Callable[[str], Path],
) -> None:
    """
    Refuses a tree in which a file is not the release's own, of those that ours replace
    and of those that ours are written for. ``place`` returns where a file is.
    """
    theirs, told = recorded(root, release), []
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


def listing(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time work on ``folder``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
