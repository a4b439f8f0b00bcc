"""Writes a mended copy of a torch_dist checkpoint: the same files, with other bytes for mended values alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.errors import UnsupportedError
from ..doctor.shifted_state import Mended, repair
from ..encodings.dcp_metadata import DcpMetadata, TensorEntry, parse_metadata
from ..encodings.inert_pickle import TensorRef
from ..encodings.torch_archive import read_archive
from ..encodings.torch_patch import checksum_places, patch
from ..foreign.megatron.boxes import BoxPlacement
from ..foreign.megatron.folders import TRACKER
from ..model.catalog import Catalog
from ..storage.local import LocalStore, writing
from ..storage.staging import Staging
from .diagnosis import Diagnosis, Mending
from .stored import Stored

__all__ = ["write_mended"]

_METADATA = ".metadata"
_LAST = "metadata.json"
_INTEGRITY = "integrity.json"


@dataclass(frozen=True, slots=True)
class _Change:
    """New elements of a chunk, from byte ``at`` of its payload on."""

    chunk: int
    at: int
    data: bytes


def write_mended(diagnosis: Diagnosis, path: Path, dst: Path) -> Mending:
    """See ``doctoring.mend``. Where ``path`` is a run folder, so is the copy, with this one iteration."""
    stored = diagnosis.stored
    assert stored is not None
    _check_container(stored)
    run = path.resolve() != stored.path.resolve()
    staging = Staging(dst, {"mended": str(stored.path)})
    try:
        inner = stored.path.name if run else ""
        _copy(stored, staging, inner)
        totals = _Totals()
        for part in diagnosis.mendable:
            changes = _changes(diagnosis, part, totals)
            _apply(stored, staging.root / inner, changes)
        last = TRACKER if run else _LAST
        source = path / TRACKER if run else stored.path / _LAST
        with writing(dst):
            _sync(staging.root)
        staging.publish(last, source.read_bytes())
    except BaseException:
        staging.abandon()
        raise
    return Mending(dst, totals.moved, totals.restored, totals.zeroed, tuple(totals.from_weights), tuple(totals.zeros))


class _Totals:
    def __init__(self) -> None:
        self.moved = self.restored = self.zeroed = 0
        self.from_weights: list[tuple[str, str, str, tuple[tuple[int, int], ...]]] = []
        self.zeros: list[tuple[str, str, str, tuple[tuple[int, int], ...]]] = []

    def add(self, part: str, param: str, mended: Mended) -> None:
        self.moved += mended.moved
        for rows, table in ((mended.from_weights, self.from_weights), (mended.zeroed, self.zeros)):
            if rows:
                table.append((part, param, mended.slot, rows))
        self.restored += sum(high - low for low, high in mended.from_weights)
        self.zeroed += sum(high - low for low, high in mended.zeroed)


def _check_container(stored: Stored) -> None:
    if stored.megatron is None or stored.megatron.container != "torch_dist":
        raise UnsupportedError("a mended copy is written of torch_dist checkpoints alone", file=stored.path)
    if _INTEGRITY in stored.megatron.entries.files:
        raise UnsupportedError(
            "the checkpoint has checksums of its files, which a mended copy would not match",
            file=stored.path / _INTEGRITY,
            hint=f"copy the checkpoint without {_INTEGRITY} and mend that",
        )
    wide = [slot.name for c in stored.catalogs.values() for slot in c.state.slots if slot.dtype != "float32"]
    if wide:
        raise UnsupportedError("only state in float32 is mended", file=stored.path, found=", ".join(sorted(set(wide))))


def _copy(stored: Stored, staging: Staging, inner: str) -> None:
    """All files but the last, which is published."""
    assert stored.megatron is not None
    for name in sorted(stored.megatron.entries.files):
        if name != _LAST or inner:
            target = staging.path(f"{inner}/{name}" if inner else name)
            with writing(target):
                shutil.copyfile(stored.path / name, target)


def _sync(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            fd = os.open(Path(folder) / name, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _changes(diagnosis: Diagnosis, part: str, totals: _Totals) -> Iterator[_Change]:
    """New payloads of chunks, one mended tensor after the other."""
    found, subject = diagnosis.examinations[part], diagnosis.subjects[part]
    assert found.shift is not None and diagnosis.stored is not None
    catalog = diagnosis.stored.catalogs[part]
    for mended in repair(subject, found.shift):
        totals.add(part, subject.params[mended.param].name, mended)
        yield from _payloads(catalog, mended)


def _payloads(catalog: Catalog, mended: Mended) -> Iterator[_Change]:
    """The chunks of one tensor. A chunk of several layers is changed layer by layer."""
    placement = catalog.placement
    assert isinstance(placement, BoxPlacement)
    slot = catalog.state.slot_index[mended.slot]
    for piece in placement.pieces:
        if (piece.param, piece.slot) == (mended.param, slot):
            flat = np.ascontiguousarray(mended.values[piece.box.slices]).reshape(-1)
            yield _Change(piece.chunk, piece.at, flat[piece.start : piece.start + piece.size].tobytes())


def _apply(stored: Stored, root: Path, changes: Iterator[_Change]) -> None:
    assert stored.megatron is not None
    store = stored.store
    metadata = parse_metadata(store.read(_METADATA), file=stored.path / _METADATA)
    rows = [(entry, row) for entry in metadata.tensors.values() for row in range(len(entry))]
    for change in changes:
        _patch(store, root, metadata, *rows[change.chunk], change)


def _patch(store: LocalStore, root: Path, metadata: DcpMetadata, entry: TensorEntry, row: int, change: _Change) -> None:
    file = metadata.files[int(entry.files[row])]
    offset, length = int(entry.at[row]), int(entry.nbytes[row])
    archive = read_archive(store, file, offset=offset, length=length)
    assert isinstance(archive.value, TensorRef)
    member = archive.storage(archive.value.storage)
    places = checksum_places(store, file, member, offset=offset, length=length)
    with writing(root / file):
        os.chmod(root / file, 0o644)
        fd = os.open(root / file, os.O_RDWR)
        try:
            patch(fd, places, archive.locate(archive.value).offset + change.at, change.data)
        finally:
            os.close(fd)
