"""Runs ``inspect``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..api.stored import Stored, describe
from ..model.catalog import Catalog
from .exit_codes import DONE
from .narrowing import Narrowing, select
from .render import Page, write_json
from .rows import document

__all__ = ["run"]


def run(
    path: str,
    narrowing: Narrowing,
    *,
    html: str | None,
    svg: str | None,
    as_json: bool,
    quiet: bool,
    layout: str | None = None,
) -> int:
    """Prints and draws what is asked for."""
    stored = describe(Path(path), layout=layout, content=None, check_files=False)
    if stored.megatron is None:
        stored.check_files()
    selections = select(_catalogs(stored), narrowing)
    folder = os.path.abspath(stored.path)
    if html is not None or svg is not None:
        from .drawing import draw

        draw(stored, selections, folder, html=html, svg=svg)
    if as_json:
        write_json(document(stored, selections, folder))
    elif not quiet:
        from .inspect_page import RANK_LIMIT, inspect_page

        page = Page.for_stdout()
        inspect_page(page, document(stored, selections, folder, RANK_LIMIT), selections)
        page.print()
    if stored.megatron is not None:
        stored.megatron.entries.check_files()  # what there is was shown; the exit code says that it is not all
    return DONE


def _catalogs(stored: Stored) -> Mapping[str, Catalog]:
    """The parts, with the layouts that are shown."""
    if stored.megatron is None:
        return stored.catalogs
    from ..api.megatron_layout import shown_catalogs

    return shown_catalogs(stored)
