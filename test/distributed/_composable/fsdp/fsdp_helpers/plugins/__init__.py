"""
What plugins and trainers outside of torch do with sharded models: scenarios, which a
file for each part of torch adds to.
"""

from fsdp_helpers.common.scenarios import Scenarios


SCENARIOS = Scenarios()
scenario = SCENARIOS.on_both
# Of units with several dtypes, which the release refuses
mixed = SCENARIOS.on_branch
of_both_kinds = SCENARIOS.of_both_kinds
