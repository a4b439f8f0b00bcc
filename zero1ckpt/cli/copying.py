"""Runs ``reshard`` and ``convert``, which are the same: plan, then print the plan or execute it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ..api.megatron_target import MegatronPlan
from ..api.resharding import ReshardPlan, execute, plan_reshard, source_rules
from ..api.stored import describe
from ..core.layout import LayoutRules
from ..model.manifest import MANIFEST_NAME, FormatOptions
from ..storage.rendezvous import Ranks
from ..storage.staging import refuse_existing
from .exit_codes import DONE, resumable
from .progress import progress
from .render import Column, Page, Table, write_json
from .text import count, plural, safe, short_bytes

if TYPE_CHECKING:
    from .rows import Row

__all__ = ["CopyOptions", "run"]


Plan = ReshardPlan | MegatronPlan


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """What the command line asked for; None where it is as in the source."""

    command: str
    src: str
    dst: str | None
    to_dp: int | None
    from_dp: int | None = None
    bucket_size: int | str | None = None
    format: str | None = None
    container: str | None = None
    shard_size: int | None = None
    chunk_size: int | None = None
    compression: str | None = None
    verify: bool = True
    dry_run: bool = False
    resume: bool = False
    overwrite: bool = False
    workers: int | None = None
    memory_limit: int | None = None
    layout: str | None = None
    unproved: bool = False
    flavour: str | None = None
    as_json: bool = False
    quiet: bool = False


def run(options: CopyOptions) -> int:
    """Writes the copy, or with ``dry_run`` only says what it would be."""
    ranks = Ranks.from_environment()
    plan = _plan(options)
    before = _manifest(plan.dst) if options.resume else None
    if options.dry_run:
        if not options.resume:
            refuse_existing(plan.dst, options.overwrite)
    else:
        _execute(plan, options, ranks)
    if ranks.rank:
        return DONE  # rank 0 speaks for all
    complete = before is not None and before == _manifest(plan.dst)
    if options.as_json:
        write_json(_document(plan, options))
    elif not options.quiet:
        page = Page.for_stdout()
        _write(page, plan, options, complete=complete)
        page.print()
    return DONE


def _plan(options: CopyOptions) -> Plan:
    given = _format_options(options)
    return plan_reshard(
        options.src,
        options.dst,
        to_dp=options.to_dp,
        bucket_size=options.bucket_size,
        format=options.format,
        container=options.container,
        from_dp=options.from_dp,
        options=_with_source(options, given) if given else None,
        workers=options.workers,
        memory_limit=options.memory_limit,
        verify=options.verify,
        check_files=not options.dry_run,
        layout=options.layout,
        unproved=options.unproved,
        flavour=options.flavour,
    )


def _format_options(options: CopyOptions) -> dict[str, Any]:
    """Those of ``FormatOptions`` that were given."""
    given = {
        "shard_bytes": options.shard_size,
        "chunk_bytes": options.chunk_size,
        "compression": options.compression,
    }
    return {name: value for name, value in given.items() if value is not None}


def _with_source(options: CopyOptions, given: dict[str, Any]) -> FormatOptions:
    """The given options; the others as in the source, where it has the same format and container."""
    manifest = describe(options.src, check_files=False, layout=options.layout).manifest
    same = options.format in (None, manifest.format) and options.container in (None, manifest.container)
    return structs.replace(manifest.options if same else FormatOptions(), **given)


def _execute(plan: Plan, options: CopyOptions, ranks: Ranks) -> None:
    share = plan.payload_bytes // ranks.size
    with (
        resumable(plan.dst),
        progress(options.command, share, quiet=options.quiet or ranks.rank > 0) as told,
    ):
        execute(plan, overwrite=options.overwrite, resume=options.resume, progress=told, ranks=ranks)


def _manifest(dst: Path) -> bytes | None:
    """The manifest's bytes, where there is one: they name the whole state and layout."""
    try:
        return (dst / MANIFEST_NAME).read_bytes()
    except OSError:
        return None


def part_rows(plan: Plan) -> list[Row]:
    """How each part is laid out before and after."""
    if isinstance(plan, MegatronPlan):
        return plan.part_rows()
    rows = []
    for catalog in plan.catalogs:
        old, new = source_rules(plan.stored, catalog.part), _rules(catalog.layout)
        buffers = catalog.layout.buffers if catalog.layout else ()
        rows.append(
            {
                "part": catalog.part,
                "from_dp": old.dp_size if old else None,
                "to_dp": new.dp_size if new else None,
                "from_bucket_size": old.bucket_size if old else None,
                "bucket_size": new.bucket_size if new else None,
                "buffers": len(buffers),
                "buckets": sum(buffer.bucket_count for buffer in buffers),
                "numel": catalog.layout.numel if catalog.layout else None,
                "files": catalog.placement.blob_count,
                "bytes": sum(catalog.placement.payload_nbytes(b) for b in range(catalog.placement.blob_count)),
            }
        )
    return rows


