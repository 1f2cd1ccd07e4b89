"""
What is expected of each figure: ``docs/gpu.md`` shows this table, and a report compares
with it. It was written before anybody had run the branch on a device.
"""

import operator
from dataclasses import dataclass


WRONG, SLOWER = "wrong", "slower than expected"
RELATIONS = {"=": operator.eq, "at most": operator.le, "at least": operator.ge}


@dataclass(frozen=True)
class Expectation:
    """Of figures whose ``part.case.figure`` the pattern matches; the first row counts."""

    figures: str
    relation: str
    value: float
    otherwise: str
    because: str

    @property
    def bound(self) -> str:
        return f"{self.relation} {self.value:g}"

    def holds(self, value: float) -> bool:
        return RELATIONS[self.relation](value, self.value)


EXPECTED = (
    Expectation(
        "right_*.differs",
        "=",
        0,
        WRONG,
        "the contract: a uniform unit has the release's bits, a mixed one those of one "
        "unit for each dtype, and `grad_comm_dtype` the same on any mesh. So it is on a CPU",
    ),
    Expectation(
        "right_*.beyond_rounding",
        "=",
        0,
        WRONG,
        "half an eps for each addition, of magnitudes, and 16 more for other kernels",
    ),
)


def expected_table() -> str:
    """Returns the table of the documentation."""
    lines = ["| figure | expected | else | because |", "|---|---|---|---|"]
    lines += [
        f"| `{row.figures}` | {row.bound} | {row.otherwise} | {row.because} |"
        for row in EXPECTED
    ]
    return "\n".join(lines)
