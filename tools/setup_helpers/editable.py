"""The in-place build as setup.py needs it: for the Python that runs it."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.setup_helpers import wheel
from tools.setup_helpers.cli import given_wheel
from tools.setup_helpers.environment import installed_torch
from tools.setup_helpers.inplace import InPlaceBuild
from tools.setup_helpers.report import explain, Progress, SetupError


# The commands by which pip asks for the requirements of an editable install.
# They are known only once the base is there.
METADATA_COMMANDS = {"dist_info", "editable_wheel", "develop"}


def build_in_place(root: Path) -> tuple[list[str], list[str]]:
    """Lays the base under ``root``; returns its requirements and ours, and commands.

    pip installs both, and writes the path file.
    """
    progress = Progress()
    build = InPlaceBuild(root, progress)
    try:
        version = installed_torch()
        if version is not None:
            raise SetupError(
                f"torch {version} is installed here and would hide this tree; "
                "first: pip uninstall torch"
            )
        build.lay_under(Path(sys.executable), given_wheel())
    except (SetupError, OSError) as error:
        text = explain(error) if isinstance(error, OSError) else str(error)
        sys.exit(f"error: {text}")
    base = wheel.unpacked_distribution(build.base)
    scripts = [f"{k} = {v}" for k, v in wheel.console_scripts(base).items()]
    return [*(base.requires or []), *_requirements(build.requirements_file)], scripts


def _requirements(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]
