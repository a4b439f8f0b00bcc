"""The document of ``inspect`` as text: facts, tables, a bar for each bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .bar_text import draw_bar
from .bars import bars_of
from .narrowing import Selection
from .render import Column, Page, Table
from .rows import Row, part_documents
from .text import count, first_and_last, hyper_parameters, percent, plural, safe, shape_text, short_bytes, some

__all__ = ["RANK_LIMIT", "facts", "inspect_page", "tables"]

RANK_LIMIT = 8
_ROWS = 24
_BARS = 8
_LEGEND = 12


def inspect_page(page: Page, document: Row, selections: Mapping[str, Selection]) -> None:
    """Writes everything on the page."""
    parts = part_documents(document)
    page.line(safe(document["path"]), "bold")
    if len(parts) > 1:
        page.facts(_common_facts(document))
    for name, part in parts.items():
        selection = selections[name]
        if len(parts) > 1:
            page.title(f"Part {safe(name)}")
        page.facts(facts(part, whole=selection.whole))
        ranks = 0 if part["dp_size"] is None else len(selection.ranks())
        for table in tables(part, selection, ranks, _ROWS if selection.whole else 10 * _ROWS):
            page.table(table)
        if part["dp_size"] is not None:
            _bars(page, selection)


def _bars(page: Page, selection: Selection) -> None:
    total = sum(len(buckets) for buckets in selection.buckets)
    if not total:
        return
    page.title("Which rank owns which params")
    narrowed = not selection.whole
    limit = 4 * _BARS if narrowed else _BARS
    wanted = set(first_and_last(range(total), limit))
    for i, bar in enumerate(bars_of(selection)):
        if i in wanted:
            draw_bar(page, bar, 10 * _LEGEND if narrowed else _LEGEND)
    page.line()
    if total > limit:
        page.line(f"  first {limit - 2} and last 2 of {count(total)} buckets; --bucket shows another", "dim")
    padding, other = ("░", "╌") if page.unicode else (".", "-")
    others = f"{other} other params, " if narrowed else ""
    page.line(f"  {others}{padding} padding; the ruler counts ranks", "dim")


def facts(part: Row, *, whole: bool) -> list[tuple[str, str]]:
    """What stands at the head of a part."""
    numel = sum(param["numel"] for param in part["params"])
    buckets = [bucket for buffer in part["buffers"] for bucket in buffer["buckets"]]
    padded = sum(bucket["numel"] for bucket in buckets)
    waste = f", {percent(padded - numel, padded)} padding" if whole else ""
    rows = [("format", f"{part['format']} in {part['container']}"), ("step", count(part["step"]))]
    if part["dp_size"] is not None:
        size = part["bucket_size"]
        rows.append(("dp size", count(part["dp_size"])))
        rows.append(("bucket size", "one bucket a buffer" if size is None else f"{count(size)} elements"))
    rows.append(("params", f"{count(len(part['params']))} with {count(numel)} elements"))
    if buckets:
        buffers = plural(sum(1 for buffer in part["buffers"] if buffer["buckets"]), "buffer")
        rows.append(("layout", f"{buffers}, {plural(len(buckets), 'bucket')}, {count(padded)} elements{waste}"))
    slots = ", ".join(f"{safe(slot)} {dtype}" for slot, dtype in part["slot_dtypes"].items())
    rows.append(("slots", slots or "none"))
    rows.append(("size", _size(part)))
    rows += _proof(part)
    if part["digest"] is not None:
        rows.append(("digest", str(part["digest"])))
    return rows


def _proof(part: Row) -> list[tuple[str, str]]:
    """How far a Megatron part's map from params to places is proved, and what a reader should know."""
    proof = part.get("evidence")
    if proof is None:
        return []
    if proof["proved"] is None:
        state = f"by {proof['by']}, not proved yet (`verify --deep` does, and every conversion first)"
    else:
        state = f"by {proof['by']}, {percent(proof['proved'], proof['elements'])} of the elements proved by the weights"
    rows = [("map", state)]
    shown = ("ambiguous",) if proof["by"] == "sizes and order" else ("ambiguous", "unproved")  # no weight was looked at
    for what in shown:
        if proof[what]:
            rows.append((what, f"{plural(len(proof[what]), 'param')}: {some([safe(name) for name in proof[what]])}"))
    return rows + [("note", safe(line)) for line in part["notices"]]


def _common_facts(document: Row) -> list[tuple[str, str]]:
    return [
        ("format", f"{document['format']} in {document['container']}"),
        ("step", "differs between parts" if document["step"] is None else count(document["step"])),
        ("parts", ", ".join(safe(name) for name in document["parts"])),
        ("size", _size(document)),
        *([] if document["digest"] is None else [("digest", str(document["digest"]))]),
    ]


def _size(part: Row) -> str:
    return f"{short_bytes(part['total_bytes'])} ({count(part['total_bytes'])} bytes)"


def tables(part: Row, selection: Selection, ranks: int, limit: int) -> Iterable[Table]:
    """Groups, params, buckets, ranks and files; at most ``limit`` rows each. ``ranks``: how many there are."""
    yield _groups(part)
    yield _params(part, limit)
    if any(buffer["buckets"] for buffer in part["buffers"]):
        yield _buckets(part, selection, limit)
    shards = list(part["ranks"])
    if ranks == 1 and len(shards) == 1:
        yield _shards(shards[0], limit)
    elif shards:
        yield _ranks(shards, ranks)
    yield _files(part["files"], limit)


