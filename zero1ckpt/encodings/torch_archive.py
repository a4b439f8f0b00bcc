"""Archives that ``torch.save`` writes: a zip of stored members, alone in a file or at an offset inside one.

``archive/data.pkl`` is the value, a pickle whose tensors refer to storages by key; ``archive/data/<key>`` holds the
bytes of a storage. Members are stored, never compressed, so a storage lies at a known byte of the file and is read in
place; nothing but the directory, the headers and the small members is read here. Section numbers below are those of
PKZIP's APPNOTE 6.3.

Written archives have no clock, no random id and a fixed name, and hold the checksum of a storage only after its bytes
(a data descriptor, 4.3.9), so that the bytes before it are known before the payload is.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ..core.errors import CorruptError, UnsupportedError, UsageError
from ..model.protocols import Store
from .inert_pickle import StorageRef, TensorRef, Value, load
from .inert_pickle.makers import STORAGE_DTYPES
from .inert_pickle.writer import dump

__all__ = [
    "ALIGNMENT",
    "Archive",
    "ArchivePlan",
    "Hole",
    "Member",
    "TensorBytes",
    "check_member",
    "combine_crc32",
    "object_archive",
    "plan_archive",
    "plan_tensor",
    "read_archive",
    "read_member",
    "tensor_itemsize",
]

ALIGNMENT = 64
"""Storages begin at a multiple of this many bytes from the start of the archive, as torch's do."""

_LOCAL = struct.Struct("<4s5H3I2H")  # 4.3.7
_CENTRAL = struct.Struct("<4s6H3I5H2I")  # 4.3.12
_END = struct.Struct("<4s4H2IH")  # 4.3.16
_END64 = struct.Struct("<4sQ2H2I4Q")  # 4.3.14
_LOCATOR64 = struct.Struct("<4sIQI")  # 4.3.15
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _DESCRIPTOR = 1, 8  # bits of the general purpose flag, 4.4.4
_ZIP64_FIELD = 1  # 4.5.3
_BLOCK = 4096
_OLD_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_SIZES = {"float64": 8, "int64": 8, "complex64": 8, "uint64": 8, "complex128": 16}
_SIZES |= dict.fromkeys(("float32", "int32", "uint32", "complex32", "qint32"), 4)
_SIZES |= dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2)
_SIZES |= dict.fromkeys(("int8", "uint8", "bool", "qint8", "quint8", "float8_e4m3fn", "float8_e5m2"), 1)
_SIZES |= dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1)


def tensor_itemsize(dtype: str) -> int:
    """Bytes an element of a torch dtype, of those too that no container of ours holds."""
    if dtype not in _SIZES:
        raise UnsupportedError("element type is not supported", found=dtype, expected=f"one of {', '.join(_SIZES)}")
    return _SIZES[dtype]


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Member:
    """One member: its name without the archive's folder, the byte of the file where its data begins, its checksum."""

    name: str
    offset: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Where a tensor's elements lie in the file. ``stride`` is in elements; ``offset`` is that of the first element."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    contiguous: bool

    @property
    def nbytes(self) -> int:
        """Of the elements; of a contiguous tensor, the bytes from ``offset`` on."""
        return prod(self.shape) * tensor_itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Archive:
    """The value of an archive, and where its storages lie."""

    value: Value
    members: Mapping[str, Member]
    file: str

    def storage(self, ref: StorageRef) -> Member:
        """The member that holds a storage. Raises ``CorruptError`` if it is missing or too small."""
        member = self.members.get(f"data/{ref.key}")
        if member is None:
            raise CorruptError("the archive lacks a storage that its pickle names", file=self.file, found=ref.key)
        expected = ref.numel * (1 if ref.dtype is None else tensor_itemsize(ref.dtype))
        if member.nbytes != expected:
            raise CorruptError(
                f"storage {ref.key} of the archive has another size than its pickle says",
                file=self.file,
                found=f"{member.nbytes} bytes",
                expected=f"{expected} bytes",
            )
        return member

    def locate(self, tensor: TensorRef) -> TensorBytes:
        """Where a tensor's elements lie. Raises ``CorruptError`` for one that reaches beyond its storage."""
        member = self.storage(tensor.storage)
        size = tensor_itemsize(tensor.dtype)
        reach = 0
        if tensor.numel:
            reach = tensor.offset + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
        if reach * size > member.nbytes:
            raise CorruptError(
                f"a tensor reaches beyond storage {tensor.storage.key} of the archive",
                file=self.file,
                found=f"{reach * size} bytes",
                expected=f"at most {member.nbytes} bytes",
            )
        at = member.offset + (tensor.offset * size if tensor.numel else 0)
        return TensorBytes(tensor.dtype, tensor.shape, tensor.stride, at, tensor.contiguous)


