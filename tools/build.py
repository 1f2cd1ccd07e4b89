"""In-place build: an environment with a release, and a tree of links that lays ours over.

``build/VERSION`` holds, for each release,

    .venv     the environment, into which pip installs the release and what it requires
    branch    the tree of links, which the environment imports torch from
    base      links to the release itself, for PYTHONPATH
    setup.json  what the environment was made of
    pip.log   what pip said last

A set-up that was cut off is done anew. Needs only Python, and what pip needs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from tools.overlay import lay_links, Overlay, replace_by_link, torch_links
from tools.releases import (
    chosen_release,
    DEFAULT,
    files_under,
    locked,
    release_of,
    ROOT,
    ToolError,
)


DEV = "dev"  # requirements.txt; the other groups are lists of pyproject.toml
TRAIN, MODELS, CLIENTS = "train", "models", "clients"
PTH = "torch-fsdp2-mixed-dtype.pth"
# Follows the release's label in a wheel's version: 2.13.0+cpu.mixeddtype1. Each wheel
# that is given to others gets the next number.
LABEL = "mixeddtype1"


def run(*command: str | Path, **env: str) -> None:
    """Runs a command, which says itself what goes wrong."""
    if status := subprocess.run(command, env=os.environ | env).returncode:
        name = Path(command[0]).name
        raise ToolError(f"{name} stopped with status {status}, see above")


def make_venv(folder: Path, *options: str) -> Path:
    """Makes an environment anew; returns its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    # From inside an environment, the Python that it was made with
    python = getattr(sys, "_base_executable", None) or sys.executable
    run(python, "-m", "venv", *options, folder)
    return folder / "bin/python"


def pip_install(python: Path, log: Path, *arguments: str) -> None:
    """Installs packages; pip's pages go to ``log``, and are shown where it fails."""
    # Python compiles what it imports
    command = (python, "-m", "pip", "install", "--no-compile", *arguments)
    place = python.parents[1].relative_to(ROOT)
    print(f"pip installs into {place}, which may take minutes: {log}", flush=True)
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        print(log.read_text(), file=sys.stderr)
        raise ToolError(f"pip stopped with status {done.returncode}, see above")


def requirements_of(group: str) -> list[str]:
    """Returns what a group has pip install, in a form that tells when it has changed."""
    if group == DEV:
        return [*re.findall(r"(?m)^[a-z].*", (ROOT / "requirements.txt").read_text())]
    # Python 3.10 reads no TOML
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(rf"(?ms)^{group} = \[$(.*?)^\]", text)
    return re.findall('"(.+)"', listed)


def site_of(venv: Path) -> Path:
    return next(venv.glob("lib/python3*/site-packages"))


def lay_trees(site: Path, home: Path) -> None:
    """Brings ``home``'s trees of links up to date with the torch in ``site``."""
    # What pip knows of torch is for the release alone
    known = {path.name: str(path) for path in site.glob("torch-*.dist-info")}
    lay_links(home / "base", torch_links(site, ROOT, ()) | known)
    lay_links(home / "branch", torch_links(site, ROOT, files_under(ROOT, "torch")))


def first_on_path(tree: Path) -> str:
    """Returns a path file's line that puts a tree before the packages beside the file."""
    return f"import sys; sys.path.insert(sys.path.index(sitedir), {str(tree)!r})\n"


