"""``zero1ckpt inspect``."""

from __future__ import annotations

import rich_click as click

from .options import BUCKET, common, group_of, layout_file

__all__ = ["inspect"]


@click.command()
@click.argument("path", default=".", metavar="[PATH]")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only what this rank owns.")
@click.option("--param", metavar="NAME", help="Only this param; * stands for anything.")
@click.option("--bucket", type=BUCKET, metavar="B", help="Only this bucket of every buffer, or BUFFER.BUCKET.")
@click.option(
    "--group", metavar="G", help="Only params of this group, or the part or data-parallel group of this name."
)
@layout_file
@click.option("--html", metavar="FILE", help="Draw it as a page of its own.")
@click.option("--svg", metavar="FILE", help="Draw the buckets as a picture.")
@common
def inspect(
    path: str,
    rank: int | None,
    param: str | None,
    bucket: tuple[int | None, int] | None,
    group: str | None,
    layout: str | None,
    html: str | None,
    svg: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Show what a checkpoint holds: format, sizes, params, buckets, and which rank owns what. Reads no tensor data."""
    from .inspecting import run
    from .narrowing import Narrowing

    narrowing = Narrowing(rank, param, bucket, group_of(group))
    return run(path, narrowing, html=html, svg=svg, as_json=as_json, quiet=quiet, layout=layout)
