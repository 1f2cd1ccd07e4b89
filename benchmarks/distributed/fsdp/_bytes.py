"""
Collectives and bytes of one step, counted where FSDP2 calls torch.distributed.

The least possible is the parameters' own bytes, gathered twice and reduced once; a
mixed unit's regions begin on 16 bytes on each rank, which may add as much.
"""

from typing import Any

from _calls import Call, seen_by
from _models import BLOCKS, language_model, training_step, UNIFORM_BLOCK
from _ratios import alternate, Row
from _sides import Side
from _step_time import BRANCH, groups_of


OWN = "the parameters' own bytes"
ALIGNMENT = 16  # bytes


def measure(*, device: str, block: str, way: str) -> dict[str, Any]:
    """Returns what one step sends, and the parameters' own bytes."""
    model, x = language_model(block, way, device, "small")
    training_step(model, x)
    calls: list[Call] = []
    with seen_by(calls.append):
        training_step(model, x)
    return {
        "nbytes": sum(call.nbytes for call in calls),
        "collectives": len(calls),
        # Blocks are resharded after forward
        "own": 3 * sum(p.numel() * p.itemsize for p in model.parameters()),
        # A gather and a reduction have a region for each dtype
        "padding": 3 * len(model) * calls[0].ranks * ALIGNMENT * len(BLOCKS),
    }


def run(sides: dict[str, Side], *, quick: bool, rounds: int | None) -> list[Row]:
    """Counts what a step of each block sends in each way."""
    groups = [g for g in groups_of(sides, quick=quick) if g.name.endswith(" blocks")]
    samples = alternate(__name__, sides, groups)
    rows = []
    for name, subjects in groups:
        found = {key[1:]: v[0] for key, v in samples.values.items() if key[0] == name}
        nbytes, own = found[BRANCH, "nbytes"], found[BRANCH, "own"]
        padding = 0 if UNIFORM_BLOCK in name else found[BRANCH, "padding"]
        bar = 1 + padding / own
        rows.append(Row("bytes", name, "bytes / step", nbytes, OWN, own, bar))
        for metric, quantity in (("nbytes", "bytes"), ("collectives", "collectives")):
            for subject in (s for s in subjects if s.name != BRANCH):
                two = (found[BRANCH, metric], subject.name, found[subject.name, metric])
                at_most = bar if metric == "nbytes" else None
                rows.append(Row("bytes", name, f"{quantity} / step", *two, at_most))
    return rows
