"""``zero1ckpt log``."""

from __future__ import annotations

import rich_click as click

from .options import common

__all__ = ["log"]


@click.command()
@click.argument("path", default=".", metavar="[DIR]")
@common
def log(path: str, as_json: bool, quiet: bool) -> int:
    """List the checkpoints of a run folder by step: size, format, committed or not, digest.

    Warns when two steps hold identical state, and when the run's pointer names what is not committed. Reads no tensor
    data.
    """
    from .listing import run

    return run(path, as_json=as_json, quiet=quiet)
