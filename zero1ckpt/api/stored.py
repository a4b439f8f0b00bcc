"""A committed checkpoint as found on disk: its manifest, proved, and a catalog for each part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ..core.errors import CorruptError, MissingError, UsageError, Zero1CkptError
from ..core.layout import layout_params
from ..foreign.megatron.folders import TRACKER, is_iteration, iteration_folders
from ..model.catalog import Catalog
from ..model.manifest import MANIFEST_NAME, FileEntry, FormatOptions, Manifest, PartManifest, decode_manifest
from ..model.protocols import Format, NativeFormat, Source
from ..registry import find_format
from ..storage.local import LocalStore
from ..storage.staging import find_leftovers

if TYPE_CHECKING:
    from ..foreign.megatron.model import MegatronCheckpoint

__all__ = [
    "CARRIED",
    "EXTRA_FILE",
    "MODEL_FILE",
    "POINTERS",
    "VALUE_KEY",
    "Stored",
    "describe",
    "part_prefix",
    "rank_extra_file",
    "resolve",
]

CARRIED = "carried/"
"""Below this folder lies what a native checkpoint keeps of a foreign one."""

EXTRA_FILE = "extra.safetensors"
MODEL_FILE = "model.safetensors"
VALUE_KEY = "zero1ckpt.value"
"""Metadata key under which a rank-bound file holds its value, as JSON."""
_MAX_ELEMENTS = 2**52
"""Of a part: bytes of all its slots then fit into 64 bits with room to spare."""
POINTERS = ("latest", TRACKER)


def rank_extra_file(rank: int, ranks: int) -> str:
    return f"rank_extra-{rank:05d}-of-{ranks:05d}.safetensors"


def part_prefix(part: str) -> str:
    """Folder of a part's blobs; the only part of a checkpoint, "", lies in the root."""
    return f"part-{quote(part, safe='')}/" if part else ""


@dataclass(frozen=True)
class Stored:
    """A checkpoint on disk. ``manifest_digest`` is the checksum of the manifest's bytes: it names the save.

    ``megatron``: the Megatron checkpoint that it is, else None. Such a one has no manifest and no checksums:
    ``manifest`` then says what one would, with empty digests.
    """

    path: Path
    store: LocalStore
    manifest: Manifest
    manifest_digest: str
    format: Format
    catalogs: Mapping[str, Catalog]
    megatron: MegatronCheckpoint | None = None

    @cached_property
    def files(self) -> dict[str, FileEntry]:
        return {entry.path: entry for entry in self.manifest.files}

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.manifest.files)

    def source(self, part: str) -> Source:
        return self.format.source(self.store, self.catalogs[part], self.files)

    def part(self, name: str) -> PartManifest:
        return next(part for part in self.manifest.parts if part.name == name)

    @property
    def by_rank(self) -> bool:
        """Whether params have the names that each rank of a Megatron job gave its own."""
        return self.megatron is not None and self.megatron.by_rank

    @property
    def digest(self) -> str | None:
        return self.manifest.digest or None

    def derived(self) -> dict[str, bytes]:
        """Files that follow from the catalogs, by path: what they must hold."""
        return {key: data for catalog in self.catalogs.values() for key, data in self.format.derived(catalog)}

    def other_files(self) -> list[FileEntry]:
        """Files that hold nothing of a part's slots: extra, rank-bound state, the model's own tensors."""
        known = set(self.derived())
        for catalog in self.catalogs.values():
            for blob in range(catalog.placement.blob_count):
                known.update(self.format.blob_files(catalog, blob))
        return [entry for entry in self.manifest.files if entry.path not in known]

    def tensor_files(self) -> list[FileEntry]:
        """Those of them that are files of tensors."""
        return [entry for entry in self.other_files() if not entry.path.startswith(CARRIED)]

    def carried_files(self) -> list[FileEntry]:
        """What is kept of a foreign checkpoint."""
        return [entry for entry in self.manifest.files if entry.path.startswith(CARRIED)]

    def check_files(self) -> None:
        """Raises ``MissingError`` or ``CorruptError`` for the first file that is not there in its full size."""
        for entry in self.manifest.files:
            nbytes = self.store.size(entry.path)
            if nbytes != entry.bytes:
                raise CorruptError(
                    "the file is truncated" if nbytes < entry.bytes else "the file is longer than it should be",
                    file=self.store.label(entry.path),
                    found=f"{nbytes} bytes",
                    expected=f"{entry.bytes} bytes",
                    hint="restore it from a copy",
                )


