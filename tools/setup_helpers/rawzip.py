"""Writing an archive out of another one's members, as they are, and new ones.

``zipfile`` reads archives, but copies a member only by inflating and deflating
it again: minutes for a release.  Here the bytes of a member, from its local
header to the end of its data, go over unchanged, and the directory behind them
is written anew.  The format is PKWARE's APPNOTE, with its 64-bit extension.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import BinaryIO, TYPE_CHECKING


if TYPE_CHECKING:
    from pathlib import Path


_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
_UNIX = 3
_HAS_DESCRIPTOR = 1 << 3
_NAME_IS_UTF8 = 1 << 11
_EXTRA64_ID = 1
_MAX16 = (1 << 16) - 1
_MAX32 = (1 << 32) - 1
_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True)
class _Placed:
    """A member of the new archive: its directory entry, and where it starts."""

    info: zipfile.ZipInfo
    name: bytes
    offset: int


class ArchiveWriter:
    """Writes an archive front to back: members first, then ``finish``."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target
        self._members: list[_Placed] = []

    def copy(self, source: BinaryIO, info: zipfile.ZipInfo, name: str) -> None:
        """Copies the member ``info`` of the archive ``source``, as ``name``."""
        source.seek(info.header_offset)
        header = source.read(_LOCAL.size)
        if len(header) < _LOCAL.size or header[:4] != b"PK\3\4":
            raise zipfile.BadZipFile(f"{info.filename} is not where it should be")
        fields = _LOCAL.unpack(header)
        name_nbytes, extra_nbytes = fields[-2:]
        if source.read(name_nbytes) != _encoded(info.orig_filename, info):
            raise zipfile.BadZipFile(f"{info.filename} has another name at its data")
        extra = source.read(extra_nbytes)
        encoded = _encoded(name, info)
        self._place(info, encoded)
        self._target.write(_LOCAL.pack(*fields[:-2], len(encoded), extra_nbytes))
        self._target.write(encoded + extra)
        self._copy_bytes(source, info)

    def add(
        self,
        name: str,
        data: bytes,
        date_time: tuple[int, int, int, int, int, int],
        external_attr: int,
    ) -> None:
        """Adds a member.

        It is stored, because what a compressor makes of it differs between
        versions of zlib: this way the same input gives the same archive.
        """
        info = zipfile.ZipInfo(name, date_time)
        info.create_system = _UNIX  # whose modes `external_attr` holds
        info.external_attr = external_attr
        info.flag_bits = 0 if name.isascii() else _NAME_IS_UTF8
        info.CRC = zlib.crc32(data)
        info.file_size = info.compress_size = len(data)
        encoded = _encoded(name, info)
        self._place(info, encoded)
        header = _LOCAL.pack(
            b"PK\3\4",
            info.extract_version,
            info.flag_bits,
            info.compress_type,
            *_packed_date(info),
            info.CRC,
            info.compress_size,
            info.file_size,
            len(encoded),
            0,
        )
        self._target.write(header + encoded + data)

    def finish(self) -> None:
        """Writes the directory."""
        start = self._target.tell()
        for member in self._members:
            self._target.write(_central_entry(member))
        nbytes = self._target.tell() - start
        count = len(self._members)
        if count >= _MAX16 or start >= _MAX32 or nbytes >= _MAX32:
            at = self._target.tell()
            sizes = (count, count, nbytes, start)
            self._target.write(_END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, *sizes))
            self._target.write(_END64_LOCATOR.pack(b"PK\6\7", 0, at, 1))
        counts = (min(count, _MAX16),) * 2
        extent = (min(nbytes, _MAX32), min(start, _MAX32))
        self._target.write(_END.pack(b"PK\5\6", 0, 0, *counts, *extent, 0))

    def _place(self, info: zipfile.ZipInfo, name: bytes) -> None:
        self._members.append(_Placed(info, name, self._target.tell()))

    def _copy_bytes(self, source: BinaryIO, info: zipfile.ZipInfo) -> None:
        """Copies the data, and the descriptor behind it where there is one."""
        left = info.compress_size
        while left:
            chunk = source.read(min(left, _CHUNK_NBYTES))
            if not chunk:
                raise zipfile.BadZipFile(f"{info.filename} is cut off")
            self._target.write(chunk)
            left -= len(chunk)
        if info.flag_bits & _HAS_DESCRIPTOR:
            self._target.write(_descriptor(source, info))


def _descriptor(source: BinaryIO, info: zipfile.ZipInfo) -> bytes:
    """Reads the CRC and the sizes that follow the data of a streamed member.

    Nothing says which of the four forms a descriptor has.
    """
    following = source.read(24)
    forms = ["<LQQ"] if info.file_size > _MAX32 else ["<LLL", "<LQQ"]
    for form in forms:
        record = struct.pack(form, info.CRC, info.compress_size, info.file_size)
        for descriptor in (b"PK\7\x08" + record, record):
            if following.startswith(descriptor):
                return descriptor
    raise zipfile.BadZipFile(f"{info.filename} has other sizes at its data")


def _central_entry(member: _Placed) -> bytes:
    info = member.info
    sizes = (info.compress_size, info.file_size)
    # Sizes before the offset, in this order, and only those that do not fit.
    wide = [n for n in (info.file_size, info.compress_size) if n >= _MAX32]
    wide += [member.offset] if member.offset >= _MAX32 else []
    extra = _without_extra64(info.extra)
    if wide:
        extra64 = struct.pack(f"<2H{len(wide)}Q", _EXTRA64_ID, 8 * len(wide), *wide)
        extra = extra64 + extra
    head = _CENTRAL.pack(
        b"PK\1\2",
        info.create_version,
        info.create_system,
        max(info.extract_version, 45) if wide else info.extract_version,
        info.reserved,
        info.flag_bits,
        info.compress_type,
        *_packed_date(info),
        info.CRC,
        *(min(size, _MAX32) for size in sizes),
        len(member.name),
        len(extra),
        len(info.comment),
        0,  # the disk that it starts on
        info.internal_attr,
        info.external_attr,
        min(member.offset, _MAX32),
    )
    return head + member.name + extra + info.comment


def _without_extra64(extra: bytes) -> bytes:
    kept, at = b"", 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind != _EXTRA64_ID:
            kept += extra[at : at + 4 + nbytes]
        at += 4 + nbytes
    return kept


def _packed_date(info: zipfile.ZipInfo) -> tuple[int, int]:
    """Returns time and date as archives hold them."""
    year, month, day, hour, minute, second = info.date_time
    time = hour << 11 | minute << 5 | second // 2
    return time, (year - 1980) << 9 | month << 5 | day


def _encoded(name: str, info: zipfile.ZipInfo) -> bytes:
    return name.encode("utf-8" if info.flag_bits & _NAME_IS_UTF8 else "cp437")


def open_archive(path: Path) -> zipfile.ZipFile:
    """Opens ``path`` for reading, and sees to it that no name stands in it twice."""
    archive = zipfile.ZipFile(path)
    names = archive.namelist()
    if len(set(names)) != len(names):
        archive.close()
        raise zipfile.BadZipFile("it holds a name twice")
    return archive
