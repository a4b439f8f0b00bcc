"""``zero1ckpt demo``."""

from __future__ import annotations

import rich_click as click

from .options import common

__all__ = ["demo"]


@click.command()
@click.option("--out", metavar="DIR", help="Where its checkpoints go.")
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="Ranks that train first. Default: 4.")
@click.option("--to-ranks", type=click.IntRange(min=1), metavar="N", help="Ranks that go on. Default: 2.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Steps before and after.")
@common
def demo(
    out: str | None, ranks: int | None, to_ranks: int | None, steps: int | None, as_json: bool, quiet: bool
) -> int:
    """Train a small model here, save, inspect, reshard and resume it, and show that the loss goes on."""
    from .subprocesses import run_module

    options = {"--out": out, "--ranks": ranks, "--to-ranks": to_ranks, "--steps": steps}
    args = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    return run_module("zero1ckpt.demo", [*args, *(["--json"] if as_json else [])], quiet=quiet and not as_json)