def read_archive(
    store: Store,
    key: str,
    *,
    offset: int = 0,
    length: int | None = None,
    max_pickle_bytes: int = 1 << 28,
    max_members: int = 1 << 20,
) -> Archive:
    """The value of the archive that is bytes [offset, offset + length) of a file, and where its storages lie.

    Raises ``CorruptError``, ``MissingError``, and ``UnsupportedError`` for what torch writes but is not read here.
    """
    label = store.label(key)
    window = _Window(store, key, offset, length)
    try:
        members = _directory(window, max_members)
        pickled = members.get("data.pkl")
        if pickled is None:
            raise CorruptError("the archive has no data.pkl: it is not one of torch.save")
        if any(name.startswith("code/") or name == "constants.pkl" for name in members):
            raise UnsupportedError("the archive is a TorchScript program, not a checkpoint")
        _check_byte_order(window, members)
        if pickled.nbytes > max_pickle_bytes:
            raise CorruptError("the pickle is larger than the limit", found=pickled.nbytes, expected=max_pickle_bytes)
        value = load(window.absolute(pickled), max_bytes=max_pickle_bytes)
    except (CorruptError, UnsupportedError) as error:
        raise (error if error.file else error.at(label)) from error.__cause__
    except struct.error as error:
        raise CorruptError(f"the archive is damaged: {error}", file=label) from error
    return Archive(value, members, label)


def check_member(store: Store, key: str, member: Member, *, window_bytes: int = 1 << 20) -> None:
    """Proves a member by its CRC-32. Raises ``CorruptError``."""
    buffer = memoryview(bytearray(min(window_bytes, max(member.nbytes, 1))))
    crc = 0
    for at in range(0, member.nbytes, window_bytes):
        part = buffer[: min(window_bytes, member.nbytes - at)]
        store.readv_into(key, member.offset + at, [part])
        crc = zlib.crc32(part, crc)
    if crc != member.crc:
        raise CorruptError(
            f"member {member.name} does not match its checksum",
            file=store.label(key),
            found=f"CRC-32 {crc:08x}",
            expected=f"{member.crc:08x}",
            hint="restore the file from a copy",
        )


def read_member(store: Store, key: str, member: Member, *, max_bytes: int = 1 << 28) -> bytes:
    """The bytes of a small member. Raises ``CorruptError``."""
    if member.nbytes > max_bytes:
        raise CorruptError(f"member {member.name} is larger than the limit", file=store.label(key), found=member.nbytes)
    data = bytearray(member.nbytes)
    store.readv_into(key, member.offset, [memoryview(data)])
    return bytes(data)


class _Window:
    """An archive inside a file. Keeps its first and last block, which hold most of what is asked for."""

    def __init__(self, store: Store, key: str, offset: int, length: int | None) -> None:
        available = store.size(key) - offset
        if length is None:
            length = available
        if offset < 0 or not 0 <= length <= available:
            raise CorruptError(
                "the file ends before the archive does",
                file=store.label(key),
                found=f"{available + offset} bytes",
                expected=f"{offset + length} bytes",
                hint="restore it from a copy",
            )
        self.store = store
        self.key = key
        self.offset = offset
        self.length = length
        self.head = self._read(0, min(length, _BLOCK))
        self.tail_at = max(0, length - _BLOCK)
        self.tail = self._read(self.tail_at, length - self.tail_at) if length > _BLOCK else self.head

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes of the archive; ``CorruptError`` beyond its ends."""
        if at < 0 or nbytes < 0 or at + nbytes > self.length:
            raise CorruptError(
                "the archive is truncated", found=f"{self.length} bytes", expected=f"data through byte {at + nbytes}"
            )
        if at + nbytes <= len(self.head):
            return self.head[at : at + nbytes]
        if at >= self.tail_at:
            return self.tail[at - self.tail_at : at - self.tail_at + nbytes]
        return self._read(at, nbytes)

    def absolute(self, member: Member) -> bytes:
        return self.read(member.offset - self.offset, member.nbytes)

    def _read(self, at: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.store.readv_into(self.key, self.offset + at, [memoryview(data)])
        return bytes(data)


def _check_byte_order(window: _Window, members: Mapping[str, Member]) -> None:
    """Absent before torch 2.1, which wrote little-endian unless the machine was not."""
    member = members.get("byteorder")
    order = window.absolute(member).strip() if member is not None and member.nbytes < 100 else b"little"
    if order == b"big":
        raise UnsupportedError("the archive was written on a big-endian machine")
    if order != b"little":
        raise CorruptError("the archive's byte order is unknown", found=repr(order))


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row of the central directory."""

    name: str
    at: int
    nbytes: int
    crc: int


