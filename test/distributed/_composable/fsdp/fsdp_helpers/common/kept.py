"""
What runs on the release gave, kept under ``build/``. The release is read-only and what
tests run on it is deterministic, so it runs again only if a test, an example, or what
is installed has changed. What the branch gives is never kept.
"""

import contextlib
import hashlib
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch


T = TypeVar("T")

TESTS = Path(__file__).absolute().parents[2]
SOURCES = (TESTS, TESTS.parents[3] / "examples")
# Inherited variables that may change what torch computes
READ_BY_TORCH = re.compile(
    "FSDP|TORCH|PYTORCH|ATEN|OMP|MKL|KMP|GLOO|CUDA|HF_|TRANSFORMERS"
)


def of_release(release: Path, module: str, run: Callable[[], T]) -> T:
    """Returns what ``run`` does on the release in that folder, or did before."""
    # Kernels of an accelerator may add in any order
    if torch.accelerator.is_available() or not release.is_dir():
        return run()
    # In the place of what was kept of the same before something changed
    file = release.with_name("kept") / module
    key = surroundings(release)
    if not os.environ.get("CI"):
        with contextlib.suppress(Exception):  # nothing there, or of another format
            kept_key, result = pickle.loads(file.read_bytes())
            if kept_key == key:
                return result
    result = run()
    if surroundings(release) == key:  # else a file was edited while it ran
        file.parent.mkdir(exist_ok=True)
        written = file.with_name(f"{file.name}.{os.getpid()}")
        written.write_bytes(pickle.dumps((key, result)))
        written.replace(file)  # whole, beside others who do the same
    return result


def surroundings(release: Path) -> str:
    """Returns a digest of all that a result comes from but the arguments."""
    (record,) = release.glob("torch-*.dist-info/RECORD")
    folders = (Path(entry).glob("*.dist-info") for entry in sys.path)
    # Not how fast each core is now
    asked = ("model name", "flags", "Features")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    parts = [
        str(release),  # which results name
        sys.version,
        sorted({info.name for infos in folders for info in infos}),
        sorted({line for line in lines if line.startswith(asked)}),
        sorted(v for v in os.environ.items() if READ_BY_TORCH.match(v[0])),
    ]
    found = hashlib.sha256(repr(parts).encode() + record.read_bytes())
    for file in sorted(file for root in SOURCES for file in root.rglob("*.py")):
        found.update(str(file).encode() + file.read_bytes())
    return found.hexdigest()
