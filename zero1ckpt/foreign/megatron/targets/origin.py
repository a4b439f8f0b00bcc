"""What a target is made from: a Megatron checkpoint, or a native one that keeps all of a Megatron one (``carried``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ....core.boxes import Box
from ....core.errors import CorruptError
from ....encodings.torch_archive import Archive, read_archive
from ....model.catalog import Catalog
from ....model.protocols import Source
from ....model.state import MAIN_PARAM
from ....storage.local import LocalStore
from ..carried import CARRIED_DATA, CARRIED_FILES, Carried, CarriedBox, CarriedTensor
from ..entries import Place
from ..model import LocalParam, MegatronCheckpoint, PartLayout
from .items import CastItem, FileItem, Item, Piece
from .values import StateValue, read_value

__all__ = [
    "COMMON_ENTRY",
    "COMMON_FILE",
    "Origin",
    "OriginPart",
    "OriginTensor",
    "Twin",
    "from_carried",
    "from_checkpoint",
]

COMMON_FILE = "common.pt"
COMMON_ENTRY = "common_state/shard_0_1"


@dataclass(frozen=True)
class OriginPart:
    """One data-parallel group, or all state of a checkpoint in model space (``model.MegatronPart``).

    ``pieces``: where each local param lies, where it is not a run of one param of the catalog (a group that is made
    from state in model space); else empty.
    """

    name: str
    catalog: Catalog
    source: Source
    local_params: tuple[LocalParam, ...]
    layout: PartLayout | None
    chained: int | None
    group: int
    pipeline_rank: int | None
    pieces: tuple[tuple[Piece, ...], ...] = ()


@dataclass(frozen=True)
class OriginTensor:
    """A tensor of the model: its chunks, and the bytes of each."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Twin:
    """Two ranks' bytes of one box of the model's tensor ``key``: they must be the same."""

    key: str
    first: Item
    second: Item


@dataclass(frozen=True)
class Origin:
    """All that a target needs of its source. ``store``: its files; ``files``: other files by their path in the Megatron
    checkpoint, with their bytes and their place. ``objects``: keys and bytes of archives.
    ``grouped``: the groups of the run, of a source in model space with a layout file. ``values``: objects that were
    made of other things, and ``common_made`` the common state; ``twins``: what several ranks hold of the weights.
    """

    label: str
    store: LocalStore
    format: str
    container: str
    common_in: str
    step: int
    iteration: int | None
    parts: tuple[OriginPart, ...]
    tensors: Mapping[str, OriginTensor]
    objects: Mapping[str, int]
    files: Mapping[str, FileItem]
    object_place: Callable[[str], Place]
    grouped: tuple[OriginPart, ...] = ()
    values: Mapping[str, StateValue] = field(default_factory=dict)
    common_made: StateValue | None = None
    twins: tuple[Twin, ...] = ()

    @property
    def groups(self) -> tuple[OriginPart, ...]:
        """Parts for a target in buckets."""
        return self.grouped or self.parts

    def object_archive(self, key: str) -> Archive:
        """An object's archive. Raises ``CorruptError``."""
        file, at = self.object_place(key)
        return read_archive(self.store, file, offset=at, length=self.objects[key])

    def object_item(self, key: str) -> FileItem:
        """The bytes of an object's archive."""
        return FileItem(self.store, partial(self.object_place, key), self.objects[key])

    def common_archive(self) -> Archive:
        """The archive of the common state. Raises ``CorruptError`` where there is none."""
        item = self.files.get(COMMON_FILE)
        if item is not None:
            file, at = item.place()
            return read_archive(self.store, file, offset=at, length=item.nbytes)
        if COMMON_ENTRY in self.objects:
            return self.object_archive(COMMON_ENTRY)
        raise CorruptError("the checkpoint has no common state", file=self.label, expected=COMMON_FILE)

    def object_value(self, key: str) -> StateValue:
        """An object, without the list of one that torch_dist puts around it. Raises ``CorruptError``."""
        made = self.values.get(key)
        return read_value(self.store, self.object_archive(key)) if made is None else made

    def common_value(self) -> StateValue:
        """The common state. Raises ``CorruptError`` where there is none, or it is no dict."""
        whole = self.common_made or read_value(self.store, self.common_archive())
        if not isinstance(whole.value, dict):
            raise CorruptError("the common state is no dict", file=self.label, found=type(whole.value).__name__)
        return whole


def from_checkpoint(checkpoint: MegatronCheckpoint) -> Origin:
    """A Megatron checkpoint as a source of targets. Reads nothing."""
    entries = checkpoint.entries
    source = checkpoint.source
    parts = tuple(
        OriginPart(
            name,
            part.catalog,
            source,
            part.local_params,
            part.layout,
            part.chained,
            part.group,
            part.pipeline_rank,
        )
        for name, part in checkpoint.parts.items()
    )
    tensors = {}
    for key in checkpoint.model_keys:
        stored = entries.tensors[key]
        boxes = tuple(
            Box(tuple(o), tuple(s)) for o, s in zip(stored.offsets.tolist(), stored.sizes.tolist(), strict=True)
        )
        items = tuple(
            FileItem(entries.store, partial(entries.chunks.place, chunk), int(entries.chunks.nbytes[chunk]))
            for chunk in stored.chunks.tolist()
        )
        tensors[key] = OriginTensor(key, stored.dtype, stored.shape, boxes, items)
    files = {path: FileItem(entries.store, partial(_at_start, path), nbytes) for path, nbytes in entries.files.items()}
    return Origin(
        str(entries.path),
        entries.store,
        checkpoint.format.removeprefix("megatron:"),
        checkpoint.container,
        entries.common_in,
        checkpoint.step,
        checkpoint.iteration,
        parts,
        tensors,
        entries.objects,
        files,
        entries.object_place,
    )


