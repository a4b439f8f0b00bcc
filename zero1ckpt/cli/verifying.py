"""Runs ``verify``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..api.stored import describe
from ..api.verification import Finding, Verification, verify
from ..core.errors import VerificationError
from .exit_codes import DONE
from .progress import progress
from .render import Column, Page, Table, write_json
from .rows import Row
from .text import count, first_and_last, one_line, plural, safe, short_bytes

__all__ = ["finding_row", "run"]

_ROWS = 40


def run(
    path: str,
    *,
    deep: bool,
    against: str | None,
    workers: int | None,
    memory_limit: int | None,
    layout: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Prints what was found. Raises ``VerificationError`` where that is something."""
    total = describe(Path(path), check_files=False, layout=layout).total_bytes if deep else 0
    with progress("verify", total, quiet=quiet or not deep) as told:
        result = verify(
            path,
            deep=deep,
            against=against,
            workers=workers,
            memory_limit=memory_limit,
            progress=told,
            layout=layout,
        )
    if as_json:
        write_json(_document(path, against, deep, result))
    elif not quiet:
        page = Page.for_stdout()
        _write(page, path, against, deep, result)
        page.print()
    if result.ok:
        return DONE
    raise _answer(path, result.findings)


def _answer(path: str, findings: Sequence[Finding]) -> VerificationError:
    first = findings[0]
    more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
    message = first.message.removeprefix(f"{path}: ")
    return VerificationError(f"the answer is no: {first.kind}: {message}{more}", file=path)


def finding_row(finding: Finding) -> Row:
    return {
        "kind": finding.kind,
        "part": finding.part,
        "param": finding.param,
        "slot": finding.slot,
        "range": None if finding.range is None else list(finding.range),
        "file": finding.file,
        "message": finding.message,
    }


def _document(path: str, against: str | None, deep: bool, result: Verification) -> Row:
    return {
        "schema": "zero1ckpt.verify/1",
        "path": path,
        "against": against,
        "deep": deep,
        "ok": result.ok,
        "findings": [finding_row(finding) for finding in result.findings],
        "notices": [finding_row(notice) for notice in [*result.notices, *result.steps]],
    }


def _write(page: Page, path: str, against: str | None, deep: bool, result: Verification) -> None:
    notices = [*result.notices, *result.steps]
    for title, findings in (("Findings", result.findings), ("Notices", notices)):
        if findings:
            page.table(_table(title, findings))
    if result.findings or notices:
        page.line()
    mark = ("✓" if page.unicode else "ok:") if result.ok else ("✗" if page.unicode else "no:")
    page.line(f"{mark} {_summary(path, against, deep, result)}", "green" if result.ok else "red")


def _summary(path: str, against: str | None, deep: bool, result: Verification) -> str:
    if not result.ok:
        return f"{safe(path)}: {plural(len(result.findings), 'finding')}"
    what = "structure, sizes and digests" if result.has_digests else "structure and sizes"
    proved = f"{what} hold"
    if deep:
        proved = f"{what.replace(' and', ',')} and all data hold ({short_bytes(result.bytes_read)} read)"
    same = f"; it holds the same state as {safe(against)}" if against is not None else ""
    return f"{safe(path)}: {proved}{same}"


def _table(title: str, findings: Sequence[Finding]) -> Table:
    rows = tuple((safe(finding.kind), one_line(finding.message)) for finding in first_and_last(findings, _ROWS))
    note = "" if len(findings) <= _ROWS else f"first {_ROWS - 2} and last 2 of {count(len(findings))}; --json lists all"
    return Table(title, (Column("kind"), Column("what", wide=True)), rows, note)
