"""
Runs release and branch in turns, and compares their times, bytes and memory.

[Note: Ratios of pairs]
A machine that others use as well is slower at times, for both sides alike. So a time is
never compared with one taken minutes before: each round measures all subjects of a group
one after the other, and gives one ratio. What is reported is the median of the ratios
and their quartiles: half of all rounds lie between them.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from _sides import Side
from tabulate import tabulate
from tqdm import tqdm


class Subject(NamedTuple):
    """What one side measures: ``request`` are arguments of a part's ``measure``."""

    name: str
    side: str  # "release" or "branch"
    request: dict[str, Any]


class Group(NamedTuple):
    """Subjects that are compared with one another, in the order of a round."""

    name: str
    subjects: Sequence[Subject]


class Comparison(NamedTuple):
    """Two subjects of a group; the ratio should be at most ``bar``."""

    group: str
    branch: str
    versus: str
    bar: float | None = None


@dataclass
class Row:
    """A quantity on the branch and in another way, and the ratio with quartiles.

    Without these it is counted, and the same in every run.
    """

    part: str
    case: str
    quantity: str  # with its unit
    branch: float
    versus: str
    other: float
    bar: float | None = None
    low: Any = None
    ratio: Any = None
    high: Any = None

    def __post_init__(self) -> None:
        if self.ratio is None:  # 0 of 0 is 1
            beside_none = float("inf") if self.branch else 1.0
            ratio = self.branch / self.other if self.other else beside_none
            self.low = self.ratio = self.high = ratio

    @property
    def is_met(self) -> bool | None:
        """None if nothing is expected. A NaN is not met."""
        return None if self.bar is None else self.ratio <= self.bar

    def cells(self) -> list[str]:
        # The ratio of times says something about another machine, times alone do not
        is_exact = self.low == self.high
        return [
            self.part,
            self.case,
            self.quantity,
            f"{self.branch:,.6g}" if is_exact else "",
            self.versus,
            f"{self.other:,.6g}" if is_exact else "",
            f"{self.ratio:.3f}",
            "exact" if is_exact else f"{self.low:.3f} to {self.high:.3f}",
            "" if self.bar is None else f"{self.bar:.4g}",
            {None: "", True: "yes", False: "NO"}[self.is_met],
        ]


def table(rows: Iterable[Row]) -> str:
    header = ["part", "case", "quantity", "branch", "compared with", "other", "ratio"]
    header += ["quartiles", "at most", "met"]
    align = ["left"] * 3 + ["right", "left"] + ["right"] * 5
    cells = [row.cells() for row in rows]
    return tabulate(cells, header, "simple", disable_numparse=True, colalign=align)


@dataclass
class Samples:
    """Values of each subject's metrics, one per round."""

    values: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)

    def add(self, group: str, subject: str, measured: dict[str, float]) -> None:
        for metric, value in measured.items():
            self.values.setdefault((group, subject, metric), []).append(value)

    def rows(
        self, part: str, quantity: str, metric: str, comparisons: Iterable[Comparison]
    ) -> list[Row]:
        """See [Note: Ratios of pairs]."""
        rows = []
        for group, branch, versus, bar in comparisons:
            ours, theirs = (
                np.array(self.values[group, name, metric]) for name in (branch, versus)
            )
            quartiles = map(float, np.percentile(ours / theirs, (25, 50, 75)))
            median, other = float(np.median(ours)), float(np.median(theirs))
            row = (part, group, quantity, median, versus, other, bar)
            rows.append(Row(*row, *quartiles))
        return rows


def alternate(
    module: str,
    sides: dict[str, Side],
    groups: Sequence[Group],
    rounds: int = 1,
    launches: int = 1,
) -> Samples:
    """
    Has ``module`` measure every subject once in each of ``rounds``. If there are several
    ``launches``, each begins with new processes, so that what a process has by chance
    (the addresses that it got, the order in which it hashes) is averaged out as well.
    """
    samples = Samples()
    total = rounds * sum(len(group.subjects) for group in groups)
    interval = 0.5 if sys.stderr.isatty() else 10.0
    with tqdm(total=total, desc=module[1:], unit="run", mininterval=interval) as bar:
        for launch in range(launches):
            first, last = (rounds * (launch + i) // launches for i in range(2))
            if launches > 1:
                stop(sides)
            for side in sides.values():
                side.start()
            for group in [g for _ in range(first, last) for g in groups]:
                for subject in group.subjects:
                    bar.set_postfix_str(f"{group.name}: {subject.name}", False)
                    measured = sides[subject.side].ask(module, subject.request)
                    samples.add(group.name, subject.name, measured)
                    bar.update()
    return samples


def stop(sides: dict[str, Side]) -> None:
    """Ends the processes of both sides."""
    for side in sides.values():
        side.stop()
