"""``zero1ckpt reshard``."""

from __future__ import annotations

from typing import Any

import rich_click as click

from .options import copying

__all__ = ["reshard"]


@click.command()
@click.argument("src", default=".", metavar="[SRC]")
@click.argument("dst", required=False, metavar="[DST]")
@click.option("--to-dp", type=click.IntRange(min=1), metavar="M", required=True, help="Data-parallel size of DST.")
@click.option("--format", metavar="F", help="How state is laid out. Default: as in SRC.")
@copying
def reshard(**options: Any) -> int:
    """Write the same state for another data-parallel size, bucket size, format or container.

    SRC is the current directory by default, DST the name of SRC with -dp<M> added, beside it.
    """
    from .copying import CopyOptions, run

    return run(CopyOptions("reshard", **options))
