"""``zero1ckpt plan``: what DDP and ZeRO-1, 2 and 3 would take, computed without running anything."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import CorruptError, MissingError, UsageError
from ..core.layout import layout_params
from ..core.memory import BufferSize, Memory, Recipe, Stage, buffer_sizes, sharded_memory, smallest_dp, wire_bytes
from ..model.state import MAIN_PARAM, ParamSpec, PartState
from ..registry import DEFAULT_FORMAT
from .resharding import ReshardPlan, plan_reshard
from .writing import make_rules, parse_bucket_size

__all__ = ["Choice", "MemoryPlan", "plan_checkpoint", "plan_count", "plan_model", "read_shapes"]

_MOST_RANKS = 99_999


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to train. ``fits``: whether it needs no more than the limit, None without one; bytes are of one rank."""

    stage: Stage
    memory: Memory
    wire_bytes: int
    messages: int | None
    fits: bool | None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What each way takes. ``padding``: elements, None where no shapes are known."""

    dp_size: int
    bucket_size: int | None
    buffers: tuple[BufferSize, ...]
    recipe: Recipe
    choices: tuple[Choice, ...]
    padding: int | None
    limit: int | None

    @property
    def numel(self) -> int:
        return sum(buffer.numel for buffer in self.buffers)

    @property
    def buckets(self) -> int | None:
        return None if self.padding is None else sum(buffer.buckets for buffer in self.buffers)

    @property
    def suits(self) -> Stage | None:
        """The first that fits, in the order of what they send and of how much they change; None where none does."""
        return next((choice.stage for choice in self.choices if choice.fits), None)

    @property
    def dp_needed(self) -> int | None:
        """The smallest dp size at which the most thorough way fits the limit; None where there is no such."""
        if self.limit is None:
            return None
        return smallest_dp(self.buffers, self.recipe, self.limit, Stage.ZERO_3, _MOST_RANKS)


def plan_count(
    numel: int,
    *,
    dp_size: int,
    param_dtype: str = "bfloat16",
    grad_dtype: str | None = None,
    recipe: Recipe | None = None,
    limit: int | None = None,
) -> MemoryPlan:
    """For a number of params of which nothing else is known, so without padding. Pure.

    ``grad_dtype``: by default float32, the engine's default.
    """
    make_rules(dp_size, None)
    if numel < 0:
        raise UsageError("params", found=numel, expected="a number that is not negative")
    buffer = BufferSize(param_dtype, grad_dtype or _grad_dtype(param_dtype), numel, numel, 1, dp_size)
    return _plan([buffer], dp_size, None, recipe or Recipe(), limit, known=False)


def plan_model(
    params: Sequence[ParamSpec],
    *,
    dp_size: int,
    bucket_size: int | str | None = None,
    recipe: Recipe | None = None,
    limit: int | None = None,
) -> MemoryPlan:
    """For params in registration order, laid out as the optimizer would. Pure."""
    size = parse_bucket_size(bucket_size)
    buffers = buffer_sizes(layout_params(params, make_rules(dp_size, size)))
    return _plan(buffers, dp_size, size, recipe or Recipe(), limit, known=True)


def plan_checkpoint(
    path: str | os.PathLike[str],
    *,
    dp_size: int,
    bucket_size: int | str | None = None,
    limit: int | None = None,
) -> MemoryPlan:
    """For the params and slots of a checkpoint. ``bucket_size`` None: as in it. Reads its manifest only.

    Slots of another shape than their param's are not counted: one rank holds each. Errors as of ``reshard``.
    """
    plan = plan_reshard(path, to_dp=dp_size, bucket_size=bucket_size, format=DEFAULT_FORMAT)
    assert isinstance(plan, ReshardPlan)  # the default format is a native one
    recipe = _recipe([catalog.state for catalog in plan.catalogs], plan.stored.path)
    layouts = [catalog.layout for catalog in plan.catalogs if catalog.layout is not None]
    buffers = [size for layout in layouts for size in buffer_sizes(layout)]
    size = layouts[0].rules.bucket_size if layouts else None
    return _plan(buffers, dp_size, size, recipe, limit, known=True)


def _recipe(states: Sequence[PartState], path: Path) -> Recipe:
    """What the parts' slots are. Raises ``UsageError`` where the parts have different ones."""
    found: list[Recipe] = []
    for state in states:
        slots = {slot.name: slot.dtype for slot in state.slots if not slot.whole}
        main = slots.pop(MAIN_PARAM, "float32")
        found.append(Recipe(main, tuple(slots.values())))
    if len(set(found)) > 1:
        raise UsageError("the parts of the checkpoint have different slots", file=path, found=found)
    return found[0]


