"""``zero1ckpt diff``."""

from __future__ import annotations

from typing import Any

import rich_click as click

from .options import reading

__all__ = ["diff"]


@click.command()
@click.argument("a")
@click.argument("b")
@reading
def diff(**options: Any) -> int:
    """Show what differs between the states of two checkpoints, whatever their layouts, formats and dp sizes.

    For each param and slot: equal, changed (by how much, how many elements), missing or added; scalars, groups, step,
    extra state and the model's own tensors too. The exit code is 0 where nothing differs, else 1. Data is read only of
    tensors whose digests differ.
    """
    from .diffing import run

    return run(**options)
