"""Compares a sharded training run with the same run in one process.

[Note: what differs between the runs]
Weights and batches are the same, so what differs is rounding. A matrix's gradient is a
sum over tokens: each rank rounds its part of the sum to the parameter's dtype, and the
reduction rounds again, where one process rounds once. In bf16 that is 2**-9 of a value
each time, in any direction, and the next steps carry it on. It reaches the gradients of
all dtypes, fp32 too, by way of the bf16 matrices and activations.

Parameters. Their difference is compared with how far training moved them. Rounding
comes to about 2**-5 of that in the worst parameter, much the same for 2 to 16 ranks and
40 to 600 steps; gradients of one dtype that are wrong by a factor of 2 come to 2**-1 or
more. Halfway, on the logarithmic scale, is 2**-3. One unit in the last place is allowed
as well (2**-7 in bf16, 2**-10 in fp16, 2**-23 in fp32), as the parameters themselves
are stored rounded.

Loss. As a mean over thousands of tokens it averages rounding out: 2**-9 at most was
seen, and 2**-7 is allowed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

import torch
from torch import Tensor


DRIFT_TOLERANCE = 2**-3
LOSS_TOLERANCE = 2**-7


@dataclass(frozen=True)
class Difference:
    """The largest difference between two runs, and where it is."""

    what: str
    where: str
    relative: float
    allowed: float

    def severity(self) -> float:
        """The share used up of what is allowed; infinite where a run diverged."""
        if self.relative == 0:
            return 0.0
        share = self.relative / self.allowed if self.allowed else math.inf
        return share if math.isfinite(share) else math.inf

    @property
    def ok(self) -> bool:
        return self.severity() <= 1


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> Difference:
    """The largest difference of the loss at any step."""
    return max(
        (
            Difference("loss", f"step {step}", abs(a - b) / abs(b), LOSS_TOLERANCE)
            for step, (a, b) in enumerate(zip(losses, reference), start=1)
        ),
        key=Difference.severity,
    )


def parameter_differences(
    sharded: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    initial: Mapping[str, Tensor],
) -> list[Difference]:
    """The largest difference of a parameter, for each dtype."""
    by_dtype: dict[torch.dtype, list[Difference]] = {}
    for name, expected in reference.items():
        size, moved = _norm(expected), _norm(expected, initial[name])
        dtype = expected.dtype
        difference = Difference(
            f"{str(dtype).removeprefix('torch.')} parameters",
            name,
            relative=_norm(sharded[name], expected) / size,
            allowed=torch.finfo(dtype).eps + DRIFT_TOLERANCE * moved / size,
        )
        by_dtype.setdefault(dtype, []).append(difference)
    return [max(group, key=Difference.severity) for group in by_dtype.values()]


def difference_table(differences: Iterable[Difference]) -> str:
    """How far the two runs are apart, and what is allowed."""
    rows = [
        [
            d.what,
            d.where,
            f"{d.relative:.1e}",
            f"{d.allowed:.1e}",
            "yes" if d.ok else "NO",
        ]
        for d in differences
    ]
    header = ["quantity", "largest in", "relative difference", "allowed", "within"]
    align = ["left"] * 2 + ["right"] * 2 + ["left"]
    return tabulate(rows, header, disable_numparse=True, colalign=align)


def _norm(a: Tensor, b: Tensor | None = None) -> float:
    """The norm of ``a``, or of ``a - b``, in fp32."""
    a = a.detach().float()
    return (a if b is None else a - b.detach().float()).norm().item()
