"""What plugins and trainers outside of torch do: files of this package add it."""

from functools import partial

from fsdp_helpers.common.scenarios import Scenarios


SCENARIOS = Scenarios()
scenario = partial(SCENARIOS.add, kinds=("uniform",))
# The release refuses these units, whose parameters have several dtypes
mixed = partial(SCENARIOS.add, kinds=("mixed",))
of_both_kinds = SCENARIOS.add