class Build:
    """The folders and state of one release's set-up."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.home = ROOT / "build" / release
        self.venv = self.home / ".venv"
        self.stamp = self.home / "setup.json"
        self.log = self.home / "pip.log"
        self.made_of: dict[str, Any] = {}

    def set_up(self, groups: list[str]) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        with locked(self.home):
            if self.stamp.exists():
                self.made_of = json.loads(self.stamp.read_text())
            try:
                self._make_environment([each for each in groups if each != CLIENTS])
                lay_trees(site_of(self.venv), self.home)
                if CLIENTS in groups:
                    self._make_clients()
            except ToolError as error:
                home = self.home.relative_to(ROOT)
                raise ToolError(f"{error}; to begin anew: rm -rf {home}") from None
            for name in (".venv", "build/base") if self.release == DEFAULT else ():
                self._make_short(name)

    def _make_environment(self, groups: list[str]) -> None:
        """Installs the release and the groups, unless that was done."""
        made_of, python = self.made_of, self.venv / "bin/python"
        soabi, prefix = sysconfig.get_config_var("SOABI"), sys.base_prefix
        identity: dict[str, Any] = {
            "python": [soabi, os.path.realpath(prefix), str(self.venv)],
            # The first wheel stays until another is named
            "wheel": named_wheel() or made_of.get("wheel"),
        }
        # Groups that are there stay up to date
        groups = sorted({TRAIN, *groups, *made_of.get("groups", ())})
        wanted = identity | {"groups": {each: requirements_of(each) for each in groups}}
        if wanted.items() <= made_of.items():
            return
        self.stamp.unlink(missing_ok=True)
        if not identity.items() <= made_of.items():
            make_venv(self.venv)
        # pip looks for no other where a wheel comes first
        torch = [*(wanted["wheel"] or ())[:1], f"torch=={self.release}"]
        pip_install(python, self.log, *torch, *sum(wanted["groups"].values(), []))
        (site_of(self.venv) / PTH).write_text(first_on_path(self.home / "branch"))
        self._write_stamp(wanted)
        print(f"torch {self.release}: {python.relative_to(ROOT)} imports the branch")

    def _make_clients(self) -> None:
        """Installs what clients want otherwise than tests do, over ``.venv``."""
        required = requirements_of(CLIENTS)
        wanted = [self.made_of["groups"], required]
        folder = self.venv / "clients"
        if self.made_of.get("clients") == wanted and folder.exists():
            return
        python = make_venv(folder, "--without-pip")
        lines = f"{self.home / 'branch'}\n{site_of(self.venv)}\n"
        (site_of(folder) / PTH).write_text(lines)
        pip_install(python, self.log, f"torch=={self.release}", *required)
        self._write_stamp(self.made_of | {"clients": wanted})

    def _write_stamp(self, made_of: dict[str, Any]) -> None:
        self.made_of = made_of
        partial = self.stamp.with_suffix(".partial")
        partial.write_text(json.dumps(made_of, indent=1))
        partial.replace(self.stamp)

    def _make_short(self, name: str) -> None:
        """Gives what the default release has a short name in the clone."""
        place = ROOT / name
        if place.exists() and not place.is_symlink():
            raise ToolError(f"{name} was not made by set-up: move it out of the way")
        replace_by_link(place, os.path.relpath(self.home / place.name, place.parent))


def named_wheel() -> list[Any] | None:
    """Returns the path of TORCH_WHEEL, and what tells it from another without reading."""
    if not (name := os.environ.get("TORCH_WHEEL")):
        return None
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise ToolError(f"TORCH_WHEEL: there is no wheel at {path}")
    return [str(path), path.stat().st_size, path.stat().st_mtime_ns]


# A wheel #


def make_wheel(release: str) -> Path:
    """Puts our files into the release's wheel; returns the path of ours."""
    home = ROOT / "build" / "wheel"
    python = home / ".venv/bin/python"
    if not (home / ".venv/bin/wheel").exists():
        run(make_venv(home / ".venv"), "-m", "pip", "install", "--quiet", "wheel>=0.45")
    work = home / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    if given := named_wheel():
        wheel = Path(given[0])
    else:
        pip = (python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:")
        run(*pip, f"--dest={work}", f"torch=={release}")
        wheel = next(work.glob("*.whl"))
    run(python, "-m", "wheel", "unpack", f"--dest={work / 'unpacked'}", wheel)
    (unpacked,) = (work / "unpacked").iterdir()
    overlay = Overlay(unpacked)
    if (found := release_of(overlay.version)) != release:
        raise ToolError(f"{wheel} is of torch {overlay.version}: take RELEASE={found}")
    overlay.check()
    for path in overlay.ours:
        (unpacked / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, unpacked / path)
    set_version(unpacked, overlay.version)
    dist = ROOT / "build" / "dist"
    dist.mkdir(exist_ok=True)
    pack = (python, "-m", "wheel", "pack", f"--dest={dist}", unpacked)
    # The clock's date would make each wheel another one
    run(*pack, SOURCE_DATE_EPOCH="315532800")
    shutil.rmtree(work)
    return max(dist.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)


def set_version(unpacked: Path, version: str) -> None:
    """Names the branch in what tells a wheel's version."""
    ours = f"{version}{'.' if '+' in version else '+'}{LABEL}"
    (dist_info,) = unpacked.glob("*.dist-info")
    for path, line in {
        unpacked / "torch/version.py": r"__version__ = ['\"]([^'\"]+)['\"]",
        dist_info / "METADATA": r"Version: (.+)",
    }.items():
        text = path.read_text()
        found = re.search(f"(?m)^{line}$", text)
        if not found:
            raise ToolError(f"{path} does not say which torch this is")
        path.write_text(text[: found.start(1)] + ours + text[found.end(1) :])
    dist_info.rename(unpacked / f"torch-{ours}.dist-info")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("setup", "wheel"))
    groups = ", ".join((DEV, MODELS, CLIENTS))
    parser.add_argument("groups", nargs="*", help=f"what setup installs too: {groups}")
    parsed = parser.parse_args(arguments)
    try:
        release = chosen_release()
        if parsed.command == "wheel":
            print(make_wheel(release).relative_to(ROOT))
        else:
            Build(release).set_up(parsed.groups)
    except (ToolError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
