"""The commands behind the Makefile's targets: setup, clean, wheel.

They work on the release that ``TORCH_RELEASE`` names, or else on the default.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tools.setup_helpers import wheel
from tools.setup_helpers.build import Build
from tools.setup_helpers.releases import chosen_release, DEFAULT, known, RELEASES
from tools.setup_helpers.report import explain, megabytes, Progress, SetupError


if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.setup_helpers.releases import Release


ROOT = Path(__file__).resolve().parents[2]


def given_wheel() -> Path | None:
    """Returns the wheel that the user named in ``TORCH_WHEEL``, if any."""
    name = os.environ.get("TORCH_WHEEL")
    return Path(name).expanduser().absolute() if name else None


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="setup_helpers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    setup = commands.add_parser("setup", help="build in place, with .venv")
    models = "install requirements-models.txt too"
    setup.add_argument("--models", action="store_true", help=models)
    clients = "and requirements-clients.txt, into an environment over .venv"
    setup.add_argument("--clients", action="store_true", help=clients)
    commands.add_parser("clean", help="leave the clone as it was")
    commands.add_parser("wheel", help="write the release's wheel with our files in it")
    commands.add_parser("releases", help="print the releases that there are")
    return parser.parse_args(arguments)


def run(
    arguments: argparse.Namespace,
    make_build: Callable[[Progress, Release], Build],
    progress: Progress,
) -> None:
    chosen = chosen_release()
    build = make_build(progress, chosen or DEFAULT)
    if arguments.command == "releases":
        print(f"RELEASE=VERSION takes one of the releases {known()}")
    elif arguments.command == "clean":
        for release in [chosen] if chosen else RELEASES:
            make_build(progress, release).clean()
        if not chosen:
            build.clean_rest()
    elif arguments.command == "wheel":
        began_s = time.monotonic()
        path = build.make_wheel(given_wheel())
        took = f"{megabytes(path.stat().st_size)}, {time.monotonic() - began_s:.1f} s"
        progress.phase(f"{path.relative_to(build.root)}: {took}")
    else:
        changed = build.set_up(
            given_wheel(),
            with_models=arguments.models,
            with_clients=arguments.clients,
        )
        version = wheel.unpacked_distribution(build.unpacked).version
        where = build.home.relative_to(build.root)
        state = "up to date"
        if changed:
            state = f"set up: {where}/.venv/bin/python imports it"
        progress.phase(f"torch {version} in {where}, {state}")


def build_here(progress: Progress, release: Release) -> Build:
    return Build(ROOT, progress, release)


def main(
    arguments: list[str],
    make_build: Callable[[Progress, Release], Build] = build_here,
) -> int:
    """Runs one command; an error is one line on stderr and exit status 1."""
    progress = Progress()
    try:
        run(parse_arguments(arguments), make_build, progress)
    except (SetupError, OSError) as error:
        progress.end()
        text = explain(error) if isinstance(error, OSError) else str(error)
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.end()
        print("error: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    return 0
