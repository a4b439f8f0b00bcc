"""Runs ``diff``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..api.comparison import Comparison, TensorDiff, compare, read_changed
from ..api.stored import Stored, describe
from ..core.errors import VerificationError
from .exit_codes import DONE
from .progress import progress
from .render import Column, Page, Table, write_json
from .rows import Row
from .text import count, first_and_last, json_safe, one_line, plural, safe, shape_text, short_bytes
from .verifying import finding_row

__all__ = ["run"]

_ROWS = 40
_STATUSES = ("equal", "changed", "missing", "added")


def run(a: str, b: str, *, workers: int | None, memory_limit: int | None, as_json: bool, quiet: bool) -> int:
    """Prints what differs. Raises ``VerificationError`` where that is something."""
    first, second = describe(a), describe(b)
    found = compare(first, second)
    with progress("diff", found.bytes_to_read, quiet=quiet) as told:
        read_changed(found, workers=workers, memory_limit=memory_limit, progress=told)
    if as_json:
        write_json(_document(a, b, first, second, found))
    elif not quiet:
        page = Page.for_stdout()
        _write(page, a, b, first, second, found)
        page.print()
    if found.ok:
        return DONE
    findings = found.findings
    more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
    raise VerificationError(f"the two differ: {findings[0].message}{more}", file=a)


def _side(path: str, stored: Stored) -> Row:
    layouts = [catalog.layout for catalog in stored.catalogs.values() if catalog.layout is not None]
    return {
        "path": path,
        "format": stored.manifest.format,
        "container": stored.manifest.container,
        "dp_size": max((layout.rules.dp_size for layout in layouts), default=None),
        "step": max(catalog.state.step for catalog in stored.catalogs.values()),
        "digest": stored.digest,
    }


def _summary(found: Comparison) -> Row:
    statuses = Counter(row.status for row in found.tensors)
    return {status: statuses[status] for status in _STATUSES}


def _tensor(row: TensorDiff) -> Row:
    """One tensor; what was not measured is null."""
    made = row.measure if row.status == "changed" else None
    values = None if made is None or made.values is None else [json_safe(value) for value in made.values]
    first = None if made is None or made.first is None else made.first
    return {
        "kind": row.kind,
        "part": row.part,
        "param": row.param,
        "slot": row.slot,
        "status": row.status,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "changed": 0 if row.status == "equal" else None if made is None else made.changed,
        "share": 0.0 if row.status == "equal" else None if made is None else made.changed / row.numel,
        "max_abs": None if made is None else json_safe(made.max_abs),
        "max_ulp": None if made is None else made.max_ulp,
        "nan": None if made is None else made.nan,
        "first": first,
        "first_index": None if first is None else list(row.index(first)),
        "first_values": values,
    }


def _document(a: str, b: str, first: Stored, second: Stored, found: Comparison) -> Row:
    return {
        "schema": "zero1ckpt.diff/1",
        "a": _side(a, first),
        "b": _side(b, second),
        "ok": found.ok,
        "summary": _summary(found),
        "findings": [finding_row(finding) for finding in found.findings],
        "notices": [finding_row(notice) for notice in found.notices],
        "tensors": [_tensor(row) for row in found.tensors],
        "values": [
            {"kind": kind, "part": part, "key": value.key, "a": value.a, "b": value.b}
            for kind, part, value in found.values
        ],
        "bytes_read": found.bytes_read,
    }


def _write(page: Page, a: str, b: str, first: Stored, second: Stored, found: Comparison) -> None:
    page.facts([("a", _side_text(a, first)), ("b", _side_text(b, second))])
    changed = [row for row in found.tensors if row.status != "equal"]
    if changed:
        page.table(_table(changed, len(first.catalogs) + len(second.catalogs) > 2))
    if found.others:
        rows = tuple((safe(f.kind), one_line(f.message)) for f in first_and_last(found.others, _ROWS))
        note = "" if len(found.others) <= _ROWS else f"of {count(len(found.others))}; --json lists all"
        page.table(Table("Besides tensors", (Column("kind"), Column("what", wide=True)), rows, note))
    page.line()
    mark = ("✓" if page.unicode else "ok:") if found.ok else ("✗" if page.unicode else "no:")
    totals = ", ".join(f"{count(n)} {status}" for status, n in _summary(found).items() if n) or "no tensors"
    read = f"; {short_bytes(found.bytes_read)} read" if found.bytes_read else "; no data read"
    page.line(f"{mark} {totals}{read}", "green" if found.ok else "red")


def _side_text(path: str, stored: Stored) -> str:
    side = _side(path, stored)
    dp = f", dp {count(side['dp_size'])}" if side["dp_size"] is not None else ""
    return f"{safe(path)}  (step {count(side['step'])}, {side['format']} in {side['container']}{dp})"


def _table(changed: list[TensorDiff], parts: bool) -> Table:
    columns: tuple[Column, ...] = (
        Column("part", spare=6),
        Column("param", wide=True),
        Column("slot"),
        Column("status"),
        Column("shape", right=True, spare=5),
        Column("changed", right=True),
        Column("max abs", right=True),
        Column("max ulp", right=True, spare=2),
        Column("NaN", right=True, spare=3),
        Column("first at", right=True, spare=4),
    )
    rows = tuple((safe(row.part), *_cells(row)) for row in first_and_last(changed, _ROWS))
    if not parts:
        columns, rows = columns[1:], tuple(row[1:] for row in rows)
    note = "" if len(changed) <= _ROWS else f"first {_ROWS - 2} and last 2 of {count(len(changed))}; --json lists all"
    return Table(plural(len(changed), "tensor"), columns, rows, note)


def _cells(row: TensorDiff) -> tuple[str, ...]:
    head = (safe(row.param), safe(row.slot or row.kind), row.status or "", shape_text(row.shape))
    made: Any = row.measure if row.status == "changed" else None
    if made is None:
        return (*head, "-", "-", "-", "-", "-")
    share = f"{100 * made.changed / row.numel:.3g} %"
    apart = f"{made.max_abs:.3g}" if made.changed > made.nan else "-"
    ulp = "-" if made.max_ulp is None else count(made.max_ulp) if made.max_ulp < 1e9 else f"{made.max_ulp:.3g}"
    return (*head, share, apart, ulp, count(made.nan) if made.nan else "-", str(list(row.index(made.first))))
