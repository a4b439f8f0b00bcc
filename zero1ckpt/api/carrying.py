"""``carried/``: what a native checkpoint keeps of the Megatron checkpoint that it was made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..core.digest import crc64, format_digest, shift
from ..core.errors import CorruptError
from ..foreign.megatron.carried import CARRIED_DATA, CARRIED_FILES, CARRIED_JSON, Carried, Piece, decode, encode
from ..foreign.megatron.carried import from_checkpoint as carry
from ..foreign.megatron.model import MegatronCheckpoint
from ..model.manifest import FileEntry
from ..model.protocols import Area, Store
from ..storage.local import OutputFile, writing
from .stored import Stored

__all__ = ["carried_bytes", "carried_names", "read_carried", "write_carried"]


def read_carried(stored: Stored) -> Carried | None:
    """What a native checkpoint keeps of a Megatron one; None where it was not made from one.

    Raises ``CorruptError`` where that is not what the manifest says, or cannot be understood.
    """
    entry = stored.files.get(CARRIED_JSON)
    if entry is None or stored.megatron is not None:
        return None
    data = stored.store.read(CARRIED_JSON)
    label = stored.store.label(CARRIED_JSON)
    if format_digest(crc64(data)) != entry.digest:
        raise CorruptError(
            "the file does not match its digest",
            file=label,
            found=format_digest(crc64(data)),
            expected=entry.digest,
            hint="restore it from a copy",
        )
    return decode(data, label)


def carried_names(stored: Stored) -> tuple[str, ...]:
    """Keys of entries and files besides the params' state, sorted."""
    carried = read_carried(stored) if stored.megatron is None else carry(stored.megatron)[0]
    if carried is None:
        return ()
    keys = (*(row.key for row in carried.objects), *(row.key for row in carried.tensors), *carried.files)
    return tuple(sorted(keys))


def carried_bytes(megatron: MegatronCheckpoint) -> int:
    """Bytes that will be kept of a checkpoint, near enough to ask for space."""
    carried, pieces = carry(megatron)
    return sum(piece.nbytes for piece in pieces) + sum(megatron.entries.files[path] for path in carried.files)


def write_carried(megatron: MegatronCheckpoint, area: Area, *, window_bytes: int) -> list[FileEntry]:
    """Writes what is kept of a checkpoint whose map is proved. Raises ``OutputError``, and ``CorruptError`` where the
    source cannot be read.
    """
    carried, pieces = carry(megatron)
    entries = [_write(area, CARRIED_JSON, len(data := encode(carried)), [memoryview(data)])]
    total = sum(piece.nbytes for piece in pieces)
    if pieces:
        entries.append(_write(area, CARRIED_DATA, total, _read_pieces(megatron, pieces, window_bytes)))
    store = megatron.entries.store
    for path in carried.files:
        nbytes = megatron.entries.files[path]
        entries.append(_write(area, CARRIED_FILES + path, nbytes, _read_run(store, path, 0, nbytes, window_bytes)))
    return entries


def _read_pieces(megatron: MegatronCheckpoint, pieces: Iterable[Piece], window_bytes: int) -> Iterator[memoryview]:
    entries = megatron.entries
    for piece in pieces:
        file, at = entries.chunks.place(piece.chunk) if piece.place is None else piece.place
        yield from _read_run(entries.store, file, at, piece.nbytes, window_bytes)


def _read_run(store: Store, key: str, at: int, nbytes: int, window_bytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(window_bytes, nbytes)))
    for low in range(0, nbytes, max(window_bytes, 1)):
        window = buffer[: min(window_bytes, nbytes - low)]
        store.readv_into(key, at + low, [window])
        yield window


def _write(area: Area, key: str, nbytes: int, windows: Iterable[memoryview]) -> FileEntry:
    """Writes a file durably, in one pass."""
    path = area.path(key)
    file = OutputFile(path.with_name(path.name + ".part"), nbytes)
    crc = at = 0
    try:
        for window in windows:
            file.write(at, window)
            crc, at = shift(crc, window.nbytes) ^ crc64(window), at + window.nbytes
        file.sync_and_close()
    finally:
        file.close()
    with writing(path):
        file.path.rename(path)
    return FileEntry(key, nbytes, format_digest(crc))
