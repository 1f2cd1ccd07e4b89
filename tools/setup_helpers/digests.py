"""Whether files are a release's own, by ``tools/release_digests.json``.

Ours replace some of them, and are written for those that lie beside.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping
    from pathlib import Path
    from typing import Any

    from tools.setup_helpers.releases import Release


DIGESTS = "tools/release_digests.json"


def recorded(root: Path, release: Release) -> Any:
    """Returns the commit and the digests of ``release``, None if nothing is known."""
    path = root / DIGESTS
    known = json.loads(path.read_text()) if path.exists() else {}
    return known.get(release.version)


def sha256(path: Path) -> str | None:
    """Returns the digest of the file at ``path``, None where there is nothing."""
    if not path.is_file():
        return "" if path.exists() else None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def difference(known: str | None, found: str | None) -> str | None:
    """Says how what ours would replace is not the release's; None if it is.

    The digests are those that are recorded and found; None stands for no file.
    """
    if known == found:
        return None
    if known is None:
        return f"is no file of the release, by {DIGESTS}, and one of ours here"
    if found is None:
        return "is missing, and the release has it"
    return "is not the release's"


def notes(
    known: Mapping[str, str], ours: Container[str], find: Callable[[str], str | None]
) -> list[str]:
    """Tells of files beside ours that are not the release's."""
    return [
        f"{path} is not the release's, and ours are written for it"
        for path, digest in known.items()
        if path not in ours and find(path) != digest
    ]
