"""In-place build into the current environment, as upstream's developers do it:

    pip install --no-build-isolation -v -e .

Takes the torch that is installed, or has pip install the release (TORCH_RELEASE=VERSION).
`make wheel` writes the wheel.
"""

import sys
from pathlib import Path

import setuptools


sys.path.insert(0, str(Path(__file__).resolve().parent))

from tools.build import editable


class Distribution(setuptools.Distribution):
    def has_data(self) -> bool:
        """Editable installs ask this, and not `has_data_files`."""
        return self.has_data_files()


if __name__ == "__main__":
    setuptools.setup(distclass=Distribution, **editable(sys.argv))
