#!/usr/bin/env python3
"""Writes down what the releases' own files are, for trees that have no wheel of one.

    python3 tools/record_release_digests.py [WHEEL ...]

Run it after ``make setup`` and ``make setup RELEASE=...`` when another file of the
release becomes ours, or the branch is to fit another release.  Then
``tools/release_digests.json`` holds, for each release, the digest of each file that
ours replace, and of those that lie beside one that does more than export names: they
call each other.  What is written of a release that is not set up here, and of which no
wheel is named, stays as it was.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.setup_helpers import tree, wheel  # noqa: E402
from tools.setup_helpers.build import Build  # noqa: E402
from tools.setup_helpers.digests import DIGESTS  # noqa: E402
from tools.setup_helpers.releases import RELEASES  # noqa: E402
from tools.setup_helpers.report import Progress, SetupError  # noqa: E402


if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


def record(root: Path, theirs: Path | zipfile.Path) -> dict[str, Any]:
    """Returns the commit and the digests of a release, unpacked or a wheel."""
    own = tree.own_files(root)
    replaced = sorted(path for path in own if (theirs / path).is_file())
    files = {path: theirs / path for path in replaced}
    files |= {
        f"{folder}/{file.name}": file
        for folder, _, name in (path.rpartition("/") for path in replaced)
        if name != "__init__.py"  # which only names what is beside it
        for file in (theirs / folder).iterdir()
        if file.name.endswith(".py")
    }
    version_text = (theirs / "torch/version.py").read_text()
    commit = re.search(r"(?m)^git_version = '(\w+)'$", version_text)
    return {
        "commit": commit[1] if commit else None,
        "sha256": {
            path: hashlib.sha256(files[path].read_bytes()).hexdigest()
            for path in sorted(files)
        },
    }


def record_all(root: Path, wheels: Iterable[Path] = ()) -> dict[str, Any]:
    """Returns what is known of each release; ``root`` is the clone."""
    path = root / DIGESTS
    before = json.loads(path.read_text()) if path.exists() else {}
    progress = Progress(quiet=True)
    found: dict[str, Path | zipfile.Path] = {}
    for release in RELEASES:
        unpacked = Build(root, progress, release).unpacked
        if unpacked.is_dir():
            found[release.version] = unpacked
    for path in wheels:
        release = wheel.release_of(path)
        found[release.version] = zipfile.Path(path)
    recorded = {version: record(root, theirs) for version, theirs in found.items()}
    return {
        release.version: (before | recorded)[release.version]
        for release in RELEASES
        if release.version in before | recorded
    }


def main(arguments: list[str], root: Path = ROOT) -> int:
    try:
        recorded = record_all(root, [Path(name) for name in arguments])
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    (root / DIGESTS).write_text(json.dumps(recorded, indent=2) + "\n")
    lacking = [r.version for r in RELEASES if r.version not in recorded]
    for version in lacking:
        print(f"note: nothing is known of {version}: make setup RELEASE={version}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
