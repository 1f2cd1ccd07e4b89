"""
Collectives and bytes of one step, counted where FSDP2 calls torch.distributed.

Bytes are those of the larger buffer of a collective: what a gather leaves on a rank,
what a reduce-scatter takes from it. The least possible is the parameters' own bytes,
gathered for forward and again for backward, and reduced once.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from _models import language_model, tokens, training_step
from _ratios import alternate, Group, Samples, Spread
from _rows import PartResult, Row
from _sides import Side
from _step_time import BRANCH, groups_of

import torch.distributed as dist
from torch import nn


# What releases call differs in name; the larger buffer of each
GATHERS = {
    "all_gather_single": "output_tensor",
    "all_gather_into_tensor": "output_tensor",
}
REDUCTIONS = {"reduce_scatter_single": "input", "reduce_scatter_tensor": "input"}
UNSHARDS = 2  # of a block in one step: it is resharded after forward


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts this rank's collectives, and their bytes, inside the context."""
    counts = dict.fromkeys(
        ("gathers", "gathered_nbytes", "reductions", "reduced_nbytes"), 0
    )

    def count(original: Callable[..., Any], kind: str, buffer: str) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            nbytes = signature.bind(*args, **kwargs).arguments[buffer].nbytes
            counts["gathers" if kind == "gathered" else "reductions"] += 1
            counts[f"{kind}_nbytes"] += nbytes
            return original(*args, **kwargs)

        return call

    originals: dict[str, Callable[..., Any]] = {}
    for kind, buffers in (("gathered", GATHERS), ("reduced", REDUCTIONS)):
        for name, buffer in buffers.items():
            if original := getattr(dist, name, None):
                originals[name] = original
                setattr(dist, name, count(original, kind, buffer))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def least_nbytes(model: nn.Module, *, grad_itemsize: int = 0) -> dict[str, int]:
    """
    Returns the bytes of a step that sends nothing but the parameters, each rank's part
    of a block aligned to its widest element. With ``grad_itemsize``, gradients are all
    reduced at that width.
    """
    ranks = dist.get_world_size()
    sums = dict.fromkeys(("own_nbytes", "gathered_nbytes", "reduced_nbytes"), 0)
    for block in model.children():
        params = [*block.parameters()]
        # Of one rank's shard, which dim 0 is rounded up for
        numels = [-(-p.size(0) // ranks) * (p.numel() // p.size(0)) for p in params]
        widest = max(p.itemsize for p in params)
        segment = sum(numel * p.itemsize for numel, p in zip(numels, params))
        aligned = -(-segment // widest) * widest
        own = sum(p.numel() * p.itemsize for p in params)
        sums["own_nbytes"] += (UNSHARDS + 1) * own
        sums["gathered_nbytes"] += UNSHARDS * ranks * aligned
        for numel, p in zip(numels, params):
            sums["reduced_nbytes"] += ranks * numel * (grad_itemsize or p.itemsize)
    return sums


def measure(*, device: str, block: str, way: str) -> dict[str, Any]:
    """Returns what one step sends, and computes what it would have to send at least."""
    model = language_model(block, way, device)
    x = tokens(way, device)
    training_step(model, x)
    with counted() as counts:
        training_step(model, x)
    widest = max(p.itemsize for p in model.parameters())
    promoted = least_nbytes(model, grad_itemsize=widest)
    return {
        **counts,
        **{f"least_{name}": value for name, value in least_nbytes(model).items()},
        **{f"promoted_{name}": value for name, value in promoted.items()},
        "units": len([*model.children()]),
    }


# What is compared #

OWN = "the parameters' own bytes"
PROMOTED_COMPUTED = "gradients promoted (computed)"


@dataclass(frozen=True)
class Sent:
    """What one way sends in a step."""

    way: str
    collectives: int
    gathered_nbytes: int
    reduced_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.gathered_nbytes + self.reduced_nbytes


def _ways(samples: Samples, group: Group) -> list[Sent]:
    """Returns the branch's first, then what it is compared with."""
    measured = {
        s.name: {k: int(v[0]) for k, v in samples.values[group.name, s.name].items()}
        for s in group.subjects
    }
    ways = [
        Sent(
            name,
            counts["gathers"] + counts["reductions"],
            counts["gathered_nbytes"],
            counts["reduced_nbytes"],
        )
        for name, counts in measured.items()
    ]
    ways.sort(key=lambda sent: sent.way != BRANCH)  # stable
    branch = measured[BRANCH]
    ways.append(
        Sent(
            PROMOTED_COMPUTED,
            branch["units"] * (UNSHARDS + 1),
            branch["promoted_gathered_nbytes"],
            branch["promoted_reduced_nbytes"],
        )
    )
    return ways


def _row(
    case: str, quantity: str, branch: int, versus: str, other: int, bar: Any
) -> Row:
    ratio = branch / other
    return Row(
        "bytes",
        case,
        quantity,
        branch,
        versus,
        other,
        Spread(ratio, ratio, ratio, 1),
        bar,
    )


def _block_rows(block: str, ways: Sequence[Sent], own: int, least: int) -> list[Row]:
    branch, *others = ways
    case = f"{block} block"
    # What alignment adds may be sent, and no more: nothing in these blocks
    rows = [_row(case, "bytes / step", branch.nbytes, OWN, own, least / own)]
    for other in others:
        row = _row(case, "bytes / step", branch.nbytes, other.way, other.nbytes, 1.0)
        rows.append(row)
    for other in others:
        counts = branch.collectives, other.way, other.collectives
        rows.append(_row(case, "collectives / step", *counts, None))
    return rows


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> PartResult:
    """Counts what a step of each block sends in each way."""
    del quick, rounds  # the same in every run
    groups = groups_of({}, promoted=False)
    samples = alternate("bytes", sides, groups, rounds=1)
    result, blocks = PartResult(), {}
    for group in groups:
        ways = _ways(samples, group)
        counts = {k: int(v[0]) for k, v in samples.values[group.name, BRANCH].items()}
        own = counts["least_own_nbytes"]
        least = counts["least_gathered_nbytes"] + counts["least_reduced_nbytes"]
        result.rows += _block_rows(group.name, ways, own, least)
        blocks[group.name] = {
            "least_nbytes": least,
            "own_nbytes": own,
            "ways": [asdict(way) for way in ways],
        }
    result.data["blocks"] = blocks
    return result
