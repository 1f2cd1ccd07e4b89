"""Python environments: creating one, running its pip, pointing it at the tree."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tools.setup_helpers.files import write_whole
from tools.setup_helpers.report import SetupError


if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from tools.setup_helpers.report import Progress


# The entries of the stamp that tell of packages
INSTALLED = ("requirements", "models", "clients")
PTH_NAME = "torch-fsdp2-mixed-dtype.pth"
# A shell finds the Python beside the script, as `#!` cannot name a path with spaces
# or a long one.  To Python, which reads the file next, that is a string.
_SCRIPT = """\
#!/bin/sh
'''exec' "$(dirname -- "$(readlink -f -- "$0")")/python" "$0" "$@"
'''
import sys

from {module} import {function}

if __name__ == "__main__":
    sys.exit({function}())
"""


class Stamp:
    """A JSON file beside or inside what set-up made: which inputs it was made of.

    A step drops its entry before it starts and writes it when it is done.  So an
    entry that is missing tells of an interruption, and one that differs of a
    change.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.entries: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            self.entries = {}

    def get(self, key: str) -> Any:
        return self.entries.get(key)

    def put(self, key: str, value: Any) -> None:
        """Sets an entry, or drops it where ``value`` is None."""
        if value is None:
            self.entries.pop(key, None)
        else:
            self.entries[key] = value
        write_whole(self.path, (json.dumps(self.entries, indent=2) + "\n").encode())


class Pip:
    """The pip of an environment, under the user's own pip configuration."""

    def __init__(self, python: Path, progress: Progress) -> None:
        self._command = [str(python), "-m", "pip", "--disable-pip-version-check"]
        self._progress = progress

    def download(self, requirement: str, folder: Path) -> None:
        """Fetches the wheel that satisfies ``requirement`` into ``folder``."""
        arguments = ["download", "--no-deps", "--only-binary", ":all:"]
        # One large file: on a terminal, pip's own bar shows how far it is.
        problem = self._run(
            [*arguments, "--dest", str(folder), requirement],
            shows_own_progress=self._progress.live,
        )
        if problem:
            raise SetupError(
                f"pip cannot fetch {requirement}: {problem}; "
                "TORCH_WHEEL=PATH takes a wheel from the disk"
            )

    def install(self, requirements: Sequence[str], *files: Path) -> None:
        """Installs everything in one go, so that pip resolves it as a whole."""
        arguments = [f"--requirement={file}" for file in files]
        problem = self._run(["install", *arguments, *requirements])
        if problem:
            hint = "PIP_FIND_LINKS=FOLDER takes wheels from the disk"
            where = f"; {hint}" if "No matching" in problem else ""
            raise SetupError(f"pip cannot install the requirements: {problem}{where}")

    def _run(
        self, arguments: list[str], *, shows_own_progress: bool = False
    ) -> str | None:
        """Runs pip; returns None, or the line in which it says what is wrong."""
        with tempfile.TemporaryFile("w+", errors="replace") as stderr:
            with subprocess.Popen(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=None if shows_own_progress else subprocess.PIPE,
                stderr=stderr,
                text=True,
                errors="replace",
                close_fds=False,  # see locked
            ) as process:
                for line in process.stdout or ():
                    if line.startswith(("Collecting", "Downloading", "Installing")):
                        self._progress.update(line.strip())
            self._progress.end()
            if process.returncode == 0:
                return None
            stderr.seek(0)
            return _last_error(stderr.read()) or f"it stopped with {process.returncode}"


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if "ERROR: " in line]
    text = (errors or lines or [""])[-1]
    if any("Retrying (" in line for line in lines):
        text += " (the package index cannot be reached)"
    return text


