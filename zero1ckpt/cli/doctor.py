"""``zero1ckpt doctor``."""

from __future__ import annotations

from typing import Any

import rich_click as click

from .options import common

__all__ = ["doctor"]


@click.command()
@click.argument("path")
@click.option("--repair", metavar="DST", help="Write a mended copy to DST; PATH is never touched.")
@click.option(
    "--zero-lost-moments", is_flag=True, help="With --repair: write zeros for moments that are in no file any more."
)
@common
def doctor(**options: Any) -> int:
    """Look for known damage, and say what it would cost to mend. The exit code is 0 where there is none, else 1."""
    from .doctoring import run

    return run(**options)
