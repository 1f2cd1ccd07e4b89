"""
The releases that the branch fits, and which files are ours.

``constraints/VERSION.txt`` makes a release one of them: nothing else lists them. The
oldest is the default. Needs only Python and git.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
RELEASES = sorted(
    (path.stem for path in (ROOT / "constraints").glob("*.txt")),
    key=lambda version: [*map(int, version.split("."))],
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
