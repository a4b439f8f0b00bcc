"""``manifest.json``: the one file that makes a folder a checkpoint.

Text with a line for each param and file, and a last line that checksums all bytes before it. The schema is
formats/manifest.schema.json. Rules and placement are stored, never a row for each fragment: 10,000 params at DP 4,096
take about 3 MB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..core.digest import CHECKSUM, crc64, format_digest, merge_digests, parse_digest
from ..core.dtypes import itemsize
from ..core.errors import CorruptError, UnsupportedError, UsageError
from ..core.layout import LayoutRules
from .catalog import PIECE_BYTES
from .state import LossScale, ParamSpec, PartState, Scalar, SlotSpec

__all__ = [
    "MANIFEST_NAME",
    "SCHEMA",
    "FileEntry",
    "FormatOptions",
    "Manifest",
    "ModelTensor",
    "ParamEntry",
    "PartManifest",
    "RankExtra",
    "ReadManifest",
    "decode_manifest",
    "encode_manifest",
    "make_part",
    "new_manifest",
    "whole_digest",
]

MANIFEST_NAME = "manifest.json"
SCHEMA = "zero1ckpt.manifest/1"
_LAST = b'"manifest_digest": "'
_TAIL = b'"\n}\n'


class _Entry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of the manifest's records: immutable, and an unknown field is an error rather than lost."""


class FileEntry(_Entry, frozen=True):
    """One file of the checkpoint; ``digest`` is the checksum of all its bytes."""

    path: str
    bytes: int
    digest: str


class ParamEntry(_Entry, frozen=True):
    """One param. ``digests`` has an entry for each slot that has a value; ``scalars`` those that differ from most.

    A scalar that other params have and this one has not is null.
    """

    name: str
    shape: list[int]
    dtype: str
    grad_dtype: str
    digests: dict[str, str]
    group: int = 0
    expert: bool = False
    shared_embedding: bool = False
    scalars: dict[str, int | float | str | bool | None] = {}
    shapes: dict[str, list[int]] = {}


class SlotEntry(_Entry, frozen=True):
    name: str
    dtype: str
    whole: bool = False


class ScalarEntry(_Entry, frozen=True):
    """A scalar slot: its dtype, and the value that params have which do not state their own."""

    name: str
    dtype: str
    value: int | float | str | bool


class LayoutEntry(_Entry, frozen=True):
    dp_size: int
    bucket_size: int | None
    param_align: int
    bucket_align: int
    pad_for_high_nccl_busbw: bool = False


class ModelTensor(_Entry, frozen=True):
    """A persistent buffer or frozen param of the model, stored whole beside the optimizer state."""

    name: str
    kind: str
    dtype: str
    shape: list[int]
    digest: str


class RankExtra(_Entry, frozen=True):
    """Rank-bound state is in ``rank_extra-*.safetensors``, one file for each of the ``ranks`` that saved."""

    ranks: int


class LossScaleEntry(_Entry, frozen=True):
    """State of a dynamic loss scale."""

    scale: float
    finite_steps: int
    hysteresis_left: int


class PartManifest(_Entry, frozen=True):
    name: str
    step: int
    digest: str
    layout: LayoutEntry | None
    slots: list[SlotEntry]
    groups: list[dict[str, Any]]
    params: list[ParamEntry]
    scalars: list[ScalarEntry] = []
    loss_scale: LossScaleEntry | None = None

    def rules(self) -> LayoutRules | None:
        """Raises ``ValueError`` for rules out of range."""
        return None if self.layout is None else LayoutRules(**msgspec.structs.asdict(self.layout))

    def state(self) -> PartState:
        slots = tuple(SlotSpec(s.name, s.dtype, s.whole) for s in self.slots)
        index = {slot.name: k for k, slot in enumerate(slots)}
        params = tuple(
            ParamSpec(p.name, tuple(p.shape), p.dtype, p.grad_dtype, p.group, p.expert, p.shared_embedding)
            for p in self.params
        )
        absent = frozenset(
            (i, k) for i, p in enumerate(self.params) for k, slot in enumerate(slots) if slot.name not in p.digests
        )
        scalars = tuple(_scalars_of(p, self.scalars) for p in self.params) if self.scalars else ()
        entry = self.loss_scale
        scale = None if entry is None else LossScale(entry.scale, entry.finite_steps, entry.hysteresis_left)
        shapes = {(i, index[s]): tuple(shape) for i, p in enumerate(self.params) for s, shape in p.shapes.items()}
        return PartState(params, slots, self.step, tuple(self.groups), scalars, absent, scale, shapes)

    def tensor_digests(self) -> dict[tuple[int, int], int]:
        """Raises ``ValueError`` for text that is no digest."""
        index = {slot.name: k for k, slot in enumerate(self.slots)}
        return {(i, index[s]): parse_digest(d) for i, p in enumerate(self.params) for s, d in p.digests.items()}


