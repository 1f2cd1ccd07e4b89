"""
How host time grows with the number of units, and of parameters in a unit.

Straight lines are fitted to each round's host times, least squares of the relative
residuals: 256 parameters do not drown what a unit of one costs. See `_host_time` for
what host time is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _host_time import PER_DTYPE, UNIFORM
from _models import PRECISIONS
from _ratios import alternate, Group, Samples, Spread, Subject
from _rows import PartResult, Row
from _sides import Side


BRANCH_UNIFORM = "branch, uniform fp32"
BRANCH_MIXED = "branch, fp32, bf16 and fp16 in a unit"
SUBJECTS = {
    UNIFORM: ("release", "fp32", False),
    BRANCH_UNIFORM: ("branch", "fp32", False),
    PER_DTYPE: ("release", "mixed", True),
    BRANCH_MIXED: ("branch", "mixed", False),
}
COMPARISONS = (
    ("uniform fp32", BRANCH_UNIFORM, UNIFORM),
    ("fp32, bf16 and fp16 in a unit", BRANCH_MIXED, UNIFORM),
    ("fp32, bf16 and fp16 in a unit", BRANCH_MIXED, PER_DTYPE),
)
UNITS, PARAMS_OF_UNITS = (1, 2, 4, 8, 16, 32, 64), 16
PARAMS, UNITS_OF_PARAMS = (1, 4, 16, 64, 256), 4


def fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Returns the intercept and the slope of the line through the points."""
    values = np.asarray(y)
    columns = np.stack([np.ones(len(x)), np.asarray(x, dtype=float)], axis=1)
    scaled = columns / values[:, None]
    (intercept, slope), *_ = np.linalg.lstsq(scaled, np.ones(len(values)))
    return float(intercept), float(slope)


def _groups(counts: Sequence[int], *, vary_units: bool) -> list[Group]:
    groups = []
    for count in counts:
        units = count if vary_units else UNITS_OF_PARAMS
        params = PARAMS_OF_UNITS if vary_units else count
        subjects = []
        for name, (side, precision, per_dtype) in SUBJECTS.items():
            if params < len(PRECISIONS[precision][0]):
                continue  # not of all dtypes
            request: dict[str, Any] = {
                "precision": precision,
                "units": units,
                "params": params,
                "per_dtype": per_dtype,
                "seconds": 0.03,
            }
            subjects.append(Subject(name, side, request))
        groups.append(Group(f"{params} parameters x {units}", tuple(subjects)))
    return groups


@dataclass(frozen=True)
class Curve:
    """Host time per step of one subject over a count."""

    counts: list[int]
    # Of each count, a time of each round
    times_us: list[list[float]]

    def fits(self) -> np.ndarray:
        """Returns intercept and slope of each round, a row each."""
        rounds = zip(*self.times_us)
        return np.array([fit(self.counts, times) for times in rounds])

    def medians(self, scale: float) -> dict[str, Any]:
        medians = [float(np.median(times)) / scale for times in self.times_us]
        return {"counts": self.counts, "median_us": medians}


def _curve(
    samples: Samples, groups: Sequence[Group], subject: str, counts: Sequence[int]
) -> Curve:
    found = {
        count: samples.of(group.name, subject, "step_us")
        for count, group in zip(counts, groups)
        if (group.name, subject) in samples.values
    }
    return Curve([*found], [*found.values()])


def _rows(
    quantity: str, coefficients: dict[str, np.ndarray], scale: float
) -> list[Row]:
    rows = []
    for case, branch, versus in COMPARISONS:
        ours, theirs = coefficients[branch] / scale, coefficients[versus] / scale
        ratio = Spread.of([*(ours / theirs)])
        medians = float(np.median(ours)), float(np.median(theirs))
        rows.append(
            Row("growth", case, quantity, medians[0], versus, medians[1], ratio)
        )
    return rows


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> PartResult:
    """Measures host time over both counts, and compares the slopes."""
    units = UNITS[:4:3] if quick else UNITS
    params = PARAMS[1:4] if quick else PARAMS
    by_units = _groups(units, vary_units=True)
    by_params = _groups(params, vary_units=False)
    groups = {group.name: group for group in [*by_units, *by_params]}
    samples = alternate(
        "growth",
        sides,
        [*groups.values()],
        rounds=rounds or (2 if quick else 4),
        launches=1 if quick else 2,
    )
    of_units = {s: _curve(samples, by_units, s, units) for s in SUBJECTS}
    of_params = {s: _curve(samples, by_params, s, params) for s in SUBJECTS}
    unit_fits = {s: curve.fits() for s, curve in of_units.items()}
    param_fits = {s: curve.fits() for s, curve in of_params.items()}
    per_unit = f"us / further unit of {PARAMS_OF_UNITS} parameters"
    per_param, beside = "us / further parameter of a unit", "us / unit beside them"
    rows = [
        *_rows(per_unit, {s: f[:, 1] for s, f in unit_fits.items()}, 1),
        *_rows(per_param, {s: f[:, 1] for s, f in param_fits.items()}, UNITS_OF_PARAMS),
        *_rows(beside, {s: f[:, 0] for s, f in param_fits.items()}, UNITS_OF_PARAMS),
    ]
    curves = {
        "units": {s: curve.medians(1) for s, curve in of_units.items()},
        "parameters a unit": {
            s: curve.medians(UNITS_OF_PARAMS) for s, curve in of_params.items()
        },
    }
    return PartResult(rows, {"samples": samples.as_json(), "curves": curves})