def _groups(part: Row) -> Table:
    numel = {param["name"]: param["numel"] for param in part["params"]}
    numbers = sorted({param["group"] for param in part["params"]})
    if len(numbers) != len(part["groups"]):
        numbers = list(range(len(part["groups"])))
    rows = [
        (
            str(number),
            count(len(group["params"])),
            count(sum(numel.get(name, 0) for name in group["params"])),
            hyper_parameters(group) or "none",
        )
        for number, group in zip(numbers, part["groups"], strict=True)
    ]
    columns = (
        Column("group", right=True),
        Column("params", right=True),
        Column("elements", right=True),
        Column("hyper-parameters", wide=True),
    )
    return Table("Groups", columns, tuple(rows))


def _params(part: Row, limit: int) -> Table:
    where = {
        param["name"]: f"{i}.{bucket['index']}"
        for i, buffer in enumerate(part["buffers"])
        for bucket in buffer["buckets"]
        for param in bucket["params"]
    }
    rows: list[tuple[str, ...]] = [
        (
            safe(param["name"]),
            shape_text(param["shape"]),
            safe(param["dtype"]),
            count(param["numel"]),
            str(param["group"]),
            where.get(param["name"], ""),
        )
        for param in first_and_last(part["params"], limit)
    ]
    columns: tuple[Column, ...] = (
        Column("param", wide=True),
        Column("shape", right=True),
        Column("dtype"),
        Column("elements", right=True, spare=2),
        Column("group", right=True, spare=1),
        Column("bucket", right=True),
    )
    if not where:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table("Params", columns, tuple(rows), _note(part["params"], limit, "--param shows another"))


def _buckets(part: Row, selection: Selection, limit: int) -> Table:
    buckets = [(i, buffer, bucket) for i, buffer in enumerate(part["buffers"]) for bucket in buffer["buckets"]]
    rows = [
        (
            f"{i}.{bucket['index']}",
            f"{safe(buffer['param_dtype'])}, {safe(buffer['grad_dtype'])}",
            count(bucket["offset"]),
            count(bucket["numel"]),
            count(bucket["numel_unpadded"]),
            percent(selection.padding(i, bucket["index"]), bucket["numel"]),
            count(len(bucket["params"])),
        )
        for i, buffer, bucket in first_and_last(buckets, limit)
    ]
    columns = (
        Column("bucket", right=True),
        Column("param, grad dtype", spare=2),
        Column("offset", right=True, spare=1),
        Column("elements", right=True),
        Column("unpadded", right=True, spare=3),
        Column("padding", right=True),
        Column("params", right=True),
    )
    return Table("Buckets", columns, tuple(rows), _note(buckets, limit, "--bucket shows another"))


def _ranks(ranks: Sequence[Row], total: int) -> Table:
    rows = []
    for rank in ranks:
        shards = rank["shards"]
        names = dict.fromkeys(safe(shard["name"]) for shard in shards)
        first, last = next(iter(names), "nothing but padding"), next(reversed(names), "")
        rows.append(
            (
                str(rank["rank"]),
                count(rank["bytes"]),
                count(sum(shard["param"][1] - shard["param"][0] for shard in shards)),
                count(len(names)),
                first if len(names) < 2 else f"{first} to {last}",
            )
        )
    columns = (
        Column("rank", right=True),
        Column("bytes", right=True, spare=1),
        Column("elements", right=True),
        Column("params", right=True, spare=2),
        Column("owns", wide=True),
    )
    note = "" if len(rows) == total else f"first {len(rows) - 2} and last 2 of {count(total)}; --rank shows another"
    return Table("Ranks", columns, tuple(rows), note)


def _shards(rank: Row, limit: int) -> Table:
    shards = rank["shards"]
    rows = [
        (
            safe(shard["name"]),
            f"{shard['buffer']}.{shard['bucket']}",
            *(_range(shard[view]) for view in ("gbuf_world", "gbuf_world_in_bucket", "gbuf_local", "param")),
        )
        for shard in first_and_last(shards, limit)
    ]
    columns = (
        Column("param", wide=True),
        Column("bucket", right=True),
        Column("gbuf_world", right=True, spare=1),
        Column("in_bucket", right=True, spare=2),
        Column("gbuf_local", right=True),
        Column("of the param", right=True),
    )
    title = f"What rank {rank['rank']} owns"
    return Table(title, columns, tuple(rows), _note(shards, limit, "--json shows all"))


def _files(files: Sequence[Row], limit: int) -> Table:
    rows = [(safe(file["path"]), count(file["bytes"])) for file in first_and_last(files, limit // 2)]
    columns = (Column("file", wide=True), Column("bytes", right=True))
    return Table("Files", columns, tuple(rows), _note(files, limit // 2, "--json lists all"))


def _note(rows: Sequence[Any], limit: int, how: str) -> str:
    return "" if len(rows) <= limit else f"first {limit - 2} and last 2 of {count(len(rows))}; {how}"


def _range(bounds: Sequence[int]) -> str:
    return f"{bounds[0]}:{bounds[1]}"
