"""
Does with sharded models what plugins and trainers outside of torch do, with whatever
torch is imported: names that they read, write, call and replace, and what their
replacements then see. Also what later releases than 2.13 added, where they have it.
"""

import sys

# Each adds its scenarios
import fsdp_helpers.plugins.collectives
import fsdp_helpers.plugins.groups
import fsdp_helpers.plugins.later_releases  # noqa: F401
from fsdp_helpers.plugins import SCENARIOS


if __name__ == "__main__":
    sys.exit(SCENARIOS.main(__doc__))
