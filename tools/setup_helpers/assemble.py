"""The branch's wheel: the base's, with our files in it.

Entries that stay go over as they are, so it takes seconds.  What must change
with a file: the version, which names the branch, in ``METADATA`` and
``torch/version.py``; the name of the dist-info folder; and ``RECORD``.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.setup_helpers.digests import difference, notes
from tools.setup_helpers.files import replacing
from tools.setup_helpers.rawzip import ArchiveWriter, open_archive
from tools.setup_helpers.report import SetupError
from tools.setup_helpers.wheel import (
    BASE_PROJECT,
    compare_with_record,
    parse_fields,
    parse_record,
    record_row,
    telling_damage,
)


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tools.setup_helpers.report import Progress
    from tools.setup_helpers.wheel import BaseWheel


# Follows the base's label in the version: 2.13.0+cpu.mixeddtype1.  Each wheel
# that is given to others gets the next number.
LABEL = "mixeddtype1"
VERSION_FILE = "torch/version.py"
_VERSION_LINE = re.compile(r"(?m)^(__version__ = )(['\"])([^'\"\n]+)\2$")
_METADATA_LINE = re.compile(r"(?m)^Version: .*$")
_CHUNK_NBYTES = 1 << 20


def labelled(version: str) -> str:
    """Returns ``version`` with our label behind its own, if it has one."""
    return f"{version}{'.' if '+' in version else '+'}{LABEL}"


@dataclass
class _Record:
    """RECORD: digest and size of each entry, in the base's order."""

    rows: dict[str, list[str]]

    @classmethod
    def parse(cls, text: str) -> _Record:
        return cls(parse_record(text))

    def render(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([name, *rest] for name, rest in self.rows.items())
        return text.getvalue()


class _Base:
    """The base wheel, opened; what is read of it is compared with its RECORD."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.archive = open_archive(path)
        self.entries = {i.filename: i for i in self.archive.infolist()}
        (self.dist_info,) = {
            top for top in (name.partition("/")[0] for name in self.entries)
            if top.endswith(".dist-info")
        }  # fmt: skip
        self.record_name = f"{self.dist_info}/RECORD"
        self.record = _Record.parse(self.archive.read(self.record_name).decode())

    def read(self, name: str) -> bytes:
        if name not in self.entries:
            raise SetupError(f"{self.path} lacks {name}")
        data = self.archive.read(name)
        self._compare(name, hashlib.sha256(data).digest(), len(data))
        return data

    def digest(self, name: str) -> str | None:
        """Returns the digest of an entry, None if there is none of this name."""
        is_there = name in self.entries
        return hashlib.sha256(self.read(name)).hexdigest() if is_there else None

    def check_all(self, progress: Progress) -> None:
        """Compares every entry with RECORD, which reads the whole wheel."""
        total_nbytes = sum(info.file_size for info in self.entries.values())
        done_nbytes = 0
        for name, info in self.entries.items():
            if self._is_listed(name):
                digest = hashlib.sha256()
                with self.archive.open(info) as file:
                    while chunk := file.read(_CHUNK_NBYTES):
                        digest.update(chunk)
                self._compare(name, digest.digest(), info.file_size)
            done_nbytes += info.file_size
            progress.bar(done_nbytes, total_nbytes)
        progress.end()

    def stays(self, name: str) -> bool:
        """Whether an entry has a place in our wheel: signatures have none."""
        return not name.startswith(self.record_name)

    def _is_listed(self, name: str) -> bool:
        return self.stays(name) and not name.endswith("/")

    def _compare(self, name: str, digest: bytes, nbytes: int) -> None:
        row = record_row(digest, nbytes)
        compare_with_record(self.path, name, row, self.record.rows)


@dataclass(frozen=True)
class _Entry:
    data: bytes
    external_attr: int


@dataclass(frozen=True)
class _Plan:
    """What our wheel is made of, besides the base's entries."""

    version: str
    dist_info: str
    entries: dict[str, _Entry]
    """Those that are ours or must change, by name in our wheel."""

    def renamed(self, name: str, base: _Base) -> str:
        top, slash, rest = name.partition("/")
        return f"{self.dist_info}{slash}{rest}" if top == base.dist_info else name


def _make_plan(base: _Base, root: Path, files: set[str]) -> _Plan:
    if VERSION_FILE in files:
        raise SetupError(f"{VERSION_FILE} must stay the base's: make wheel rewrites it")
    entries = {}
    for name in sorted(files):
        if name in base.entries:
            base.read(name)
            external_attr = base.entries[name].external_attr
        else:
            external_attr = _external_attr(root / name)
        entries[name] = _Entry((root / name).read_bytes(), external_attr)
    version_text = base.read(VERSION_FILE).decode()
    found = _VERSION_LINE.findall(version_text)
    if len(found) != 1:
        raise SetupError(f"{base.path}: {VERSION_FILE} does not set __version__ once")
    # Not METADATA's: wheels from PyPI have their label here alone.
    version = labelled(found[0][2])
    version_text = _VERSION_LINE.sub(rf"\1\g<2>{version}\2", version_text)
    dist_info = f"{BASE_PROJECT}-{version}.dist-info"
    metadata = f"{base.dist_info}/METADATA"
    head, blank, body = base.read(metadata).partition(b"\n\n")
    head = _METADATA_LINE.sub(f"Version: {version}", head.decode()).encode()
    for name, base_name, data in (
        (VERSION_FILE, VERSION_FILE, version_text.encode()),
        (f"{dist_info}/METADATA", metadata, head + blank + body),
    ):
        entries[name] = _Entry(data, base.entries[base_name].external_attr)
    return _Plan(version, dist_info, entries)


def _refuse_changed(base: _Base, files: set[str], known: Mapping[str, str]) -> None:
    """Refuses a wheel in whose files somebody changed what ours would drop."""
    differences = {n: difference(known.get(n), base.digest(n)) for n in sorted(files)}
    told = [f"{name} {text}" for name, text in differences.items() if text]
    if told:
        raise SetupError(
            f"{base.path} has other files than its release, in whose places ours go: "
            f"{'; '.join(told)}; name the release's own wheel, or bring these changes "
            "into ours first"
        )


def _external_attr(path: Path) -> int:
    """Returns a mode as archives hold it; the rest of it is the user's umask."""
    return (stat.S_IFREG | (0o755 if os.access(path, os.X_OK) else 0o644)) << 16


def _order(base: _Base, plan: _Plan) -> Iterator[tuple[str, str | None]]:
    """Yields each entry's name with us and with the base, where it has one there.

    The base's order, new files behind its own, and dist-info at the end, where
    installers look for it.
    """
    names = [name for name in base.entries if base.stays(name)]
    in_dist_info = [n for n in names if n.partition("/")[0] == base.dist_info]
    code = set(names) - set(in_dist_info)
    yield from ((name, name) for name in names if name in code)
    renamed = {plan.renamed(name, base) for name in names}
    yield from ((name, None) for name in plan.entries if name not in renamed)
    yield from ((plan.renamed(name, base), name) for name in in_dist_info)


def _write(base: _Base, plan: _Plan, path: Path) -> None:
    last = base.entries[base.record_name]
    # The clock's would make each wheel another one.
    date_time = last.date_time
    record = _Record({})
    with open(base.path, "rb") as source, open(path, "wb") as target:
        writer = ArchiveWriter(target)
        for name, base_name in _order(base, plan):
            entry = plan.entries.get(name)
            if entry is not None:
                writer.add(name, entry.data, date_time, entry.external_attr)
                digest = hashlib.sha256(entry.data).digest()
                record.rows[name] = record_row(digest, len(entry.data))
            elif base_name is not None:
                writer.copy(source, base.entries[base_name], name)
                if not name.endswith("/"):
                    record.rows[name] = base.record.rows[base_name]
        name = plan.renamed(base.record_name, base)
        record.rows[name] = ["", ""]
        writer.add(name, record.render().encode(), date_time, last.external_attr)
        writer.finish()


def _file_name(base: _Base, version: str) -> str:
    """Returns our wheel's, from the tags within: a file may have been renamed."""
    fields = parse_fields(base.read(f"{base.dist_info}/WHEEL"))
    tags = [tag.split("-") for tag in fields.get_all("Tag", [])]
    parts = [".".join(dict.fromkeys(column)) for column in zip(*tags)]
    build = [fields["Build"]] if fields["Build"] else []
    return "-".join([BASE_PROJECT, version, *build, *parts]) + ".whl"


def compare_wheel(wheel: BaseWheel, progress: Progress) -> None:
    """Refuses a wheel with an entry that is not as its RECORD says."""
    progress.phase(f"comparing {wheel.path.name} with its RECORD")
    with telling_damage(wheel.path):
        base = _Base(wheel.path)
        with base.archive:
            base.check_all(progress)


def assemble_wheel(
    wheel: BaseWheel,
    root: Path,
    files: set[str],
    folder: Path,
    progress: Progress,
    *,
    is_known: bool,
    digests: Mapping[str, str] | None,
) -> Path:
    """Writes our wheel into ``folder`` and returns its path.

    Args:
        files: ours, by path from ``root``; they replace the base's.
        is_known: whether ``wheel`` is, by size and date, the file that set-up
            unpacked.  Any other one is compared with its RECORD as a whole.
        digests: of the release's own files, where they are known.
    """
    if not is_known:
        compare_wheel(wheel, progress)
    with telling_damage(wheel.path):
        base = _Base(wheel.path)
        with base.archive:
            if digests is not None:
                _refuse_changed(base, files, digests)
                for note in notes(digests, files, base.digest):
                    progress.phase(f"note: {note}")
            plan = _make_plan(base, root, files)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / _file_name(base, plan.version)
            with replacing(path) as partial:
                _write(base, plan, partial)
    return path
