"""Shows a training run: tables of what was sent and compared, and two pictures."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator
from tabulate import SEPARATING_LINE, tabulate

import torch
from _wire import StepTraffic, Traffic, UnitKind


KIB = 2**10
WIRE_HEADER = (
    "unit",
    "collective",
    "dtype",
    "parameters",
    "calls",
    "bytes",
    "least possible",
)

plt.switch_backend("Agg")  # draws to files, with or without a display


def wire_table(kinds: Iterable[UnitKind], steps: int) -> str:
    """What one step sent, per kind of unit and dtype, and the least possible.

    Parameters count where they are gathered and where their gradients are reduced,
    each time with the dtype that is sent then. What is sent as bytes is of all dtypes.
    """
    rows: list[Iterable[object]] = []
    for kind in kinds:
        name = f"{kind.name} x{kind.units}" if kind.units > 1 else kind.name
        gathers = _cells(kind.gathers.per(steps), kind.least_gathers())
        reduced = {dtype: sent.per(steps) for dtype, sent in kind.reductions.items()}
        total = sum(reduced.values(), Traffic())
        reductions = _cells(total, kind.least_reductions())
        collective, by_dtype = "all-to-all", {}
        if torch.uint8 not in reduced:
            collective, by_dtype = (
                "reduce-scatter",
                {
                    dtype: _cells(
                        reduced.get(dtype, Traffic()), kind.least_reductions(dtype)
                    )
                    for dtype in dict.fromkeys([*kind.reduced_numel, *reduced])
                },
            )
        for row in (
            *_section("all-gather", kind.numel, {}, gathers),
            *_section(collective, kind.reduced_numel, by_dtype, reductions),
        ):
            rows.append([name, *row])
            name = ""
        rows.append(SEPARATING_LINE)
    align = ["left"] * 3 + ["right"] * 4
    return tabulate(rows[:-1], WIRE_HEADER, disable_numparse=True, colalign=align)


def _section(
    collective: str,
    numel: Counter[torch.dtype],
    by_dtype: Mapping[torch.dtype, list[str]],
    total: list[str],
) -> list[list[str]]:
    """A row for each dtype, and one for all of them if there are several."""
    dtypes = dict.fromkeys([*numel, *by_dtype])
    rows = [
        [
            str(dtype).removeprefix("torch."),
            f"{numel[dtype]:,}",
            *by_dtype.get(dtype, [""] * 3),
        ]
        for dtype in dtypes
    ]
    if len(rows) > 1:
        rows.append(["all", f"{numel.total():,}", *total])
    else:
        rows[0][2:] = total
    return [[collective if i == 0 else "", *row] for i, row in enumerate(rows)]


def _cells(sent: Traffic, least: Traffic) -> list[str]:
    numbers = (sent.calls, sent.nbytes, least.nbytes)
    return [f"{number:,.1f}".removesuffix(".0") for number in numbers]


def draw_losses(
    path: Path, losses: Sequence[float], reference: Sequence[float], label: str
) -> None:
    """Draws both runs' losses, and below them how far they are apart."""
    figure, (above, below) = plt.subplots(
        2, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, len(losses) + 1)
    above.plot(steps, losses, color="tab:blue", linewidth=3, alpha=0.5, label=label)
    above.plot(steps, reference, color="black", linewidth=1, label="1 process, no FSDP")
    above.axhline(
        losses[0] / 2, color="gray", linestyle=":", label="half the first loss"
    )
    above.set(ylabel="loss (nats per byte)", ylim=(0, None))
    above.set_title("A language model with bf16, fp32 and fp16 parameters in each unit")
    above.legend()
    # Where both are equal, as at the first steps, a log scale has no place for it
    apart = [abs(a - b) / abs(b) or math.nan for a, b in zip(losses, reference)]
    below.plot(steps, apart, ".-", color="tab:red", linewidth=1, markersize=3)
    below.set(xlabel="step", ylabel="relative\ndifference")
    if not all(map(math.isnan, apart)):
        below.set_yscale("log")
    below.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_wire(path: Path, ways: Sequence[StepTraffic], title: str) -> None:
    """Draws the bytes of one step as a bar per way, with its collectives' number."""
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    labels = [way.label for way in ways]
    gathered = [way.gathers.nbytes / KIB for way in ways]
    reduced = [way.reductions.nbytes / KIB for way in ways]
    axes.barh(labels, gathered, color="tab:blue", label="all-gather")
    axes.barh(
        labels, reduced, left=gathered, color="tab:orange", label="reduce-scatter"
    )
    longest = max(a + b for a, b in zip(gathered, reduced)) or 1.0
    for row, way in enumerate(ways):
        end = gathered[row] + reduced[row]
        calls = way.gathers.calls + way.reductions.calls
        note = f"{end:,.0f} KiB\n{calls:g} collectives"
        axes.text(end + 0.01 * longest, row, note, va="center")
    axes.set(title=title, xlabel="KiB per step", xlim=(0, 1.25 * longest))
    axes.invert_yaxis()
    axes.legend(loc="upper right")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
