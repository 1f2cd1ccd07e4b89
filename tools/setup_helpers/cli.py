"""The commands behind the Makefile's targets: setup, clean, fork, wheel.

They work on the base that ``TORCH_BASE`` names, or else on the one of the tree that
they are run in.  ``tree`` tells where that base's tree is, and ``bases`` which
there are.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tools.setup_helpers import tree, wheel
from tools.setup_helpers.inplace import InPlaceBuild
from tools.setup_helpers.mirror import build_of, clean_all
from tools.setup_helpers.releases import chosen_release, find_release, known
from tools.setup_helpers.report import explain, megabytes, Progress, SetupError


if TYPE_CHECKING:
    from collections.abc import Callable


ROOT = Path(__file__).resolve().parents[2]


def given_wheel() -> Path | None:
    """Returns the wheel that the user named in ``TORCH_BASE_WHEEL``, if any."""
    name = os.environ.get("TORCH_BASE_WHEEL")
    return Path(name).expanduser().absolute() if name else None


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="setup_helpers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    setup = commands.add_parser("setup", help="build in place, with .venv")
    models = "install requirements-models.txt too"
    setup.add_argument("--models", action="store_true", help=models)
    clients = "and requirements-clients.txt, into build/clients"
    setup.add_argument("--clients", action="store_true", help=clients)
    commands.add_parser("clean", help="leave the clone as it was")
    commands.add_parser("wheel", help="write the base's wheel with our files in it")
    fork = commands.add_parser("fork", help="make a file of the base ours")
    fork.add_argument("file")
    commands.add_parser("tree", help="print the folder of the base's tree")
    commands.add_parser("bases", help="print the releases that there are")
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace, here: InPlaceBuild) -> None:
    clone, release = here.main, chosen_release()
    build = build_of(clone, release) if release else here
    if arguments.command == "tree":
        print(build.root)
    elif arguments.command == "bases":
        print(f"BASE=VERSION takes one of the releases {known()}")
    elif arguments.command == "clean":
        clean_all(clone) if build is clone and not release else build.clean()
    elif arguments.command == "fork":
        build.progress.phase(build.fork(arguments.file))
    elif arguments.command == "wheel":
        began_s = time.monotonic()
        path = build.make_wheel(given_wheel())
        took = f"{megabytes(path.stat().st_size)}, {time.monotonic() - began_s:.1f} s"
        build.progress.phase(f"{path.relative_to(clone.root)}: {took}")
    else:
        changed = build.set_up(
            given_wheel(),
            with_models=arguments.models,
            with_clients=arguments.clients,
        )
        state = "set up" if changed else "up to date"
        version = wheel.unpacked_distribution(build.base).version
        place = "place" if build is clone else build.root.relative_to(clone.root)
        build.progress.phase(f"torch {version} in {place}, {state}")


def build_here(progress: Progress) -> InPlaceBuild:
    """Returns the build of the tree that these tools lie in."""
    clone = InPlaceBuild(tree.clone_of(ROOT), progress)
    is_clone = clone.root == ROOT
    return clone if is_clone else build_of(clone, find_release(ROOT.name))


def main(
    arguments: list[str],
    make_build: Callable[[Progress], InPlaceBuild] = build_here,
) -> int:
    """Runs one command; an error is one line on stderr and exit status 1."""
    progress = Progress()
    try:
        run(parse_arguments(arguments), make_build(progress))
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