def describe(
    path: str | os.PathLike[str],
    *,
    check_files: bool = True,
    layout: str | os.PathLike[str] | None = None,
    content: bool | None = True,
) -> Stored:
    """Reads the manifest of a checkpoint or run folder, or what a foreign one has in its place; no tensor byte.

    ``layout``: a file that says how a Megatron checkpoint's params lie in its buffers; ``content``: whether its tensors
    are looked into for that, None where it is quickly done.

    Raises ``MissingError`` where there is no committed checkpoint, ``CorruptError`` or ``UnsupportedError`` where it
    cannot be understood, and, with ``check_files``, where a file is missing or of another size.
    """
    folder = resolve(Path(path))
    if not (folder / MANIFEST_NAME).is_file():
        from .megatron_source import describe_megatron

        return describe_megatron(folder, layout, content=content, check_files=check_files)
    if layout is not None:
        raise UsageError("a layout file is for Megatron checkpoints, and this is none", file=folder, found=layout)
    store = LocalStore(folder)
    try:
        read = decode_manifest(store.read(MANIFEST_NAME), folder / MANIFEST_NAME)
        manifest = read.manifest
        plugin = find_format(manifest.format, manifest.container)
        options = _options(plugin, manifest.options)
        catalogs = {part.name: _catalog(plugin, part, options) for part in manifest.parts}
        stored = Stored(folder, store, manifest, read.digest, plugin, catalogs)
        _check_listing(stored, plugin)
        store.check_inside(stored.files)
    except Zero1CkptError as error:
        if error.file:
            raise
        raise error.at(folder / MANIFEST_NAME) from error
    except (ValueError, ArithmeticError) as error:
        raise CorruptError(f"the manifest is inconsistent: {error}", file=folder / MANIFEST_NAME) from error
    if check_files:
        stored.check_files()
    return stored


def _options(plugin: Format, stated: FormatOptions) -> FormatOptions:
    """The options as the format has them. Raises ``ValueError`` for one that is out of range or not of this format."""
    try:
        known = plugin.normalize(stated)
    except UsageError as error:
        raise ValueError(str(error)) from error
    for name in stated.__struct_fields__:
        if getattr(stated, name) is not None and getattr(known, name) is None:
            raise ValueError(f"the format has no option {name}")
    return known


def _catalog(plugin: Format, part: PartManifest, options: FormatOptions) -> Catalog:
    state = part.state()
    rules = part.rules()
    elements = sum(prod(shape) for shape in (*(p.shape for p in state.params), *state.shapes.values()))
    if elements > _MAX_ELEMENTS:
        raise ValueError(f"part {part.name!r} has {elements} elements, which cannot be")
    for group in state.groups:
        if len(group) == 1 and next(iter(group)).startswith("$") and "$map" not in group:
            raise ValueError(f"part {part.name!r} has a group that is no mapping but a {next(iter(group))}")
    if (rules is None) is plugin.keeps_layout:
        raise ValueError(f"part {part.name!r} states {'no' if rules is None else 'a'} layout")
    layout = None if rules is None else layout_params(state.params, rules)
    if layout is not None and layout.numel > _MAX_ELEMENTS:
        raise ValueError(f"part {part.name!r} has {layout.numel} elements with padding, which cannot be")
    catalog = plugin.plan(state, layout, part.name, part_prefix(part.name), options)
    return Catalog(
        catalog.format,
        catalog.container,
        part.name,
        state,
        catalog.layout,
        catalog.placement,
        part.tensor_digests(),
    )


