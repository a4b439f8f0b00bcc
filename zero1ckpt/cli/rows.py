"""What ``inspect`` shows, as rows: the keys of ``inspect --json``. Pure functions of a checkpoint's catalogs.

Ranks are made from the layout's columns and only when they are asked for, so that one rank of 16,384 costs one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..api.stored import Stored
from ..core.layout import Fragments
from ..core.ranges import IntColumn
from ..model.catalog import Catalog
from ..model.manifest import MANIFEST_NAME, PartManifest
from ..model.values import decode_value
from .narrowing import Selection
from .text import first_and_last, json_safe

__all__ = ["Row", "bucket_rows", "document", "part_documents", "rank_rows"]

Row = dict[str, Any]
_MANY_CHUNKS = 1000


def document(stored: Stored, selections: Mapping[str, Selection], folder: str, rank_limit: int | None = None) -> Row:
    """The whole document of ``inspect --json``; its ranks are an iterator, of the first and last few with a limit.

    With several parts the top level holds what is common to them, and ``parts`` each of them.
    """
    head: Row = {"schema": "zero1ckpt.inspect/1"}
    parts = {
        name: head | _part(stored, name, selection, folder, rank_limit) | {"parts": {}}
        for name, selection in selections.items()
    }
    if len(stored.catalogs) == 1:
        return next(iter(parts.values()))
    return head | _common(stored, parts, folder) | {"parts": parts}


def part_documents(document: Row) -> dict[str, Row]:
    """The parts of a document by name; the only one is ""."""
    parts: dict[str, Row] = document["parts"]
    return parts or {"": document}


def _part(stored: Stored, name: str, selection: Selection, folder: str, rank_limit: int | None) -> Row:
    catalog, part = selection.catalog, stored.part(name)
    rules = catalog.layout.rules if catalog.layout else None
    foreign = _foreign(stored, name)
    everything = _files(stored, catalog, range(catalog.placement.blob_count))
    ranks = selection.ranks() if rank_known(stored, name) else ()
    return foreign | {
        "path": folder,
        "format": stored.manifest.format,
        "container": stored.manifest.container,
        "step": catalog.state.step,
        "dp_size": rules.dp_size if rules and rank_known(stored, name) else None,
        "bucket_size": rules.bucket_size if rules else None,
        "digest": part.digest or None,
        "total_bytes": _total(stored, catalog, everything),
        "slots": list(_slot_dtypes(part)),
        "slot_dtypes": _slot_dtypes(part),
        "groups": group_rows(catalog, selection),
        "params": param_rows(part, selection),
        "buffers": [bucket_rows(selection, i) for i in range(len(selection.buckets))],
        "ranks": rank_rows(stored, selection, ranks if rank_limit is None else first_and_last(ranks, rank_limit)),
        "files": everything if selection.whole else _files(stored, catalog, selection.owners(), narrowed=True),
    }


def rank_known(stored: Stored, part: str) -> bool:
    """Whether the files tell how many ranks a part's buckets are cut for."""
    layout = None if stored.megatron is None else stored.megatron.parts[part].layout
    return stored.megatron is None or (layout is not None and layout.dp_size is not None)


def _foreign(stored: Stored, part: str) -> Row:
    """What is said of a Megatron part only: how far its map is proved, and what else the checkpoint holds."""
    if stored.megatron is None:
        return {}
    it = stored.megatron.parts[part]
    proof = it.evidence
    return {
        "iteration": stored.megatron.iteration,
        "chained": it.chained,
        "dp_group": None if it.group < 0 else it.group,
        "pipeline_rank": it.pipeline_rank,
        "evidence": {
            "by": proof.by,
            "elements": proof.elements,
            "proved": proof.proved,
            "ambiguous": list(proof.ambiguous),
            "unproved": list(proof.unproved),
            "unknown": list(proof.unknown),
        },
        "notices": list(stored.megatron.notices),
    }


def _total(stored: Stored, catalog: Catalog, files: Sequence[Row]) -> int:
    """Bytes of a part: of its files, or where a Megatron checkpoint has several parts in each file, of its state."""
    if stored.megatron is None or len(stored.catalogs) == 1:
        return sum(row["bytes"] for row in files)
    state = catalog.state
    width = int(state.slot_bytes.sum())
    missing = sum(state.tensor_nbytes(param, slot) for param, slot in state.absent)
    return sum(param.numel for param in state.params) * width - missing


def _common(stored: Stored, parts: dict[str, Row], folder: str) -> Row:
    steps = {row["step"] for row in parts.values()}
    files = _all_files(stored)
    dtypes: dict[str, str] = {}
    for row in parts.values():
        dtypes |= row["slot_dtypes"]
    return {
        "path": folder,
        "format": stored.manifest.format,
        "container": stored.manifest.container,
        "step": steps.pop() if len(steps) == 1 else None,
        "dp_size": None,
        "bucket_size": None,
        "digest": stored.digest,
        "total_bytes": sum(row["bytes"] for row in files),
        "slots": list(dtypes),
        "slot_dtypes": dtypes,
        "groups": [],
        "params": [],
        "buffers": [],
        "ranks": [],
        "files": files,
    }


def _slot_dtypes(part: PartManifest) -> dict[str, str]:
    """Slots in the order of the files, elementwise ones first."""
    return {slot.name: slot.dtype for slot in part.slots} | {scalar.name: scalar.dtype for scalar in part.scalars}


