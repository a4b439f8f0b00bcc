"""Runs ``plan``."""

from __future__ import annotations

from dataclasses import dataclass

from ..api.planning import Choice, MemoryPlan, plan_checkpoint, plan_count, plan_model, read_shapes
from ..core.errors import UsageError
from ..core.memory import Recipe
from .exit_codes import DONE
from .options import dtype_of
from .render import Column, Page, Table, write_json
from .rows import Row
from .text import count, percent, plural, short_bytes

__all__ = ["PlanOptions", "run"]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the command line asked for; None where it was not given."""

    path: str | None
    params: int | None
    model: str | None
    dp_size: int
    bucket_size: int | str | None
    param_dtype: str | None
    grad_dtype: str | None
    main_dtype: str | None
    states: str | None
    limit: int | None
    as_json: bool
    quiet: bool


def run(options: PlanOptions) -> int:
    """Prints the plan."""
    made = _plan(options)
    if options.as_json:
        write_json(_document(made))
    elif not options.quiet:
        page = Page.for_stdout()
        _write(page, made)
        page.print()
    return DONE


def _plan(options: PlanOptions) -> MemoryPlan:
    given = [options.path is not None, options.params is not None, options.model is not None]
    if sum(given) != 1:
        raise UsageError(
            "plan for what", found=f"{sum(given)} models", expected="one of PATH, --params N and --model FILE"
        )
    if options.path is not None:
        _refuse(options, ("param_dtype", "grad_dtype", "main_dtype", "states"), "a checkpoint states it")
        return plan_checkpoint(
            options.path, dp_size=options.dp_size, bucket_size=options.bucket_size, limit=options.limit
        )
    recipe = _recipe(options)
    dtype = options.param_dtype or "bfloat16"
    if options.params is not None:
        _refuse(options, ("bucket_size",), "a number of params has no buckets: give --model")
        return plan_count(
            options.params,
            dp_size=options.dp_size,
            param_dtype=dtype,
            grad_dtype=options.grad_dtype,
            recipe=recipe,
            limit=options.limit,
        )
    assert options.model is not None
    params = read_shapes(options.model, param_dtype=dtype, grad_dtype=options.grad_dtype)
    return plan_model(
        params, dp_size=options.dp_size, bucket_size=options.bucket_size, recipe=recipe, limit=options.limit
    )


def _refuse(options: PlanOptions, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} does not apply", found=getattr(options, name), hint=why)


def _recipe(options: PlanOptions) -> Recipe:
    main = options.main_dtype or "float32"
    if options.states is None:
        return Recipe(main)
    return Recipe(main, tuple(dtype_of(text) for text in options.states.split(",") if text.strip()))


def _choice(choice: Choice, numel: int) -> Row:
    memory = choice.memory
    return {
        "name": choice.stage.value,
        "params": memory.params,
        "grads": memory.grads,
        "main_params": memory.main_params,
        "states": memory.states,
        "temporary_main_grads": memory.temporary_main_grads,
        "optimizer": memory.optimizer,
        "total": memory.total,
        "peak": memory.peak,
        "bytes_per_param": memory.total / numel if numel else None,
        "wire_bytes": choice.wire_bytes,
        "messages": choice.messages,
        "fits": choice.fits,
    }


def _document(made: MemoryPlan) -> Row:
    return {
        "schema": "zero1ckpt.plan/1",
        "params": made.numel,
        "dp_size": made.dp_size,
        "bucket_size": made.bucket_size,
        "buffers": [
            {
                "param_dtype": buffer.param_dtype,
                "grad_dtype": buffer.grad_dtype,
                "numel": buffer.numel,
                "padded": buffer.padded if made.padding is not None else None,
                "buckets": buffer.buckets if made.padding is not None else None,
                "dp_size": buffer.dp_size,
            }
            for buffer in made.buffers
        ],
        "main_dtype": made.recipe.main_dtype,
        "state_dtypes": list(made.recipe.states),
        "padding": made.padding,
        "choices": [_choice(choice, made.numel) for choice in made.choices],
        "memory": made.limit,
        "suits": made.suits.value if made.suits else None,
        "dp_needed": made.dp_needed,
    }


def _write(page: Page, made: MemoryPlan) -> None:
    facts = [("params", count(made.numel)), ("dp size", count(made.dp_size))]
    for buffer in made.buffers:
        facts.append(("buffer", f"{count(buffer.numel)} {buffer.param_dtype} params, {buffer.grad_dtype} grads"))
    facts.append(
        ("optimizer", f"{made.recipe.main_dtype} main params, states of {', '.join(made.recipe.states) or '-'}")
    )
    if made.padding is None:
        facts.append(("padding", "not counted: it depends on the shapes (--model)"))
    else:
        share = percent(made.padding, made.numel + made.padding)
        facts.append(
            ("padding", f"{plural(made.padding, 'element')} in {plural(made.buckets or 0, 'bucket')}, {share}")
        )
    page.facts(facts)
    page.table(_table(made, page))
    page.line()
    for line in _advice(made):
        page.line(f"  {line}", "dim")


def _table(made: MemoryPlan, page: Page) -> Table:
    columns: tuple[Column, ...] = (
        Column("on each card"),
        Column("params", right=True, spare=3),
        Column("grads", right=True, spare=3),
        Column("main params", right=True, spare=2),
        Column("states", right=True, spare=2),
        Column("total", right=True),
        Column("in the step", right=True),
        Column("sent a step", right=True),
        Column("fits", right=True),
    )
    rows = tuple(_row(choice, page) for choice in made.choices)
    if made.limit is None:
        columns, rows = columns[:-1], tuple(row[:-1] for row in rows)
    return Table("Bytes", columns, rows)


def _row(choice: Choice, page: Page) -> tuple[str, ...]:
    memory = choice.memory
    sizes = (memory.params, memory.grads, memory.main_params, memory.states, memory.total, memory.peak)
    fits = ("✓" if page.unicode else "yes") if choice.fits else ("✗" if page.unicode else "no")
    return (choice.stage.title, *(short_bytes(n) for n in (*sizes, choice.wire_bytes)), fits)


def _advice(made: MemoryPlan) -> list[str]:
    lines = ["'In the step' adds main grads: what a rank steps, in the dtype of the main params. No activations."]
    if made.limit is None:
        lines.append("ZeRO-1 sends what DDP sends where params and grads are as wide. --memory SIZE says what fits.")
    elif made.suits is not None:
        lines.append(f"{made.suits.title} is the least that fits {short_bytes(made.limit)}.")
    else:
        needed = f"ZeRO-3 does from dp {count(made.dp_needed)} on" if made.dp_needed else "nor does any dp size"
        lines.append(f"None fits {short_bytes(made.limit)} at dp {count(made.dp_size)}; {needed}.")
    return lines
