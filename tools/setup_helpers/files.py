"""Writing a file whole or not at all, whatever stops the writer."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# Behind the name of what is being written.
PARTIAL = ".partial"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which takes the place of ``path`` if all goes well."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Writes ``data`` to ``path``; returns only once it is there to the last byte."""
    with replacing(path) as partial:
        partial.write_bytes(data)
        partial.chmod(mode)
