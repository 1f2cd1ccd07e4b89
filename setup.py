"""In-place build into the current environment, as upstream's developers do it:

    pip install --no-build-isolation -v -e .

The release is fetched and unpacked as by ``make setup``; pip then installs what it
requires, and no more unless an extra is named, ``'.[examples]'`` or ``'.[dev]'``; and
it puts the tree of links on the environment's import path.  There is no other kind of
build here: ``make wheel`` writes the wheel.  ``TORCH_RELEASE=VERSION`` in the
environment takes another release.
"""

import sys
from pathlib import Path

import setuptools


ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tools.setup_helpers.__main__ import version_error  # noqa: E402
from tools.setup_helpers.editable import (  # noqa: E402
    build_in_place,
    Metadata,
    METADATA_COMMANDS,
)


# Not "torch": the release's own dist-info, linked in the tree, goes by that name.
NAME = "torch-fsdp2-mixed-dtype"


def main() -> None:
    problem = version_error(sys.version_info, sys.executable)
    if problem:
        sys.exit(problem)
    if "bdist_wheel" in sys.argv:
        sys.exit(
            "error: make wheel writes the wheel; "
            "to build in place: pip install --no-build-isolation -v -e ."
        )
    metadata = Metadata()
    if not METADATA_COMMANDS.isdisjoint(sys.argv):
        if int(setuptools.__version__.partition(".")[0]) < 77:
            sys.exit("error: setuptools is too old: pip install 'setuptools>=77.0.3'")
        metadata = build_in_place(ROOT)
    setuptools.setup(
        name=NAME,
        version=metadata.version,
        description="PyTorch with FSDP2 units of mixed dtypes, built in place",
        license="BSD-3-Clause",
        python_requires=">=3.10",
        # No package is listed: the tree goes on the import path as a whole.
        packages=[],
        package_dir={"": metadata.folder},
        install_requires=metadata.requirements,
        extras_require=metadata.extras,
        entry_points={"console_scripts": metadata.scripts},
    )


if __name__ == "__main__":
    main()
