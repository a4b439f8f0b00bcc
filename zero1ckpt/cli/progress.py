"""A progress bar on standard error: bytes, rate, time left. Only where somebody looks at it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..model.protocols import Progress

__all__ = ["progress"]


@contextmanager
def progress(what: str, nbytes: int, *, quiet: bool) -> Iterator[Progress | None]:
    """Yields what is told of bytes, or None where standard error is no terminal or silence is asked for."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, complete_style="#7aa6c9", finished_style="#8fb58a"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    console = Console(stderr=True, highlight=False, emoji=False)
    with RichProgress(*columns, console=console, transient=True, refresh_per_second=10) as bar:
        yield _Told(bar, nbytes, what)


class _Told:
    """Adapts rich's bar, which has a lock of its own, to ``Progress``."""

    def __init__(self, bar: object, nbytes: int, what: str) -> None:
        from rich.progress import Progress as RichProgress

        assert isinstance(bar, RichProgress)
        self._bar = bar
        self._task = bar.add_task(what, total=max(nbytes, 1))

    def advance(self, nbytes: int) -> None:
        self._bar.advance(self._task, nbytes)
