"""
What runs on the release gave, kept under ``build/``. The release is read-only and what
tests run on it is deterministic, so it runs again only where something that the result
comes from has changed. What the branch gives is never kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch


T = TypeVar("T")

TESTS = Path(__file__).absolute().parents[1]
# Folders of modules that scripts import, by the word that names each in a script
FOLDERS = {folder.name: folder for folder in TESTS.glob("fsdp_*")}
FOLDERS |= {file.parent.name: file.parent for file in TESTS.parents[3].glob("*/*.py")}
# Inherited variables that may change what torch computes
READ_BY_TORCH = re.compile("TORCH|PYTORCH|ATEN|OMP|MKL|KMP|GLOO|CUDA|HF_|TRANSFORMERS")
# Asks that everything runs: `pytest --fresh` sets it, as continuous integration sets CI
FRESH = "FSDP_TEST_FRESH"


def of_release(
    release: Path,
    args: Sequence[str],
    env: dict[str, str] | None,
    run: Callable[[], T],
) -> T:
    """
    Returns what ``run`` does, or what it returned before.

    Args:
        release: The folder of the release that it runs on.
        args: What the interpreter is given, but for folders made for one run.
        env: The variables that it gets beside those of this process.
    """
    # Kernels of an accelerator may add in any order
    if torch.accelerator.is_available() or not release.is_dir():
        return run()
    what = repr((args, sorted((env or {}).items())))
    # In the place of what was kept of the same before something changed
    file = release.with_name("kept") / digest(what.encode())
    key = key_of(release, args, what)
    if not any(map(os.environ.get, (FRESH, "CI"))):
        with contextlib.suppress(OSError, ValueError):
            return pickle.loads(unseal(file.read_bytes(), key))
    result = run()
    if key_of(release, args, what) != key:  # a file was edited while it ran
        return result
    file.parent.mkdir(exist_ok=True)
    written = file.with_name(f"{file.name}.{os.getpid()}")
    written.write_bytes(seal(pickle.dumps(result), key))
    written.replace(file)  # whole, beside others who do the same
    return result


def seal(result: bytes, key: str) -> bytes:
    return digest(key.encode() + result).encode() + result


def unseal(sealed: bytes, key: str) -> bytes:
    size = len(digest(b""))
    if seal(result := sealed[size:], key) != sealed:
        raise ValueError("damaged, or made from something else")
    return result


def key_of(release: Path, args: Sequence[str], what: str) -> str:
    """Returns a digest of all that the result of a script comes from."""
    parts = [
        what,
        str(release),  # which results name
        surroundings(release),
        sorted(v for v in os.environ.items() if READ_BY_TORCH.match(v[0])),
        *((str(file), digest(file.read_bytes())) for file in sorted(sources(args))),
    ]
    return digest(repr(parts).encode())


@functools.cache
def surroundings(release: Path) -> tuple[str, ...]:
    """Returns the release's files, its Python, other packages and the processor."""
    (record,) = release.glob("torch-*.dist-info/RECORD")
    folders = (Path(entry).glob("*.dist-info") for entry in sys.path)
    packages = sorted({info.name for infos in folders for info in infos})
    # Not how fast each core is now
    asked = ("model name", "flags", "Features")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cores = sorted({line for line in lines if line.startswith(asked)})
    return (
        digest(record.read_bytes()),
        sys.version,
        *packages,
        platform.machine(),
        *cores,
    )


def sources(args: Sequence[str]) -> set[Path]:
    """
    Returns the files of all folders that a script names, and of those that these name
    in turn. A folder is in as a whole, and by a word anywhere: a script that imports by
    a name that it computes is as safe as another.
    """
    found = {Path(arg) for arg in args if arg.endswith(".py")}
    texts = [*args, *(file.read_text() for file in found)]
    named: set[str] = set()
    while texts:
        words = {word.lower() for word in re.findall(r"\w+", texts.pop())}
        for name in words & FOLDERS.keys() - named:
            files = [f for f in FOLDERS[name].rglob("*") if f.suffix != ".pyc"]
            files = [file for file in files if file.is_file()]
            texts += [file.read_text() for file in files]
            found.update(files)
            named.add(name)
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
