"""Runs release and branch in turns, and says how much one takes of what the other does.

[Note: Ratios of pairs]
A machine that others use as well is slower at times, for both sides alike. So a time is
never compared with one taken minutes before: each round measures all subjects of a
group one after the other, release and branch alternating, and gives one ratio. What is
reported is the median of the ratios, with their interquartile range: half of all rounds
lie inside it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from _sides import Side
from tqdm import tqdm


@dataclass(frozen=True)
class Subject:
    """What one side measures: ``request`` are arguments of a part's ``measure``."""

    name: str
    side: str  # "release" or "branch"
    request: dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Subjects that are compared with one another, in the order of a round."""

    name: str
    subjects: tuple[Subject, ...]


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, median, high = np.percentile(values, (25, 50, 75))
        return cls(float(median), float(low), float(high), len(values))


@dataclass
class Samples:
    """What each subject of each group measured, a value of each metric per round."""

    values: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)

    def add(self, group: str, subject: str, measured: dict[str, float]) -> None:
        metrics = self.values.setdefault((group, subject), {})
        for metric, value in measured.items():
            metrics.setdefault(metric, []).append(value)

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"group": group, "subject": subject, **metrics}
            for (group, subject), metrics in self.values.items()
        ]

    def of(self, group: str, subject: str, metric: str) -> list[float]:
        return self.values[group, subject][metric]

    def spread(self, group: str, subject: str, metric: str) -> Spread:
        return Spread.of(self.of(group, subject, metric))

    def ratio(self, group: str, above: str, below: str, metric: str) -> Spread:
        """How much ``above`` takes of what ``below`` does, round by round."""
        pairs = zip(
            self.of(group, above, metric), self.of(group, below, metric), strict=True
        )
        return Spread.of([a / b for a, b in pairs])


def alternate(
    part: str,
    sides: dict[str, Side],
    groups: Sequence[Group],
    *,
    rounds: int,
    launches: int = 1,
) -> Samples:
    """
    Measures every subject once in each of ``rounds``. If there are several
    ``launches``, each begins with new processes, so that what a process has by chance
    (the addresses that it got, the order in which it hashes) is averaged out as well.
    The processes of the last one are left for who measures next, and for :func:`stop`.
    """
    samples = Samples()
    total = rounds * sum(len(group.subjects) for group in groups)
    interval = 0.5 if sys.stderr.isatty() else 10.0
    with tqdm(total=total, desc=f"{part:>7}", unit="run", mininterval=interval) as bar:
        for launch in range(launches):
            first, last = (rounds * (launch + i) // launches for i in range(2))
            if launches > 1:
                stop(sides)
            for side in sides.values():
                side.start()
            for group in [g for _ in range(first, last) for g in groups]:
                for subject in group.subjects:
                    bar.set_postfix_str(f"{group.name}: {subject.name}", False)
                    measured = sides[subject.side].ask(part, subject.request)
                    samples.add(group.name, subject.name, measured)
                    bar.update()
    return samples


def stop(sides: dict[str, Side]) -> None:
    """Ends the processes of both sides."""
    for side in sides.values():
        side.stop()
