"""Changes the elements of a stored tensor in an archive of ``torch.save``, in place, and the checksum of its member.

The archive's other bytes stay as they are. Section numbers are those of PKZIP's APPNOTE 6.3.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

from ..core.errors import CorruptError
from ..model.protocols import Store
from .torch_archive import Member, _data_offset, _entries, _Entry, _find_directory, _Window

__all__ = ["ChecksumPlaces", "checksum_places", "patch"]

_LOCAL_FLAGS, _LOCAL_CRC = 6, 14  # 4.3.7
_CENTRAL = struct.Struct("<4s6H3I5H2I")  # 4.3.12
_CENTRAL_CRC = 16
_DESCRIPTOR = 8  # 4.4.4
_WINDOW = 1 << 20


@dataclass(frozen=True, slots=True)
class ChecksumPlaces:
    """A member's bytes in the file, and the bytes where its CRC-32 stands."""

    offset: int
    nbytes: int
    places: tuple[int, ...]


def checksum_places(store: Store, key: str, member: Member, *, offset: int, length: int) -> ChecksumPlaces:
    """Where the checksum of a member stands, of the archive in bytes [offset, offset + length) of a file.

    Raises ``CorruptError`` where the member is not in the archive.
    """
    window = _Window(store, key, offset, length)
    start, nbytes, count = _find_directory(window)
    table = window.read(start, nbytes)
    at = start
    for entry in _entries(table, count):
        fields = _CENTRAL.unpack_from(table, at - start)
        if window.offset + _data_offset(window, entry) == member.offset:
            return ChecksumPlaces(
                member.offset, member.nbytes, (*_beside(window, entry, member), offset + at + _CENTRAL_CRC)
            )
        at += _CENTRAL.size + sum(fields[10:13])
    raise CorruptError("the archive lacks a member that was read from it", file=store.label(key), found=member.name)


def _beside(window: _Window, entry: _Entry, member: Member) -> tuple[int, ...]:
    """The places before and behind the data: in the local header, or in a descriptor with or without its mark."""
    (flags,) = struct.unpack("<H", window.read(entry.at + _LOCAL_FLAGS, 2))
    (known,) = struct.unpack("<I", window.read(entry.at + _LOCAL_CRC, 4))
    places = [window.offset + entry.at + _LOCAL_CRC] if known == member.crc and known else []
    if flags & _DESCRIPTOR:
        behind = member.offset - window.offset + member.nbytes
        marked = window.read(behind, 4) == b"PK\x07\x08"
        at = behind + (4 if marked else 0)
        if struct.unpack("<I", window.read(at, 4))[0] != member.crc:
            raise CorruptError("a member's descriptor contradicts the archive's directory", found=member.name)
        places.append(window.offset + at)
    elif not places:
        places.append(window.offset + entry.at + _LOCAL_CRC)
    return tuple(places)


def patch(fd: int, places: ChecksumPlaces, at: int, data: bytes | memoryview) -> None:
    """Writes ``data`` at byte ``at`` of an open file, inside the member, and the member's new checksum."""
    assert places.offset <= at and at + len(data) <= places.offset + places.nbytes
    _write(fd, at, data)
    crc = 0
    for start in range(places.offset, places.offset + places.nbytes, _WINDOW):
        crc = zlib.crc32(os.pread(fd, min(_WINDOW, places.offset + places.nbytes - start), start), crc)
    for place in places.places:
        _write(fd, place, struct.pack("<I", crc))


def _write(fd: int, at: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done
