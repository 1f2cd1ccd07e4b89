"""
Runs each case with whatever torch is imported, and saves what came of it: every step's
loss and sharded gradients, the final parameters, the order of profiler ranges, the
collectives, and what was held; or the error that it raised. Then measures memory.

The cases lie in a file for each family of features.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial

# Each adds its cases
import fsdp_helpers.parity.comms
import fsdp_helpers.parity.params
import fsdp_helpers.parity.refusals  # noqa: F401
from fsdp_helpers.common.parity_layers import Record
from fsdp_helpers.common.scenarios import IS_BRANCH, Place, Scenario, Scenarios
from fsdp_helpers.parity.cases import Case, CASES
from fsdp_helpers.parity.memory import measure


# Of the series for upstream, uniform units alone
KINDS = os.environ.get("FSDP_PARITY_KINDS", "uniform mixed override").split()


def run_case(place: Place, case: Case, kind: str) -> Record:
    place = replace(place, kind=kind)
    if case.ranks == 2:
        place = replace(place, rank=place.rank % 2, mesh=place.pairs["shard"])
    return case.run(place) or {}


SCENARIOS = Scenarios(
    {
        f"{kind} {name}": Scenario(
            partial(run_case, case=case, kind=kind),
            # What the release would say to other units is no matter
            is_on_release=case.is_on_release
            and (kind == "uniform" or case.refusal is None),
            by_halves=case.takes_turns,
        )
        for name, case in CASES.items()
        for kind in case.kinds
        if kind in KINDS
    }
)


if __name__ == "__main__":
    has_mixed = IS_BRANCH and "mixed" in KINDS
    sys.exit(SCENARIOS.main(__doc__, beside=partial(measure, has_mixed=has_mixed)))
