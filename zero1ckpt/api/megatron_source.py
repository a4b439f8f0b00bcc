"""A Megatron checkpoint as a source: what every verb asks of a stored checkpoint, without a manifest.

What has no counterpart in the file is empty: no digests, no checksums, no native layout. The map from params to places
is proved by the model's weights (``prove_map``), and nothing is converted before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.digest import CHECKSUM, crc64, format_digest
from ..core.errors import CorruptError, UnsupportedError
from ..core.layout import Layout
from ..core.ranges import IntColumn
from ..encodings.inert_pickle import Dtype, EnumValue, GlobalRef, NumpyArray, Record, TensorRef, Value
from ..foreign.megatron.model import Doubt, MegatronCheckpoint
from ..foreign.megatron.proving import prove
from ..foreign.megatron.reading import describe as read_megatron
from ..model.catalog import PIECE_BYTES, Catalog
from ..model.manifest import (
    SCHEMA,
    FileEntry,
    FormatOptions,
    Manifest,
    ParamEntry,
    PartManifest,
    SlotEntry,
)
from ..model.protocols import Area, BlobWriter, Progress, Source, Store
from ..model.state import PartState
from ..model.values import Json, encode_value, is_text
from .stored import Stored

__all__ = [
    "MegatronFormat",
    "check_known",
    "check_proved",
    "describe_megatron",
    "plain",
    "prove_map",
    "unproved_params",
]

_NOT_EXTRA = re.compile(r"optimizer|content_metadata|rng_state|model\d*")
"""Entries of the common state that are state, say how it lies, or are bound to a rank: they are carried."""
_MAX_DEPTH = 20


class MegatronFormat:
    """The reading half of ``model.protocols.Format``: what is written goes through ``targets``."""

    keeps_layout = False
    shared_blobs = False
    zero_padding = False

    def __init__(self, checkpoint: MegatronCheckpoint) -> None:
        self.name = checkpoint.format
        self.container = checkpoint.container
        self._source = checkpoint.source

    def normalize(self, options: FormatOptions) -> FormatOptions:
        return options.only(self.name)

    def source(self, store: Store, catalog: Catalog, files: Mapping[str, FileEntry]) -> Source:
        return self._source

    def blob_files(self, catalog: Catalog, blob: int) -> Sequence[str]:
        return [catalog.placement.blob_key(blob)]

    def derived(self, catalog: Catalog) -> list[tuple[str, bytes]]:
        return []

    def stops(self, catalog: Catalog, blob: int) -> IntColumn:
        return np.empty(0, np.int64)

    def cuts(self, catalog: Catalog, blob: int) -> IntColumn:
        return np.array([0, catalog.placement.payload_nbytes(blob)], np.int64)

    def plan(self, state: PartState, layout: Layout | None, part: str, prefix: str, options: FormatOptions) -> Catalog:
        raise self._refused()

    def create(self, area: Area, catalog: Catalog, blob: int) -> BlobWriter:
        raise self._refused()

    def attach(self, area: Area, catalog: Catalog, blob: int) -> BlobWriter:
        raise self._refused()

    def adopt(self, area: Area, catalog: Catalog, blob: int) -> tuple[list[FileEntry], Sequence[int]] | None:
        raise self._refused()

    def _refused(self) -> UnsupportedError:
        return UnsupportedError("this layout is only read", found=self.name, hint="choose another --format")


def describe_megatron(
    folder: Path,
    layout_file: str | os.PathLike[str] | None = None,
    *,
    content: bool | None = True,
    check_files: bool = True,
) -> Stored:
    """Reads what a Megatron iteration folder says of itself; of tensors at most what tells the order of params.
    ``content=None``: not even that where it would take long. ``check_files=False``: files may be missing.

    Raises ``MissingError``, ``CorruptError``, ``UnsupportedError``.
    """
    file = None if layout_file is None else Path(layout_file)
    return as_stored(read_megatron(folder, layout_file=file, content=content, check_files=check_files))


def as_stored(checkpoint: MegatronCheckpoint) -> Stored:
    """A described checkpoint as the verbs see it. Pure, but for the times of its files."""
    catalogs = {name: _encoded(part.catalog) for name, part in checkpoint.parts.items()}
    if not catalogs:
        raise CorruptError("the checkpoint holds no optimizer state", file=checkpoint.entries.path)
    manifest = Manifest(
        SCHEMA,
        checkpoint.format,
        checkpoint.container,
        CHECKSUM,
        PIECE_BYTES,
        "",
        [_part_manifest(name, catalog.state) for name, catalog in catalogs.items()],
        [FileEntry(path, nbytes, "") for path, nbytes in sorted(checkpoint.entries.files.items())],
        _extra(checkpoint),
    )
    entries = checkpoint.entries
    plugin = MegatronFormat(checkpoint)
    return Stored(entries.path, entries.store, manifest, _identity(checkpoint), plugin, catalogs, checkpoint)


def _encoded(catalog: Catalog) -> Catalog:
    """The catalog with hyper-parameters as manifests have them."""
    groups = tuple(encode_value(dict(group), f"groups[{i}]") for i, group in enumerate(catalog.state.groups))
    return replace(catalog, state=replace(catalog.state, groups=groups))


def _part_manifest(name: str, state: PartState) -> PartManifest:
    params = [
        ParamEntry(
            spec.name,
            list(spec.shape),
            spec.dtype,
            spec.grad_dtype,
            {slot.name: "" for k, slot in enumerate(state.slots) if (i, k) not in state.absent},
            spec.group,
            spec.expert,
            spec.shared_embedding,
        )
        for i, spec in enumerate(state.params)
    ]
    slots = [SlotEntry(slot.name, slot.dtype, slot.whole) for slot in state.slots]
    return PartManifest(name, state.step, "", None, slots, [dict(group) for group in state.groups], params)


def _identity(checkpoint: MegatronCheckpoint) -> str:
    """Names a save well enough that an interrupted conversion goes on with the same one only."""
    rows = []
    for path, nbytes in sorted(checkpoint.entries.files.items()):
        try:
            changed = (checkpoint.entries.path / path).stat().st_mtime_ns
        except OSError:
            changed = 0
        rows.append(f"{path} {nbytes} {changed}")
    return format_digest(crc64("\n".join([checkpoint.format, str(checkpoint.step), *rows]).encode(errors="replace")))


# --------------------------------------------------------------------------------------------------------- extra state


def _extra(checkpoint: MegatronCheckpoint) -> Json:
    """The common state as plain values where they can be: args, iteration, scheduler and the like."""
    common = {k: v for k, v in checkpoint.entries.common.items() if not _NOT_EXTRA.fullmatch(str(k))}
    made = {str(key): plain(value) for key, value in common.items() if is_text(str(key))}
    if checkpoint.iteration is not None:
        made.setdefault("iteration", checkpoint.iteration)
    return encode_value(made, "extra")


def plain(value: Value, depth: int = 0) -> Any:
    """A value of a checkpoint's pickle as Python's own: an object by its attributes, what has none by its name."""
    if value is None or type(value) in (bool, int, float, complex, bytes):
        return value if type(value) is not int or value.bit_length() <= 4096 else hex(value)
    if isinstance(value, str):
        return value if is_text(value) else ascii(value)
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {_key(key, depth): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Dtype | GlobalRef):
        return str(value)
    if isinstance(value, TensorRef):
        return f"tensor {value.dtype}{list(value.shape)}"
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(item, depth + 1) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, EnumValue):
        return f"{value.type}({value.value!r})"
    if isinstance(value, Record):
        fields = value.fields
        return {key: plain(item, depth + 1) for key, item in fields.items() if is_text(key)} or str(value.type)
    if isinstance(value, NumpyArray):
        return "numpy array"
    return repr(value)[:200].encode("ascii", "backslashreplace").decode()


def _key(key: Value, depth: int) -> Any:
    made = plain(key, depth + 1)
    return repr(made) if isinstance(made, dict | list) else made


# ------------------------------------------------------------------------------------------------------------ the proof


def prove_map(stored: Stored, progress: Progress | None = None) -> Stored:
    """The same checkpoint with the evidence of all its weights. Reads every main param and weight once."""
    assert stored.megatron is not None
    return as_stored(prove(stored.megatron, progress))


def unproved_params(stored: Stored) -> Iterator[tuple[str, str, str]]:
    """(part, param, why) of every param whose place is not proved. Of a map that was not tried, all."""
    assert stored.megatron is not None
    for name, part in stored.megatron.parts.items():
        proof = part.evidence
        if proof.proved is None:
            yield from ((name, spec.name, "its place is not proved") for spec in part.catalog.state.params)
        yield from ((name, param, "another place fits as well") for param in proof.ambiguous)
        yield from (
            (name, param, "its main param, cast to the weight's dtype, is not the weight") for param in proof.unproved
        )


def check_known(stored: Stored) -> None:
    """State that has no name goes nowhere, whatever is asked for."""
    assert stored.megatron is not None
    for name, part in stored.megatron.parts.items():
        for place in part.evidence.unknown:
            raise UnsupportedError(
                f"a stretch of a bucket{f' of part {name!r}' if name else ''} is no param of the model that is known",
                file=stored.path,
                param=place,
                hint="give the run's layout with --layout",
            )


def _check_doubts(stored: Stored) -> None:
    assert stored.megatron is not None
    for line in stored.megatron.notices:
        if isinstance(line, Doubt):
            raise UnsupportedError(
                f"the state is not whole or not certain: {line}",
                file=stored.path,
                hint="take it as it is with --unproved",
            )


def check_readable(stored: Stored, part: str, name: str) -> None:
    """Raises ``UnsupportedError`` for a param of which it is not sure where it lies."""
    if stored.megatron is None:
        return
    proof = stored.megatron.parts[part].evidence
    for names, why in (
        (proof.ambiguous, "another place fits as well"),
        (proof.unproved, "it was found by its size alone: no weight has its values"),
    ):
        if name in names and name not in proof.unknown:
            raise UnsupportedError(
                f"where the state of this param lies is not sure: {why}",
                file=stored.path,
                param=name,
                hint="open it with the run's layout (layout=), or take it as it is with unproved=True",
            )


def check_proved(stored: Stored, *, unproved: bool = False) -> None:
    """Raises ``UnsupportedError`` that names the first param whose place is not proved, unless that is asked for."""
    check_known(stored)
    if unproved:
        return
    _check_doubts(stored)
    found = list(unproved_params(stored))
    if not found:
        return
    part, param, why = found[0]
    where = f" of part {part!r}" if part else ""
    more = f", nor are those of {len(found) - 1} other params" if len(found) > 1 else ""
    raise UnsupportedError(
        f"where the state of this param{where} lies is not proved: {why}{more}",
        file=stored.path,
        param=param,
        hint="give the run's layout with --layout, look with `zero1ckpt doctor`, or take it as it is with --unproved",
    )