def _at_start(path: str) -> Place:
    return path, 0


def from_carried(
    carried: Carried,
    store: LocalStore,
    sizes: Mapping[str, int],
    catalogs: Mapping[str, Catalog],
    source: Callable[[str], Source],
) -> Origin:
    """A native checkpoint as a source of targets. ``sizes``: bytes of its files by path; ``source``: of a part.

    Raises ``CorruptError`` where what is carried does not fit the parts.
    """
    parts = tuple(
        OriginPart(
            part.name,
            _catalog(catalogs, part.name, store),
            source(part.name),
            part.local_params,
            part.layout,
            part.chained,
            part.group,
            part.pipeline_rank,
        )
        for part in carried.parts
    )
    by_name = {part.name: part for part in parts}
    tensors = {row.key: _tensor(row, by_name, store) for row in carried.tensors}
    ats = {row.key: row.at for row in carried.objects}
    files = {
        path: FileItem(store, partial(_at_start, CARRIED_FILES + path), sizes[CARRIED_FILES + path])
        for path in carried.files
    }
    return Origin(
        str(store.root),
        store,
        carried.format.removeprefix("megatron:"),
        carried.container,
        carried.common_in,
        carried.step,
        carried.iteration,
        parts,
        tensors,
        {row.key: row.nbytes for row in carried.objects},
        files,
        lambda key: (CARRIED_DATA, ats[key]),
    )


def _catalog(catalogs: Mapping[str, Catalog], name: str, store: LocalStore) -> Catalog:
    if name not in catalogs:
        raise CorruptError("the checkpoint lacks a part that it was made from", file=store.root, found=name)
    return catalogs[name]


def _tensor(row: CarriedTensor, parts: Mapping[str, OriginPart], store: LocalStore) -> OriginTensor:
    boxes = tuple(Box(tuple(box.start), tuple(box.shape)) for box in row.boxes)
    items = tuple(_carried_item(row, box, parts, store) for box in row.boxes)
    return OriginTensor(row.key, row.dtype, tuple(row.shape), boxes, items)


def _carried_item(row: CarriedTensor, box: CarriedBox, parts: Mapping[str, OriginPart], store: LocalStore) -> Item:
    from ....encodings.torch_archive import tensor_itemsize

    nbytes = Box(tuple(box.start), tuple(box.shape)).size * tensor_itemsize(row.dtype)
    if not box.rebuilt:
        place: Place = (CARRIED_DATA, box.at or 0)
        return FileItem(store, lambda: place, nbytes)
    part = parts.get(box.part)
    if part is None or not 0 <= box.local < len(part.local_params):
        raise CorruptError("a weight is to be made from a param that is not there", file=store.root, param=row.key)
    local = part.local_params[box.local]
    if MAIN_PARAM not in part.catalog.state.slot_index or not 0 <= box.box < len(local.boxes):
        raise CorruptError("a weight is to be made from a param that is not there", file=store.root, param=row.key)
    slot = part.catalog.state.slot_index[MAIN_PARAM]
    if part.catalog.state.slots[slot].dtype != "float32":
        raise CorruptError("main params are not float32", file=store.root, param=row.key)
    return CastItem(part.catalog, part.source, slot, piece_of(local, box.box, Box(box.start, box.shape)), row.dtype)


def piece_of(local: LocalParam, index: int, chunk: Box) -> Piece:
    """Where a box of the model's tensor, inside box ``index`` of a local param, lies in the param. Pure."""
    home = local.boxes[index].box
    begin = local.start + sum(held.box.size for held in local.boxes[:index])
    inside = tuple(low - base for low, base in zip(chunk.start, home.start, strict=True))
    return Piece(local.param, begin, home.shape, Box(inside, chunk.shape))


def locals_by_key(parts: Sequence[OriginPart]) -> dict[str, list[tuple[int, int, int, Box]]]:
    """For each key of the model: part, local param, index of its box, and the box. Pure."""
    table: dict[str, list[tuple[int, int, int, Box]]] = {}
    for p, local, index, held_key, box in _every_box(parts):
        table.setdefault(held_key, []).append((p, local, index, box))
    return table


def _every_box(parts: Sequence[OriginPart]) -> Iterator[tuple[int, int, int, str, Box]]:
    for p, part in enumerate(parts):
        for i, local in enumerate(part.local_params):
            for k, held in enumerate(local.boxes):
                yield p, i, k, held.key, held.box