def _plan(
    buffers: Sequence[BufferSize],
    dp_size: int,
    bucket_size: int | None,
    recipe: Recipe,
    limit: int | None,
    *,
    known: bool,
) -> MemoryPlan:
    choices = []
    for stage in Stage:
        memory = sharded_memory(stage, buffers, recipe)
        messages = _messages(stage, sum(buffer.buckets for buffer in buffers)) if known else None
        fits = None if limit is None else memory.peak <= limit
        choices.append(Choice(stage, memory, wire_bytes(stage, buffers), messages, fits))
    padding = sum(buffer.padded - buffer.numel for buffer in buffers) if known else None
    return MemoryPlan(dp_size, bucket_size, tuple(buffers), recipe, tuple(choices), padding, limit)


def _messages(stage: Stage, buckets: int) -> int:
    """Collectives of one step of one micro-batch."""
    return buckets * {Stage.DDP: 1, Stage.ZERO_1: 2, Stage.ZERO_2: 2, Stage.ZERO_3: 3}[stage]


def _grad_dtype(param_dtype: str) -> str:
    """The engine's default: float32 but for float64 params."""
    return "float64" if param_dtype == "float64" else "float32"


def read_shapes(
    path: str | os.PathLike[str], *, param_dtype: str = "bfloat16", grad_dtype: str | None = None
) -> list[ParamSpec]:
    """Params from a JSON file, in its order: ``{"name": [shape]}``, ``{"name": {"shape": ..., "dtype": ...}}``, a list
    of objects with ``name`` and ``shape``, or what ``inspect --json`` prints.

    Raises ``MissingError`` for a file that is not there, ``CorruptError`` for one that is none of these.
    """
    file = Path(path)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise MissingError(f"cannot be read: {error.strerror}", file=file, hint="check the path") from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"this is no JSON: {error}", file=file) from error
    params = [_param(file, name, row, param_dtype, grad_dtype) for name, row in _rows(file, value)]
    names = [param.name for param in params]
    if len(set(names)) != len(names):
        raise CorruptError("a param is listed twice", file=file, param=next(n for n in names if names.count(n) > 1))
    return params


def _rows(file: Path, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and isinstance(value.get("params"), list):
        value = value["params"]
    if isinstance(value, dict):
        yield from value.items()
        return
    if not isinstance(value, list):
        raise CorruptError("shapes must be an object or a list", file=file, found=type(value).__name__)
    for row in value:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise CorruptError("an entry has no name", file=file, found=str(row)[:60])
        yield row["name"], row


def _param(file: Path, name: str, row: Any, param_dtype: str, grad_dtype: str | None) -> ParamSpec:
    facts: Mapping[str, Any] = row if isinstance(row, dict) else {"shape": row}
    shape = facts.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise CorruptError("a shape must be a list of sizes", file=file, param=name, found=str(shape)[:60])
    dtype = str(facts.get("dtype", param_dtype)).removeprefix("torch.")
    grads = str(facts.get("grad_dtype") or grad_dtype or _grad_dtype(dtype)).removeprefix("torch.")
    expert, shared = bool(facts.get("expert", False)), bool(facts.get("shared_embedding", False))
    return ParamSpec(name, tuple(shape), dtype, grads, 0, expert, shared)
