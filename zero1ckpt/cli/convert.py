"""``zero1ckpt convert``."""

from __future__ import annotations

from typing import Any

import rich_click as click

from .options import copying

__all__ = ["convert"]


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--to", "format", metavar="FORMAT", required=True, help="How state is laid out in DST.")
@click.option("--to-dp", type=click.IntRange(min=1), metavar="M", help="Data-parallel size of DST. Default: as in SRC.")
@copying
def convert(**options: Any) -> int:
    """Write the same state in another format. What is not given stays as in SRC."""
    from .copying import CopyOptions, run

    return run(CopyOptions("convert", **options))
