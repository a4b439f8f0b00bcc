"""Runs ``doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..api.doctoring import MENDABLE, Diagnosis, Mending, diagnose, mend
from ..api.stored import describe
from ..api.verification import Finding
from ..core.errors import UsageError, VerificationError, Zero1CkptError
from .exit_codes import DONE
from .progress import progress
from .render import Column, Page, Table, write_json
from .rows import Row
from .text import count, first_and_last, one_line, plural, safe
from .verifying import finding_row

__all__ = ["run"]

_ROWS = 40


def run(path: str, *, repair: str | None, zero_lost_moments: bool, as_json: bool, quiet: bool) -> int:
    """Prints what was found, and what was written. Raises ``VerificationError`` where damage remains."""
    if zero_lost_moments and repair is None:
        raise UsageError("--zero-lost-moments says what to write", hint="give --repair DST too")
    with progress("doctor", _total(path), quiet=quiet) as told:
        found = diagnose(path, progress=told)
    mended, refused = None, None
    if repair is not None:
        try:
            mended = mend(found, path, repair, zero_lost_moments=zero_lost_moments)
        except Zero1CkptError as error:
            refused = error
    if as_json:
        write_json(_document(path, found, mended, refused))
    elif not quiet:
        page = Page.for_stdout()
        _write(page, path, found, mended)
        page.print()
    if refused is not None:
        raise refused
    if found.ok or (mended is not None and _all_mended(found)):
        return DONE
    raise _answer(path, found.findings)


def _total(path: str) -> int:
    try:
        return describe(Path(path), check_files=False).total_bytes
    except Zero1CkptError:  # said by the diagnosis
        return 0


def _all_mended(found: Diagnosis) -> bool:
    return all(finding.kind in MENDABLE for finding in found.findings)


def _answer(path: str, findings: Sequence[Finding]) -> VerificationError:
    first = findings[0]
    more = f" and {len(findings) - 1} more" if len(findings) > 1 else ""
    message = first.message.removeprefix(f"{path}: ")
    return VerificationError(f"the answer is no: {first.kind}: {message}{more}", file=path)


def _document(path: str, found: Diagnosis, mended: Mending | None, refused: Zero1CkptError | None) -> Row:
    return {
        "schema": "zero1ckpt.doctor/1",
        "path": path,
        "ok": found.ok,
        "findings": [finding_row(finding) for finding in found.findings],
        "notices": [finding_row(notice) for notice in found.notices],
        "mends": list(found.mends),
        "repair": _repair_row(mended),
        "refused": None if refused is None else str(refused),
    }


def _repair_row(mended: Mending | None) -> Row | None:
    if mended is None:
        return None
    return {
        "path": str(mended.path),
        "moved": mended.moved,
        "from_weights": mended.from_weights,
        "zeroed": mended.zeroed,
        "restored": [_lost_row(row) for row in mended.restored_rows],
        "lost": [_lost_row(row) for row in mended.zeroed_rows],
    }


def _lost_row(row: tuple[str, str, str, tuple[tuple[int, int], ...]]) -> Row:
    part, param, slot, ranges = row
    return {"part": part, "param": param, "slot": slot, "ranges": [list(r) for r in ranges]}


def _write(page: Page, path: str, found: Diagnosis, mended: Mending | None) -> None:
    for title, findings in (("Findings", found.findings), ("Notices", found.notices)):
        if findings:
            page.table(_table(title, findings))
    if found.mends:
        rows = tuple((one_line(line),) for line in first_and_last(found.mends, _ROWS))
        page.table(Table("To mend", (Column("what it costs", wide=True),), rows))
    if mended is not None:
        page.table(_mended(mended))
    if found.findings or found.notices:
        page.line()
    ok = found.ok or mended is not None
    mark = ("✓" if page.unicode else "ok:") if ok else ("✗" if page.unicode else "no:")
    page.line(f"{mark} {_summary(path, found, mended)}", "green" if ok else "red")


def _mended(mended: Mending) -> Table:
    rows = (
        ("put back from another place", count(mended.moved)),
        ("main params from the weights", count(mended.from_weights)),
        ("lost moments, now zero", count(mended.zeroed)),
    )
    return Table(f"Mended copy in {safe(str(mended.path))}", (Column("elements"), Column("count", right=True)), rows)


def _summary(path: str, found: Diagnosis, mended: Mending | None) -> str:
    if mended is not None:
        return f"{safe(str(mended.path))}: a mended copy of {safe(path)}"
    if not found.ok:
        return f"{safe(path)}: {plural(len(found.findings), 'finding')}"
    return f"{safe(path)}: no known damage"


def _table(title: str, findings: Sequence[Finding]) -> Table:
    rows = tuple((safe(finding.kind), one_line(finding.message)) for finding in first_and_last(findings, _ROWS))
    note = "" if len(findings) <= _ROWS else f"first {_ROWS - 2} and last 2 of {count(len(findings))}; --json lists all"
    return Table(title, (Column("kind"), Column("what", wide=True)), rows, note)