def _directory(window: _Window, max_members: int) -> dict[str, Member]:
    """Members by their name without the folder that all of them lie in."""
    start, nbytes, count = _find_directory(window)
    if count > max_members:
        raise CorruptError("the archive has more members than the limit", found=count, expected=max_members)
    entries = _entries(window.read(start, nbytes), count)
    members: dict[str, Member] = {}
    ends = 0
    for entry in sorted(entries, key=lambda entry: entry.at):
        if entry.at < ends:
            raise CorruptError("members of the archive overlap", found=entry.name)
        data_at = _data_offset(window, entry)
        ends = data_at + entry.nbytes
        if ends > start:
            raise CorruptError("a member reaches into the archive's directory", found=entry.name)
        folder, _, name = entry.name.partition("/")
        if name in members or not name or folder != entries[0].name.partition("/")[0]:
            raise CorruptError("the archive has a member twice or outside of its folder", found=repr(entry.name)[:100])
        members[name] = Member(name, window.offset + data_at, entry.nbytes, entry.crc)
    return members


def _find_directory(window: _Window) -> tuple[int, int, int]:
    """Start, bytes and number of entries of the central directory; the archive must end with its end record."""
    head = window.head[: len(_OLD_MAGIC)]
    if head == _OLD_MAGIC:
        raise UnsupportedError(
            "the file is in torch.save's format of before torch 1.6",
            hint="load it with torch.load and save it again",
        )
    if window.length < _END.size:
        raise CorruptError("the archive is truncated", found=f"{window.length} bytes", expected="a zip archive")
    at = window.length - _END.size
    mark, disk, disk2, count, total, nbytes, start, comment = _END.unpack(window.read(at, _END.size))
    if mark != b"PK\x05\x06" or comment:
        problem = (
            "the archive is truncated or altered" if head[:4] == b"PK\x03\x04" else "it is no archive of torch.save"
        )
        raise CorruptError(problem, found=repr(head[:4]), expected="a zip that ends with its end record")
    before = at - _LOCATOR64.size
    if before >= 0 and window.read(before, 4) == b"PK\x06\x07":
        _, _, at, _ = _LOCATOR64.unpack(window.read(before, _LOCATOR64.size))
        mark, _, _, _, disk, disk2, count, total, nbytes, start = _END64.unpack(window.read(at, _END64.size))
        if mark != b"PK\x06\x06":
            raise CorruptError("the archive's zip64 end record is not where its locator says", found=at)
    if disk or disk2 or count != total or start + nbytes > at:
        raise CorruptError("the archive's end record contradicts itself", found=f"{count} of {total} members")
    return start, nbytes, count


def _entries(table: bytes, count: int) -> list[_Entry]:
    """The rows of the central directory."""
    rows = []
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(table):
            raise CorruptError("the archive's directory is truncated", found=f"{len(table)} bytes")
        (mark, _, _, flags, method, _, _, crc, packed, nbytes, n_name, n_extra, n_comment, _, _, _, start) = (
            _CENTRAL.unpack_from(table, at)
        )
        end = at + _CENTRAL.size + n_name
        raw = table[at + _CENTRAL.size : end]
        if mark != b"PK\x01\x02" or len(raw) != n_name:
            raise CorruptError("the archive's directory is damaged", found=f"at its byte {at}")
        if method or flags & _ENCRYPTED:
            raise UnsupportedError("a member of the archive is compressed or encrypted", found=repr(raw)[:100])
        nbytes, packed, start = _zip64(table[end : end + n_extra], nbytes, packed, start)
        if packed != nbytes:
            raise CorruptError("a stored member has two sizes", found=repr(raw)[:100])
        rows.append(_Entry(raw.decode("utf-8", "backslashreplace"), start, nbytes, crc))
        at = end + n_extra + n_comment
    if at != len(table):
        raise CorruptError("the archive's directory is damaged", found=f"{len(table)} bytes", expected=f"{at} bytes")
    return rows


