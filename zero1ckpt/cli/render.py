"""Prints rows: as one JSON document, or as text that fits the terminal, with colour only where it is wanted.

Everything that is printed is made first and then written at once, so standard output never holds half a document, and a
reader that goes away (``| head``) changes nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["Column", "Page", "Table", "json_text", "mute_stdout", "write_json", "write_stdout"]

_WIDTH = 100
_GAP = 2
_NAME = 28
"""Room that a wrapping column is given before others are left out."""
_INDENT = "  "
_NARROWEST, _WIDEST = 40, 200


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. ``wide`` ones wrap, others never do; the highest ``spare`` goes first for lack of room."""

    title: str
    right: bool = False
    wide: bool = False
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of safe text under a title. ``note`` says what was left out before the last two rows."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def fit(self, width: int) -> tuple[Table, tuple[str, ...]]:
        """The table without the columns that there is no room for, and their titles. Pure."""
        keep = list(range(len(self.columns)))
        while self._width(keep) > width:
            spare = max(keep, key=lambda i: self.columns[i].spare)
            if not self.columns[spare].spare:
                break
            keep.remove(spare)
        rows = tuple(tuple(row[i] for i in keep) for row in self.rows)
        left_out = tuple(column.title for i, column in enumerate(self.columns) if i not in keep)
        return Table(self.title, tuple(self.columns[i] for i in keep), rows, self.note), left_out

    def _width(self, keep: Sequence[int]) -> int:
        total = _GAP * (len(keep) - 1)
        for i in keep:
            column = self.columns[i]
            natural = max((len(row[i]) for row in self.rows), default=0)
            total += max(len(column.title), min(natural, _NAME) if column.wide else natural)
        return total


@dataclass
class Page:
    """Text for people, in the order it was added. ``unicode`` False: nothing but ASCII, no colour either."""

    width: int
    unicode: bool
    colour: bool
    _console: Console = field(init=False, repr=False)

    def __post_init__(self) -> None:
        from io import StringIO

        from rich.console import Console

        self._console = Console(
            file=StringIO(),
            width=self.width,
            force_terminal=self.colour or None,
            no_color=not self.colour,
            color_system="auto" if self.colour else None,
            markup=False,
            highlight=False,
            emoji=False,
            legacy_windows=False,
        )

    @property
    def can_fill(self) -> bool:
        """Whether areas can be told apart by colour: 16 colours are too few, and differ between terminals."""
        return self.colour and self._console.color_system in ("256", "truecolor")

    @classmethod
    def for_stdout(cls) -> Page:
        """A page as wide as the terminal, else 100 columns; ``COLUMNS`` and ``NO_COLOR`` are heeded."""
        tty = sys.stdout.isatty()
        width = int(columns) if (columns := os.environ.get("COLUMNS", "")).isdigit() else 0
        if not width:
            width = os.get_terminal_size(sys.stdout.fileno()).columns if tty else _WIDTH
        encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "").replace("_", "")
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        return cls(min(max(width, _NARROWEST), _WIDEST), encoding.startswith("utf") and not plain, tty and not plain)

    def add(self, *what: RenderableType) -> None:
        for each in what:
            self._console.print(each, soft_wrap=False)

    def line(self, text: str = "", style: str = "") -> None:
        self._console.print(text, style=style or None)

    def title(self, text: str) -> None:
        """A heading, with air above it."""
        self.line()
        self.line(text, "bold")

    def facts(self, facts: Iterable[tuple[str, str]]) -> None:
        """Names and values, one pair a line."""
        from rich.table import Table as RichTable

        grid = RichTable.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in facts:
            grid.add_row(f"  {name}", value)
        self.add(grid)

    def table(self, table: Table) -> None:
        from rich.box import Box
        from rich.table import Table as RichTable

        rule = "─" if self.unicode else "-"
        table, left_out = table.fit(self.width - len(_INDENT))
        box = Box("    \n    \n" + f" {rule}{rule} \n" + "    \n" * 5, ascii=not self.unicode)
        drawn = RichTable(box=box, show_edge=False, pad_edge=False, header_style="dim", border_style="dim")
        drawn.padding = (0, _GAP - 1, 0, 0)
        for column in table.columns:
            drawn.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=not column.wide,
                overflow="fold",
                min_width=8 if column.wide else None,
            )
        for i, row in enumerate(table.rows):
            if table.note and i == len(table.rows) - 2:
                drawn.add_row("⋮" if self.unicode else "...")
            drawn.add_row(*row)
        self.title(table.title)
        from rich.padding import Padding

        self.add(Padding(drawn, (0, 0, 0, len(_INDENT))))
        if table.note:
            self.line(f"{_INDENT}{table.note}", "dim")
        if left_out:
            self.line(f"{_INDENT}no room for: {', '.join(left_out)}", "dim")

    def text(self) -> str:
        file = self._console.file
        text: str = file.getvalue()  # type: ignore[attr-defined]  # the StringIO given above
        return "\n".join(line.rstrip() for line in text.split("\n"))

    def print(self) -> None:
        write_stdout(self.text())


def json_text(value: Any) -> Iterator[str]:
    """JSON in pieces. An iterator inside an object is written element by element, so that it need not fit memory."""
    if isinstance(value, Mapping) and any(isinstance(item, Iterator | Mapping) for item in value.values()):
        for i, (key, item) in enumerate(value.items()):
            yield f"{', ' if i else '{'}{json.dumps(key)}: "
            yield from json_text(item)
        yield "}"
    elif isinstance(value, Iterator):
        yield "["
        for i, item in enumerate(value):
            yield f"{', ' if i else ''}{json.dumps(item, allow_nan=False)}"
        yield "]"
    else:
        yield json.dumps(value, allow_nan=False)


def write_json(document: Mapping[str, Any]) -> None:
    """The one document of a run, on standard output."""
    write_stdout(*json_text(document), "\n")


def write_stdout(*pieces: str) -> None:
    """Raises ``OutputError`` where standard output cannot take it; a reader that went away is no error."""
    text = "".join(pieces)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        mute_stdout()
    except OSError as error:
        mute_stdout()
        raise OutputError(f"cannot be written: {error.strerror}", file="standard output") from error


def mute_stdout() -> None:
    """Lets the interpreter flush at exit into nothing."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass
