"""
Runs each case with whatever torch is imported, and saves what came of it: every step's
loss and sharded gradients, the final parameters, the order of profiler ranges, the
collectives, and what was held; or the error that it raised. Then measures memory.

The cases lie in a file for each family of features.
"""

import sys
from functools import partial

# Each adds its cases
import fsdp_helpers.parity.comms
import fsdp_helpers.parity.params  # noqa: F401
from fsdp_helpers.common.scenarios import IS_BRANCH
from fsdp_helpers.parity.cases import CASES, KINDS
from fsdp_helpers.parity.memory import measure


if __name__ == "__main__":
    has_mixed = IS_BRANCH and "mixed" in KINDS
    sys.exit(CASES.main(__doc__, beside=partial(measure, has_mixed=has_mixed)))
