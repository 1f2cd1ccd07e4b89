"""A release's wheel: checking that it is the right one, and unpacking it."""

from __future__ import annotations

import base64
import contextlib
import csv
import email.parser
import hashlib
import io
import lzma
import os
import platform
import re
import stat
import struct
import sys
import sysconfig
import zipfile
import zlib
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tools.setup_helpers.releases import known, RELEASES
from tools.setup_helpers.report import demand_space, SetupError


if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message
    from typing import IO

    from tools.setup_helpers.releases import Release
    from tools.setup_helpers.report import Progress


PROJECT = "torch"
_CHUNK_NBYTES = 1 << 20
# What zipfile and its decompressors raise over bytes that make no sense: a field of
# a damaged directory may ask for any feature of the format.
_DAMAGE = (
    zipfile.BadZipFile,
    EOFError,
    RuntimeError,
    ValueError,
    lzma.LZMAError,
    struct.error,
    zlib.error,
)


@contextlib.contextmanager
def telling_damage(path: Path) -> Iterator[None]:
    """Turns what reading the archive at ``path`` raises into one line."""
    try:
        yield
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a disk's, not a decompressor's
        raise SetupError(
            f"{path} is damaged: {error}; remove it and fetch it anew"
        ) from None


def python_tag() -> str:
    """Names what a compiled wheel depends on: ``cp311`` and the machine."""
    suffix = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    version = f"cp{sys.version_info.major}{sys.version_info.minor}{suffix}"
    return f"{version}-{sys.platform}-{platform.machine().lower()}"


@dataclass(frozen=True)
class ReleaseWheel:
    """A wheel that was found to be of a release."""

    path: Path
    version: str
    dist_info: str
    rows: dict[str, list[str]]
    """Of RECORD: digest and size of each file, in its order."""
    digest: str
    """Of RECORD itself: it tells wheels apart."""
    unpacked_nbytes: int

    @contextlib.contextmanager
    def opened(self) -> Iterator[zipfile.ZipFile]:
        with telling_damage(self.path), zipfile.ZipFile(self.path) as archive:
            yield archive

    @property
    def unlisted(self) -> set[str]:
        """RECORD, of which it has no digest, and the signatures of it."""
        return {f"{self.dist_info}/RECORD{kind}" for kind in ("", ".jws", ".p7s")}

    def copy(
        self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: IO[bytes]
    ) -> None:
        """Copies the data of an entry, and refuses it if it is not as RECORD says.

        A checksum of the archive's own only tells of damage, not of a change.
        """
        digest = hashlib.sha256()
        with archive.open(info) as source:
            while chunk := source.read(_CHUNK_NBYTES):
                digest.update(chunk)
                target.write(chunk)
        name, row = info.filename, record_row(digest.digest(), info.file_size)
        if name not in self.unlisted and self.rows.get(name) != row:
            raise SetupError(
                f"{self.path} was altered: {name} is not as in its RECORD; "
                "remove it and fetch it anew"
            )

    def read(self, archive: zipfile.ZipFile, name: str) -> bytes:
        if name not in self.rows:
            raise SetupError(f"{self.path} lacks {name}")
        target = io.BytesIO()
        self.copy(archive, archive.getinfo(name), target)
        return target.getvalue()


def inspect_wheel(
    path: Path, release: Release, *, for_this_python: bool = True
) -> ReleaseWheel:
    """Checks that ``path`` is a whole wheel of ``release``, and one that loads here."""
    if not path.is_file():
        raise SetupError(f"there is no wheel at {path}")
    try:
        with telling_damage(path), zipfile.ZipFile(path) as archive:
            return _inspect_archive(path, archive, release, for_this_python)
    except OSError as error:
        reason = error.strerror or error
        raise SetupError(f"{path} cannot be read: {reason}") from None


def _inspect_archive(
    path: Path, archive: zipfile.ZipFile, release: Release, for_this_python: bool
) -> ReleaseWheel:
    names = archive.namelist()
    if len(set(names)) != len(names):
        raise zipfile.BadZipFile("it holds a name twice")
    tops = {name.partition("/")[0] for name in names}
    dist_infos = [top for top in tops if top.endswith(".dist-info")]
    needed = [f"{d}/{f}" for d in dist_infos for f in ("METADATA", "WHEEL", "RECORD")]
    if len(dist_infos) != 1 or not set(needed) <= set(names):
        raise SetupError(f"{path} is not a wheel: it lacks a dist-info folder")
    metadata, wheel, record = (archive.read(name) for name in needed)
    fields = parse_fields(metadata)
    project, version = fields["Name"], fields["Version"] or ""
    if project != PROJECT or not release.is_of(version):
        raise SetupError(
            f"{path} holds {project} {version}; the release is {PROJECT} "
            f"{release.version}{_way_to(project, version)}"
        )
    tags = parse_fields(wheel).get_all("Tag", [])
    if for_this_python and not any(_runs_here(tag) for tag in tags):
        raise SetupError(
            f"{path} is for {', '.join(tags) or 'no known Python'}; "
            f"this Python is {python_tag()}"
        )
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise SetupError(f"{path} holds {name}, which lies outside of it")
    found = ReleaseWheel(
        path=path,
        version=version,
        dist_info=dist_infos[0],
        rows=parse_record(record.decode()),
        digest=hashlib.sha256(record).hexdigest(),
        unpacked_nbytes=sum(info.file_size for info in archive.infolist()),
    )
    held = {name for name in names if not name.endswith("/")}
    for name in sorted((held ^ {*found.rows}) - found.unlisted):
        raise SetupError(f"{path} does not hold what its RECORD lists: {name}")
    return found


