"""Prints rows: as one JSON document, or as text that fits the terminal, with colour only where it is wanted.

Everything that is printed is made first and then written at once, so standard output never holds half a document, and a
reader that goes away (``| head``) changes nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["Column", "Page", "Table", "json_text", "mute_stdout", "write_json", "write_stdout"]

_WIDTH = 100
_NARROWEST, _WIDEST = 40, 200


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; ``wide`` ones wrap, the others never do."""

    title: str
    right: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of safe text under a title; ``note`` says what was left out."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


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
        box = Box("    \n    \n" + f" {rule}{rule} \n" + "    \n" * 5, ascii=not self.unicode)
        drawn = RichTable(box=box, show_edge=False, pad_edge=False, header_style="dim", border_style="dim")
        for column in table.columns:
            drawn.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=not column.wide,
                overflow="fold",
                min_width=8 if column.wide else None,
            )
        for row in table.rows:
            drawn.add_row(*row)
        self.title(table.title)
        from rich.padding import Padding

        self.add(Padding(drawn, (0, 0, 0, 2)))
        if table.note:
            self.line(f"  {table.note}", "dim")

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
