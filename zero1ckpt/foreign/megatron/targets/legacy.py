"""``megatron:legacy`` as a target: ``distrib_optim.pt`` in each rank's folder, as today's Megatron-LM writes it.

One tensor a buffer and slot: the buckets' unpadded parts end to end, gaps between params zero. ``model_optim_rng.pt``
is the source's own: names and order of the params stand only there, so the source must be a legacy checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ....core.errors import CorruptError, UnsupportedError, UsageError
from ....core.layout import BufferLayout
from ....encodings.inert_pickle import Dtype, Value
from ....encodings.torch_archive import plan_archive, tensor_ref
from ....model.catalog import Catalog
from .buckets import BucketRules, field_of, laid_out
from .files import ChunkRow, FileFormat, FilePlacement, Fill, TargetFile, TargetPart, pack_chunks, single_archive
from .items import Item, Items
from .joining import join_parts
from .origin import Origin, OriginPart
from .planning import Target, iteration_name

__all__ = ["plan_legacy"]

_MODEL_FILE = "model_optim_rng.pt"
_OPTIMIZER_FILE = "distrib_optim.pt"


def plan_legacy(origin: Origin, rules: BucketRules, flavour: str | None) -> Target:
    """Plans the target. Raises ``UnsupportedError`` for a source that is no legacy checkpoint."""
    if flavour is not None:
        raise UsageError("a legacy checkpoint has one flavour", found=flavour, hint="leave --flavour out")
    if origin.container != "torch":
        raise UnsupportedError(
            "a legacy checkpoint states each rank's own names and their order, and the source does not",
            file=origin.label,
            found=f"megatron:{origin.format}",
            hint="choose megatron:dp_reshardable or megatron:fully_reshardable",
        )
    folder, tracker = iteration_name(origin)
    format = FileFormat("megatron:legacy", "torch")
    parts = [_rank_part(rank, rules, folder, format) for rank in _ranks(origin)]
    parts.append(_model_files(origin, folder, format))
    return Target(origin, "legacy", folder, tracker, tuple(parts), {}, (), format, {})


@dataclass(frozen=True)
class _RankFile:
    """One rank's ``distrib_optim.pt``: its optimizers in order, None for one that another rank holds."""

    folder: str
    parts: tuple[OriginPart | None, ...]
    several: bool


def _ranks(origin: Origin) -> list[_RankFile]:
    chained = sorted({part.chained for part in origin.parts if part.chained is not None})
    found: dict[str, dict[int | None, OriginPart]] = {}
    for part in origin.parts:
        if found.setdefault(_folder_of(part), {}).setdefault(part.chained, part) is not part:
            raise CorruptError("two parts lie in one rank's folder", file=origin.label, found=part.name)
    if not chained:
        return [_RankFile(folder, (own[None],), False) for folder, own in sorted(found.items())]
    return [
        _RankFile(folder, tuple(own.get(i) for i in range(chained[-1] + 1)), True)
        for folder, own in sorted(found.items())
    ]


def _folder_of(part: OriginPart) -> str:
    """The rank's folder, which the keys of its weights begin with."""
    folders = {held.key.partition("/")[0] for local in part.local_params for held in local.boxes}
    if len(folders) != 1:
        raise UnsupportedError("the rank that holds a part is not known", found=f"part {part.name!r}")
    return folders.pop()


def _rank_part(rank: _RankFile, rules: BucketRules, folder: str, format: FileFormat) -> TargetPart:
    """One rank's file, filled from all parts that lie in it."""
    held = [part for part in rank.parts if part is not None]
    joined = join_parts(held)
    offsets = {part.name: offset for part, offset in zip(held, joined.offsets, strict=True)}
    file = _file(rank, rules, f"{folder}/{rank.folder}/{_OPTIMIZER_FILE}", offsets)
    state = joined.catalog.state
    placement = FilePlacement((file,), tuple(slot.itemsize for slot in state.slots))
    dst = Catalog(format.name, "torch", joined.catalog.part, state, None, placement)
    return TargetPart(joined.catalog, joined.source, dst)


def _file(rank: _RankFile, rules: BucketRules, path: str, offsets: dict[str, int]) -> TargetFile:
    """``offsets``: number of the first param of each part in the catalog that the file is filled from."""
    storages: list[tuple[str, int]] = []
    fills: list[list[Fill]] = []
    values = [None if part is None else _value(part, rules, offsets[part.name], storages, fills) for part in rank.parts]
    plan = plan_archive(values if rank.several else values[0], storages)
    return single_archive(path, plan, fills)


def _value(
    part: OriginPart, rules: BucketRules, offset: int, storages: list[tuple[str, int]], fills: list[list[Fill]]
) -> Value:
    layout = part.layout
    if layout is None:
        raise UnsupportedError("the order of the params in their buffers is not known", found=f"part {part.name!r}")
    value: dict[Value, Value] = {"buckets_coalesced": True}
    for index, buffer in enumerate(laid_out(part, layout, rules, 1)):
        tensors: dict[Value, Value] = {}
        for slot, spec in enumerate(part.catalog.state.slots):
            key = str(len(storages))
            storages.append((key, buffer.numel_unpadded * spec.itemsize))
            fills.append(list(_fills(part, buffer, slot, spec.itemsize, offset)))
            tensors[field_of(spec.name)] = tensor_ref(key, spec.dtype, (buffer.numel_unpadded,))
        tensors["numel_unpadded"] = buffer.numel_unpadded
        value[index] = {(Dtype(buffer.key.param_dtype), Dtype(buffer.key.grad_dtype)): tensors}
    return value


def _fills(part: OriginPart, buffer: BufferLayout, slot: int, itemsize: int, offset: int) -> list[Fill]:
    """Params of a buffer, in the coordinates of its buckets' unpadded parts laid end to end."""
    compact = buffer.bucket_numel_unpadded.cumsum() - buffer.bucket_numel_unpadded
    made = []
    for place, local in enumerate(buffer.param.tolist()):
        bucket = int(buffer.bucket_of[place])
        at = int(compact[bucket] + buffer.start[place] - buffer.bucket_offset[bucket])
        held = part.local_params[local]
        made.append(Fill.run(offset + held.param, slot, held.start, held.numel, at * itemsize))
    return made


def _model_files(origin: Origin, folder: str, format: FileFormat) -> TargetPart:
    """``model_optim_rng.pt`` of each rank, and what else lies there, as they are."""
    items: list[Item] = []
    files: list[TargetFile] = []
    every = {key: origin.object_item(key) for key in origin.objects if key.endswith(_MODEL_FILE)}
    for path, item in origin.files.items():
        if not path.endswith(f"/{_OPTIMIZER_FILE}"):
            every.setdefault(path, item)
    for path in sorted(every):
        items.append(every[path])
        fills = (Fill.run(len(items) - 1, 0, 0, every[path].nbytes, 0),) if every[path].nbytes else ()
        row = ChunkRow(path, (), (), fills, None, every[path].nbytes)
        files += pack_chunks([[row]], _name_it(f"{folder}/{path}"), None).files
    held = Items(tuple(items))
    dst = Catalog(format.name, "torch", held.catalog.part, held.state, None, FilePlacement(tuple(files), (1,)))
    return TargetPart(held.catalog, held.source, dst)


def _name_it(path: str) -> Callable[[int], str]:
    return lambda i: path
