"""``zero1ckpt.verify``: is a checkpoint what its manifest says, and does another hold the same state?"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ..core.digest import crc64, format_digest, tensor_digest
from ..core.errors import CorruptError, MissingError, Zero1CkptError
from ..core.ranges import IntColumn
from ..encodings.tensor_file import check_tensor_file, read_tensor
from ..model.catalog import Catalog, Extents, digest_tensors, fold_pieces
from ..model.manifest import MANIFEST_NAME, FileEntry, make_part, whole_digest
from ..model.numeric import first_negative, first_nonfinite
from ..model.protocols import Progress, Source
from ..model.state import PartState
from ..model.values import same_value
from .commit import workers_or_default
from .stored import EXTRA_FILE, MODEL_FILE, Stored, describe

__all__ = ["Finding", "Verification", "verify"]

_READ_BYTES = 8 * 2**20
_NOT_NEGATIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or in ``notices`` worth knowing. ``range`` counts elements of the param."""

    kind: str
    message: str
    part: str = ""
    param: str | None = None
    slot: str | None = None
    range: tuple[int, int] | None = None
    file: str | None = None


@dataclass
class Verification:
    """The answer of ``verify``: true where nothing was found."""

    findings: list[Finding] = field(default_factory=list)
    notices: list[Finding] = field(default_factory=list)
    bytes_read: int = 0

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok


