"""Runs ``log``."""

from __future__ import annotations

import os

from ..api.history import History, LoggedCheckpoint, history
from .exit_codes import DONE
from .render import Column, Page, Table, write_json
from .rows import Row
from .text import count, one_line, plural, safe, short_bytes

__all__ = ["run"]


def run(path: str, *, as_json: bool, quiet: bool) -> int:
    """Prints the list and the warnings."""
    found = history(path)
    if as_json:
        write_json(_document(found))
    elif not quiet:
        page = Page.for_stdout()
        _write(page, found)
        page.print()
    return DONE


def _document(found: History) -> Row:
    return {
        "schema": "zero1ckpt.log/1",
        "path": os.path.abspath(found.path),
        "pointer": found.pointer,
        "checkpoints": [_row(entry) for entry in found.checkpoints],
        "warnings": list(found.warnings),
    }


def _row(entry: LoggedCheckpoint) -> Row:
    return {
        "path": os.path.abspath(entry.path),
        "name": entry.name,
        "step": entry.step,
        "bytes": entry.bytes,
        "format": entry.format,
        "container": entry.container,
        "dp_size": entry.dp_size,
        "committed": entry.committed,
        "digest": entry.digest,
        "latest": entry.latest,
        "note": entry.note,
    }


def _write(page: Page, found: History) -> None:
    columns = (
        Column("step", right=True),
        Column("name", wide=True),
        Column("bytes", right=True),
        Column("format", spare=2),
        Column("dp", right=True, spare=3),
        Column("committed"),
        Column("digest", spare=1),
    )
    rows = tuple(_cells(entry) for entry in found.checkpoints)
    page.table(Table(plural(len(rows), "checkpoint"), columns, rows))
    notes = [f"{entry.name}: {entry.note}" for entry in found.checkpoints if entry.note]
    latest = next((entry.name for entry in found.checkpoints if entry.latest), None)
    if latest is not None:
        notes.append(f"{found.pointer} names {latest}")
    if notes or found.warnings:
        page.line()
    for note in notes:
        page.line(f"  {one_line(note)}", "dim")
    for warning in found.warnings:
        page.line(f"  warning: {one_line(warning)}", "yellow")


def _cells(entry: LoggedCheckpoint) -> tuple[str, ...]:
    return (
        "-" if entry.step is None else count(entry.step),
        safe(entry.name),
        short_bytes(entry.bytes),
        f"{entry.format} in {entry.container}" if entry.format else "-",
        "-" if entry.dp_size is None else count(entry.dp_size),
        "yes" if entry.committed else "no",
        entry.digest or "-",
    )
