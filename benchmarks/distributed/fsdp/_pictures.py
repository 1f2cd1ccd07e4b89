"""Draws what was measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _rows import PartResult, Row
from matplotlib import pyplot as plt


MIB = 2**20
BRANCH_COLOR, RELEASE_COLOR = "tab:blue", "tab:gray"
# By how the name of what is drawn begins
COLORS = {
    "branch": BRANCH_COLOR,
    "gradients promoted": "tab:orange",
    "release, all fp32": "tab:green",
    "release, one unit per dtype": "tab:purple",
    "release, fp32, bf16 compute": "tab:brown",
    "release": RELEASE_COLOR,
    "BACKWARD_PRE": "tab:cyan",
    "the same sums": "tab:olive",
}

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
    "host": "Host time per unit and step: the branch over others (lower is better)",
    "step": "Time of a step, 4 gloo processes: the branch over others (lower is better)",
    "memory": "Peak memory of a rank: the branch over others (lower is better)",
    "cuda": "On a CUDA device: bandwidth and host time of the branch, over others",
}


def color_of(name: str) -> str:
    """The same thing has the same color in all pictures."""
    return next((COLORS[k] for k in COLORS if name.startswith(k)), "tab:pink")


def by_model(names: Sequence[str]) -> list[str]:
    """Returns each name once, those of a model together, in order of appearance."""
    models = list(dict.fromkeys(name.partition(",")[0] for name in names))
    unique = dict.fromkeys(names)
    return sorted(unique, key=lambda name: models.index(name.partition(",")[0]))


GAP = 0.7  # between the bars of two groups


def _draw_ratios(path: Path, rows: Sequence[Row], title: str) -> None:
    """A bar for each ratio, its quartiles, and what it should stay under."""
    one_quantity = len({row.quantity for row in rows}) == 1
    labels = [r.case if one_quantity else f"{r.case}: {r.quantity}" for r in rows]
    groups = by_model(labels)
    figure, axes = _bars(len(rows) + GAP * len(groups))
    place, middles = 0.0, []
    for group in groups:
        of_group = [row for row, label in zip(rows, labels) if label == group]
        middles.append(place + (len(of_group) - 1) / 2)
        for row in of_group:
            ratio = row.ratio
            error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
            color = color_of(row.versus)
            axes.barh(place, ratio.median, color=color, label=f"over {row.versus}")
            if ratio.low != ratio.high:
                axes.errorbar(ratio.median, place, xerr=error, color="black", capsize=2)
            axes.text(0.01, place, f"{ratio.median:.2f}", va="center", fontsize=7)
            if row.bar is not None:
                bounds = [place - 0.4, place + 0.4]
                axes.plot([row.bar] * 2, bounds, color="tab:red", label="at most")
            place += 1
        place += GAP
    axes.axvline(1, color="black", linewidth=1, linestyle=":", label="equal")
    axes.set_yticks(middles, groups, fontsize=8)
    exact = all(row.ratio.low == row.ratio.high for row in rows)
    axes.set(title=title, xlabel="ratio" if exact else "ratio: median and quartiles")
    axes.set(xlim=(0, None))
    _finish(figure, axes, path)


def _draw_bytes(path: Path, data: dict[str, Any]) -> None:
    """A bar for each block and way, split into what is gathered and what reduced."""
    count = sum(len(found["ways"]) + GAP for found in data.values())
    figure, axes = _bars(count)
    place, middles, longest = 0.0, [], 0.0
    for found in data.values():
        own, ways = found["own_nbytes"] / MIB, found["ways"]
        middles.append(place + (len(ways) - 1) / 2)
        for way in ways:
            gathered = way["gathered_nbytes"] / MIB
            end = gathered + way["reduced_nbytes"] / MIB
            longest = max(longest, end)
            color = color_of(way["way"])
            axes.barh(place, gathered, color=color, label=way["way"])
            axes.barh(place, end - gathered, left=gathered, color=color, alpha=0.5)
            note = f" {end:.1f}, {way['collectives']} collectives"
            axes.text(end, place, note, va="center", fontsize=7)
            bounds = [place - 0.4, place + 0.4]
            label = "the parameters' own bytes"
            axes.plot([own] * 2, bounds, color="tab:red", label=label)
            place += 1
        place += GAP
    axes.set_yticks(middles, data, fontsize=8)
    axes.set(
        title="Sent in one step, three blocks, 8 ranks (lower is better)",
        xlabel="MiB: all-gathers, and in light reduce-scatters",
        xlim=(0, 1.3 * longest),
    )
    _finish(figure, axes, path)


def _bars(height: float) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.24 * height), layout="constrained")
    axes.invert_yaxis()
    return figure, axes


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
    figure.suptitle("Host time (lower is better)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _finish(figure: Any, axes: Any, path: Path) -> None:
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles))
    figure.legend(once.values(), once, loc="outside lower center", ncols=3, fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
