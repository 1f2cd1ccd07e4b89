"""
The wrong uses of ``fully_shard`` that are found, one function for each: it prepares
what is needed, and returns the call that must raise. Of each is told when it is
found, how the error begins and what to do, in the words of the error. They lie in a
file for each phase of training.

The table in ``docs/wrong_uses.md`` is what ``python fsdp_wrong_uses`` prints.
"""

from __future__ import annotations

# Each adds its rows, those of gradients before the others of a step
import fsdp_wrong_uses.gradients
import fsdp_wrong_uses.making
import fsdp_wrong_uses.settings
import fsdp_wrong_uses.starting
import fsdp_wrong_uses.stepping  # noqa: F401
from fsdp_wrong_uses.rows import SECTIONS, WRONG_USES


def table() -> list[str]:
    """Returns the page's lines that tell of all rows."""
    lines = []
    for section, names in SECTIONS.items():
        lines += ["", f"## {section}", ""]
        lines += [
            "| wrong use | when it is found | the error's beginning | what to do |"
        ]
        lines += ["|---|---|---|---|"]
        for name in names:
            lines.append(f"| {' | '.join(WRONG_USES[name].cells())} |")
    return lines
