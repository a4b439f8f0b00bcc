"""``zero1ckpt export``."""

from __future__ import annotations

from typing import Any

import rich_click as click

from .options import DTYPE, SIZE, reading

__all__ = ["export"]


@click.command()
@click.argument("path")
@click.argument("out")
@click.option(
    "--dtype",
    type=DTYPE,
    metavar="D",
    help="Of all floating-point tensors: float32, bfloat16 or float16. Default: each param as in the model, and "
    "frozen params and buffers as they are stored.",
)
@click.option("--shard-size", type=SIZE, metavar="SIZE", help="Begin a new file at this size. Default: 5GB.")
@click.option("--part", metavar="P", help="Only the params of this part (with frozen params and buffers).")
@click.option(
    "--tied", multiple=True, metavar="ALIAS=NAME", help="Another name of a stored param: recorded, not stored."
)
@reading
def export(**options: Any) -> int:
    """Write the model's weights from the main params, as Hugging Face style safetensors with an index.

    OUT is a new folder. Each value is rounded once, to the nearest, ties to even.
    """
    from .exporting import ExportOptions, run

    return run(ExportOptions(**options))
