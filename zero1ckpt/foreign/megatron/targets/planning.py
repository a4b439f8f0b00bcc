"""A whole target: its files, what fills them, and what must hold before a byte is written. Pure but for small values
(param groups, the common state), which are read from the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ....core.errors import UnsupportedError, UsageError
from ....encodings.dcp_metadata import BytesEntry, DcpMetadata, dump_metadata
from ....model.catalog import Catalog
from ..layout_file import LayoutFile
from .buckets import BucketRules, PartBuckets, group_prefix, part_buckets, rank_chunks
from .files import (
    FILE_BYTES,
    ChunkRow,
    FileFormat,
    FilePlacement,
    Fill,
    Packed,
    TargetFile,
    TargetPart,
    pack_chunks,
    tensor_entries,
)
from .items import Item, Items, MadeItem
from .origin import COMMON_ENTRY, COMMON_FILE, Origin, OriginPart
from .spaces import Copy, SpacePlan, plan_spaces
from .states import (
    StateValue,
    carried_objects,
    common_bytes,
    group_objects,
    is_layout_object,
    merged_states,
    rewrapped,
    states_in_common,
    write_value,
)

__all__ = ["FLAVOURS", "TARGETS", "TRACKER", "Target", "iteration_name", "plan_target"]

TARGETS = ("dp_reshardable", "fully_reshardable", "legacy")
FLAVOURS = {"common_pt": "file", "common_state": "entry"}
"""Where the common state lies: in ``common.pt`` (Megatron-Core to 0.18), or in an entry (from 0.19 on)."""
TRACKER = "latest_checkpointed_iteration.txt"
_METADATA = ".metadata"
_INTEGRITY = "integrity.json"
"""Checksums of the source's own files."""
_DISTCP = re.compile(r"__\d+_\d+\.distcp")
_SHARDED = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON = {"common_backend": "torch", "common_backend_version": 1}
_BUCKET_FORMATS = frozenset({"dp_reshardable", "fully_sharded_bucket_space", "dp_zero_gather_scatter", "legacy"})
"""Layouts whose optimizer groups are objects of data-parallel groups."""


@dataclass(frozen=True)
class Target:
    """A planned checkpoint. ``parts``: copies that fill files; ``small``: files made here, by path; ``copies``: values
    that must be the same in two parts of the origin; ``buckets``: of each part, in a bucket format. Paths are relative
    to the save root.
    """

    origin: Origin
    layout: str
    folder: str
    tracker: bytes
    parts: tuple[TargetPart, ...]
    small: Mapping[str, bytes]
    copies: tuple[Copy, ...]
    format: FileFormat
    buckets: Mapping[str, PartBuckets]

    @property
    def total_bytes(self) -> int:
        return sum(self.payload_bytes.values()) + sum(len(data) for data in self.small.values())

    @property
    def payload_bytes(self) -> dict[str, int]:
        """Bytes of each planned file, by path."""
        return {
            part.dst.placement.blob_key(blob): part.dst.placement.payload_nbytes(blob)
            for part in self.parts
            for blob in range(part.dst.placement.blob_count)
        }


def iteration_name(origin: Origin) -> tuple[str, bytes]:
    """The folder of the iteration, and what the tracker file says of it."""
    iteration = origin.step if origin.iteration is None else origin.iteration
    return f"iter_{iteration:07d}", str(iteration).encode()


def plan_target(
    origin: Origin,
    layout: str,
    rules: BucketRules,
    flavour: str | None = None,
    layout_file: LayoutFile | None = None,
) -> Target:
    """Plans a target. ``layout``: one of ``TARGETS``; ``flavour``: one of ``FLAVOURS``, None to keep the source's.
    ``layout_file``: tells of a legacy source where its tensors lie in those of all ranks.

    Raises ``UnsupportedError``, ``UsageError``, ``CorruptError``.
    """
    if layout not in TARGETS:
        raise UnsupportedError(
            "this layout is only read",
            found=f"megatron:{layout}",
            expected=" or ".join(f"megatron:{name}" for name in TARGETS),
        )
    if flavour is not None and flavour not in FLAVOURS:
        raise UsageError("flavour", found=flavour, expected=" or ".join(FLAVOURS))
    if not origin.parts:
        raise UnsupportedError("the checkpoint holds no optimizer state", file=origin.label)
    if layout == "legacy":
        from .legacy import plan_legacy

        return plan_legacy(origin, rules, flavour)
    if origin.container == "torch":
        from .from_legacy import with_global_keys

        origin = with_global_keys(origin, layout_file, by_key=layout == "fully_reshardable")
    entry = (origin.common_in if flavour is None else FLAVOURS[flavour]) == "entry"
    return _Builder(origin, layout, entry).build(rules)


