"""``zero1ckpt verify``."""

from __future__ import annotations

import rich_click as click

from .options import common

__all__ = ["verify"]


@click.command()
@click.argument("path")
@click.option("--deep", is_flag=True, help="Read all data: every checksum, and values that cannot be.")
@click.option("--against", metavar="OTHER", help="Prove that this checkpoint holds the same state.")
@common
def verify(path: str, deep: bool, against: str | None, as_json: bool, quiet: bool) -> int:
    """Prove a checkpoint: structure, sizes, checksums. The exit code is 0 where all is well, else 1."""
    from .verifying import run

    return run(path, deep=deep, against=against, as_json=as_json, quiet=quiet)