def group_rows(catalog: Catalog, selection: Selection) -> list[Row]:
    """One row a group: its hyper-parameters, and those of its params that are asked for."""
    members: dict[int, list[str]] = {} if not selection.whole else {i: [] for i in range(len(catalog.state.groups))}
    for index in selection.params.tolist():
        param = catalog.state.params[index]
        members.setdefault(param.group, []).append(param.name)
    return [
        {**json_safe(decode_value(dict(catalog.state.groups[group]))), "params": members[group]}
        for group in sorted(members)
    ]


def param_rows(part: PartManifest, selection: Selection) -> list[Row]:
    """One row a param, in registration order."""
    rows = []
    for index in selection.params.tolist():
        entry, spec = part.params[index], selection.catalog.state.params[index]
        rows.append(
            {
                "name": entry.name,
                "shape": list(entry.shape),
                "dtype": entry.dtype,
                "numel": spec.numel,
                "group": entry.group,
                "digests": {slot: digest or None for slot, digest in entry.digests.items()},
            }
        )
    return rows


def bucket_rows(selection: Selection, index: int) -> Row:
    """One buffer and its buckets; ``range`` is the param's place in the buffer, as Megatron-Core's index map has it."""
    buffer = selection.buffer(index)
    wanted = selection.mask[buffer.param]
    buckets = []
    for k in selection.buckets[index].tolist():
        bucket = buffer.bucket(k)
        span = slice(bucket.first, bucket.last)
        members = zip(
            buffer.names[span],
            buffer.start[span].tolist(),
            buffer.end[span].tolist(),
            wanted[span].tolist(),
            strict=True,
        )
        buckets.append(
            {
                "index": k,
                "offset": bucket.offset,
                "numel": bucket.numel,
                "numel_unpadded": bucket.numel_unpadded,
                "params": [{"name": name, "range": [start, end]} for name, start, end, keep in members if keep],
            }
        )
    return {
        "param_dtype": buffer.key.param_dtype,
        "grad_dtype": buffer.key.grad_dtype,
        "numel": buffer.numel,
        "numel_unpadded": buffer.numel_unpadded,
        "buckets": buckets,
    }


def rank_rows(stored: Stored, selection: Selection, ranks: Sequence[int] | range) -> Iterator[Row]:
    """One row a rank with the four views of everything that it owns of the selection."""
    catalog = selection.catalog
    if catalog.layout is None:
        return
    tables = [(i, selection.fragments(i, ranks)) for i, _ in selection.buffers()]
    bounds = np.add.outer([0, 1], np.array(ranks, np.int64))
    cuts = [np.searchsorted(table.rank, bounds) for _, table in tables]
    for at, rank in enumerate(ranks):
        shards: list[Row] = []
        for (i, table), (first, last) in zip(tables, cuts, strict=True):
            shards += shard_rows(i, table, int(first[at]), int(last[at]))
        if shards or selection.keeps_empty_ranks:
            nbytes = _rank_bytes(stored, catalog, rank, shards)
            yield {"rank": rank, "bytes": nbytes, "shards": shards}


def shard_rows(index: int, table: Fragments, first: int, last: int) -> Iterator[Row]:
    """Rows ``first`` to ``last`` of a buffer's fragments, by their four views."""
    span = slice(first, last)
    inside = table.world[span] - table.buffer.bucket_offset[table.bucket[span]]
    columns = (table.param, table.bucket, table.world, table.local, table.param_start, table.size)
    names = table.buffer.name_of
    rows = zip(*(column[span].tolist() for column in columns), inside.tolist(), strict=True)
    for param, bucket, world, local, start, size, place in rows:
        yield {
            "name": names[param],
            "buffer": index,
            "bucket": bucket,
            "gbuf_world": [world, world + size],
            "gbuf_world_in_bucket": [place, place + size],
            "gbuf_local": [local, local + size],
            "param": [start, start + size],
        }


def _rank_bytes(stored: Stored, catalog: Catalog, rank: int, shards: Sequence[Row]) -> int:
    """Bytes of a rank's file; of a Megatron checkpoint, in which ranks write where they like, of the shown state."""
    if stored.megatron is not None:
        elements: int = sum(shard["param"][1] - shard["param"][0] for shard in shards)
        return elements * int(catalog.state.slot_bytes.sum())
    return stored.files[catalog.placement.blob_key(rank)].bytes


def _all_files(stored: Stored) -> list[Row]:
    """Every file of the checkpoint by path, the manifest included."""
    rows = [{"path": entry.path, "bytes": entry.bytes} for entry in stored.manifest.files]
    if stored.megatron is None:
        rows.append({"path": MANIFEST_NAME, "bytes": stored.store.size(MANIFEST_NAME)})
    return sorted(rows, key=lambda row: str(row["path"]))


def _files(stored: Stored, catalog: Catalog, blobs: Sequence[int] | IntColumn, *, narrowed: bool = False) -> list[Row]:
    """Files of some blobs of a part; the only part of a checkpoint has all other files too, unless narrowed."""
    if len(stored.catalogs) == 1 and not narrowed:
        return _all_files(stored)
    if stored.megatron is not None and (not narrowed or len(blobs) > _MANY_CHUNKS):
        return []  # where a chunk lies is read from its header, and there are a hundred thousand
    keys = {catalog.placement.blob_key(int(blob)) for blob in blobs}
    return [
        {"path": path, "bytes": entry.bytes}
        for path, entry in sorted(stored.files.items())
        if path in keys or any(folder in keys for folder in _folders(path))  # a blob may be a folder of chunks
    ]


def _folders(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
