"""What ``verify`` checks of a Megatron checkpoint: structure, and with ``deep`` all values and the map's proof."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ..core.errors import CorruptError, Zero1CkptError
from ..encodings.dcp_metadata import TensorEntry
from ..encodings.torch_archive import Archive, check_member, read_archive
from ..foreign.megatron.entries import Entries, StoredTensor
from ..foreign.megatron.model import Doubt
from ..model.catalog import Catalog
from ..model.numeric import first_negative, first_nonfinite
from ..model.protocols import Progress
from ..resharding.plan import Moves
from .commit import window_bytes, workers_or_default
from .exporting import TensorReader, flat_windows
from .megatron_source import prove_map
from .megatron_weights import weights_catalog
from .stored import Stored
from .verification import NOT_NEGATIVE, Finding, Verification, in_parallel

__all__ = ["check_megatron", "not_whole", "prove_archives"]


def check_megatron(
    stored: Stored,
    result: Verification,
    *,
    deep: bool,
    workers: int | None,
    memory_limit: int | None,
    progress: Progress | None,
) -> None:
    """Adds what is wrong with a described checkpoint; reads headers, with ``deep`` all data.

    Structure: chunks cover each tensor once, files are long enough, every archive can be read. ``deep``: values, and
    whether every main param, cast to the weight's dtype, is the weight.
    """
    assert stored.megatron is not None
    entries = stored.megatron.entries
    result.has_digests = False
    lines = stored.megatron.notices
    result.notices += [Finding("megatron", line) for line in lines if not isinstance(line, Doubt)]
    result.findings += not_whole(stored)
    for tensor in entries.tensors.values():
        result.findings += _check_tensor(entries, tensor)
    for key in entries.objects:
        result.findings += _check_object(entries, key)
    if not deep:
        result.notices += [f for name in stored.catalogs for f in _not_proved_yet(stored, name)]
        return
    if result.findings:
        result.notices.append(Finding("not_read", "the data was not read: its structure is damaged"))
        return
    threads = workers_or_default(workers)
    window = window_bytes(memory_limit, threads) // 4
    _check_archives(entries, result, threads, window)
    catalogs = [*stored.catalogs.values(), weights_catalog(stored.megatron)]
    for catalog in catalogs:
        _check_values(stored, catalog, result, threads, window, progress)
    if not any(finding.kind == "unreadable" for finding in result.findings):
        _check_proof(stored, result)


def not_whole(stored: Stored) -> Iterator[Finding]:
    """State that is not certain or not there: doubts of the reader, and params without a slot that others have."""
    assert stored.megatron is not None
    for line in stored.megatron.notices:
        if isinstance(line, Doubt):
            yield Finding("not_whole", line)
    for name, catalog in stored.catalogs.items():
        state = catalog.state
        for param, slot in sorted(state.absent):
            spec, kind = state.params[param].name, state.slots[slot].name
            yield Finding(
                "missing_state", f"{spec}: there is no {kind} of it, and other params have one", name, spec, kind
            )


def _check_tensor(entries: Entries, tensor: StoredTensor) -> Iterator[Finding]:
    problem = _coverage(tensor)
    if problem is not None:
        yield Finding("uncovered", f"{entries.path}: {tensor.key}: {problem}", param=tensor.key)
    for chunk in tensor.chunks.tolist():
        try:
            file, at = entries.chunks.place(chunk)
        except Zero1CkptError as error:
            yield Finding("unreadable", str(error), param=tensor.key, file=_relative(entries, error))
            continue
        end, size = at + int(entries.chunks.nbytes[chunk]), entries.files.get(file)
        if size is None or end > size:
            found = "is missing" if size is None else f"ends at byte {size}"
            message = f"{entries.store.label(file)}: {tensor.key}: its elements end at byte {end}, and the file {found}"
            yield Finding("truncated_file", message, param=tensor.key, file=file)


def _coverage(tensor: StoredTensor) -> str | None:
    """Why chunks do not cover each element once; chunks of zarr may reach over the edge."""
    shape = np.array(tensor.shape, np.int64)
    sizes = np.minimum(tensor.offsets + tensor.sizes, shape) - tensor.offsets
    columns = np.zeros(len(tensor.chunks), np.int64)
    entry = TensorEntry(tensor.key, tensor.dtype, tensor.shape, tensor.offsets, sizes, columns, columns, columns)
    return entry.coverage_problem()


def _check_object(entries: Entries, key: str) -> Iterator[Finding]:
    try:
        entries.load_archive(key)
    except Zero1CkptError as error:
        yield Finding("unreadable", f"{key}: {error}", file=_relative(entries, error))


_OWN_FILES = ("common.pt", "model_optim_rng.pt", "distrib_optim.pt")
"""Files that Megatron saves as one archive; others that lie beside them are of any kind."""

_Job = tuple[str, str, Callable[[], tuple[str, Archive]]]
"""Kind and key of an entry, and its file and archive."""


def _check_archives(entries: Entries, result: Verification, threads: int, window: int) -> None:
    """Reads every archive and compares its members' CRC-32."""
    wrong, without = _wrong_archives(entries, threads, window)
    if without:
        message = f"{without} archives state no checksums: torch was told not to compute them"
        result.notices.append(Finding("no_checksums", message))
    result.findings += sorted(wrong, key=lambda finding: finding.message)