class _Builder:
    """Collects the files of a torch_dist folder."""

    def __init__(self, origin: Origin, layout: str, entry: bool) -> None:
        self.origin, self.layout, self.entry = origin, layout, entry
        self.folder, self.tracker = iteration_name(origin)
        self.format = FileFormat(f"megatron:{layout}", "torch_dist")
        self.parts: list[TargetPart] = []
        self.packed: list[tuple[Packed, int]] = []
        self.names: list[str] = []
        self.shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.items: list[Item] = []
        self.buckets: dict[str, PartBuckets] = {}

    def build(self, rules: BucketRules) -> Target:
        copies: tuple[Copy, ...] = ()
        if self.layout == "dp_reshardable":
            made = [part_buckets(part, rules) for part in self.origin.groups]
            _check_groups(self.origin.groups)
            for buckets in made:
                self._add_buckets(buckets)
            objects = self._objects_of_buckets(made)
            states: Mapping[int | None, Mapping[str, StateValue]] = {own: {} for own in self._optimizers()}
        else:
            plan = plan_spaces(self.origin)
            copies = plan.copies
            self._add_spaces(plan)
            objects = {}
            from_objects = self.origin.format in _BUCKET_FORMATS
            states = merged_states(self.origin) if from_objects else states_in_common(self.origin)
        small = self._add_rest(objects, states)
        return Target(
            self.origin,
            self.layout,
            self.folder,
            self.tracker,
            tuple(self.parts),
            small,
            copies,
            self.format,
            self.buckets,
        )

    # ----------------------------------------------------------------------------------------------- the params' state

    def _add_buckets(self, made: PartBuckets) -> None:
        """One file a rank."""
        self.buckets[made.part.name] = made
        for gbuf, buffer in enumerate(made.buffers):
            from .buckets import bucket_key

            for bucket, numel in enumerate(buffer.bucket_numel_unpadded.tolist()):
                for spec in made.part.catalog.state.slots:
                    key = bucket_key(made.part, gbuf, buffer.key, bucket, spec.name)
                    self.shapes[key] = (spec.dtype, (numel,))
        ranks = [list(rank_chunks(made, rank)) for rank in range(made.dp_size)]
        self._add_part(made.part, ranks, None)

    def _add_spaces(self, plan: SpacePlan) -> None:
        self.shapes |= plan.shapes
        for part, rows in zip(self.origin.parts, plan.rows, strict=True):
            if rows:
                self._add_part(part, [rows], FILE_BYTES)

    def _add_part(self, part: OriginPart, groups: Sequence[Sequence[ChunkRow]], file_bytes: int | None) -> None:
        packed = self._pack(groups, file_bytes)
        state = part.catalog.state
        placement = FilePlacement(packed.files, tuple(slot.itemsize for slot in state.slots))
        dst = Catalog(self.format.name, "torch_dist", part.name, state, None, placement)
        self.parts.append(TargetPart(part.catalog, part.source, dst))

    def _pack(self, groups: Sequence[Sequence[ChunkRow]], file_bytes: int | None) -> Packed:
        before = len(self.names)

        def name(i: int) -> str:
            return f"{self.folder}/__{before + i}_0.distcp"

        packed = pack_chunks(groups, name, file_bytes)
        self.packed.append((packed, before))
        self.names += [f"__{before + i}_0.distcp" for i in range(len(packed.files))]
        return packed

    # ------------------------------------------------------------------------------------------------ objects by group

    def _optimizers(self) -> list[int | None]:
        return list(dict.fromkeys(part.chained for part in self.origin.groups))

    def _objects_of_buckets(self, made: Sequence[PartBuckets]) -> dict[str, Item]:
        """The objects that each data-parallel group writes."""
        objects: dict[str, Item] = {}
        for buckets in made:
            padded, unpadded = buckets.per_bucket
            prefix = group_prefix(buckets.part)
            objects[f"{prefix}.per_bucket_numel/shard_0_1"] = _object([padded])
            objects[f"{prefix}.per_bucket_numel_unpadded/shard_0_1"] = _object([unpadded])
        carried = [item for item in group_objects(self.origin) if not is_layout_object(item)]
        if carried:
            return objects | {item.key: self._object(item.key) for item in carried}
        states = states_in_common(self.origin)
        for buckets in made:
            fields = states.get(buckets.part.chained)
            if fields is None:
                raise UnsupportedError(
                    "the common state has no optimizer of this number",
                    found=buckets.part.chained,
                    expected=list(states),
                )
            for field, state in fields.items():
                value = StateValue([state.value], state.storages)
                objects[f"{group_prefix(buckets.part)}.{field}/shard_0_1"] = MadeItem(write_value(value))
        return objects

    # ------------------------------------------------------------------------------------------------- everything else

    def _object(self, key: str) -> Item:
        """An object as torch_dist holds it: in a list of one."""
        if self.origin.container == "torch_dist":
            return self.origin.object_item(key)
        read = self.origin.object_value(key)
        return MadeItem(write_value(StateValue([read.value], read.storages)))

    def _add_rest(
        self, objects: Mapping[str, Item], states: Mapping[int | None, Mapping[str, StateValue]]
    ) -> dict[str, bytes]:
        """Weights, objects, the common state, the metadata; returns the files that are made here."""
        rows = list(self._weight_rows())
        every = {key: self._object(key) for key in carried_objects(self.origin)} | dict(objects)
        common = self._common(states)
        small = {f"{self.folder}/metadata.json": self._metadata_json()}
        whole: list[tuple[str, Item]] = []
        if self.entry:
            every[COMMON_ENTRY] = common
        elif isinstance(common, MadeItem):
            small[f"{self.folder}/{COMMON_FILE}"] = common.data
        else:
            whole.append((f"{self.folder}/{COMMON_FILE}", common))
        whole += [(f"{self.folder}/{path}", self.origin.files[path]) for path in _other_files(self.origin)]
        for key in sorted(every):
            rows.append(ChunkRow(key, (), (), self._fill(every[key]), None, every[key].nbytes))
        packed = self._pack([rows], FILE_BYTES)
        files = packed.files + tuple(self._whole_file(path, item) for path, item in whole)
        self._add_items(files)
        small[f"{self.folder}/{_METADATA}"] = self._metadata(packed, every)
        return small

    def _weight_rows(self) -> Iterator[ChunkRow]:
        for key in sorted(self.origin.tensors):
            tensor = self.origin.tensors[key]
            self.shapes[key] = (tensor.dtype, tensor.shape)
            for box, item in sorted(zip(tensor.boxes, tensor.items, strict=True), key=lambda row: row[0].start):
                yield ChunkRow(key, box.start, box.shape, self._fill(item), tensor.dtype)

    def _fill(self, item: Item) -> tuple[Fill, ...]:
        """The whole of an item, which becomes the next of the target's items."""
        self.items.append(item)
        return (Fill.run(len(self.items) - 1, 0, 0, item.nbytes, 0),) if item.nbytes else ()

    def _whole_file(self, path: str, item: Item) -> TargetFile:
        row = ChunkRow(path, (), (), self._fill(item), None, item.nbytes)
        return pack_chunks([[row]], lambda i: path, None).files[0]

    def _add_items(self, files: tuple[TargetFile, ...]) -> None:
        items = Items(tuple(self.items))
        placement = FilePlacement(files, (1,))
        dst = Catalog(self.format.name, "torch_dist", items.catalog.part, items.state, None, placement)
        self.parts.append(TargetPart(items.catalog, items.source, dst))

    def _common(self, states: Mapping[int | None, Mapping[str, StateValue]]) -> Item:
        """The common state; its own bytes where nothing of it changes."""
        here = self.origin.common_in == "entry"
        if self.origin.format == self.layout:
            if here != self.entry:
                return MadeItem(rewrapped(self.origin, entry=self.entry))
            return self.origin.object_item(COMMON_ENTRY) if here else self.origin.files[COMMON_FILE]
        return MadeItem(common_bytes(self.origin, self.layout, states, entry=self.entry))

    def _metadata_json(self) -> bytes:
        return msgspec.json.encode(_SHARDED if self.entry else _SHARDED | _COMMON)

    def _metadata(self, rest: Packed, objects: Mapping[str, Item]) -> bytes:
        before = next(number for packed, number in self.packed if packed is rest)
        places = {
            row.key: (before + file, at, nbytes)
            for row, file, at, nbytes in zip(rest.rows, rest.file, rest.at, rest.nbytes, strict=True)
            if row.key in objects
        }
        entries = {key: BytesEntry(key, *places[key]) for key in sorted(places)}
        tensors = tensor_entries(self.packed, self.shapes)
        return dump_metadata(DcpMetadata(tensors, entries, tuple(self.names)))


def _other_files(origin: Origin) -> list[str]:
    """Files beside the checkpoint's own, such as a data loader's state. Of zarr arrays and objects none is left."""
    own = {_METADATA, COMMON_FILE, "metadata.json", _INTEGRITY}
    inside = "/" if origin.container == "zarr" else "\0"
    return sorted(
        path for path in origin.files if path not in own and inside not in path and not _DISTCP.fullmatch(path)
    )


def _object(value: object) -> MadeItem:
    """A value made here, as an object of torch_dist."""
    return MadeItem(write_value(StateValue(value, {})))


def _check_groups(parts: Sequence[OriginPart]) -> None:
    """Keys of two groups must differ."""
    seen: dict[str, str] = {}
    for part in parts:
        twin = seen.setdefault(group_prefix(part), part.name)
        if twin != part.name:
            raise UnsupportedError("two parts have one number", found=f"{twin!r} and {part.name!r}")
