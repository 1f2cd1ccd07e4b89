"""
A step on one device as one of 8 ranks, whose collectives take as long as over a link:
25 us, and the time of their bytes at its rate. On a CPU they take no time.
"""

import functools
from typing import Any

import _step_time
from _calls import Call, seen_by
from _kernels import shortest_us
from _ratios import alternate, Row
from _sides import Side

import torch


LATENCY = 25.0  # us
LINKS = (200, 40)  # GB/s
CYCLES = 20_000_000


@functools.cache
def cycles_per_us() -> float:
    return CYCLES / shortest_us(lambda: torch.cuda._sleep(CYCLES))


def measure(*, device: str, link: float, **step: Any) -> dict[str, Any]:
    """Returns the median step of several, in milliseconds, with a link of so many GB/s."""

    def sleep(call: Call) -> None:
        if device == "cuda":
            us = LATENCY + call.sent_nbytes / (link * 1e3)
            torch.cuda._sleep(int(us * cycles_per_us()))

    with seen_by(sleep):
        return _step_time.measure(device=device, **step)


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> list[Row]:
    """Compares each block and way at each link."""
    rows = []
    for link in LINKS[:1] if quick else LINKS:
        groups = [*_step_time.groups_of(sides, steps=5, link=link)]
        groups = groups[-1:] if quick else groups
        samples = alternate(__name__, sides, groups, rounds or (1 if quick else 5))
        what = "network", f"ms / step at {link} GB/s", "wall_ms"
        rows += _step_time.rows_of(*what, samples, _step_time.BARS)
    return rows