def _check_listing(stored: Stored, format: NativeFormat) -> None:
    """Every file that the layout says must be listed, and large enough: before anything is made of a forged shape."""
    for catalog in stored.catalogs.values():
        for blob in range(catalog.placement.blob_count):  # a forged dp size says any number: up to the first that lacks
            keys = format.blob_files(catalog, blob)
            _check_listed(stored, keys)
            _check_size(stored, keys[0], format.least_nbytes(catalog, blob))
    _check_listed(stored, stored.derived())


def _check_listed(stored: Stored, keys: Iterable[str]) -> None:
    for key in keys:
        if key not in stored.files:
            raise CorruptError(
                "the manifest does not list a file that its layout needs",
                file=stored.path / MANIFEST_NAME,
                expected=key,
            )


def _check_size(stored: Stored, key: str, least: int) -> None:
    if stored.files[key].bytes < least:
        raise CorruptError(
            f"the manifest states shapes that file {key} is too small for",
            file=stored.path / MANIFEST_NAME,
            found=f"{stored.files[key].bytes} bytes",
            expected=f"at least {least} bytes",
        )


def resolve(path: Path) -> Path:
    """The folder of the checkpoint that ``path`` means: itself, or the one that a run folder's pointer names.

    Raises ``MissingError`` that says what is there instead.
    """
    try:
        return _resolve(path)
    except Zero1CkptError:
        raise
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be looked into, a NUL
        problem = getattr(error, "strerror", None) or error
        raise MissingError(f"cannot be opened: {problem}", file=path, hint="check the path") from error


def _resolve(path: Path) -> Path:
    if _is_checkpoint(path):
        return path
    if not os.path.lexists(path):
        raise MissingError("there is nothing here", file=path, hint=_half_made(path) or "check the path")
    if not path.is_dir():
        raise MissingError("this is a file, and a checkpoint is a folder", file=path, hint="give its folder")
    for pointer in POINTERS:
        if (path / pointer).is_file():
            return _follow(path, pointer)
    raise MissingError(
        "there is no committed checkpoint here",
        file=path,
        found=_what(path),
        expected=f"{MANIFEST_NAME}, or what Megatron writes",
        hint=_half_made(path) or _inside(path) or "check the path",
    )


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST_NAME).is_file() or is_iteration(path)


def _what(path: Path) -> str | None:
    """What a folder looks like that is no checkpoint."""
    if (path / ".metadata").is_file():
        return "a torch.distributed.checkpoint folder that is not Megatron's (no metadata.json)"
    names = [child.name for child in path.iterdir()]
    return None if names else "an empty folder"


def _follow(run: Path, pointer: str) -> Path:
    try:
        name = (run / pointer).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise MissingError(f"the pointer cannot be read: {error}", file=run / pointer) from error
    for candidate in (name, *iteration_folders(name)):
        if candidate and "/" not in candidate and _is_checkpoint(run / candidate):
            return run / candidate
    raise MissingError(
        "the pointer names no committed checkpoint",
        file=run / pointer,
        found=name,
        hint=_inside(run) or "correct it",
    )


def _half_made(path: Path) -> str | None:
    for leftover in find_leftovers(path):
        if leftover.dst == path:
            if leftover.owner:
                return f"{leftover.owner} is writing it; wait for it"
            return f"a half-made one is beside it: go on with --resume, or `zero1ckpt clean {path}`"
    if path.name.endswith(".zero1ckpt-partial"):
        return "this is a half-made one: go on with --resume, or remove it with `zero1ckpt clean`"
    return None


def _inside(path: Path) -> str | None:
    try:
        committed = sorted(p.name for p in path.iterdir() if _is_checkpoint(p))
    except (OSError, Zero1CkptError):
        return None
    return f"committed checkpoints in it: {', '.join(committed[-5:])}" if committed else None
