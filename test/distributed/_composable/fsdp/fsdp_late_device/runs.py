"""
The long runs of the device that is late, by hand: see ``--help``.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fsdp_late_device import races, schedules, steps
from fsdp_late_device.check import examine, replay, SAME_BITS, show_one
from fsdp_late_device.memory import Device
from fsdp_late_device.orders import explore, Graph
from fsdp_late_device.races import RACES
from fsdp_late_device.schedules import KINDS, SCHEDULES
from fsdp_streams.sites import find_sites, Site

import torch.distributed.fsdp._fully_shard as fsdp_package


# The release has no context of its own, but all of it in the last one
MODULES = [
    importlib.import_module(f"{fsdp_package.__name__}._fsdp{name}")
    for name in ("_collectives", "_context", "_param_group", "_reduce")
    if importlib.util.find_spec(f"{fsdp_package.__name__}._fsdp{name}")
]


def _chosen(names: Iterable[str], only: list[str] | None) -> list[str]:
    return [name for name in names if only is None or any(o in name for o in only)]


def _kinds(args: argparse.Namespace, default: Iterable[str]) -> list[str]:
    return args.kinds or [*default]


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the recorder's."""
    return {"comms_in_order": not args.loose}


def _run_schedules(args: argparse.Namespace) -> bool:
    """All schedules and kinds. Returns whether none gave other bits."""
    total = found = 0
    for kind in _kinds(args, KINDS):
        for name in _chosen(SCHEDULES, args.only):
            print(f"{kind:16} {name:40}", end=" ", flush=True)
            try:
                recording = schedules.record(name, kind, **_options(args))
            except RuntimeError as error:  # as the release raises
                print(error)
                found += 1
                continue
            if args.order is not None:
                print(replay(recording, args.order, args.memory) or SAME_BITS)
                continue
            report = examine(recording, args.orders, schedules.RANKS)
            total += report.orders
            found += not report.is_clean
            print(report, flush=True)
    print(f"{total} orders in all, {found} runs with findings")
    return found == 0


def _run_races(args: argparse.Namespace) -> bool:
    """Published races. Returns whether all that should show do, and no others."""
    missed: list[str] = []
    for title in _chosen(RACES, args.only):
        race = RACES[title]
        print(f"{title} ({race.told})")
        shown = 0
        for name in race.schedules:
            for kind in _kinds(args, race.kinds):
                recording = races.record(race, name, kind, **_options(args))
                report = examine(recording, args.orders)
                count = len(report.findings)
                print(f"    {name}, {kind}: {count} of {report.orders} orders")
                shown += count > 0
        if (shown > 0) != race.shows:
            missed.append(title)
    print("as expected" if not missed else f"not as expected: {missed}")
    return not missed


def visitors(
    kinds: Iterable[str], names: Iterable[str] = tuple(SCHEDULES)
) -> Callable[[Site], Iterator[tuple[str, str]]]:
    """Returns what yields the schedules and kinds that come to a site."""
    visited = {
        (name, kind): schedules.record(name, kind, watched=MODULES).visited
        for kind in kinds
        for name in names
    }

    def visitors_of(site: Site) -> Iterator[tuple[str, str]]:
        for key, lines in visited.items():
            if any(site.is_at(line) for line in lines):
                yield key

    return visitors_of


def show_without(
    site: Site, visits: Iterable[tuple[str, str]], **options: Any
) -> str | None:
    """
    Returns the first of these schedules that differs without a site, if any. Options
    are the recorder's.
    """
    for name, kind in visits:
        recording = schedules.record(
            name, kind, watched=MODULES, without=site, **options
        )
        if show_one(recording) is not None:
            return f"{name}, {kind}"
    return None


def _run_waits(args: argparse.Namespace) -> bool:
    """Each call that orders streams is left out. Returns True."""
    kinds = "uniform", "mixed, cast", "uniform, cast", "mixed"
    visitors_of = visitors(_kinds(args, kinds))
    unseen: list[str] = []
    for site in (site for module in MODULES for site in find_sites(module)):
        if not _chosen([str(site)], args.only):
            continue
        visits = [*visitors_of(site)]
        where = show_without(site, visits, **_options(args))
        if where is None:
            unseen.append(str(site))
        text = where or f"nothing shows in {len(visits)} schedules"
        print(f"{site!s:60} {text}", flush=True)
    print("nothing shows without", *unseen, sep="\n    ")
    return True


def _run_steps(args: argparse.Namespace) -> bool:
    """Small steps in every order. Returns whether none gave other bits."""
    found = 0
    for name in _chosen(steps.STEPS, args.only):
        recording = steps.record(name, **_options(args))
        (start,) = recording.marks
        explored = explore(Device(recording), Graph(recording), start=start)
        print(
            f"{name:24} {len(recording.entries) - start:3} entries, "
            f"{explored.orders:.3g} orders, {explored.states} states",
            explored.finding or "",
        )
        found += explored.finding is not None
    return found == 0


def run_mode(args: argparse.Namespace) -> int:
    """Runs what the command line asks for, one after the other."""
    modes = {
        "steps": _run_steps,
        "races": _run_races,
        "schedules": _run_schedules,
        "waits": _run_waits,
    }
    chosen = [mode for mode in modes if getattr(args, mode)]
    if not chosen:
        raise SystemExit("name a program as FILE.py:FUNCTION, or see --help")
    is_good = True
    for mode in chosen:
        begun = time.process_time()
        is_good &= modes[mode](args)
        print(f"{mode}: {time.process_time() - begun:.0f} s of processor time")
    return not is_good