class FormatOptions(_Entry, frozen=True):
    """What a format lets one choose besides dp and bucket size; None: does not apply, or the format's default.

    ``shard_bytes``: size at which a new file is begun. ``chunk_bytes``: size of the smallest unit that is read.
    ``compression``: name of a codec.
    """

    shard_bytes: int | None = None
    chunk_bytes: int | None = None
    compression: str | None = None

    def only(self, format: str, *names: str) -> FormatOptions:
        """Itself, if nothing but ``names`` is chosen. Raises ``UsageError`` that names what ``format`` has not."""
        for name, value in msgspec.structs.asdict(self).items():
            if value is not None and name not in names:
                raise UsageError(f"{name} does not apply to {format}", found=value, hint="leave it out")
        return self


class Manifest(_Entry, frozen=True):
    """The whole manifest, less its own digest. ``extra`` is an encoded value (``model.values``)."""

    schema: str
    format: str
    container: str
    checksum: str
    piece_bytes: int
    digest: str
    parts: list[PartManifest]
    files: list[FileEntry]
    extra: Any = None
    model: list[ModelTensor] = []
    rank_extra: RankExtra | None = None
    options: FormatOptions = FormatOptions()


@dataclass(frozen=True, slots=True)
class ReadManifest:
    """A manifest as read, with the checksum of its bytes (which names a save by its content)."""

    manifest: Manifest
    digest: str


def make_part(
    name: str, state: PartState, rules: LayoutRules | None, digests: Mapping[tuple[int, int], int]
) -> PartManifest:
    """The manifest of one part. Pure. ``digests``: (param index, slot index) -> digest, for present tensors."""
    layout = None
    if rules is not None:
        layout = LayoutEntry(
            rules.dp_size,
            rules.bucket_size,
            rules.param_align,
            rules.bucket_align,
            rules.pad_for_high_nccl_busbw,
        )
    scale = state.loss_scale
    common = _common_scalars(state)
    params = []
    rows = []
    for i, spec in enumerate(state.params):
        own = {
            slot.name: format_digest(digests[i, k]) for k, slot in enumerate(state.slots) if (i, k) not in state.absent
        }
        rows += [(spec.name, slot, digest) for slot, digest in own.items()]
        params.append(
            ParamEntry(
                spec.name,
                list(spec.shape),
                spec.dtype,
                spec.grad_dtype,
                own,
                spec.group,
                spec.expert,
                spec.shared_embedding,
                _own_scalars(state.scalars_of(i), common),
                {s.name: list(state.shapes[i, k]) for k, s in enumerate(state.slots) if (i, k) in state.shapes},
            )
        )
    return PartManifest(
        name,
        state.step,
        merge_digests(rows),
        layout,
        [SlotEntry(slot.name, slot.dtype, slot.whole) for slot in state.slots],
        [dict(group) for group in state.groups],
        params,
        list(common.values()),
        None if scale is None else LossScaleEntry(scale.scale, scale.finite_steps, scale.hysteresis_left),
    )