def _zip64(extra: bytes, *fields: int) -> list[int]:
    """Fields that are all ones stand in the zip64 extra field, in their order (4.5.3)."""
    values = list(fields)
    if _FULL32 not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64_FIELD:
            wide = [n for (n,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + nbytes // 8 * 8])]
            missing = [i for i, value in enumerate(values) if value == _FULL32]
            if len(wide) < len(missing):
                break
            for i, value in zip(missing, wide, strict=False):
                values[i] = value
            return values
        at += 4 + nbytes
    raise CorruptError("a member's zip64 sizes are missing")


def _data_offset(window: _Window, entry: _Entry) -> int:
    """Where a member's data begins, by its local header, which must agree with the directory."""
    mark, _, flags, method, _, _, crc, packed, nbytes, n_name, n_extra = _LOCAL.unpack(
        window.read(entry.at, _LOCAL.size)
    )
    start = entry.at + _LOCAL.size
    name = window.read(start, n_name).decode("utf-8", "backslashreplace")
    known = not flags & _DESCRIPTOR and _FULL32 not in (packed, nbytes)
    if mark != b"PK\x03\x04" or method or name != entry.name or (known and (crc, nbytes) != (entry.crc, entry.nbytes)):
        raise CorruptError("a member's header contradicts the archive's directory", found=entry.name)
    return int(start + n_name + n_extra)


# ------------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class Hole:
    """Room for the bytes of a storage: ``nbytes`` at byte ``offset`` of the archive."""

    key: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ArchivePlan:
    """All bytes of an archive but those of its storages, and where these go. ``nbytes`` is of the whole archive."""

    nbytes: int
    holes: tuple[Hole, ...]
    _rows: tuple[_Row, ...]
    _runs: tuple[bytes, ...]

    @property
    def prefix(self) -> bytes:
        """The bytes before the first storage: they depend on no payload."""
        return self._runs[0]

    def runs(self, crcs: Sequence[int]) -> list[tuple[int, bytes]]:
        """The bytes around the storages, with their offsets, by the CRC-32 of each storage's bytes. Pure."""
        assert len(crcs) == len(self.holes)
        rows = list(self._rows)
        made = [(0, self._runs[0])]
        for hole, crc, row_index, run in zip(self.holes, crcs, self._hole_rows(), self._runs[1:], strict=True):
            rows[row_index] = row = rows[row_index].with_crc(crc)
            made.append((hole.offset + hole.nbytes, row.descriptor() + run))
        last_at, last = made[-1]
        made[-1] = (last_at, last + _directory_bytes(rows, last_at + len(last)))
        return made

    def suffix(self, crc: int) -> bytes:
        """The bytes after the storage of an archive that has one. Pure."""
        return self.runs([crc])[1][1]

    def _hole_rows(self) -> list[int]:
        return [i for i, row in enumerate(self._rows) if row.hole]


@dataclass(frozen=True, slots=True)
class _Row:
    name: bytes
    at: int
    nbytes: int
    crc: int
    hole: bool

    @property
    def wide(self) -> bool:
        return self.nbytes >= _FULL32

    def with_crc(self, crc: int) -> _Row:
        return _Row(self.name, self.at, self.nbytes, crc, self.hole)

    def header(self, padding_to: int) -> bytes:
        """The local header of a member at byte ``at``, padded so that its data begins at a multiple.

        Of a storage neither sizes nor CRC-32 stand here but in the descriptor; one of 4 GiB announces by its zip64
        field that the descriptor's sizes are wide (4.3.9.2).
        """
        crc, size = (0, 0) if self.hole else (self.crc, self.nbytes)
        extra = struct.pack("<2H2Q", _ZIP64_FIELD, 16, 0, 0) if self.wide else b""
        size = _FULL32 if self.wide else size
        start = self.at + _LOCAL.size + len(self.name) + len(extra)
        padding = -(start + 4) % padding_to
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        flags = _DESCRIPTOR if self.hole else 0
        fixed = (b"PK\x03\x04", self.version, flags, 0, 0, _FIRST_DAY, crc, size, size)
        return _LOCAL.pack(*fixed, len(self.name), len(extra)) + self.name + extra

    def descriptor(self) -> bytes:
        return struct.pack("<4sI2Q" if self.wide else "<4s3I", b"PK\x07\x08", self.crc, self.nbytes, self.nbytes)

    def central(self) -> bytes:
        """The row of the directory (4.3.12)."""
        wide = [n for n in (self.nbytes, self.nbytes, self.at) if n >= _FULL32]
        extra = struct.pack(f"<2H{len(wide)}Q", _ZIP64_FIELD, 8 * len(wide), *wide) if wide else b""
        flags = _DESCRIPTOR if self.hole else 0
        size, at = min(self.nbytes, _FULL32), min(self.at, _FULL32)
        fixed = (b"PK\x01\x02", 0, self.version, flags, 0, 0, _FIRST_DAY, self.crc, size, size)
        return _CENTRAL.pack(*fixed, len(self.name), len(extra), 0, 0, 0, 0, at) + self.name + extra

    @property
    def version(self) -> int:
        """The version of the format that reading needs (4.4.3)."""
        return 45 if self.wide or self.at >= _FULL32 else 20


_FIRST_DAY = 1 << 5 | 1
"""1980-01-01, the first date that a zip can hold."""


def plan_archive(value: Value, storages: Sequence[tuple[str, int]] = (), *, name: str = "archive") -> ArchivePlan:
    """The archive of a value whose ``StorageRef`` keys and bytes are ``storages``. Pure. Raises ``UsageError``."""
    keys = [key for key, _ in storages]
    if len(set(keys)) != len(keys) or not all(key and key.isascii() and key.isalnum() for key in keys):
        raise UsageError("keys of storages must be different words", found=keys[:20])
    members: list[tuple[str, bytes | int]] = [("data.pkl", dump(value)), ("byteorder", b"little")]
    members += [(f"data/{key}", nbytes) for key, nbytes in storages]
    members.append(("version", b"3\n"))
    rows, runs, holes = [], [bytearray()], []
    at = 0
    for member, data in members:
        full = f"{name}/{member}".encode()
        if isinstance(data, int):
            row = _Row(full, at, data, 0, hole=True)
            runs[-1] += row.header(ALIGNMENT)
            at += len(row.header(ALIGNMENT))
            holes.append(Hole(member.removeprefix("data/"), at, data))
            at += data + len(row.descriptor())
            runs.append(bytearray())
        else:
            row = _Row(full, at, len(data), zlib.crc32(data), hole=False)
            runs[-1] += row.header(1) + data
            at += len(row.header(1)) + len(data)
        rows.append(row)
    nbytes = at + len(_directory_bytes(rows, at))
    return ArchivePlan(nbytes, tuple(holes), tuple(rows), tuple(map(bytes, runs)))


def plan_tensor(dtype: str, shape: Sequence[int]) -> ArchivePlan:
    """The archive of one contiguous tensor, as ``torch.save(tensor)``: one hole, of the tensor's bytes. Pure."""
    numel = prod(shape)
    tensor = tensor_ref("0", dtype, shape)
    return plan_archive(tensor, [("0", numel * tensor_itemsize(dtype))])


def tensor_ref(key: str, dtype: str, shape: Sequence[int]) -> TensorRef:
    """A contiguous tensor that is the whole of storage ``key``. Pure."""
    numel = prod(shape)
    typed = dtype in STORAGE_DTYPES.values()
    storage = StorageRef(key, dtype if typed else None, numel if typed else numel * tensor_itemsize(dtype))
    strides = list(accumulate(reversed([max(n, 1) for n in shape]), lambda a, b: a * b, initial=1))[-2::-1]
    return TensorRef(storage, dtype, 0, tuple(shape), tuple(strides) if shape else ())


def object_archive(value: Value) -> bytes:
    """The archive of a value without tensors, as ``torch.save(value)``. Pure."""
    plan = plan_archive(value)
    return plan.runs([])[0][1]


def _directory_bytes(rows: Sequence[_Row], at: int) -> bytes:
    """The central directory of an archive whose members end at byte ``at``, and the end records. Pure."""
    table = b"".join(row.central() for row in rows)
    count, end = len(rows), at + len(table)
    records = b""
    if count >= _FULL16 or at >= _FULL32 or len(table) >= _FULL32 or any(row.wide for row in rows):
        fixed = (b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, len(table), at)
        records = _END64.pack(*fixed) + _LOCATOR64.pack(b"PK\x06\x07", 0, end, 1)
    small = min(count, _FULL16)
    tail = _END.pack(b"PK\x05\x06", 0, 0, small, small, min(len(table), _FULL32), min(at, _FULL32), 0)
    return table + records + tail


# ------------------------------------------------------------------------------------------------------------ checksums

_POLY = 0xEDB88320


def combine_crc32(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of two runs of bytes from those of each: for payloads that several threads write. Pure.

    ``first`` is multiplied by x^(8 n) modulo the polynomial, in the reflected order of bits that CRC-32 uses.
    """
    factor, power = 1 << 31, _times(1 << 23, 1 << 31)  # 1, and x^8
    n = second_nbytes
    while n:
        if n & 1:
            factor = _times(factor, power)
        power = _times(power, power)
        n >>= 1
    return _times(first, factor) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32; bit 31 is x^0."""
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & _FULL32
        b = b >> 1 ^ (_POLY if b & 1 else 0)
    return product
