"""``zero1ckpt.verify``: is a checkpoint what its manifest says, and does another hold the same state?"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ..core.digest import crc64, format_digest, shift, tensor_digest
from ..core.errors import CorruptError, MissingError, UnsupportedError, Zero1CkptError
from ..core.ranges import IntColumn
from ..encodings.safetensors_file import tensor_cuts
from ..encodings.tensor_file import check_tensor_file
from ..model.catalog import Catalog, digest_tensors, fold_pieces
from ..model.manifest import MANIFEST_NAME, FileEntry, make_part, whole_digest
from ..model.numeric import first_negative, first_nonfinite
from ..model.protocols import Progress, Source
from ..model.state import Scalar
from ..model.values import Json, decode_value
from ..resharding.execute import in_parallel
from ..resharding.plan import window_bounds
from .commit import window_bytes, workers_or_default
from .stored import EXTRA_FILE, MODEL_FILE, VALUE_KEY, Stored, describe, rank_extra_file

__all__ = ["NOT_NEGATIVE", "Finding", "Verification", "in_parallel", "verify"]

_SHARE = 4
"""Bytes of data that a window of one byte takes: itself, and what numpy makes of it on the way."""
NOT_NEGATIVE = frozenset(
    {
        *("exp_avg_sq", "max_exp_avg_sq", "exp_inf"),  # Adam and its kin
        *("sum", "square_avg", "acc_delta", "step_size"),  # Adagrad, RMSprop, Adadelta, Rprop
        *("exp_avg_sq_row", "exp_avg_sq_col", "row_var", "col_var"),  # factored second moments
    }
)
"""Slots that are sums of squares or sizes, by the names of torch's optimizers and of Adafactor's."""


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
    steps: list[Finding] = field(default_factory=list)
    """Counts of updates that do not agree: worth knowing where nothing else tells why, and no sign of damage."""
    bytes_read: int = 0
    has_digests: bool = True
    """Whether there were checksums to check by; a foreign checkpoint has none."""

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
    memory_limit: int | None = None,
    progress: Progress | None = None,
    layout: str | os.PathLike[str] | None = None,
) -> Verification:
    """Checks files, sizes, headers and digests; ``deep`` reads all data and checks checksums and values too.

    ``against``: proves that another checkpoint holds the same params, slots, values, groups, step and extra state,
    whatever its layout. ``memory_limit``: bytes of data in flight. ``layout``: a file that says how a Megatron
    checkpoint's params lie in its buffers.

    Raises ``MissingError`` or ``CorruptError`` where the manifest cannot be read.
    """
    stored = describe(path, check_files=False, layout=layout)
    result = Verification()
    if stored.megatron is not None:
        from .megatron_verification import check_megatron

        check_megatron(stored, result, deep=deep, workers=workers, memory_limit=memory_limit, progress=progress)
        for catalog in stored.catalogs.values():
            _check_steps(catalog, result)
        _check_parts(stored, result)
        if against is not None:
            result.findings += _differences(stored, against, result, workers, memory_limit)
        return result
    result.findings += _check_files(stored)
    result.notices += _unlisted(stored)
    broken = {finding.file for finding in result.findings}
    result.findings += _check_references(stored, broken)
    digests: list[Finding] = []
    for catalog in stored.catalogs.values():
        digests += _check_part(stored, catalog, broken, result)
    result.findings += digests
    _check_totals(stored, result)
    for catalog in stored.catalogs.values():
        _check_steps(catalog, result)
    _check_parts(stored, result)
    if deep:
        threads = workers_or_default(workers)
        window = window_bytes(memory_limit, threads) // _SHARE
        _check_data(stored, broken, result, threads, window, progress)
    if against is not None:
        result.findings += _differences(stored, against, result, workers, memory_limit)
    return result


def _check_comparable(a: Stored, b: Stored) -> None:
    """Raises ``UnsupportedError`` where a Megatron checkpoint and another cut or name the same state in other ways: a
    difference would then say nothing.
    """
    if a.megatron is None and b.megatron is None:
        return
    names = [{(part, p.name) for part, c in s.catalogs.items() for p in c.state.params} for s in (a, b)]
    legacy = [s.by_rank for s in (a, b)]
    if a.catalogs.keys() != b.catalogs.keys() or (legacy[0] != legacy[1] and names[0] != names[1]):
        raise UnsupportedError(
            "the two cannot be compared: they cut the state into other parts, or name its params in other ways",
            file=a.path,
            found=f"{len(a.catalogs)} parts, {a.manifest.format}",
            expected=f"{len(b.catalogs)} parts, {b.manifest.format}",
            hint="convert both --to megatron:fully_reshardable and compare these",
        )


def _differences(
    a: Stored,
    other: str | os.PathLike[str],
    result: Verification,
    workers: int | None,
    memory_limit: int | None,
) -> list[Finding]:
    """From digests; where one side has none, from data."""
    from .comparison import compare, read_changed  # which imports findings from here

    b = describe(other, check_files=False)
    _check_comparable(a, b)
    try:
        found = compare(a, b)
        result.notices += found.notices
        read_changed(found, only_unknown=True, workers=workers, memory_limit=memory_limit)
    except Zero1CkptError as error:
        return [Finding("unreadable", str(error), file=error.file)]
    return found.findings


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
    for entry in stored.tensor_files():
        if entry.path not in broken:
            try:
                check_tensor_file(stored.store, entry)
            except Zero1CkptError as error:
                findings.append(Finding("altered_file", str(error), file=entry.path))
    return findings


def _check_references(stored: Stored, broken: set[str | None]) -> Iterator[Finding]:
    """Every tensor that stored values refer to must be in the file beside them."""
    shared: list[tuple[str, str, Json]] = [("", "extra", stored.manifest.extra)]
    for part in stored.manifest.parts:
        shared += [(part.name, f"groups[{i}]", dict(group)) for i, group in enumerate(part.groups)]
    yield from _dangling(stored, EXTRA_FILE, shared, broken)
    ranks = 0 if stored.manifest.rank_extra is None else stored.manifest.rank_extra.ranks
    for rank in range(ranks):
        key = rank_extra_file(rank, ranks)
        if key not in stored.files:
            yield Finding("missing_file", f"{stored.store.label(key)}: the manifest does not list it", file=key)
            return  # a forged number says any: up to the first that lacks
        if key not in broken:
            text = check_tensor_file(stored.store, stored.files[key]).metadata.get(VALUE_KEY, "")
            try:
                yield from _dangling(stored, key, [("", "rank_extra", msgspec.json.decode(text))], broken)
            except msgspec.DecodeError as error:
                yield Finding("altered_file", f"{stored.store.label(key)}: it cannot be parsed: {error}", file=key)


def _dangling(
    stored: Stored, key: str, values: Sequence[tuple[str, str, Json]], broken: set[str | None]
) -> Iterator[Finding]:
    """``values``: part, place and JSON of each; ``key``: the file that their tensors lie in."""
    if key in broken:
        return
    entry = stored.files.get(key)
    there = {tensor.name for tensor in check_tensor_file(stored.store, entry).tensors} if entry else set()
    for part, place, value in values:
        wanted: dict[str, None] = {}
        try:
            decode_value(value, get_tensor=wanted.setdefault)
        except CorruptError as error:
            yield Finding("altered_file", f"{place}: {error}", part, file=MANIFEST_NAME)
        for name in wanted:
            if not name.startswith("dtype:") and name not in there:
                message = f"{place} refers to tensor {name}, and {stored.store.label(key)} does not hold it"
                yield Finding("missing_tensor", message, part, name, file=key)


def _unlisted(stored: Stored) -> list[Finding]:
    extra = sorted(set(stored.store.keys()) - set(stored.files) - {MANIFEST_NAME})
    return [
        Finding("unlisted_file", f"{stored.store.label(key)}: the manifest does not list this file", file=key)
        for key in extra
    ]


def _listed(stored: Stored, error: Zero1CkptError) -> str | None:
    """The listed file that an error is about."""
    return next((key for key in stored.files if error.file == stored.store.label(key)), None)


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
            file = _listed(stored, error) or key  # a blob's checksums may lie in a file of their own
            result.findings.append(Finding("altered_file", str(error), part=catalog.part, file=file))
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


def _check_steps(catalog: Catalog, result: Verification) -> None:
    """Counts of updates, which are scalars of params and values of groups.

    Those of one group may differ, where params were left out of a step, and so may the part's, where params came later
    or the inner optimizer was made anew: worth knowing, and no damage. A count that no optimizer makes is damage.
    """
    state, part = catalog.state, catalog.part
    seen: dict[int, dict[float, str]] = {}
    for i, spec in enumerate(state.params):
        for slot, scalar in state.scalars_of(i).items():
            problem = _impossible(slot, scalar)
            if problem:
                message = f"{spec.name}: {slot} is {scalar.value}, {problem}"
                result.findings.append(Finding("impossible_scalar", message, part, spec.name, slot))
            elif slot == "step":
                seen.setdefault(spec.group, {}).setdefault(scalar.value, spec.name)
    for group, steps in seen.items():
        if len(steps) > 1:
            (low, first), (high, last) = min(steps.items()), max(steps.items())
            message = f"group {group}: step is {low:g} for {first} and {high:g} for {last}"
            result.steps.append(Finding("steps_differ", message, part, first, "step"))
        if max(steps) > state.step:
            message = f"{steps[max(steps)]}: step is {max(steps):g}, and the whole part has made {state.step} updates"
            result.steps.append(Finding("step_beyond", message, part, steps[max(steps)], "step"))
    stated = [decode_value(dict(group)).get("step") for group in state.groups]
    known = {step for step in stated if isinstance(step, int | float)}
    if known - {state.step}:
        message = f"groups state step {', '.join(f'{step:g}' for step in sorted(known))}, the part {state.step}"
        result.steps.append(Finding("steps_differ", message, part))


def _impossible(slot: str, scalar: Scalar) -> str:
    """What is wrong with a scalar; empty where nothing is."""
    if scalar.value - scalar.value != 0:
        return "which is not finite"
    if scalar.value < 0 and (slot == "step" or slot in NOT_NEGATIVE):
        return "which cannot be negative"
    return ""


def _check_parts(stored: Stored, result: Verification) -> None:
    """Parts of one checkpoint were saved together; those that step together have made as many updates."""
    steps: Mapping[str, int] = {name: catalog.state.step for name, catalog in stored.catalogs.items()}
    if len(set(steps.values())) > 1:
        message = ", ".join(f"{name!r} {step}" for name, step in steps.items())
        result.steps.append(Finding("steps_differ", f"the parts have made different numbers of updates: {message}"))


def _check_data(
    stored: Stored,
    broken: set[str | None],
    result: Verification,
    workers: int,
    window: int,
    progress: Progress | None,
) -> None:
    """Reads every payload and compares each piece; looks at the values on the way."""
    lock = threading.Lock()

    def check(job: tuple[Catalog, Source, int]) -> None:
        catalog, source, blob = job
        reader = _BlobReader(catalog, source, blob, window, zero_padding=stored.format.zero_padding)
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
    in_parallel(iter(jobs), check, workers)
    for entry in stored.tensor_files():
        if entry.path not in broken:
            result.findings += _check_tensors(stored, entry, window)
    for entry in stored.carried_files():
        if entry.path not in broken:
            result.findings += _check_carried(stored, entry, window)
    result.findings.sort(key=_place)


def _place(finding: Finding) -> tuple[str, str, str, str, bool, tuple[int, int]]:
    """Findings by their place; damage comes before the values that it made."""
    f = finding
    return f.part, f.file or "", f.param or "", f.slot or "", f.kind != "damaged_data", f.range or (0, 0)


def _check_tensors(stored: Stored, entry: FileEntry, window: int) -> Iterator[Finding]:
    """Reads all tensors of a file beside the state; those of the model must have the digests of the manifest."""
    header = check_tensor_file(stored.store, entry)
    stated = {model.name: model for model in stored.manifest.model} if entry.path == MODEL_FILE else {}
    cuts = tensor_cuts(header.tensors, header.piece_bytes)
    for tensor in header.tensors:
        total = 0
        for piece in range(*np.searchsorted(cuts, [tensor.begin, tensor.end]).tolist()):
            low, high = int(cuts[piece]), int(cuts[piece + 1])
            crc = _checksum(stored, entry.path, header.payload + low, high - low, window)
            total ^= shift(crc, tensor.end - high)
            if crc != header.pieces[piece]:
                inside = f"bytes {low - tensor.begin} to {high - tensor.begin} of it do not match their checksum"
                message = f"{stored.store.label(entry.path)}: {tensor.name}: {inside}"
                yield Finding("damaged_data", message, param=tensor.name, file=entry.path)
        model = stated.pop(tensor.name, None)
        if model is not None:
            size = tensor.end - tensor.begin
            digest = format_digest(tensor_digest(model.name, model.kind, tensor.dtype, tensor.shape, total, size))
            if digest != model.digest:
                message = f"{entry.path}: {model.name}: found digest {digest}, expected {model.digest}"
                yield Finding("wrong_digest", message, param=model.name, file=entry.path)
    for name in stated:
        yield Finding("missing_tensor", f"{entry.path}: {name} is not in the file", param=name, file=entry.path)


def _check_carried(stored: Stored, entry: FileEntry, window: int) -> Iterator[Finding]:
    """Reads all of a file that is kept of a foreign checkpoint."""
    found = format_digest(_checksum(stored, entry.path, 0, entry.bytes, window))
    if found != entry.digest:
        message = f"{stored.store.label(entry.path)}: found digest {found}, expected {entry.digest}"
        yield Finding("damaged_data", message, file=entry.path)


def _checksum(stored: Stored, key: str, offset: int, nbytes: int, window: int) -> int:
    """Checksum of a run of a file's bytes, read in windows."""
    crc = 0
    buffer = memoryview(bytearray(min(window, nbytes)))
    for at in range(0, nbytes, max(window, 1)):
        data = buffer[: min(window, nbytes - at)]
        stored.store.readv_into(key, offset + at, [data])
        crc = shift(crc, data.nbytes) ^ crc64(data)
    return crc


