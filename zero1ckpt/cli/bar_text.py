"""Draws a bar on a page: a line of cells, a ruler of ranks below it, and a legend."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from .bars import OTHER, PADDING, Bar, Span
from .palette import ink, shade
from .render import Page
from .text import count, percent, ranks_text, safe

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["draw_bar"]

_INDENT = "  "


def draw_bar(page: Page, bar: Bar, legend: int) -> None:
    """The bar of one bucket; its legend has at most ``legend`` params."""
    width = page.width - 2 * len(_INDENT)
    page.line()
    page.add(_heading(bar))
    page.add(_cells(page, bar, width))
    page.add(_ruler(page, bar, width))
    page.add(*_legend(page, bar.spans, width, legend))


def _heading(bar: Bar) -> Text:
    from rich.text import Text

    text = Text(f"{_INDENT}bucket {bar.name}")
    waste = f", {percent(bar.padding, bar.numel)} padding" if bar.padding else ""
    return text.append(f"  {count(bar.numel)} elements from {count(bar.offset)}{waste}", "dim")


def _cells(page: Page, bar: Bar, width: int) -> Text:
    """One line; a param's letter stands in the middle of it, or everywhere where there is no colour."""
    from rich.text import Text

    line = Text(_INDENT, no_wrap=True, end="\n")
    cells = bar.cells(width)
    alternate = bar.dp_size * 2 <= width
    at = 0
    for what, run in groupby(cells):
        size = len(list(run))
        letters = _run(page, bar, what, size)
        for i, letter in enumerate(letters):
            odd = alternate and bar.rank_at(at + i, width) % 2 == 1
            line.append(letter, _style(page, what, odd))
        at += size
    return line


def _run(page: Page, bar: Bar, what: int, size: int) -> str:
    if what == PADDING:
        return ("░" if page.unicode else ".") * size
    if what == OTHER:
        return ("╌" if page.unicode else "-") * size
    key = bar.spans[what].key
    return key.center(size) if page.can_fill else key * size


def _style(page: Page, what: int, odd: bool) -> str:
    if not page.can_fill:
        return ""
    return "dim" if what < 0 else f"{ink(what)} on {shade(what, odd)}"


def _ruler(page: Page, bar: Bar, width: int) -> Text:
    """Where each rank's shard begins, by number where there is room."""
    from rich.text import Text

    major, minor = ("│", "╵") if page.unicode else ("|", "'")
    line = [" "] * width
    if bar.dp_size * 2 <= width:
        for rank in range(bar.dp_size):
            line[rank * width // bar.dp_size] = minor
    for rank in range(0, bar.dp_size, bar.ruler_step(width)):
        at = rank * width // bar.dp_size
        label = f"{major}{rank}"
        if at + len(label) > width:
            label = major
        line[at : at + len(label)] = label
    return Text(_INDENT + "".join(line), "dim", no_wrap=True)


def _legend(page: Page, spans: Sequence[Span], width: int, limit: int) -> list[Text]:
    """Params by their letters with the ranks that own them, in as many columns as there is room for."""
    from rich.text import Text

    listed = spans[:limit]
    names = [safe(span.name) for span in listed]
    ranks = ["no elements" if span.empty else _owners(span) for span in listed]
    widest = max((len(name) + len(rank) for name, rank in zip(names, ranks, strict=True)), default=0) + 5
    columns = max(1, (width + 2) // (widest + 2))
    rows = -(-len(listed) // columns)
    lines = []
    for row in range(rows):
        line = Text(_INDENT, overflow="fold")
        for i in range(row, len(listed), rows):
            line.append(listed[i].key, f"{ink(i)} on {shade(i, False)}" if page.can_fill else "")
            line.append(f" {names[i]} ")
            line.append(ranks[i], "dim")
            if i + rows < len(listed):
                line.append(" " * (widest - 3 - len(names[i]) - len(ranks[i])))
        lines.append(line)
    if len(spans) > limit:
        lines.append(Text(f"{_INDENT}and {count(len(spans) - limit)} more", "dim"))
    return lines


def _owners(span: Span) -> str:
    return f"rank{'s' if span.last_rank > span.first_rank else ''} {ranks_text(span.first_rank, span.last_rank)}"