def prove_archives(stored: Stored, *, workers: int, window: int) -> None:
    """Raises ``CorruptError`` for the first entry whose bytes do not have their checksum. Reads all data."""
    assert stored.megatron is not None
    entries = stored.megatron.entries
    wrong, _ = _wrong_archives(entries, workers, window)
    if wrong:
        first = min(wrong, key=lambda finding: finding.message)
        file = entries.path if first.file is None else entries.store.label(first.file)
        more = f", nor do {len(wrong) - 1} other entries" if len(wrong) > 1 else ""
        raise CorruptError(
            f"its bytes do not have the checksum of their archive{more}",
            file=file,
            param=first.param,
            hint="restore the file from a copy, or take it as it is with --no-verify",
        )


def _states_none(archive: Archive) -> bool:
    """Whether an archive was written without checksums: torch then states 0 for every member."""
    return all(member.crc == 0 for member in archive.members.values())


def _wrong_archives(entries: Entries, threads: int, window: int) -> tuple[list[Finding], int]:
    """What is found in archives, and how many state no checksums."""
    wrong: list[Finding] = []
    without: list[str] = []

    def work(job: _Job) -> None:
        kind, key, load = job
        try:
            file, archive = load()
            if _states_none(archive):
                without.append(key)
                return
            for member in archive.members.values():
                check_member(entries.store, file, member, window_bytes=window)
        except Zero1CkptError as error:
            param = key if kind != "file" else None
            wrong.append(Finding("damaged_data", f"{key}: {error}", param=param, file=_relative(entries, error)))

    in_parallel(_archives(entries), work, threads)
    return wrong, len(without)


def _archives(entries: Entries) -> Iterator[_Job]:
    archive = entries.chunks.archive
    if archive is not None:
        for key, tensor in entries.tensors.items():
            for chunk in tensor.chunks.tolist():
                yield "tensor", key, partial(archive, chunk)
    held = set()
    for key in entries.objects:
        held.add(entries.object_place(key)[0])
        yield "object", key, partial(_of_object, entries, key)
    for path in entries.files:
        if path.rpartition("/")[2] in _OWN_FILES and path not in held:
            yield "file", path, partial(_of_file, entries, path)


def _of_object(entries: Entries, key: str) -> tuple[str, Archive]:
    return entries.object_place(key)[0], entries.load_archive(key)


def _of_file(entries: Entries, path: str) -> tuple[str, Archive]:
    return path, read_archive(entries.store, path)


def _relative(entries: Entries, error: Zero1CkptError) -> str | None:
    """The file of the checkpoint that an error is about."""
    return next((path for path in entries.files if error.file == entries.store.label(path)), error.file)


