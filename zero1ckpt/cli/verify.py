"""``zero1ckpt verify``."""

from __future__ import annotations

from typing import Any

import rich_click as click

from .options import layout_file, reading

__all__ = ["verify"]


@click.command()
@click.argument("path")
@click.option("--deep", is_flag=True, help="Read all data: every checksum, and values that cannot be.")
@click.option("--against", metavar="OTHER", help="Prove that this checkpoint holds the same state.")
@layout_file
@reading
def verify(**options: Any) -> int:
    """Prove a checkpoint: structure, sizes, checksums. The exit code is 0 where all is well, else 1."""
    from .verifying import run

    return run(**options)