class Environment:
    """The ``.venv`` of a release, or one that lies over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.stamp = Stamp(folder / "setup.json")

    @property
    def is_current(self) -> bool:
        """Whether it was made for this Python, at this place, to the end."""
        return self.stamp.get("python") == self._identity() and self.python.exists()

    def create(self, *, with_pip: bool = True) -> None:
        """Makes the folder, which must not be there yet."""
        for module in ("venv", "ensurepip") if with_pip else ("venv",):
            if not importlib.util.find_spec(module):
                version = f"{sys.version_info.major}.{sys.version_info.minor}"
                raise SetupError(
                    f"this Python has no {module} module, which makes the virtual "
                    f"environment; on Debian and Ubuntu, apt install "
                    f"python{version}-venv"
                )
        self.folder.mkdir(parents=True)
        self.stamp = Stamp(self.stamp.path)
        # From inside a virtual environment, the Python that it was made with.
        python = getattr(sys, "_base_executable", None) or sys.executable
        _make_venv(python, "venv", "--without-pip", str(self.folder))
        if with_pip:
            # By itself, as venv would not pass on why it failed.
            _make_venv(self.python, "ensurepip", "--upgrade", "--default-pip")
        self.stamp.put("python", self._identity())

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))

    def point_at(self, *folders: Path) -> None:
        """Puts folders on the import path, behind the environment's own packages."""
        lines = "".join(f"{folder}\n" for folder in folders)
        _write_if_changed(self.site_packages / PTH_NAME, os.fsencode(lines))

    def add_scripts(self, scripts: dict[str, str]) -> None:
        """Puts the release's commands into bin."""
        for name, target in scripts.items():
            module, _, function = target.partition(":")
            text = _SCRIPT.format(module=module, function=function)
            _write_if_changed(self.folder / "bin" / name, text.encode(), mode=0o755)

    def installed(self) -> list[str]:
        """Returns what tells whether its packages changed."""
        return [str(self.stamp.get(key)) for key in ("python", *INSTALLED)]

    def has_installed(self, entry: str, requirements: list[str], *ours: Path) -> bool:
        """Whether the stamp's ``entry`` is of these requirements."""
        return self.stamp.get(entry) == _requirements_digest(requirements, *ours)

    def install(
        self,
        entry: str,
        pip: Pip,
        requirements: list[str],
        *ours: Path,
        made_of: list[str] | None = None,
    ) -> None:
        """Installs what the release requires and our files name.

        ``made_of`` is what ``has_installed`` is to be asked for, if that is more.

        A pip that is cut off may leave any package in halves, those of another
        entry too: until it is done, none holds.
        """
        others = {key: self.stamp.get(key) for key in INSTALLED if key != entry}
        for key in INSTALLED:
            self.stamp.put(key, None)
        pip.install(requirements, *ours)
        others[entry] = _requirements_digest(made_of or requirements, *ours)
        for key, value in others.items():
            self.stamp.put(key, value)

    def _identity(self) -> dict[str, str]:
        return {
            "abi": str(sysconfig.get_config_var("SOABI")),
            "home": os.path.realpath(sys.base_prefix),
            "folder": str(self.folder),
        }


def _make_venv(python: Path | str, module: str, *arguments: str) -> None:
    """Runs a module that makes a part of the environment."""
    result = subprocess.run(
        [python, "-I", "-m", module, *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        close_fds=False,  # see locked
    )
    if result.returncode != 0:
        reason = _last_error(result.stderr or result.stdout)
        raise SetupError(f"cannot make .venv: {reason or 'it gives no reason'}")


def installed_torch() -> str | None:
    """Returns the version of a torch that would hide the tree's, if there is one.

    Its folder stands before the tree on the import path.
    """
    paths = sysconfig.get_paths()
    folders = [paths["purelib"], paths["platlib"]]
    for distribution in importlib.metadata.distributions(name="torch", path=folders):
        return distribution.version
    return None


def _requirements_digest(requirements: list[str], *ours: Path) -> str:
    texts = ["\n".join(requirements).encode(), *(path.read_bytes() for path in ours)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _write_if_changed(path: Path, data: bytes, mode: int = 0o644) -> None:
    if not path.exists() or path.read_bytes() != data:
        write_whole(path, data, mode)
