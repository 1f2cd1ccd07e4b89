"""
Does with sharded models what plugins and trainers outside of torch do, with whatever
torch is imported: names that they read, write, call and replace, and what their
replacements then see. Also what later releases than 2.13 added, where they have it.
"""

import sys

# Each adds its scenarios
import fsdp_plugins.collectives
import fsdp_plugins.groups
import fsdp_plugins.later_releases  # noqa: F401
from fsdp_plugins import SCENARIOS


if __name__ == "__main__":
    sys.exit(SCENARIOS.main(__doc__))
