"""The releases that the branch fits.  No other file lists them.

The first is the default.  What the branch replaces of each is in
``tools/release_digests.json``, which ``tools/record_release_digests.py`` writes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tools.setup_helpers.report import SetupError


@dataclass(frozen=True)
class Release:
    """A release of torch, and what pip fetches where nobody names a wheel."""

    version: str
    wheel_nbytes: int
    """The size of its wheel, as pip's own index has it or the one for CPUs."""
    disk_nbytes: int
    """What takes that wheel on the disk, unpacked and with what it requires."""
    cuda_nbytes: int = 4_900_000_000
    """What the packages take that any build for CUDA requires."""

    @property
    def requirement(self) -> str:
        return f"torch=={self.version}"

    def is_of(self, version: str) -> bool:
        """Whether ``version`` is this release's, whatever its label."""
        return version.partition("+")[0] == self.version


RELEASES = (
    # The least: which build there is for it is up to pip's index
    Release("2.13.0", 192_000_000, 1_500_000_000),
    Release("2.14.1", 555_000_000, 6_600_000_000),
    Release("2.15.0", 539_000_000, 6_600_000_000),
)
DEFAULT = RELEASES[0]
# What make calls RELEASE: that name is too common for an environment.
VARIABLE = "TORCH_RELEASE"


def known(last: str = "and") -> str:
    """Returns the versions as a list in words."""
    *first, end = (release.version for release in RELEASES)
    return f"{', '.join(first)} {last} {end}"


def find_release(version: str) -> Release:
    for release in RELEASES:
        if release.version == version:
            return release
    raise SetupError(
        f"RELEASE={version} is no release that this branch is for: these are {known()}"
    )


def chosen_release() -> Release | None:
    """Returns the release that the user named, if any."""
    version = os.environ.get(VARIABLE)
    return find_release(version) if version else None
