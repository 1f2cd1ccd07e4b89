"""The branch's wheel: the release's, with our files in it.

What must change with a file: the version, which names the branch, in ``METADATA`` and
``torch/version.py``; the name of the dist-info folder; and ``RECORD``.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
import stat
import zipfile
from typing import TYPE_CHECKING

from tools.setup_helpers.digests import difference, notes
from tools.setup_helpers.files import replacing
from tools.setup_helpers.report import SetupError
from tools.setup_helpers.wheel import parse_fields, PROJECT, record_row


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tools.setup_helpers.report import Progress
    from tools.setup_helpers.wheel import ReleaseWheel


# Follows the release's label in the version: 2.13.0+cpu.mixeddtype1.  Each wheel
# that is given to others gets the next number.
LABEL = "mixeddtype1"
VERSION_FILE = "torch/version.py"
_VERSION_LINE = re.compile(r"(?m)^(__version__ = )(['\"])([^'\"\n]+)\2$")
_METADATA_LINE = re.compile(r"(?m)^Version: .*$")


def assemble_wheel(
    wheel: ReleaseWheel,
    root: Path,
    files: set[str],
    folder: Path,
    progress: Progress,
    digests: Mapping[str, str] | None,
) -> Path:
    """Writes our wheel into ``folder`` and returns its path.

    Args:
        files: ours, by path from ``root``; they replace the release's.
        digests: of the release's own files, where they are known.
    """
    with wheel.opened() as archive:
        if digests is not None:
            _compare(wheel, archive, files, digests, progress)
        version, changed = _changed(wheel, archive)
        if not files.isdisjoint(changed):
            raise SetupError(
                f"{VERSION_FILE} must stay the release's: make wheel rewrites it"
            )
        changed |= {name: (root / name).read_bytes() for name in sorted(files)}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _file_name(wheel, archive, version)
        with replacing(path) as partial, zipfile.ZipFile(partial, "w") as target:
            dist_info = f"{PROJECT}-{version}.dist-info"
            _write(wheel, archive, target, dist_info, changed, root, progress)
    return path


def _compare(
    wheel: ReleaseWheel,
    archive: zipfile.ZipFile,
    files: set[str],
    known: Mapping[str, str],
    progress: Progress,
) -> None:
    """Refuses a wheel in whose files somebody changed what ours would drop."""

    def digest(name: str) -> str | None:
        if name not in wheel.rows:
            return None
        return hashlib.sha256(wheel.read(archive, name)).hexdigest()

    differences = {name: difference(known.get(name), digest(name)) for name in files}
    told = [f"{name} {text}" for name, text in sorted(differences.items()) if text]
    if told:
        raise SetupError(
            f"{wheel.path} has other files than its release, in whose places ours go: "
            f"{'; '.join(told)}; name the release's own wheel, or bring these changes "
            "into ours first"
        )
    for note in notes(known, files, digest):
        progress.phase(f"note: {note}")


def _changed(
    wheel: ReleaseWheel, archive: zipfile.ZipFile
) -> tuple[str, dict[str, bytes]]:
    """Returns our version, and the entries that name it."""
    text = wheel.read(archive, VERSION_FILE).decode()
    found = _VERSION_LINE.findall(text)
    if len(found) != 1:
        raise SetupError(f"{wheel.path}: {VERSION_FILE} does not set __version__ once")
    # Not METADATA's: wheels from PyPI have their label here alone.
    version = found[0][2]
    version += f"{'.' if '+' in version else '+'}{LABEL}"
    metadata = f"{wheel.dist_info}/METADATA"
    head, blank, body = wheel.read(archive, metadata).partition(b"\n\n")
    head = _METADATA_LINE.sub(f"Version: {version}", head.decode()).encode()
    return version, {
        VERSION_FILE: _VERSION_LINE.sub(rf"\1\g<2>{version}\2", text).encode(),
        metadata: head + blank + body,
    }


def _file_name(wheel: ReleaseWheel, archive: zipfile.ZipFile, version: str) -> str:
    """Returns our wheel's, from the tags within: a file may have been renamed."""
    fields = parse_fields(wheel.read(archive, f"{wheel.dist_info}/WHEEL"))
    tags = [tag.split("-") for tag in fields.get_all("Tag", [])]
    parts = [".".join(dict.fromkeys(column)) for column in zip(*tags)]
    build = [fields["Build"]] if fields["Build"] else []
    return "-".join([PROJECT, version, *build, *parts]) + ".whl"


def _write(
    wheel: ReleaseWheel,
    archive: zipfile.ZipFile,
    target: zipfile.ZipFile,
    dist_info: str,
    changed: Mapping[str, bytes],
    root: Path,
    progress: Progress,
) -> None:
    last = archive.getinfo(f"{wheel.dist_info}/RECORD")
    rows: dict[str, list[str]] = {}
    done_nbytes = 0
    for name, info in _order(wheel, archive, changed):
        top, _, rest = name.partition("/")
        renamed = f"{dist_info}/{rest}" if top == wheel.dist_info else name
        # The clock's date would make each wheel another one.
        entry = zipfile.ZipInfo(renamed, (info or last).date_time)
        entry.external_attr = info.external_attr if info else _attributes(root / name)
        entry.compress_type = info.compress_type if info else zipfile.ZIP_DEFLATED
        entry.file_size = info.file_size if info else 0
        if name.endswith("/"):
            target.writestr(entry, b"")
            continue
        if info:
            # Compares it with RECORD, also where it is replaced
            with io.BytesIO() if name in changed else target.open(entry, "w") as file:
                wheel.copy(archive, info, file)
            rows[renamed] = wheel.rows[name]
        if name in changed:
            data = changed[name]
            target.writestr(entry, data)
            rows[renamed] = record_row(hashlib.sha256(data).digest(), len(data))
        done_nbytes += entry.file_size
        progress.bar(done_nbytes, wheel.unpacked_nbytes)
    progress.end()
    entry = zipfile.ZipInfo(f"{dist_info}/RECORD", last.date_time)
    entry.external_attr = last.external_attr
    rows[entry.filename] = ["", ""]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([name, *row] for name, row in rows.items())
    target.writestr(entry, text.getvalue(), zipfile.ZIP_DEFLATED)


def _order(
    wheel: ReleaseWheel, archive: zipfile.ZipFile, changed: Mapping[str, bytes]
) -> Iterator[tuple[str, zipfile.ZipInfo | None]]:
    """Yields each entry's name with the release, and what it is there.

    The release's order, new files behind its own, and dist-info at the end, where
    installers look for it.
    """
    infos = {i.filename: i for i in archive.infolist()}
    in_dist_info = [n for n in infos if n.partition("/")[0] == wheel.dist_info]
    code = [name for name in infos if name not in {*in_dist_info}]
    new = [name for name in changed if name not in infos]
    for name in [*code, *new, *in_dist_info]:
        if name not in wheel.unlisted:
            yield name, infos.get(name)


def _attributes(path: Path) -> int:
    """Returns a mode as archives hold it; the rest of it is the user's umask."""
    return (stat.S_IFREG | (0o755 if os.access(path, os.X_OK) else 0o644)) << 16
