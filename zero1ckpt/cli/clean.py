"""``zero1ckpt clean``."""

from __future__ import annotations

import rich_click as click

from .options import common

__all__ = ["clean"]


@click.command()
@click.argument("path")
@click.option("--dry-run", is_flag=True, help="Name the leftovers and remove nothing.")
@common
def clean(path: str, dry_run: bool, as_json: bool, quiet: bool) -> int:
    """Remove half-made leftovers of this tool, after naming them.

    PATH is a checkpoint (made or not), a run folder, or a half-made folder itself.
    """
    from .cleaning import run

    return run(path, dry_run=dry_run, as_json=as_json, quiet=quiet)
