"""The in-place build as setup.py needs it: for the Python that runs it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tools.setup_helpers import wheel
from tools.setup_helpers.build import Build, CLIENTS, EXAMPLES, MODELS, REQUIREMENTS
from tools.setup_helpers.cli import given_wheel
from tools.setup_helpers.environment import installed_torch
from tools.setup_helpers.releases import chosen_release, DEFAULT
from tools.setup_helpers.report import explain, Progress, SetupError


# The commands by which pip asks for the requirements of an editable install.
# They are known only once the release is there.
METADATA_COMMANDS = {"dist_info", "editable_wheel", "develop"}
# By what follows the name in `pip install -e '.[dev]'`
EXTRAS = {
    "examples": (EXAMPLES, MODELS),
    "dev": (*REQUIREMENTS, MODELS),
    "clients": (CLIENTS,),
}


@dataclass(frozen=True)
class Metadata:
    """What pip is told, to install it beside the path file that it writes."""

    requirements: list[str] = field(default_factory=list)
    """The release's alone: who uses the branch needs no more than who uses that."""
    extras: dict[str, list[str]] = field(default_factory=dict)
    scripts: list[str] = field(default_factory=list)
    version: str = DEFAULT.version
    folder: str = "."
    """The tree to put on the import path, as seen from the clone."""


def build_in_place(root: Path) -> Metadata:
    """Lays the tree of a release; returns what pip must know of it."""
    try:
        build = Build(root, Progress(), chosen_release() or DEFAULT)
        version = installed_torch()
        if version is not None:
            raise SetupError(
                f"torch {version} is installed here and would hide this tree; "
                "first: pip uninstall torch"
            )
        build.lay_under(Path(sys.executable), given_wheel())
    except (SetupError, OSError) as error:
        text = explain(error) if isinstance(error, OSError) else str(error)
        if importlib.util.find_spec("pip") is None:  # as in an isolated build
            text += "; with pip: pip install --no-build-isolation -v -e ."
        sys.exit(f"error: {text}")
    distribution = wheel.unpacked_distribution(build.unpacked)
    scripts = [f"{k} = {v}" for k, v in wheel.console_scripts(distribution).items()]
    return Metadata(
        requirements=list(distribution.requires or []),
        extras=extras_of(root),
        scripts=scripts,
        version=build.release.version,
        folder=build.branch.relative_to(root).as_posix(),
    )


def extras_of(root: Path) -> dict[str, list[str]]:
    """Returns what each extra asks for, from our files of requirements."""
    return {
        extra: [line for file in files for line in _requirements(root / file)]
        for extra, files in EXTRAS.items()
    }


def _requirements(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]
