"""
The wrong uses of ``fully_shard`` that are found, one function for each: it prepares
what is needed, and returns the call that must raise. Of each is told when it is
found, how the error begins and what to do, in the words of the error. They lie in a
file for each phase of training.
"""

from __future__ import annotations

# Each adds its rows, those of gradients before the others of a step
import fsdp_wrong_uses.gradients
import fsdp_wrong_uses.making
import fsdp_wrong_uses.settings
import fsdp_wrong_uses.starting
import fsdp_wrong_uses.stepping  # noqa: F401
from fsdp_wrong_uses.rows import SECTIONS as SECTIONS
from fsdp_wrong_uses.rows import WRONG_USES as WRONG_USES
