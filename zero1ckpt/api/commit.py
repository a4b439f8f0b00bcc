"""From what was written to the manifest that makes it a checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.digest import crc64, format_digest
from ..core.errors import CorruptError, OutputError, UsageError, Zero1CkptError
from ..encodings.tensor_file import TensorData, write_tensor_file
from ..model.catalog import Catalog, digest_tensors
from ..model.manifest import (
    MANIFEST_NAME,
    FileEntry,
    FormatOptions,
    ModelTensor,
    PartManifest,
    RankExtra,
    decode_manifest,
    encode_manifest,
    make_part,
    new_manifest,
)
from ..model.protocols import Area, Format, Progress
from ..model.values import Json, encode_value
from ..resharding.copying import BlobReport, PartCopy, copy_part
from ..storage.local import OutputFile, writing
from .stored import EXTRA_FILE, describe
from .tensors import stored_dtype, tensor_bytes

__all__ = [
    "DEFAULT_MEMORY",
    "check_overwrite",
    "check_space",
    "encode_manifest_of",
    "group_values",
    "part_manifest",
    "prepare_extra",
    "window_bytes",
    "workers_or_default",
    "write_derived",
    "write_extra",
    "write_part",
]

DEFAULT_MEMORY = 256 * 2**20
"""Bytes of data in flight where no limit is given."""
_LARGEST_WINDOW = 16 * 2**20
_SMALLEST_LIMIT = 2**16


def workers_or_default(workers: int | None) -> int:
    """Threads that copy: the given number, else one a usable core, at most 8. Raises ``UsageError`` below 1."""
    if workers is None:
        return min(len(os.sched_getaffinity(0)), 8)
    if workers < 1:
        raise UsageError("workers", found=workers, expected="at least 1")
    return workers


def window_bytes(memory_limit: int | None, workers: int) -> int:
    """Bytes of each worker's window. Raises ``UsageError`` for a limit that leaves no window."""
    limit = DEFAULT_MEMORY if memory_limit is None else memory_limit
    if limit < _SMALLEST_LIMIT * workers:
        raise UsageError(
            "the memory limit is too small",
            found=f"{limit} bytes for {workers} workers",
            expected=f"at least {_SMALLEST_LIMIT * workers} bytes",
            hint="raise --memory-limit or lower --workers",
        )
    return min(limit // workers, _LARGEST_WINDOW)


def part_manifest(catalog: Catalog, reports: Iterable[BlobReport]) -> PartManifest:
    """The manifest of a part from the reports of all of its blobs. Pure.

    Raises ``CorruptError`` where digests are known from the source and the written values do not have them.
    """
    values: dict[tuple[int, int], int] = {}
    for report in reports:
        for key, crc in report.values.items():
            values[key] = values.get(key, 0) ^ crc
    digests = digest_tensors(catalog.state, values)
    for (param, slot), stated in catalog.digests.items():
        if digests.get((param, slot)) != stated:
            raise CorruptError(
                f"the values of {catalog.state.slots[slot].name} do not have the digest that the source states",
                param=catalog.state.params[param].name,
                hint="run `zero1ckpt verify --deep` on the source",
            )
    rules = None if catalog.layout is None else catalog.layout.rules
    return make_part(catalog.part, catalog.state, rules, digests)


def write_part(
    part: PartCopy, area: Area, *, workers: int, window_bytes: int, prove: bool, progress: Progress | None = None
) -> tuple[PartManifest, list[FileEntry]]:
    """Writes all blobs of a part, and what follows from them; its manifest and its files."""
    blobs = range(part.dst.placement.blob_count)
    reports = copy_part(part, area, blobs, workers=workers, window_bytes=window_bytes, prove=prove, progress=progress)
    files = [entry for report in reports for entry in report.files]
    return part_manifest(part.dst, reports), files + write_derived(area, part.format, part.dst)


def encode_manifest_of(
    format: Format,
    parts: Sequence[PartManifest],
    files: Sequence[FileEntry],
    *,
    extra: Json = None,
    model: Sequence[ModelTensor] = (),
    rank_extra: RankExtra | None = None,
    options: FormatOptions,
) -> bytes:
    """The bytes of the manifest. Pure."""
    manifest = new_manifest(
        format.name, format.container, parts, files, extra=extra, model=model, rank_extra=rank_extra, options=options
    )
    data = encode_manifest(manifest)
    decode_manifest(data, MANIFEST_NAME)  # what could not be read again must not be published
    return data


def write_derived(area: Area, format: Format, catalog: Catalog) -> list[FileEntry]:
    """Writes the files that follow from a part's catalog, such as an index."""
    entries = []
    for key, data in format.derived(catalog):
        file = OutputFile(area.path(key), len(data))
        file.write(0, memoryview(data))
        file.sync_and_close()
        entries.append(FileEntry(key, len(data), format_digest(crc64(data))))
    return entries


def prepare_extra(extra: Any, place: str = "extra") -> tuple[Json, list[TensorData]]:
    """Extra state as JSON, and its tensors named by their place. Raises ``UsageError`` for what cannot be stored."""
    tensors: list[TensorData] = []
    names: set[str] = set()

    def put(tensor: Any, where: str) -> str:
        name, count = where, len(tensors)
        while name in names:  # {"a.b": ..., "a": {"b": ...}}
            name, count = f"{where}#{count}", count + 1
        names.add(name)
        tensors.append((name, stored_dtype(tensor, where), tuple(tensor.shape), tensor_bytes(tensor)))
        return name

    return encode_value(extra, place, put_tensor=put), tensors


def write_extra(area: Area, tensors: Sequence[TensorData]) -> list[FileEntry]:
    """Writes the tensors of the extra state, if there are any."""
    return [write_tensor_file(area.path(EXTRA_FILE), EXTRA_FILE, tensors)] if tensors else []


def check_overwrite(dst: Path, overwrite: bool) -> None:
    """Refuses to replace a folder that holds anything but one whole checkpoint of ours: nothing else is deleted."""
    with writing(dst):
        if not overwrite or not dst.is_dir() or not any(dst.iterdir()):
            return
    try:
        stored = describe(dst, check_files=False)
    except Zero1CkptError as error:
        raise OutputError(
            "exists and is not a zero1ckpt checkpoint, so it is not overwritten", file=dst, hint="choose another place"
        ) from error
    foreign = set(stored.store.keys()) - set(stored.files) - {"manifest.json"}
    if stored.path != dst or foreign:
        found = sorted(foreign)[0] if foreign else stored.path
        raise OutputError(
            "holds files that are not of the checkpoint in it, so it is not overwritten",
            file=dst,
            found=found,
            hint="move them away or choose another place",
        )


def check_space(dst: Path, nbytes: int) -> None:
    """Raises ``OutputError`` where the file system has not the bytes, before anything is written."""
    with writing(dst):
        folder = dst
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OutputError(
            "there is not enough space",
            file=dst,
            found=f"{free} bytes free",
            expected=f"{nbytes} bytes",
            hint="free some space or choose another place",
        )


def group_values(
    groups: Sequence[Mapping[str, Any]], part: str
) -> tuple[tuple[dict[str, Json], ...], list[TensorData]]:
    """Hyper-parameters of groups as JSON, and their tensors."""
    encoded = []
    tensors: list[TensorData] = []
    for i, group in enumerate(groups):
        json, found = prepare_extra(dict(group), f"groups.{part}[{i}]" if part else f"groups[{i}]")
        encoded.append(json)
        tensors += found
    return tuple(encoded), tensors
