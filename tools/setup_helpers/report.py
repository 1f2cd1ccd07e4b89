"""What set-up tells the user: phases, a progress bar, errors of one line."""

from __future__ import annotations

import errno
import shutil
import sys
import time
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from pathlib import Path


_CLONE_ELSEWHERE = "; make it writable, or work in a clone of your own"
_REMEDIES = {
    errno.EACCES: _CLONE_ELSEWHERE,
    errno.EPERM: _CLONE_ELSEWHERE,
    errno.EROFS: _CLONE_ELSEWHERE,
    errno.EFBIG: "; raise the limit on the size of files (ulimit -f)",
    errno.EXDEV: "; build must lie on the file system of the tree",
}


class SetupError(Exception):
    """Something the user can act on; its text is the one line they see."""


def explain(error: OSError) -> str:
    """Says in one line what an operating system error means for set-up."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on the disk"
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}{_REMEDIES.get(error.errno or 0, '')}"


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def demand_space(folder: Path, nbytes: int, what: str, remedy: str = "") -> None:
    """Refuses to go on where the disk of ``folder`` has no room for ``nbytes``."""
    free_nbytes = shutil.disk_usage(folder).free if nbytes else 0
    if free_nbytes < nbytes:
        raise SetupError(
            f"no space left on the disk: {what} needs {megabytes(nbytes)}, "
            f"{megabytes(free_nbytes)} are free{remedy}"
        )


class Progress:
    """Prints one line per phase; on a terminal, a bar that redraws in place."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.live = not quiet and sys.stdout.isatty()
        self._drawn_s = 0.0

    def phase(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def update(self, text: str) -> None:
        """Shows a passing state, at most ten times a second."""
        now_s = time.monotonic()
        if self.live and now_s - self._drawn_s > 0.1:
            self._drawn_s = now_s
            print(f"\r\033[K  {text[:76]}", end="", flush=True)

    def bar(self, done_nbytes: int, total_nbytes: int) -> None:
        share = done_nbytes / max(total_nbytes, 1)
        cells = "#" * round(30 * share)
        size = f"{megabytes(done_nbytes)} of {megabytes(total_nbytes)}"
        self.update(f"[{cells:<30}] {share:4.0%}  {size}")

    def end(self) -> None:
        """Wipes the passing state, so that the next line starts clean."""
        if self.live and self._drawn_s:
            print("\r\033[K", end="", flush=True)
        self._drawn_s = 0.0
