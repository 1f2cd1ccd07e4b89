"""Prints the tables of ``docs/wrong_uses.md``: ``python fsdp_wrong_uses``."""

import sys
from pathlib import Path


# Started by its path, Python has put this folder there, which is not its parent
sys.path[0] = str(Path(__file__).absolute().parents[1])

from fsdp_wrong_uses.table import table  # noqa: E402


print("\n".join(table()))
