"""Draws what was measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _rows import PartResult, Row
from matplotlib import pyplot as plt


MIB = 2**20
BRANCH_COLOR, RELEASE_COLOR = "tab:blue", "tab:gray"

plt.switch_backend("Agg")  # draws to files, with or without a display


def draw(results: dict[str, PartResult], folder: Path) -> list[Path]:
    """Draws a picture of each part that was measured; returns their paths."""
    paths = []
    for name, result in results.items():
        if not result.rows:
            continue
        path = folder / f"{name}.png"
        if name == "bytes":
            _draw_bytes(path, result.data["blocks"])
        elif name == "growth":
            _draw_growth(path, result.data["curves"])
        else:
            _draw_ratios(path, result.rows, TITLES[name])
        paths.append(path)
    return paths


TITLES = {
    "host": "Host time per unit and step, over that of the release",
    "step": "Time of a step, 4 gloo processes, over that of other ways",
    "memory": "Peak memory of a rank, over that of other ways",
    "cuda": "On a CUDA device: bandwidth and host time, over those of others",
}


def _draw_ratios(path: Path, rows: Sequence[Row], title: str) -> None:
    """A bar for each ratio, its quartiles, and what it should stay under."""
    height = 1.2 + 0.34 * len(rows)
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    labels = [f"{row.case}: {row.quantity}\nover {row.versus}" for row in rows]
    medians = np.array([row.ratio.median for row in rows])
    below = medians - [row.ratio.low for row in rows]
    above = [row.ratio.high for row in rows] - medians
    places = np.arange(len(rows))
    axes.barh(places, medians, xerr=[below, above], color=BRANCH_COLOR, capsize=3)
    bars = [(i, row.bar) for i, row in enumerate(rows) if row.bar is not None]
    for i, (place, bar) in enumerate(bars):
        label = "at most" if i == 0 else None
        axes.plot([bar] * 2, [place - 0.4, place + 0.4], color="tab:red", label=label)
    axes.axvline(1, color="black", linewidth=1, linestyle=":", label="equal")
    axes.set_yticks(places, labels, fontsize=7)
    axes.set(title=title, xlabel="ratio: median and quartiles", xlim=(0, None))
    axes.invert_yaxis()
    figure.legend(loc="outside lower right", ncols=2)
    _finish(figure, axes, path)


def _draw_bytes(path: Path, data: dict[str, Any]) -> None:
    """A bar for each block and way, split into what is gathered and what reduced."""
    ways = [(block, way) for block, found in data.items() for way in found["ways"]]
    height = 1 + 0.42 * len(ways)
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    labels = [f"{block}\n{way['way']}" for block, way in ways]
    gathered = [way["gathered_nbytes"] / MIB for _, way in ways]
    reduced = [way["reduced_nbytes"] / MIB for _, way in ways]
    places = np.arange(len(ways))
    axes.barh(places, gathered, color=BRANCH_COLOR, label="all-gather")
    axes.barh(
        places, reduced, left=gathered, color="tab:orange", label="reduce-scatter"
    )
    longest = max(a + b for a, b in zip(gathered, reduced))
    for place, (block, way) in enumerate(ways):
        end = gathered[place] + reduced[place]
        note = f"{end:.1f} MiB, {way['collectives']} collectives"
        axes.text(end + 0.01 * longest, place, note, va="center", fontsize=7)
        own = data[block]["own_nbytes"] / MIB
        label = "the parameters' own bytes" if place == 0 else None
        axes.plot([own] * 2, [place - 0.4, place + 0.4], color="tab:red", label=label)
    axes.set_yticks(places, labels, fontsize=7)
    axes.set(
        title="Sent in one step, three blocks, 8 ranks",
        xlabel="MiB",
        xlim=(0, 1.3 * longest),
    )
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3)
    _finish(figure, axes, path)


def _draw_growth(path: Path, curves: dict[str, Any]) -> None:
    """A line for each side and kind of unit, over units and over parameters."""
    figure, both = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    styles = {"uniform fp32": "-o", "dtype": "--s", "in a unit": "--o"}
    y_labels = ("microseconds / step", "microseconds / unit and step")
    for axes, (x_label, subjects), y_label in zip(both, curves.items(), y_labels):
        for subject, curve in subjects.items():
            style = next(s for end, s in styles.items() if subject.endswith(end))
            color = BRANCH_COLOR if subject.startswith("branch") else RELEASE_COLOR
            points = curve["counts"], curve["median_us"]
            axes.plot(*points, style, color=color, label=subject)
        axes.set(xlabel=x_label, ylabel=y_label, xscale="log", yscale="log")
        counts = sorted({n for c in subjects.values() for n in c["counts"]})
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    both[0].legend(fontsize=8)
    figure.suptitle("Host time")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _finish(figure: Any, axes: Any, path: Path) -> None:
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
