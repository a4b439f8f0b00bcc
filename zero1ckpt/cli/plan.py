"""``zero1ckpt plan``."""

from __future__ import annotations

import rich_click as click

from .options import BUCKET_SIZE, COUNT, DTYPE, SIZE, common

__all__ = ["plan"]


@click.command()
@click.argument("path", required=False, metavar="[PATH]")
@click.option("--params", type=COUNT, metavar="N", help="A model of so many params, as 7B or 350M.")
@click.option("--model", metavar="SHAPES.json", help="A model by the shapes of its params, or by `inspect --json`.")
@click.option("--dp", "dp_size", type=click.IntRange(min=1), metavar="N", required=True, help="Data-parallel size.")
@click.option("--bucket-size", type=BUCKET_SIZE, metavar="E|none", help="Elements of a bucket. Default: as in PATH.")
@click.option("--param-dtype", type=DTYPE, metavar="D", help="Of the model's params. Default: bf16.")
@click.option("--grad-dtype", type=DTYPE, metavar="D", help="In which gradients are added up. Default: fp32.")
@click.option("--main-dtype", type=DTYPE, metavar="D", help="Of the main params. Default: fp32.")
@click.option("--states", metavar="D,D", help="Dtypes of what the optimizer keeps for a param. Default: fp32,fp32.")
@click.option("--memory", "limit", type=SIZE, metavar="SIZE", help="Memory of a card: says what fits it.")
@common
def plan(
    path: str | None,
    params: int | None,
    model: str | None,
    dp_size: int,
    bucket_size: int | str | None,
    param_dtype: str | None,
    grad_dtype: str | None,
    main_dtype: str | None,
    states: str | None,
    limit: int | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Compute what training takes on each card and on the wire, by DDP and by ZeRO-1, 2 and 3, without running it.

    PATH is a checkpoint, whose params and slots are taken; otherwise give --params or --model. Activations are not
    counted.
    """
    from .planning import PlanOptions, run

    options = PlanOptions(
        path, params, model, dp_size, bucket_size, param_dtype, grad_dtype, main_dtype, states, limit, as_json, quiet
    )
    return run(options)