def _not_proved_yet(stored: Stored, part: str) -> Iterator[Finding]:
    assert stored.megatron is not None
    proof = stored.megatron.parts[part].evidence
    if proof.proved is None:
        message = f"where its params lie follows from {proof.by}, and is not proved yet (--deep does)"
        yield Finding("map_not_proved", f"part {part!r}: {message}" if part else message, part)
    for param in proof.ambiguous:
        yield Finding("ambiguous_param", f"{param}: another place fits as well", part, param)


def _check_proof(stored: Stored, result: Verification) -> None:
    proved = prove_map(stored).megatron
    assert proved is not None
    for name, part in proved.parts.items():
        proof = part.evidence
        for param in proof.unproved:
            message = f"{param}: its main param, cast to the weight's dtype, is not the weight, or there is no weight"
            result.findings.append(Finding("not_the_weight", message, name, param, "fp32_param"))
        for param in proof.ambiguous:
            message = f"{param}: another place fits as well"
            result.notices.append(Finding("ambiguous_param", message, name, param))


def _check_values(
    stored: Stored, catalog: Catalog, result: Verification, threads: int, window: int, progress: Progress | None
) -> None:
    """Reads all tensors of a part; one finding a tensor at most."""
    assert stored.megatron is not None
    reader = TensorReader(catalog, stored.megatron.source)
    state = catalog.state
    lock = threading.Lock()
    found: dict[tuple[int, int], Finding] = {}
    local = threading.local()

    def work(job: tuple[int, int, int, int, Moves]) -> None:
        param, slot, start, size, moves = job
        buffer = getattr(local, "buffer", None)
        if buffer is None:
            buffer = local.buffer = memoryview(np.empty(window, np.uint8).data)
        data = buffer[: size * state.slots[slot].itemsize]
        try:
            reader.read(moves, data)
            finding = _look(catalog, param, slot, start, data)
        except Zero1CkptError as error:
            spec = state.params[param]
            finding = Finding("unreadable", str(error), catalog.part, spec.name, state.slots[slot].name)
        with lock:
            result.bytes_read += data.nbytes
            if finding is not None:
                known = found.get((param, slot))
                if known is None or (known.range or (0, 0)) > (finding.range or (0, 0)):
                    found[param, slot] = finding
        if progress is not None:
            progress.advance(data.nbytes)

    in_parallel(_jobs(catalog, reader, window), work, threads)
    result.findings += [found[key] for key in sorted(found)]


def _jobs(catalog: Catalog, reader: TensorReader, window: int) -> Iterator[tuple[int, int, int, int, Moves]]:
    """(param, slot, start, size, where it lies) of ranges of at most ``window`` bytes of everything."""
    state = catalog.state
    for slot, kind in enumerate(state.slots):
        mine = np.array([i for i in range(len(state.params)) if (i, slot) not in state.absent], np.int64)
        numels = [state.params[i].numel for i in mine.tolist()]
        for tensor, start, size in flat_windows(numels, window // kind.itemsize):
            params = mine[tensor]
            located = reader.locate(params, np.full(len(params), slot, np.int64), start, size)
            rows = zip(params.tolist(), start.tolist(), size.tolist(), located, strict=True)
            for param, low, count, moves in rows:
                yield param, slot, low, count, moves


def _look(catalog: Catalog, param: int, slot: int, start: int, data: memoryview) -> Finding | None:
    spec, kind = catalog.state.params[param], catalog.state.slots[slot]
    at, what, problem = first_nonfinite(data, kind.dtype), "nonfinite", "is not finite"
    if at is None and kind.name in NOT_NEGATIVE:
        at = first_negative(data, kind.dtype)
        what, problem = "negative", "is negative, and a second moment cannot be"
    if at is None:
        return None
    span = (start + at, start + at + 1)
    message = f"{spec.name}: {kind.name} element {start + at} {problem}"
    return Finding(what, message, catalog.part, spec.name, kind.name, span)