def _rules(layout: object) -> LayoutRules | None:
    rules = getattr(layout, "rules", None)
    return rules if isinstance(rules, LayoutRules) else None


def _document(plan: Plan, options: CopyOptions) -> Row:
    """The document of --json: the same whether the plan was executed or not, but for ``dry_run``."""
    totals = plan.totals()
    parts = part_rows(plan)
    dense = max(parts, key=lambda row: row["to_dp"] or 0)
    return {
        "schema": f"zero1ckpt.{options.command}/1",
        "src": str(plan.stored.path.resolve()),
        "dst": str(plan.dst),
        "format": plan.format.name,
        "container": plan.container,
        "from_dp": dense["from_dp"],
        "to_dp": dense["to_dp"],
        "from_bucket_size": dense["from_bucket_size"],
        "bucket_size": dense["bucket_size"],
        "digest": plan.stored.digest,
        "bytes_read": totals.bytes_read,
        "bytes_written": totals.bytes_written,
        "reads": totals.reads,
        "writes": totals.writes,
        "files": totals.files_written,
        "peak_memory": totals.peak_memory,
        "verified": plan.verify,
        "dry_run": options.dry_run,
        "parts": parts,
    }


def _write(page: Page, plan: Plan, options: CopyOptions, *, complete: bool) -> None:
    parts = part_rows(plan)
    page.line(safe(str(plan.dst)), "bold")
    facts = [("from", safe(str(plan.stored.path)))]
    facts.append(("format", f"{plan.format.name} in {plan.container}"))
    if len(parts) == 1:
        facts.append(("dp size", _dp_sizes(parts[0], page)))
        facts.append(("bucket size", _bucket_sizes(parts[0], page)))
    if options.dry_run:
        totals = plan.totals()
        facts += [
            ("reads", f"{count(totals.reads)} of {_bytes(totals.bytes_read)} together"),
            ("writes", f"{count(totals.writes)} of {_bytes(totals.bytes_written)} together"),
            ("files", count(totals.files_written)),
            ("peak memory", f"{_bytes(totals.peak_memory)} in flight, by {plan.workers} workers"),
            ("to prove", _to_prove(plan)),
        ]
    elif complete:
        facts.append(("wrote", "nothing: it was complete already"))
    else:
        facts.append(("wrote", f"{_bytes(plan.payload_bytes)} in {plural(sum(row['files'] for row in parts), 'file')}"))
        facts.append(("proved", _proved(plan)))
    if plan.stored.digest is not None:
        facts.append(("digest", f"{plan.stored.digest}, as the source"))
    page.facts(facts)
    if options.dry_run or len(parts) > 1:
        page.table(_part_table(parts, page))
    if options.dry_run:
        page.line()
        page.line("  A dry run: nothing was written.", "dim")


def _to_prove(plan: Plan) -> str:
    if plan.stored.megatron is not None:
        return "where each param lies, by the model's weights, before a byte is written"
    return "the checksums of the source, before the commit" if plan.verify else "nothing"


def _proved(plan: Plan) -> str:
    if plan.stored.megatron is not None:
        return "nothing asked for (--unproved)" if plan.unproved else "where each param lies, by the model's weights"
    return "the checksums of the source" if plan.verify else "nothing (--no-verify)"


def _part_table(parts: list[Row], page: Page) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            safe(row["part"]) or "-",
            _dp_sizes(row, page),
            _bucket_sizes(row, page),
            count(row["buffers"]),
            count(row["buckets"]),
            "-" if row["numel"] is None else count(row["numel"]),
            count(row["files"]),
            short_bytes(row["bytes"]),
        )
        for row in parts
    ]
    columns: tuple[Column, ...] = (
        Column("part", wide=True),
        Column("dp size", right=True),
        Column("bucket size", right=True),
        Column("buffers", right=True, spare=3),
        Column("buckets", right=True, spare=1),
        Column("elements", right=True, spare=2),
        Column("files", right=True),
        Column("bytes", right=True),
    )
    if all(not row["part"] for row in parts):
        columns, rows = columns[1:], [row[1:] for row in rows]
    return Table("Layout", columns, tuple(rows))


def _dp_sizes(row: Row, page: Page) -> str:
    old, new = ("no ranks" if row[key] is None else count(row[key]) for key in ("from_dp", "to_dp"))
    return _change(old, new, page)


def _bucket_sizes(row: Row, page: Page) -> str:
    old = _bucket_size(row["from_dp"], row["from_bucket_size"])
    return _change(old, _bucket_size(row["to_dp"], row["bucket_size"]), page)


def _bucket_size(dp_size: int | None, size: int | None) -> str:
    if dp_size is None:
        return "no buckets"
    return "one a buffer" if size is None else count(size)


def _change(old: str, new: str, page: Page) -> str:
    return new if old == new else f"{old} {'→' if page.unicode else '->'} {new}"


def _bytes(n: int) -> str:
    return f"{short_bytes(n)}" if n < 1000 else f"{short_bytes(n)} ({count(n)} bytes)"
