"""In-place build into the current environment, as upstream's developers do it:

    pip install --no-build-isolation -v -e .

Takes the torch that is installed, or has pip install the release; extras are
``'.[examples]'`` and ``'.[dev]'``. There is no other kind of build here: ``make wheel``
writes the wheel. ``TORCH_RELEASE=VERSION`` in the environment takes another release.
"""

import sys
from pathlib import Path

import setuptools


sys.path.insert(0, str(Path(__file__).resolve().parent))

from tools.build import editable
from tools.releases import DEFAULT, ToolError


class Distribution(setuptools.Distribution):
    def has_data(self) -> bool:
        """Editable installs ask this, and not `has_data_files`."""
        return self.has_data_files()


def main() -> None:
    if "bdist_wheel" in sys.argv:
        sys.exit(
            "error: make wheel writes the wheel; "
            "to build in place: pip install --no-build-isolation -v -e ."
        )
    try:
        is_editable = {"dist_info", "editable_wheel", "develop"} & {*sys.argv}
        metadata = editable() if is_editable else {"version": DEFAULT}
    except (ToolError, OSError) as error:
        sys.exit(f"error: {error}")
    setuptools.setup(
        name="torch-fsdp2-mixed-dtype",
        description="PyTorch with FSDP2 units of mixed dtypes, built in place",
        license="BSD-3-Clause",
        python_requires=">=3.10",
        packages=[],
        distclass=Distribution,
        **metadata,
    )


if __name__ == "__main__":
    main()
