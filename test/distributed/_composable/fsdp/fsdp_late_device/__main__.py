"""The command line of ``check.py``: ``python fsdp_late_device --help``."""

import sys
from pathlib import Path


# Started by its path, Python has put this folder there, which is not its parent
sys.path[0] = str(Path(__file__).absolute().parents[1])

from fsdp_late_device.check import main  # noqa: E402


sys.exit(main())