def whole_digest(parts: Sequence[PartManifest]) -> str:
    """Digest of the checkpoint: that of its only part, else over the parts' names and digests."""
    if len(parts) == 1 and not parts[0].name:
        return parts[0].digest
    return merge_digests((part.name, "", part.digest) for part in parts)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``: one top-level key, param, group or file a line, then the digest of it all."""
    json = msgspec.json.encode
    lines = [b"{"]
    for name in ("schema", "format", "container", "checksum", "piece_bytes", "digest", "extra", "rank_extra"):
        lines.append(b'"%s": %s,' % (name.encode(), json(getattr(manifest, name))))
    if manifest.options != FormatOptions():
        lines.append(b'"options": %s,' % json(manifest.options))
    lines.append(b'"model": [%s],' % _rows([json(entry) for entry in manifest.model]))
    lines.append(b'"parts": [%s],' % _rows([_encode_part(part) for part in manifest.parts]))
    lines.append(b'"files": [%s],' % _rows([json(entry) for entry in manifest.files]))
    body = b"\n".join(lines) + b"\n"
    return body + _LAST + format_digest(crc64(body)).encode() + _TAIL


def decode_manifest(data: bytes, file: object) -> ReadManifest:
    """Manifest from its bytes.

    Raises ``CorruptError`` for text that is cut off, altered or not of the schema, ``UnsupportedError`` for a manifest
    of another schema version or checksum.
    """
    end = len(data) - len(_TAIL)
    start = end - 16
    if data[end:] != _TAIL or data[start - len(_LAST) : start] != _LAST:
        raise CorruptError(
            "the manifest is cut off or altered: its last line does not hold its digest",
            file=file,
            hint="restore it from a copy",
        )
    stated = data[start:end].decode("ascii", "replace")
    body = data[: start - len(_LAST)]
    actual = format_digest(crc64(body))
    if stated != actual:
        raise CorruptError(
            "the manifest does not match its own digest",
            file=file,
            found=actual,
            expected=stated,
            hint="restore it from a copy",
        )
    return ReadManifest(_parse(body, file), stated)


def _parse(body: bytes, file: object) -> Manifest:
    text = body.rstrip(b",\n") + b"}"
    try:
        schema = msgspec.json.decode(text, type=_OnlySchema).schema
        if schema != SCHEMA:
            raise UnsupportedError(
                "manifest of another version", file=file, found=schema, expected=SCHEMA, hint="use a newer zero1ckpt"
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"the manifest cannot be parsed: {error}", file=file) from error
    if manifest.checksum != CHECKSUM:
        raise UnsupportedError("unknown checksum", file=file, found=manifest.checksum, expected=CHECKSUM)
    if manifest.piece_bytes != PIECE_BYTES:
        raise UnsupportedError("pieces of another size", file=file, found=manifest.piece_bytes, expected=PIECE_BYTES)
    _check_consistent(manifest, file)
    return manifest


class _OnlySchema(msgspec.Struct):
    schema: str


def _check_consistent(manifest: Manifest, file: object) -> None:
    """What the types do not say: names that must be unique, indexes in range, paths inside the folder."""

    def refuse(problem: str, param: str | None = None, **facts: object) -> None:
        raise CorruptError(f"the manifest is inconsistent: {problem}", file=file, param=param, **facts)  # type: ignore[arg-type]

    paths = [entry.path for entry in manifest.files]
    if len(set(paths)) != len(paths):
        refuse("a file is listed twice")
    for entry in manifest.files:
        parts = entry.path.split("/")
        if entry.path.startswith("/") or {"", ".", ".."} & set(parts) or "\\" in entry.path or "\0" in entry.path:
            refuse("a file's path leaves the folder", found=entry.path)
        if entry.bytes < 0:
            refuse("a file has a negative size", found=entry.path)
    if not manifest.parts or len({part.name for part in manifest.parts}) != len(manifest.parts):
        refuse("parts must have unique names, and there must be one")
    for part in manifest.parts:
        _check_part(part, refuse)
    try:
        parse_digest(manifest.digest)
        for part in manifest.parts:
            parse_digest(part.digest)
            part.tensor_digests()
            part.rules()
        for entry in manifest.files:
            parse_digest(entry.digest)
    except ValueError as error:
        refuse(str(error))


def _check_part(part: PartManifest, refuse: Any) -> None:
    dtypes = {row.dtype for row in part.slots} | {row.dtype for row in part.scalars}
    for dtype in sorted(dtypes | {name for param in part.params for name in (param.dtype, param.grad_dtype)}):
        itemsize(dtype)  # raises UnsupportedError
    slots = {slot.name for slot in part.slots}
    if len(slots) != len(part.slots):
        refuse("a slot is listed twice")
    if part.step < 0:
        refuse("step is negative", found=part.step)
    if part.loss_scale is not None and not part.loss_scale.scale > 0:
        refuse("the loss scale is not positive", found=part.loss_scale.scale)
    scalars = {row.name for row in part.scalars}
    if len(scalars) != len(part.scalars) or scalars & slots:
        refuse("a scalar slot is listed twice")
    whole = {slot.name for slot in part.slots if slot.whole}
    names: set[str] = set()
    for param in part.params:
        if param.name in names:
            refuse("a param is listed twice", param.name)
        names.add(param.name)
        if param.shapes.keys() != whole & param.digests.keys():
            refuse("its whole slots have no shape, or others have one", param.name, found=sorted(param.shapes))
        if any(n < 0 for shape in (param.shape, *param.shapes.values()) for n in shape):
            refuse("a size is negative", param.name, found=param.shape)
        if not 0 <= param.group < len(part.groups):
            refuse("its group does not exist", param.name, found=param.group, expected=f"below {len(part.groups)}")
        if not slots.issuperset(param.digests):
            refuse("it has a slot that the part has not", param.name, found=sorted(set(param.digests) - slots))
        if not scalars.issuperset(param.scalars):
            refuse("it has a scalar that the part has not", param.name, found=sorted(set(param.scalars) - scalars))


def _rows(rows: Sequence[bytes]) -> bytes:
    return b"\n" + b",\n".join(rows) + b"\n" if rows else b""


def _encode_part(part: PartManifest) -> bytes:
    json = msgspec.json.encode
    head = b'{"name": %s, "step": %s, "digest": %s,\n' % (json(part.name), json(part.step), json(part.digest))
    head += b'"layout": %s,\n"slots": %s,\n"scalars": %s,\n' % (json(part.layout), json(part.slots), json(part.scalars))
    if part.loss_scale is not None:
        head += b'"loss_scale": %s,\n' % json(part.loss_scale)
    groups = b'"groups": [%s],\n' % _rows([json(group) for group in part.groups])
    return head + groups + b'"params": [%s]}' % _rows([json(param) for param in part.params])


def _common_scalars(state: PartState) -> dict[str, ScalarEntry]:
    """For each scalar slot the value of the first param that has it; the others state theirs if it differs."""
    common: dict[str, ScalarEntry] = {}
    for scalars in state.scalars:
        for name, scalar in scalars.items():
            if name not in common:
                common[name] = ScalarEntry(name, scalar.dtype, scalar_to_json(scalar.value))
    return dict(sorted(common.items()))


def _own_scalars(
    own: Mapping[str, Scalar], common: Mapping[str, ScalarEntry]
) -> dict[str, int | float | str | bool | None]:
    stated: dict[str, int | float | str | bool | None] = {}
    for name, entry in common.items():
        value = scalar_to_json(own[name].value) if name in own else None
        if repr(value) != repr(entry.value):  # 0.0 and -0.0, 1 and 1.0 differ
            stated[name] = value
    return stated


def _scalars_of(param: ParamEntry, common: Sequence[ScalarEntry]) -> dict[str, Scalar]:
    own = {}
    for entry in common:
        value = param.scalars.get(entry.name, entry.value)
        if value is not None:
            own[entry.name] = Scalar(entry.dtype, scalar_from_json(value, entry.dtype))
    return own


def scalar_to_json(value: float) -> int | float | str | bool:
    """JSON has no infinities: those and NaN stand as text."""
    return value if isinstance(value, int) or value - value == 0 else repr(value)


def scalar_from_json(value: float | str | bool, dtype: str) -> int | float | bool:
    """The value as its dtype has it: another writer's JSON may have 3 for 3.0. Raises ``ValueError``."""
    if dtype == "bool" or isinstance(value, bool):
        if dtype == "bool" and isinstance(value, bool):
            return value
    elif "float" in dtype:
        return float(value)
    elif not isinstance(value, str) and value == int(value):
        return int(value)
    raise ValueError(f"{value!r} is no {dtype}")


def new_manifest(
    format: str,
    container: str,
    parts: Sequence[PartManifest],
    files: Sequence[FileEntry],
    *,
    extra: Any = None,
    model: Sequence[ModelTensor] = (),
    rank_extra: RankExtra | None = None,
    options: FormatOptions,
) -> Manifest:
    """Manifest of this package's current schema; files are listed by path."""
    return Manifest(
        SCHEMA,
        format,
        container,
        CHECKSUM,
        PIECE_BYTES,
        whole_digest(parts),
        list(parts),
        sorted(files, key=lambda entry: entry.path),
        extra,
        list(model),
        rank_extra,
        options,
    )
