"""``inspect --html`` and ``--svg``: the same tables and bars as files that need nothing else. Pure but for ``draw``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from ..api.stored import Stored
from ..core.errors import OutputError
from ..model.manifest import MANIFEST_NAME
from ..storage.local import writing
from .bars import OTHER, Bar, bars_of
from .inspect_page import RANK_LIMIT, facts, tables
from .narrowing import Selection
from .palette import ink, shade
from .render import Table
from .rows import Row, document, part_documents
from .text import count, first_and_last, percent, ranks_text, safe

__all__ = ["draw", "html_page", "svg_picture"]

_WIDTH, _MARGIN, _BAR, _STEP = 1000, 24, 26, 78
_BARS = 200
_ROWS = 2000
_FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"

_STYLE = """
:root { color-scheme: light dark; --ink: #24262b; --soft: #6d717a; --line: #d9dbe0; --back: #fcfcfb; --pad: #e9e9ee }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dcdee3; --soft: #9a9fa9; --line: #3a3d45; --back: #1a1b1f; --pad: #2c2e35 } }
body { margin: 2.5rem auto; padding: 0 1.5rem; max-width: 66rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 FONT }
h1 { font-size: 1.35rem; overflow-wrap: anywhere } h2 { font-size: 1.05rem; margin: 2.2rem 0 .5rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.5rem; margin: 0 } dd { margin: 0 }
dt, .note { color: var(--soft) } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td { overflow-wrap: anywhere }
th { color: var(--soft); font-weight: 500; text-align: left; border-bottom: 1px solid var(--line) }
th, td { padding: .2rem 1.6rem .2rem 0; vertical-align: top } .right { text-align: right }
svg { width: 100%; height: auto; display: block }
""".replace("FONT", _FONT)


def draw(
    stored: Stored, selections: Mapping[str, Selection], folder: str, *, html: str | None, svg: str | None
) -> None:
    """Writes the files that are asked for. Raises ``OutputError``."""
    if svg is not None:
        _write(stored, svg, svg_picture(selections, folder))
    if html is not None:
        _write(stored, html, html_page(document(stored, selections, folder, RANK_LIMIT), selections))


def _write(stored: Stored, file: str, text: str) -> None:
    path = Path(file).resolve()
    root = stored.path.resolve()
    if root in path.parents and str(path.relative_to(root)) in {MANIFEST_NAME, *stored.files}:
        raise OutputError("is a file of the checkpoint, and is not overwritten", file=file, hint="choose another name")
    with writing(file):
        path.write_text(text, encoding="utf-8")


def html_page(document: Row, selections: Mapping[str, Selection]) -> str:
    """A page with the facts, the tables and the bars."""
    parts = part_documents(document)
    title = _text(document["path"])
    body = [f"<h1>{title}</h1>"]
    for name, part in parts.items():
        selection = selections[name]
        if len(parts) > 1:
            body.append(f"<h2>Part {_text(name)}</h2>")
        rows = "".join(
            f"<dt>{_text(key)}</dt><dd>{_text(value)}</dd>" for key, value in facts(part, whole=selection.whole)
        )
        body.append(f"<dl>{rows}</dl>")
        bars, left_out = _bars(selection)
        if bars:
            body.append("<h2>Which rank owns which params</h2>")
            body.append(_svg(bars, top=0))
            body.append(f'<p class="note">{_text(_legend(left_out))}</p>')
        body += [_table(table) for table in tables(part, selection, len(selection.ranks()), _ROWS)]
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n'
        + "\n".join(body)
        + "\n</html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th{_align(column.right)}>{_text(column.title)}</th>" for column in table.columns)
    rows = [
        "<tr>"
        + "".join(f"<td{_align(c.right)}>{_text(cell)}</td>" for c, cell in zip(table.columns, row, strict=True))
        + "</tr>"
        for row in table.rows
    ]
    if table.note:
        rows.insert(-2, "<tr><td>⋮</td></tr>")
    note = f'<p class="note">{_text(table.note)}</p>' if table.note else ""
    return (
        f'<h2>{_text(table.title)}</h2><div class="scroll"><table><tr>{head}</tr>\n'
        + "\n".join(rows)
        + f"</table></div>{note}"
    )


def _align(right: bool) -> str:
    return ' class="right"' if right else ""


def svg_picture(selections: Mapping[str, Selection], folder: str) -> str:
    """The bars of all parts as one picture, on a ground of its own."""
    bars: list[tuple[str, Bar]] = []
    left_out = 0
    for name, selection in selections.items():
        found, more = _bars(selection)
        bars += [(f"{safe(name)} " if name else "", bar) for _, bar in found]
        left_out += more
    title = f'<text x="{_MARGIN}" y="34" class="name" font-size="17">{_text(folder)}</text>'
    note = f'<text x="{_MARGIN}" y="54" class="soft" font-size="12">{_text(_legend(left_out))}</text>'
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + _svg(bars, top=72, head=title + note, ground=True) + "\n"


def _bars(selection: Selection) -> tuple[list[tuple[str, Bar]], int]:
    """The bars that are drawn, and how many are not."""
    total = sum(len(buckets) for buckets in selection.buckets)
    wanted = set(first_and_last(range(total), _BARS))
    return [("", bar) for i, bar in enumerate(bars_of(selection)) if i in wanted], total - len(wanted)


def _legend(left_out: int) -> str:
    more = f" {count(left_out)} buckets are left out; narrow with --bucket." if left_out else ""
    return (
        "Each bar is a bucket, each colour a param, and each change of shade the shard of the next rank. "
        f"Point at a param for its name.{more}"
    )


def _svg(bars: Sequence[tuple[str, Bar]], *, top: int, head: str = "", ground: bool = False) -> str:
    height = top + _STEP * len(bars) + 8
    style = (
        f"text {{ font-family: {_FONT} }} .name {{ fill: #24262b; font-weight: 600 }} .soft {{ fill: #6d717a }} "
        ".pad { fill: #e9e9ee } .tick { stroke: #6d717a } "
        "@media (prefers-color-scheme: dark) { .name { fill: #dcdee3 } .soft { fill: #9a9fa9 } "
        ".pad { fill: #2c2e35 } .tick { stroke: #9a9fa9 } .ground { fill: #1a1b1f } }"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>Which rank owns which params</title><style>{style}</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{height}" fill="#fcfcfb"/>' if ground else "",
        head,
    ]
    for i, (prefix, bar) in enumerate(bars):
        parts += _bar(bar, top + i * _STEP, prefix)
    return "\n".join([*filter(None, parts), "</svg>"])


def _bar(bar: Bar, top: int, prefix: str) -> Iterator[str]:
    inner = _WIDTH - 2 * _MARGIN
    scale = inner / max(bar.numel, 1)
    waste = f", {percent(bar.padding, bar.numel)} padding" if bar.padding else ""
    yield (
        f'<text x="{_MARGIN}" y="{top + 16}" font-size="13"><tspan class="name">{prefix}bucket {bar.name}</tspan>'
        f'<tspan class="soft" dx="10">{count(bar.numel)} elements{waste}</tspan></text>'
    )
    y = top + 24
    yield f'<rect class="pad" x="{_MARGIN}" y="{y}" width="{inner}" height="{_BAR}" rx="3"></rect>'
    for start, end in bar.others:
        yield _rect(start, end, y, scale, shade(OTHER, False), "0.25", "other params")
    for i, span in enumerate(bar.spans):
        yield from _span(bar, i, y, scale)
        if (span.end - span.start) * scale > 7 * min(len(span.name), 12) + 8:
            at = _MARGIN + (span.start + span.end) / 2 * scale
            room = int(((span.end - span.start) * scale - 8) / 6.2)
            name = span.name if len(span.name) <= room else f"…{span.name[-room + 1 :]}"
            yield (
                f'<text x="{at:.1f}" y="{y + 17}" font-size="11" text-anchor="middle" fill="{ink(i)}" '
                f'pointer-events="none">{_text(name)}</text>'
            )
    yield from _ticks(bar, y + _BAR, inner)


def _span(bar: Bar, index: int, y: int, scale: float) -> Iterator[str]:
    """A param, one rectangle a rank while ranks are wide enough to see, else one."""
    span = bar.spans[index]
    if span.empty:
        return
    shard = bar.numel // bar.dp_size
    ranks = f"rank {ranks_text(span.first_rank, span.last_rank)}"
    hint = f"{span.name}: {count(span.end - span.start)} elements, {ranks}"
    if shard * scale < 2:
        yield _rect(span.start, span.end, y, scale, shade(index, False), "1", hint)
        return
    for rank in range(span.first_rank, span.last_rank + 1):
        start, end = max(span.start, rank * shard), min(span.end, (rank + 1) * shard)
        mine = f"{hint}; rank {rank} owns {count(end - start)}"
        yield _rect(start, end, y, scale, shade(index, rank % 2 == 1), "1", mine)


def _rect(start: int, end: int, y: int, scale: float, fill: str, opacity: str, hint: str) -> str:
    x, width = _MARGIN + start * scale, max((end - start) * scale, 0.5)
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{fill}" fill-opacity="{opacity}">'
        f"<title>{_text(hint)}</title></rect>"
    )


def _ticks(bar: Bar, y: int, inner: int) -> Iterator[str]:
    """The ruler of ranks."""
    step = bar.ruler_step(inner // 9)
    for rank in range(0, bar.dp_size, step):
        x = _MARGIN + rank / bar.dp_size * inner
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 12}" stroke-width="1"/>'
        yield f'<text class="soft" x="{x + 4:.1f}" y="{y + 12}" font-size="11">{rank}</text>'


def _text(text: str) -> str:
    return escape(safe(str(text)), quote=True)
