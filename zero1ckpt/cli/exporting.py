"""Runs ``export``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..api.exporting import DEFAULT_SHARD_BYTES, Export, plan_export, write_export
from ..core.errors import UsageError
from .exit_codes import DONE
from .progress import progress
from .render import Page, write_json
from .rows import Row
from .text import one_line, plural, safe, short_bytes, some

__all__ = ["ExportOptions", "run"]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What the command line asked for."""

    path: str
    out: str
    dtype: str | None
    shard_size: int | None
    part: str | None
    tied: tuple[str, ...]
    workers: int | None
    memory_limit: int | None
    as_json: bool
    quiet: bool


def run(options: ExportOptions) -> int:
    """Writes the weights and says what was written."""
    size = DEFAULT_SHARD_BYTES if options.shard_size is None else options.shard_size
    tied = dict(_pair(text) for text in options.tied)
    plan = plan_export(options.path, dtype=options.dtype, shard_size=size, part=options.part, tied=tied)
    with progress("export", plan.payload_bytes, quiet=options.quiet) as told:
        write_export(plan, options.out, workers=options.workers, memory_limit=options.memory_limit, progress=told)
    if options.as_json:
        write_json(_document(plan, options))
    elif not options.quiet:
        page = Page.for_stdout()
        _write(page, plan, options)
        page.print()
    return DONE


def _pair(text: str) -> tuple[str, str]:
    alias, equals, name = text.partition("=")
    if not (alias and equals and name):
        raise UsageError("--tied", found=text, expected="ALIAS=NAME")
    return alias, name


def _document(plan: Export, options: ExportOptions) -> Row:
    return {
        "schema": "zero1ckpt.export/1",
        "path": str(plan.stored.path.resolve()),
        "out": str(Path(options.out).resolve()),
        "dtype": plan.dtype,
        "digest": plan.stored.digest,
        "bytes": plan.payload_bytes,
        "files": [{"path": shard.name, "bytes": shard.nbytes, "tensors": len(shard.weights)} for shard in plan.shards],
        "tensors": [
            {
                "name": weight.name,
                "shape": list(weight.shape),
                "dtype": weight.dtype,
                "stored_dtype": weight.stored,
                "kind": weight.kind,
                "file": shard.name,
            }
            for shard in plan.shards
            for weight in shard.weights
        ],
        "tied": dict(plan.tied),
        "notices": list(plan.notices),
    }


def _write(page: Page, plan: Export, options: ExportOptions) -> None:
    weights = plan.weights
    kinds = Counter(weight.kind for weight in weights)
    page.line(safe(str(Path(options.out).resolve())), "bold")
    facts = [("from", safe(str(plan.stored.path)))]
    facts.append(("wrote", f"{short_bytes(plan.payload_bytes)} in {plural(len(plan.shards), 'file')}, and an index"))
    facts.append(("tensors", ", ".join(f"{n} {kind}{_plural(kind, n)}" for kind, n in kinds.items()) or "none"))
    for (stored, dtype), n in Counter((weight.stored, weight.dtype) for weight in weights).items():
        how = f"kept as {dtype}" if stored == dtype else f"{stored} rounded to {dtype}"
        facts.append(("", f"{plural(n, 'tensor')} {how}"))
    kept = [safe(w.name) for w in weights if w.kind not in ("param", "weight") and w.stored == w.dtype]
    if kept:
        facts.append(("kept dtype", some(kept)))
    for alias, name in plan.tied.items():
        facts.append(("tied", f"{safe(alias)} is {safe(name)}"))
    page.facts(facts)
    for notice in plan.notices:
        page.line(f"  note: {one_line(notice)}", "yellow")


def _plural(kind: str, n: int) -> str:
    return "" if kind == "frozen" or n == 1 else "s"
