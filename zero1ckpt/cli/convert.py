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
@copying
def convert(**options: Any) -> int:
    """Write the same state in another format; the data-parallel size stays."""
    from .copying import CopyOptions, run

    return run(CopyOptions("convert", to_dp=None, **options))
