"""Describes a Megatron checkpoint: which container, which layout, which parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...core.errors import CorruptError, MissingError, UnsupportedError
from ...core.layout import default_bucket_size
from ...encodings.torch_archive import read_archive
from ...model.state import LossScale, ParamSpec
from .bucket_space import Memo, PartOptions, part_name, read_part
from .common import Common, chained_values, read_common
from .entries import Entries
from .folders import container_of
from .frozen import with_lookalikes
from .groups import GroupSet, archive_numbers, assign_groups, read_groups, read_loss_scale
from .layout_file import LayoutFile, LayoutGroup, read_layout
from .model import Doubt, MegatronCheckpoint, MegatronPart, said_of
from .model_space import SpaceOptions, model_keys, read_model_space
from .raw_buckets import RawPart, read_raw_parts
from .search import UnitTable
from .stacks import stack_of
from .torch_dist import COMMON_ENTRY, COMMON_FILE, open_torch_dist
from .weights import Weights, units

__all__ = ["describe", "part_options"]

_MANY_CHUNKS = 10_000
"""Beyond, tensors are not looked into where it is only to show a checkpoint: each has a header to be read."""
_BUCKETS = ("dp_reshardable", "fully_sharded_bucket_space")
_MODEL_SPACE = ("fully_reshardable", "fully_sharded_model_space")


def describe(
    path: Path, *, layout_file: Path | None = None, content: bool | None = True, check_files: bool = True
) -> MegatronCheckpoint:
    """An iteration folder as a value. Reads headers and, with ``content``, the ends of tensors that name params; None:
    where there are not many. ``check_files=False``: describes what there is, even where files are missing or too short.
    ``layout_file``: says how params lie in buffers (``layout_file``), so that nothing is derived.

    Raises ``MissingError``, ``CorruptError``, ``UnsupportedError``.
    """
    container = container_of(path)
    if container is None:
        raise MissingError("this is no folder of an iteration that Megatron saved", file=path)
    if container == "torch":
        from .legacy import open_legacy

        return open_legacy(path)
    layout = None if layout_file is None else read_layout(layout_file)
    entries = _open(path, container)
    if check_files:
        entries.check_files()
    look = len(entries.chunks) <= _MANY_CHUNKS if content is None else content
    try:
        entries.check_files()
        return _of_entries(entries, look, layout)
    except (CorruptError, MissingError):
        if check_files:
            raise
        return _of_entries(replace(entries, lenient=True), False, layout)


def _open(path: Path, container: str) -> Entries:
    if container == "torch_dist":
        return open_torch_dist(path)
    from .zarr_v2 import open_zarr

    return open_zarr(path)


def _of_entries(entries: Entries, content: bool, layout: LayoutFile | None) -> MegatronCheckpoint:
    common = read_common(entries)
    if common.sharding_type is None:
        raise UnsupportedError(
            "the checkpoint holds no state of Megatron's distributed optimizer",
            file=entries.path,
            hint="it was saved without the optimizer, or with another one",
        )
    if common.sharding_type in _BUCKETS:
        return _buckets(entries, common, content, layout)
    if common.sharding_type in _MODEL_SPACE:
        return _model_space(entries, common)
    if common.sharding_type == "dp_zero_gather_scatter":
        from .zero_gather import read_zero_gather

        if layout is not None:
            raise UnsupportedError(
                "a layout file is not used for this layout", file=entries.path, found=common.sharding_type
            )

        return read_zero_gather(entries, common)
    raise UnsupportedError("unknown layout of the optimizer", file=entries.path, found=common.sharding_type)


# --------------------------------------------------------------------------------------------------------- model space


def _model_space(entries: Entries, common: Common) -> MegatronCheckpoint:
    found, notices = _chained_groups(entries, common)
    options = SpaceOptions(
        found.groups,
        found.step or 0,
        _scaler(entries) or _common_scaler(entries, common),
        None if common.args.num_experts is None else len(chained_values(common.optimizer)) > 1,
        common.args.num_layers,
        common.args.grads_in_fp32 is not False,
        lambda params: assign_groups(params, found.groups)[0],
    )
    assert common.sharding_type is not None
    space = read_model_space(entries, common.sharding_type, options)
    open_groups = assign_groups(space.part.catalog.state.params, found.groups)[1]
    part = replace(space.part, catalog=replace(space.part.catalog, format=f"megatron:{common.sharding_type}"))
    return MegatronCheckpoint(
        entries,
        f"megatron:{common.sharding_type}",
        entries.container,
        found.step or 0,
        common.iteration,
        {"": part},
        space.model_keys,
        (*common.notices, *notices, *space.notices, *((open_groups,) if open_groups else ())),
    )


def _chained_groups(entries: Entries, common: Common) -> tuple[GroupSet, tuple[str, ...]]:
    """Groups of all optimizers, one after the other, from the common state, or from entries of the groups."""
    sets = [read_groups(value) for value in chained_values(common.optimizer) if _has_groups(value)]
    if not sets:
        keys = sorted(key for key in entries.objects if re.search(r"\.optimizer/shard_", key))
        firsts = {key.partition("dp_group_idx")[0]: key for key in reversed(keys)}
        sets = [_groups_of(entries, firsts[prefix]) for prefix in sorted(firsts)]
    steps = {one.step for one in sets if one.step is not None}
    notices = [line for one in sets for line in one.notices]
    if len(steps) > 1:
        notices.append(Doubt(f"optimizers are at different steps: {', '.join(map(str, sorted(steps)))}"))
    if not sets:
        notices.append(Doubt("the checkpoint states no optimizer groups"))
    step = next(iter(steps)) if len(steps) == 1 else (max(steps) if steps else common.iteration)
    groups = tuple(group for one in sets for group in one.groups) or ({},)
    return GroupSet(groups, step), tuple(notices)


def _has_groups(value: object) -> bool:
    while isinstance(value, dict):
        if isinstance(value.get("param_groups"), list):
            return True
        value = value.get("optimizer")
    return False


def _groups_of(entries: Entries, key: str) -> GroupSet:
    archive = entries.find_archive(key)
    if archive is None:
        return GroupSet(({},), None, notices=("the optimizer groups cannot be read",))
    return read_groups(archive.value, archive_numbers(entries.store, archive))


def _scaler(entries: Entries, prefix: str = "") -> LossScale | None:
    for key in entries.objects:
        if key.startswith(prefix) and "grad_scaler" in key:
            archive = entries.find_archive(key)
            return None if archive is None else read_loss_scale(archive.value, archive_numbers(entries.store, archive))
    return None


def _common_scaler(entries: Entries, common: Common) -> LossScale | None:
    """The state of the grad scaler where it stands in the common state, as in ``fully_reshardable``."""
    stored = [v["grad_scaler"] for v in chained_values(common.optimizer) if isinstance(v, dict) and "grad_scaler" in v]
    if not stored:
        return None
    if entries.common_in == "file":
        archive = read_archive(entries.store, COMMON_FILE)
    else:
        archive = entries.load_archive(COMMON_ENTRY)
    return read_loss_scale(stored[0], archive_numbers(entries.store, archive))


# ------------------------------------------------------------------------------------------------------------- buckets


def _buckets(entries: Entries, common: Common, content: bool, layout: LayoutFile | None) -> MegatronCheckpoint:
    keys = model_keys(entries)
    found_units = UnitTable(units(entries, keys, common.args.num_layers))
    memo: Memo = {}
    weights = Weights(entries, keys)
    raw_parts = read_raw_parts(entries)
    format = f"megatron:{common.sharding_type}"
    parts: dict[str, MegatronPart] = {}
    notices = list(common.notices)
    of_parts: dict[str, list[str]] = {}
    steps = set()
    if not raw_parts:
        raise UnsupportedError(
            "the checkpoint says that its optimizer lies in buckets, and holds none",
            file=entries.path,
            hint="it was saved without the optimizer, or entries are missing",
        )
    missing = _missing_groups(entries, common, raw_parts)
    notices += missing
    for raw in raw_parts:
        name = part_name(raw, len(raw_parts) == 1 and not missing)
        options, said = part_options(entries, common, raw, keys)
        steps.add(options.step)
        stated = None if layout is None else _stated(layout, raw)
        parts[name] = read_part(
            entries, raw, name, format, found_units, weights, options, content=content, stated=stated, memo=memo
        )
        state = parts[name].catalog.state
        open_groups = assign_groups(state.params, state.groups)[1]
        for line in (*said, *((open_groups,) if open_groups else ())):
            of_parts.setdefault(line, []).append(name)
    if len(steps) > 1:
        notices.append(Doubt(f"parts are at different steps: {', '.join(map(str, sorted(steps)))}"))
    for line, names in of_parts.items():
        more = f" and {len(names) - 1} more parts" if len(names) > 1 else ""
        notices.append(said_of(f"{names[0]}{more}" if names[0] else "", line))
    if content and layout is None:
        parts = with_lookalikes(parts, found_units, weights)
    notices += _unknown(parts)
    return MegatronCheckpoint(
        entries, format, entries.container, max(steps), common.iteration, parts, keys, tuple(dict.fromkeys(notices))
    )


def _stated(layout: LayoutFile, raw: RawPart) -> LayoutGroup:
    found = layout.group(raw.chained, raw.group)
    if found is None:
        raise UnsupportedError(
            "the layout file says nothing of a data-parallel group of the checkpoint",
            param=raw.prefix,
            found=", ".join(group.label for group in layout.groups[:4]),
            hint="give the layout file of the run that saved it",
        )
    return found


def _missing_groups(entries: Entries, common: Common, raw_parts: Sequence[RawPart]) -> list[str]:
    """Data-parallel groups that must be there and are not: numbers are without holes, and of the first optimizer there
    is one for each model-parallel rank.
    """
    lines: list[str] = []
    pipelines, tensors = _shard_grid(entries) or (common.args.pipeline_parallel, common.args.tensor_parallel)
    for chained in sorted({raw.chained for raw in raw_parts}, key=lambda c: -1 if c is None else c):
        groups = {raw.group for raw in raw_parts if raw.chained == chained}
        least = (pipelines or 1) * (tensors or 1) if not chained else 1
        lost = sorted(set(range(max(least, max(groups) + 1))) - groups)
        if lost:
            first = "" if chained is None else f"chained_{chained}."
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            lines.append(Doubt(f"the state of data-parallel group {first}dp_group_idx_{lost[0]}{more} is missing"))
    return lines


def _unknown(parts: Mapping[str, MegatronPart]) -> list[str]:
    lines = []
    for name, part in parts.items():
        if part.evidence.unknown:
            where = f"{name}: " if name else ""
            count, first = len(part.evidence.unknown), part.evidence.unknown[0]
            lines.append(f"{where}{count} stretches of its buckets are no known param, the first is {first}")
    return lines


def part_options(
    entries: Entries, common: Common, raw: RawPart, keys: Sequence[str]
) -> tuple[PartOptions, tuple[str, ...]]:
    key = next((k for k in entries.objects if k.startswith(f"{raw.prefix}.optimizer/")), None)
    found = GroupSet(({},), None, notices=(Doubt("the checkpoint states no optimizer groups"),))
    if key is not None:
        found = _groups_of(entries, key)
    args = common.args
    pipelines = args.pipeline_parallel or (_shard_grid(entries) or (1, 1))[0]
    untied = any(k.endswith("output_layer.weight") for k in keys)

    def assign(params: Sequence[ParamSpec]) -> Sequence[int]:
        return assign_groups(params, found.groups)[0]

    tensors = args.tensor_parallel or (_shard_grid(entries) or (1, 1))[1]
    expert = any(group.get("is_expert_parallel") for group in found.groups) if key is not None else bool(raw.chained)
    expert = expert and raw.chained is not None
    ranks = (args.expert_tensor_parallel or tensors) * (args.expert_parallel or 1) if expert else tensors
    stage = _pipeline_rank(raw, pipelines, ranks)
    options = PartOptions(
        found.groups,
        common.iteration or 0 if found.step is None else found.step,
        _scaler(entries, f"{raw.prefix}."),
        assign,
        pipelines > 1 and not untied,
        stage,
        _stated_bucket_size(common),
        None if args.overlap_grad_reduce is None else not args.overlap_grad_reduce,
        _stage_layers(entries, keys, stage, pipelines),
        expert,
    )
    return options, found.notices


def _stage_layers(entries: Entries, keys: Sequence[str], stage: int | None, pipelines: int) -> range | None:
    """The layers of a stage of an even pipeline; None where they cannot be even."""
    stacks = {entries.tensors[key].shape[0] for key in keys if stack_of(key) == "decoder.layers"}
    if stage is None or len(stacks) != 1 or (layers := next(iter(stacks))) % pipelines:
        return None
    each = layers // pipelines
    return range(stage * each, (stage + 1) * each)


def _stated_bucket_size(common: Common) -> int | None:
    args = common.args
    if args.overlap_grad_reduce is not True:
        return None
    return args.ddp_bucket_size or (default_bucket_size(args.data_parallel) if args.data_parallel else None)


def _shard_grid(entries: Entries) -> tuple[int, int] | None:
    """(pipeline, tensor) parallel sizes as the key of the RNG state says; None without one."""
    for key in entries.objects:
        found = re.fullmatch(r"rng_state/shard_\d+\.\d+_(\d+)\.(\d+)", key)
        if found is not None:
            return int(found[1]), int(found[2])
    return None


def _pipeline_rank(raw: RawPart, pipelines: int, ranks: int) -> int | None:
    """Groups are numbered over the model-parallel ranks, ``ranks`` a pipeline stage, stages outermost."""
    stage = raw.group // max(ranks, 1)
    return stage if stage < pipelines else None
