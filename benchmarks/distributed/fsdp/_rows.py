"""One line for each comparison, and the table of all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from _ratios import Samples, Spread
from tabulate import SEPARATING_LINE, tabulate


@dataclass(frozen=True)
class Row:
    """What the branch takes, what another way takes, and the ratio of the two."""

    part: str
    case: str
    quantity: str  # with its unit
    branch: float
    versus: str
    other: float
    ratio: Spread
    bar: float | None = None  # the ratio should not be above it

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        return "yes" if self.ratio.median <= self.bar else "NO"


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


@dataclass
class PartResult:
    """The rows of one part, with what its picture and the JSON need beside them."""

    rows: list[Row] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    # Why nothing was measured, if so
    skipped: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": as_json(self.rows),
            "data": self.data,
            "skipped": self.skipped,
        }

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> "PartResult":
        spreads = [Spread(**row.pop("ratio")) for row in found["rows"]]
        rows = [Row(ratio=s, **row) for s, row in zip(spreads, found["rows"])]
        return cls(rows, found["data"], found["skipped"])


@dataclass(frozen=True)
class Timed:
    """A comparison to make a row of: two subjects of a group, and the bar."""

    group: str
    case: str
    branch: str
    versus: str
    bar: float | None = None


def timed_rows(
    part: str, quantity: str, metric: str, samples: Samples, timed: Iterable[Timed]
) -> list[Row]:
    return [
        Row(
            part,
            t.case,
            quantity,
            samples.spread(t.group, t.branch, metric).median,
            t.versus,
            samples.spread(t.group, t.versus, metric).median,
            samples.ratio(t.group, t.branch, t.versus, metric),
            t.bar,
        )
        for t in timed
    ]


HEADER = (
    "part",
    "case",
    "quantity",
    "branch",
    "compared with",
    "other",
    "ratio",
    "quartiles",
    "at most",
    "met",
)


def table(results: dict[str, PartResult], style: str = "simple") -> str:
    """Returns the table of all parts that were measured."""
    lines: list[Any] = []
    for result in results.values():
        last: tuple[str, ...] = ("", "", "")
        for row in result.rows:
            labels = (row.part, row.case, row.quantity)
            lines.append([*_unrepeated(labels, last), *_cells(row)])
            last = labels
        if result.rows and style == "simple":
            lines.append(SEPARATING_LINE)
    if lines and style == "simple":
        lines.pop()
    align = ["left"] * 3 + ["right", "left"] + ["right"] * 5
    return tabulate(lines, HEADER, style, disable_numparse=True, colalign=align)


def _unrepeated(labels: Sequence[str], last: Sequence[str]) -> list[str]:
    """Leaves out what the line above says already, from the left."""
    for i, (label, above) in enumerate(zip(labels, last)):
        if label != above:
            return [""] * i + list(labels[i:])
    return [""] * len(labels)


def _cells(row: Row) -> list[str]:
    ratio = row.ratio
    exact = ratio.low == ratio.high
    # Of what is timed only the ratio says something about another machine; what
    # it was made of is in the JSON
    return [
        number(row.branch) if exact else "",
        row.versus,
        number(row.other) if exact else "",
        f"{ratio.median:.3f}",
        "exact" if exact else f"{ratio.low:.3f} to {ratio.high:.3f}",
        "" if row.bar is None else f"{row.bar:.2f}",
        row.verdict,
    ]


def number(value: float) -> str:
    """Whole numbers as they are, others with three digits or more."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