class _BlobReader:
    """Reads one payload in windows; keeps what it finds, one finding a piece or slice at most.

    A window lies inside one slice or what is between slices, and begins at an element, so that values can be looked at;
    a piece may lie in several windows.
    """

    def __init__(self, catalog: Catalog, source: Source, blob: int, window: int, *, zero_padding: bool) -> None:
        self.catalog = catalog
        self.zero_padding = zero_padding
        self.source = source
        self.blob = blob
        self.window = max(window // 8 * 8, 8)
        self.findings: list[Finding] = []
        self.bytes_read = 0
        self._cuts, self._crcs = _pieces(source, blob)
        self._table = catalog.placement.extents(blob)
        self._crc = 0
        self._bad_values: set[tuple[int, int]] = set()
        self._bad_padding = False

    def run(self) -> Iterator[int]:
        table = self._table
        edges = np.concatenate((table.at, table.at + table.nbytes))
        bounds = window_bounds(self.catalog.placement.payload_nbytes(self.blob), self.window, edges)
        owner = np.searchsorted(table.at, bounds[:-1], side="right") - 1
        buffer = memoryview(bytearray(min(self.window, int(bounds[-1]))))
        for first, last in _groups(bounds, self.window):
            begin, end = int(bounds[first]), int(bounds[last])
            data = buffer[: end - begin]
            self.source.read_run(self.blob, begin, [data])
            for i in range(first, last):
                low, high = int(bounds[i]), int(bounds[i + 1])
                self._look(int(owner[i]), low, data[low - begin : high - begin])
                self._hash(int(owner[i]), low, data[low - begin : high - begin])
            self.bytes_read += end - begin
            yield end - begin

    def _is_padding(self, row: int, at: int) -> bool:
        return row < 0 or at >= int(self._table.at[row] + self._table.nbytes[row])

    def _hash(self, row: int, low: int, data: memoryview) -> None:
        """Goes on with the checksums of the pieces that these bytes lie in."""
        piece = int(np.searchsorted(self._cuts, low, side="right")) - 1
        done = 0
        while done < data.nbytes:
            end = int(self._cuts[piece + 1])
            part = data[done : min(end - low, data.nbytes)]
            self._crc = shift(self._crc, part.nbytes) ^ crc64(part) if self._crc else crc64(part)
            done += part.nbytes
            if low + done == end:
                self._end_piece(row, piece)
                piece += 1

    def _end_piece(self, row: int, piece: int) -> None:
        low, high = int(self._cuts[piece]), int(self._cuts[piece + 1])
        wrong = self._crc != self._crcs[piece]
        if self._is_padding(row, low):
            if wrong and not self._bad_padding:
                kind = "damaged_data" if self.zero_padding else "damaged_structure"
                self._padding(kind, f"what lies between tensors at byte {low}", "does not match its checksum")
            self._bad_padding = False
        elif wrong:
            self._found("damaged_data", row, low, high, "the data does not match its checksum")
        self._crc = 0

    def _look(self, row: int, low: int, data: memoryview) -> None:
        """Values that cannot be, and padding that is not zero."""
        if self._is_padding(row, low):
            if self.zero_padding and not self._bad_padding and np.frombuffer(data, np.uint8).any():
                self._bad_padding = True
                self._padding("nonzero_padding", f"padding at payload byte {low} to {low + data.nbytes}", "is not zero")
            return
        key = int(self._table.param[row]), int(self._table.slot[row])
        kind = self.catalog.state.slots[key[1]]
        if key in self._bad_values:
            return
        at = first_nonfinite(data, kind.dtype)
        what, problem = "nonfinite", "is not finite"
        if at is None and kind.name in NOT_NEGATIVE:
            at = first_negative(data, kind.dtype)
            what, problem = "negative", "is negative, and a second moment cannot be"
        if at is not None:
            self._bad_values.add(key)
            start = int(self._table.start[row]) + (low - int(self._table.at[row])) // kind.itemsize
            place = low + at * kind.itemsize
            self._found(what, row, place, place + kind.itemsize, f"element {start + at} {problem}")

    def _found(self, what: str, row: int, low: int, high: int, problem: str) -> None:
        """A finding of payload bytes inside one slice."""
        spec = self.catalog.state.params[int(self._table.param[row])]
        kind = self.catalog.state.slots[int(self._table.slot[row])]
        origin = int(self._table.start[row]) * kind.itemsize - int(self._table.at[row])
        span = ((origin + low) // kind.itemsize, -(-(origin + high) // kind.itemsize))
        file, key = self.source.label(self.blob), self.catalog.placement.blob_key(self.blob)
        message = f"{file}: {spec.name}: {kind.name} elements {span[0]} to {span[1]}: {problem}"
        self.findings.append(Finding(what, message, self.catalog.part, spec.name, kind.name, span, key))

    def _padding(self, what: str, place: str, problem: str) -> None:
        file, key = self.source.label(self.blob), self.catalog.placement.blob_key(self.blob)
        self.findings.append(Finding(what, f"{file}: {place} {problem}", self.catalog.part, file=key))


def _pieces(source: Source, blob: int) -> tuple[IntColumn, Sequence[int]]:
    """Bounds and checksums of a blob's pieces, proved by the manifest."""
    pieces = source.pieces(blob)
    assert pieces is not None  # every committed blob has them
    return pieces


def _groups(bounds: IntColumn, limit: int) -> Iterator[tuple[int, int]]:
    """Runs of windows of at most ``limit`` bytes together."""
    first = 0
    while first < len(bounds) - 1:
        last = max(int(np.searchsorted(bounds, bounds[first] + limit, side="right")) - 1, first + 1)
        yield first, last
        first = last