def verify(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    against: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Checks files, sizes, headers and digests; ``deep`` reads all data and checks checksums and values too.

    ``against``: proves that another checkpoint holds the same params, slots, values, groups, step and extra state,
    whatever its layout. Raises ``MissingError`` or ``CorruptError`` where the manifest cannot be read.
    """
    stored = describe(path, check_files=False)
    result = Verification()
    result.findings += _check_files(stored)
    result.notices += _unlisted(stored)
    broken = {finding.file for finding in result.findings}
    digests: list[Finding] = []
    for catalog in stored.catalogs.values():
        digests += _check_part(stored, catalog, broken, result)
    result.findings += digests
    _check_totals(stored, result)
    if deep:
        _check_data(stored, broken, result, workers_or_default(workers), progress)
    if against is not None:
        result.findings += _compare(stored, describe(against, check_files=False))
    return result


def _check_files(stored: Stored) -> list[Finding]:
    findings = []
    for entry in stored.manifest.files:
        try:
            nbytes = stored.store.size(entry.path)
        except MissingError as error:
            findings.append(Finding("missing_file", str(error), file=entry.path))
            continue
        if nbytes != entry.bytes:
            kind = "truncated_file" if nbytes < entry.bytes else "long_file"
            message = f"{stored.store.label(entry.path)}: found {nbytes} bytes, expected {entry.bytes}"
            findings.append(Finding(kind, message, file=entry.path))
    broken = {finding.file for finding in findings}
    for key, data in stored.derived().items():
        if key not in broken and stored.store.read(key) != data:
            message = f"{stored.store.label(key)}: it is not what follows from the manifest"
            findings.append(Finding("altered_file", message, file=key))
        elif key not in broken and format_digest(crc64(data)) != stored.files[key].digest:
            message = f"{stored.store.label(key)}: the manifest states digest {stored.files[key].digest} for it"
            findings.append(Finding("wrong_digest", f"{message}, found {format_digest(crc64(data))}", file=key))
    for entry in stored.other_files():
        if entry.path not in broken:
            try:
                check_tensor_file(stored.store, entry)
            except Zero1CkptError as error:
                findings.append(Finding("altered_file", str(error), file=entry.path))
    return findings


def _unlisted(stored: Stored) -> list[Finding]:
    extra = sorted(set(stored.store.keys()) - set(stored.files) - {MANIFEST_NAME})
    return [
        Finding("unlisted_file", f"{stored.store.label(key)}: the manifest does not list this file", file=key)
        for key in extra
    ]


def _check_part(stored: Stored, catalog: Catalog, broken: set[str | None], result: Verification) -> list[Finding]:
    """Proves every blob's header by the manifest, and the digests by the headers' checksums. Reads no data."""
    source = stored.source(catalog.part)
    values: dict[tuple[int, int], int] = {}
    whole = True
    for blob in range(catalog.placement.blob_count):
        key = catalog.placement.blob_key(blob)
        if key in broken:
            whole = False
            continue
        try:
            pieces = _pieces(source, blob)
        except Zero1CkptError as error:
            whole = False
            broken.add(key)
            result.findings.append(Finding("altered_file", str(error), part=catalog.part, file=key))
            continue
        partial = fold_pieces(catalog.state, catalog.placement.extents(blob), *pieces)
        for tensor, crc in partial.items():
            values[tensor] = values.get(tensor, 0) ^ crc
    return list(_wrong_digests(catalog, digest_tensors(catalog.state, values))) if whole else []


def _wrong_digests(catalog: Catalog, actual: dict[tuple[int, int], int]) -> Iterator[Finding]:
    for (param, slot), crc in actual.items():
        stated = catalog.digests[param, slot]
        if crc != stated:
            name, kind = catalog.state.params[param].name, catalog.state.slots[slot].name
            message = f"{name}: {kind} has digest {format_digest(crc)}, the manifest states {format_digest(stated)}"
            yield Finding("wrong_digest", message, catalog.part, name, kind)


def _check_totals(stored: Stored, result: Verification) -> None:
    """The manifest's sums over its own rows."""
    for part in stored.manifest.parts:
        catalog = stored.catalogs[part.name]
        remade = make_part(part.name, catalog.state, part.rules(), catalog.digests)
        if remade.digest != part.digest:
            message = f"part {part.name!r} has digest {remade.digest}, the manifest states {part.digest}"
            result.findings.append(Finding("wrong_digest", message, part.name))
    if whole_digest(stored.manifest.parts) != stored.manifest.digest:
        result.findings.append(Finding("wrong_digest", "the checkpoint's digest is not that of its parts"))


def _check_data(
    stored: Stored, broken: set[str | None], result: Verification, workers: int, progress: Progress | None
) -> None:
    """Reads every payload and compares each piece; looks at the values on the way."""
    lock = threading.Lock()

    def check(job: tuple[Catalog, Source, int]) -> None:
        catalog, source, blob = job
        reader = _BlobReader(catalog, source, blob)
        try:
            for nbytes in reader.run():
                if progress is not None:
                    progress.advance(nbytes)
        except Zero1CkptError as error:
            reader.findings.append(
                Finding("unreadable", str(error), catalog.part, file=catalog.placement.blob_key(blob))
            )
        with lock:
            result.findings += reader.findings
            result.bytes_read += reader.bytes_read

    jobs = [
        (catalog, stored.source(catalog.part), blob)
        for catalog in stored.catalogs.values()
        for blob in range(catalog.placement.blob_count)
        if catalog.placement.blob_key(blob) not in broken
    ]
    with ThreadPoolExecutor(workers, thread_name_prefix="zero1ckpt") as pool:
        list(pool.map(check, jobs))
    for entry in stored.other_files():
        if entry.path not in broken:
            result.findings += _check_tensors(stored, entry)
    result.findings.sort(key=lambda f: (f.part, f.file or "", f.param or "", f.slot or "", f.range or (0, 0)))


def _check_tensors(stored: Stored, entry: FileEntry) -> Iterator[Finding]:
    """Reads all tensors of a file beside the state; those of the model must have the digests that the manifest states."""
    header = check_tensor_file(stored.store, entry)
    stated = {model.name: model for model in stored.manifest.model} if entry.path == MODEL_FILE else {}
    for tensor in header.tensors:
        try:
            data = memoryview(read_tensor(stored.store, entry.path, header, tensor.name))
        except CorruptError as error:
            yield Finding("damaged_data", str(error), param=tensor.name, file=entry.path)
            continue
        model = stated.pop(tensor.name, None)
        if model is not None:
            crc = tensor_digest(model.name, model.kind, tensor.dtype, tensor.shape, crc64(data), data.nbytes)
            if format_digest(crc) != model.digest:
                message = f"{entry.path}: {model.name}: found digest {format_digest(crc)}, expected {model.digest}"
                yield Finding("wrong_digest", message, param=model.name, file=entry.path)
    for name in stated:
        yield Finding("missing_tensor", f"{entry.path}: {name} is not in the file", param=name, file=entry.path)


class _BlobReader:
    """Reads one payload in windows of whole pieces; keeps what it finds, one finding a piece or slice at most."""

    def __init__(self, catalog: Catalog, source: Source, blob: int) -> None:
        self.catalog = catalog
        self.source = source
        self.blob = blob
        self.findings: list[Finding] = []
        self.bytes_read = 0
        self._nonfinite: set[tuple[int, int]] = set()

    def run(self) -> Iterator[int]:
        cuts, crcs = _pieces(self.source, self.blob)
        table = self.catalog.placement.extents(self.blob)
        owner = np.searchsorted(table.at, cuts[:-1], side="right") - 1
        for first, last in _groups(cuts, _READ_BYTES):
            begin, end = int(cuts[first]), int(cuts[last])
            data = memoryview(bytearray(end - begin))
            self.source.read_run(self.blob, begin, [data])
            for piece in range(first, last):
                low, high = int(cuts[piece]), int(cuts[piece + 1])
                self._piece(table, int(owner[piece]), low, data[low - begin : high - begin], crcs[piece])
            self.bytes_read += end - begin
            yield end - begin

    def _piece(self, table: Extents, row: int, low: int, data: memoryview, stated: int) -> None:
        file = self.source.label(self.blob)
        key = self.catalog.placement.blob_key(self.blob)
        if row < 0 or low >= int(table.at[row] + table.nbytes[row]):
            if np.frombuffer(data, np.uint8).any():
                message = f"{file}: padding at payload byte {low} to {low + data.nbytes} is not zero"
                self.findings.append(Finding("nonzero_padding", message, self.catalog.part, file=key))
            elif crc64(data) != stated:
                message = f"{file}: checksum of padding at payload byte {low} is wrong"
                self.findings.append(Finding("damaged_data", message, self.catalog.part, file=key))
            return
        param, slot = int(table.param[row]), int(table.slot[row])
        spec, kind = self.catalog.state.params[param], self.catalog.state.slots[slot]
        start = int(table.start[row]) + (low - int(table.at[row])) // kind.itemsize
        span = (start, start + data.nbytes // kind.itemsize)

        def found(what: str, problem: str) -> None:
            message = f"{file}: {spec.name}: {kind.name} elements {span[0]} to {span[1]}: {problem}"
            self.findings.append(Finding(what, message, self.catalog.part, spec.name, kind.name, span, key))

        if crc64(data) != stated:
            found("damaged_data", "the data does not match its checksum")
        if (param, slot) in self._nonfinite:
            return
        at = first_nonfinite(data, kind.dtype)
        if at is not None:
            self._nonfinite.add((param, slot))
            found("nonfinite", f"element {start + at} is not finite")
        at = first_negative(data, kind.dtype) if kind.name in _NOT_NEGATIVE else None
        if at is not None:
            self._nonfinite.add((param, slot))
            found("negative", f"element {start + at} is negative, and a second moment cannot be")


def _pieces(source: Source, blob: int) -> tuple[IntColumn, Sequence[int]]:
    """Bounds and checksums of a blob's pieces, proved by the manifest."""
    pieces = source.pieces(blob)
    assert pieces is not None  # every committed blob has them
    return pieces


def _groups(cuts: IntColumn, limit: int) -> Iterator[tuple[int, int]]:
    """Runs of pieces of at most ``limit`` bytes, or one piece that is larger."""
    first = 0
    while first < len(cuts) - 1:
        last = max(int(np.searchsorted(cuts, cuts[first] + limit, side="right")) - 1, first + 1)
        yield first, last
        first = last


def _compare(a: Stored, b: Stored) -> list[Finding]:
    """Differences in state, whatever the layouts, from digests alone."""
    findings = []

    def differs(kind: str, message: str, part: str = "", param: str | None = None, slot: str | None = None) -> None:
        findings.append(Finding(kind, message, part, param, slot))

    for part in sorted(a.catalogs.keys() ^ b.catalogs.keys()):
        differs("missing_part", f"part {part!r} is only in one of the two", part)
    for part in sorted(a.catalogs.keys() & b.catalogs.keys()):
        findings += _compare_parts(part, a.catalogs[part], b.catalogs[part])
    mine, theirs = a.manifest, b.manifest
    if not same_value(mine.extra, theirs.extra) or _digest(a, EXTRA_FILE) != _digest(b, EXTRA_FILE):
        differs("different_extra", "the extra state differs")
    if mine.model != theirs.model:
        differs("different_model", "the stored model buffers or frozen params differ")
    ranks = [entry for entry in a.other_files() if entry.path.startswith("rank_extra-")]
    if mine.rank_extra != theirs.rank_extra or any(_digest(b, e.path) != e.digest for e in ranks):
        differs("different_rank_extra", "the rank-bound state differs")
    return findings


def _digest(stored: Stored, path: str) -> str | None:
    entry = stored.files.get(path)
    return entry.digest if entry else None


def _compare_parts(part: str, a: Catalog, b: Catalog) -> Iterator[Finding]:
    if a.state.step != b.state.step:
        yield Finding("different_step", f"step is {a.state.step} in one and {b.state.step} in the other", part)
    mine, theirs = _by_name(a), _by_name(b)
    for name, slot in sorted(mine.keys() ^ theirs.keys()):
        where = "first" if (name, slot) in mine else "second"
        yield Finding("missing_tensor", f"{name}: {slot} is only in the {where}", part, name, slot)
    for name, slot in sorted(mine.keys() & theirs.keys()):
        if mine[name, slot] != theirs[name, slot]:
            yield Finding("different_values", f"{name}: {slot} differs", part, name, slot)
    for name in a.state.index.keys() & b.state.index.keys():
        yield from _compare_params(part, name, a.state, b.state)
    if a.state.index.keys() == b.state.index.keys() and list(a.state.index) != list(b.state.index):
        yield Finding("different_order", "the params are registered in another order", part)
    if not same_value([dict(g) for g in a.state.groups], [dict(g) for g in b.state.groups]):
        yield Finding("different_groups", "the groups' hyper-parameters differ", part)
    if a.state.loss_scale != b.state.loss_scale:
        scales = f"{a.state.loss_scale} in one and {b.state.loss_scale} in the other"
        yield Finding("different_loss_scale", f"the dynamic loss scale is {scales}", part)


def _compare_params(part: str, name: str, a: PartState, b: PartState) -> Iterator[Finding]:
    mine, theirs = a.params[a.index[name]], b.params[b.index[name]]
    if mine != theirs:
        yield Finding("different_param", f"{name}: found {theirs}, expected {mine}", part, name)
    own, other = dict(a.scalars_of(a.index[name])), dict(b.scalars_of(b.index[name]))
    for slot in sorted(own.keys() | other.keys()):
        if repr(own.get(slot)) != repr(other.get(slot)):
            message = f"{name}: {slot} is {own.get(slot)} in one and {other.get(slot)} in the other"
            yield Finding("different_scalar", message, part, name, slot)


def _by_name(catalog: Catalog) -> dict[tuple[str, str], int]:
    state = catalog.state
    return {(state.params[p].name, state.slots[s].name): digest for (p, s), digest in catalog.digests.items()}
