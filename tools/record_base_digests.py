#!/usr/bin/env python3
"""Writes down what the base's own files are, for trees that have no base wheel.

    python3 tools/record_base_digests.py

Run it after ``make setup`` when another file of the base becomes ours, or the
base another release.  ``tools/base_digests.json`` then holds the digest of each
file of the base that ours replace, and of those that lie beside them: they call
each other.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.setup_helpers import tree, wheel  # noqa: E402


if TYPE_CHECKING:
    from typing import Any


def record(root: Path) -> dict[str, Any]:
    """Returns version, commit and digests of the base under ``root``."""
    base = root / tree.BASE
    tracked = tree.tracked_files(root) if tree.has_git(root) else set()
    replaced = {p for p in tree.own_files(root, tracked) if (base / p).is_file()}
    folders = {(base / path).parent for path in replaced}
    files = {file for folder in folders for file in folder.glob("*.py")}
    version_text = (base / "torch/version.py").read_text()
    commit = re.search(r"(?m)^git_version = '(\w+)'$", version_text)
    return {
        "version": wheel.BASE_VERSION,
        "commit": commit[1] if commit else None,
        "sha256": {
            file.relative_to(base).as_posix(): hashlib.sha256(
                file.read_bytes()
            ).hexdigest()
            for file in sorted(files)
        },
    }


if __name__ == "__main__":
    text = json.dumps(record(ROOT), indent=2) + "\n"
    (ROOT / "tools/base_digests.json").write_text(text)