def release_of(path: Path) -> Release:
    """Returns which release the wheel at ``path`` is of, by its name."""
    version = (path.name.split("-") + [""])[1]
    for release in RELEASES:
        if release.is_of(version):
            inspect_wheel(path, release, for_this_python=False)
            return release
    raise SetupError(f"{path} is of no release that this branch is for: {known()}")


def _way_to(project: str, version: str) -> str:
    """Says how to choose the release that a wheel is of, where that can be."""
    if project != PROJECT:
        return ""
    for release in RELEASES:
        if release.is_of(version):
            return f": take RELEASE={release.version}"
    return f", and others can be {known()}"


def _runs_here(tag: str) -> bool:
    """Whether this Python can load a wheel with ``tag``.

    A coarse check, for a clear error: interpreter, system and machine, but not
    the age of the C library, about which pip knows more.
    """
    python, _, rest = tag.partition("-")
    abi, _, target = rest.partition("-")
    version, system, machine = python_tag().split("-")
    if python != "py3" and (python, abi) not in {
        (version.removesuffix("t"), version),
        (version.removesuffix("t"), "abi3"),
    }:
        return False
    prefixes = {"linux": r"(many|musl)?linux", "darwin": "macosx"}
    pattern = f"{prefixes.get(system, system)}.*_({machine}|universal2)"
    return target == "any" or re.fullmatch(pattern, target) is not None


def unpack_wheel(wheel: ReleaseWheel, folder: Path, progress: Progress) -> None:
    """Unpacks ``wheel`` into the new ``folder``; its files become read-only."""
    folder.mkdir(parents=True)
    demand_space(folder, wheel.unpacked_nbytes, "the release")
    done_nbytes = 0
    try:
        with wheel.opened() as archive:
            for info in archive.infolist():
                _unpack_member(wheel, archive, info, folder)
                done_nbytes += info.file_size
                progress.bar(done_nbytes, wheel.unpacked_nbytes)
    finally:
        progress.end()


def _unpack_member(
    wheel: ReleaseWheel, archive: zipfile.ZipFile, info: zipfile.ZipInfo, folder: Path
) -> None:
    path = folder / info.filename
    if info.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    executable = (info.external_attr >> 16) & stat.S_IXUSR
    # Read-only from the start: the open file can still be written to.
    mode = 0o555 if executable else 0o444
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(os.open(path, flags, mode), "wb") as target:
        wheel.copy(archive, info, target)


def record_row(digest: bytes, nbytes: int) -> list[str]:
    """Returns what RECORD says of a file with this SHA-256 and size."""
    encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    return [f"sha256={encoded}", str(nbytes)]


def unpacked_distribution(unpacked: Path) -> Distribution:
    """Returns what the dist-info folder of an unpacked release says about it."""
    return Distribution.at(next(_dist_infos_of(unpacked)))


def unpacked_version(unpacked: Path) -> str:
    """Returns the version of an unpacked release, as its wheel has it."""
    # Of the folder's name: reading it takes no time.
    name = max((path.name for path in _dist_infos_of(unpacked)), default="")
    return name.removesuffix(".dist-info").partition("-")[2]


def _dist_infos_of(unpacked: Path) -> Iterator[Path]:
    return unpacked.glob(f"{PROJECT}-*.dist-info")


def strays_in(unpacked: Path) -> list[str]:
    """Returns the files under ``unpacked`` that did not come with it.

    A file that is created in a tree's folder that is a link ends up there.
    """
    listed = parse_record(unpacked_distribution(unpacked).read_text("RECORD") or "")
    found = []
    for parent, folders, files in os.walk(unpacked):
        inside = os.path.relpath(parent, unpacked)
        if not inside.endswith(".dist-info"):
            found += [os.path.normpath(os.path.join(inside, file)) for file in files]
        folders[:] = [name for name in folders if name != "__pycache__"]
    return sorted({*found} - listed.keys())


def parse_record(record: str) -> dict[str, list[str]]:
    """Returns the digest and the size of each file, in the order of RECORD."""
    return {row[0]: row[1:] for row in csv.reader(record.splitlines()) if row}


def console_scripts(distribution: Distribution) -> dict[str, str]:
    """Returns the commands that ``distribution`` declares, such as torchrun."""
    points = distribution.entry_points.select(group="console_scripts")
    return {point.name: point.value for point in points}


def parse_fields(text: bytes) -> Message:
    return email.parser.BytesHeaderParser().parsebytes(text)
