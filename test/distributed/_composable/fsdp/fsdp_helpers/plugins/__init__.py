"""
What plugins and trainers outside of torch do with sharded models: scenarios, which the
files of this package add to.
"""

from functools import partial

from fsdp_helpers.common.scenarios import Scenarios


SCENARIOS = Scenarios()
scenario = partial(SCENARIOS.add, kinds=("uniform",))
# The release refuses these units, whose parameters have several dtypes
mixed = partial(SCENARIOS.add, kinds=("mixed",))
of_both_kinds = SCENARIOS.add
