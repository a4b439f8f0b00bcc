"""Megatron's optimizer param groups, step and loss scale as ours.

A group stands in the files without its params: which param is in which follows from Megatron's own rule (no weight
decay for biases and one-dimensional params, experts apart), where that rule leaves one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from ...core.dtypes import itemsize
from ...core.errors import CorruptError
from ...encodings.inert_pickle import Dtype, EnumValue, Record, TensorRef, Value
from ...encodings.torch_archive import Archive
from ...model.state import Group, LossScale, ParamSpec
from ...storage.local import LocalStore
from .entries import unwrapped
from .model import Doubt

__all__ = ["GroupSet", "archive_numbers", "assign_groups", "read_groups", "read_loss_scale"]

Numbers = Callable[[TensorRef], Value]
"""The value of a small tensor: a number for one element, else a list. Raises ``CorruptError``."""

_KINDS = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "int64": "<i8", "int32": "<i4", "uint8": "|u1"}
_KINDS |= {"int16": "<i2", "int8": "|i1", "bool": "|b1"}
_MAX_NUMBERS = 4096
_LEFT_OUT = frozenset({"params", "step", "param_group_id"})


@dataclass(frozen=True, slots=True)
class GroupSet:
    """Hyper-parameters of each group as plain values (``model.values``), without params and step.

    ``step``: of the optimizer; None where no group states it, or where they disagree (a notice then says so).
    ``steps``: what each group states, as stored; None where it does not.
    """

    groups: tuple[Group, ...]
    step: int | None
    steps: tuple[float | int | None, ...] = ()
    notices: tuple[str, ...] = ()


def archive_numbers(store: LocalStore, archive: Archive) -> Numbers:
    """Reads small tensors of an archive that lies in a file of ``store``."""
    file = PurePath(archive.file).relative_to(store.root).as_posix()

    def read(tensor: TensorRef) -> Value:
        place = archive.locate(tensor)
        if tensor.numel > _MAX_NUMBERS or not place.contiguous:
            raise CorruptError("a tensor among the hyper-parameters is too large", file=archive.file)
        data = bytearray(tensor.numel * itemsize(tensor.dtype))
        store.readv_into(file, place.offset, [memoryview(data)])
        values = _numbers(tensor.dtype, bytes(data), archive.file)
        return values[0] if len(values) == 1 else values

    return read


def _numbers(dtype: str, data: bytes, file: str) -> list[Any]:
    if dtype == "bfloat16":
        return list((np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).tolist())
    if dtype not in _KINDS:
        raise CorruptError("a tensor among the hyper-parameters is of an unexpected type", file=file, found=dtype)
    return list(np.frombuffer(data, _KINDS[dtype]).tolist())


def read_groups(value: Value, numbers: Numbers | None = None) -> GroupSet:
    """The groups of one optimizer's state: a dict with ``param_groups``, or one with such a dict as ``optimizer``.

    Raises ``CorruptError`` for a value that holds no groups.
    """
    stored = _param_groups(value)
    notices: list[str] = []
    groups = []
    steps: list[float | int | None] = []
    for index, group in enumerate(stored):
        if not isinstance(group, dict):
            raise CorruptError("an optimizer group is no dict", found=type(group).__name__)
        plain = _Plain(numbers, f"group {index}", notices)
        steps.append(plain.step(group.get("step")))
        groups.append({k: plain.of(v, k) for k, v in group.items() if type(k) is str and k not in _LEFT_OUT})
        if unsaid := [k for k in groups[-1] if groups[-1][k] is _DROPPED]:
            groups[-1] = {k: v for k, v in groups[-1].items() if k not in unsaid}
    step = _common_step(steps, notices)
    return GroupSet(tuple(groups), step, tuple(steps), tuple(notices))


def _param_groups(value: Value) -> Sequence[Value]:
    value = unwrapped(value)
    for _ in range(3):
        if not isinstance(value, dict):
            break
        found = value.get("param_groups")
        if isinstance(found, list):
            return found
        value = value.get("optimizer")
    raise CorruptError("the optimizer's state has no param_groups", found=type(value).__name__)


def _common_step(steps: Sequence[float | int | None], notices: list[str]) -> int | None:
    """The one step of all groups. A group that states none does not count: it had no params on the saving rank."""
    stated = {step for step in steps if step is not None}
    if not stated:
        notices.append(Doubt("no optimizer group states its step"))
        return None
    if len(stated) > 1:
        notices.append(Doubt(f"optimizer groups are at different steps: {', '.join(str(s) for s in sorted(stated))}"))
        return None
    if None in steps:
        notices.append(f"group {steps.index(None)} states no step; the others are at {next(iter(stated))}")
    (step,) = stated
    if step != int(step) or step < 0:
        notices.append(f"an optimizer group's step is no count of updates: {step}")
        return None
    return int(step)


_DROPPED = object()


@dataclass(frozen=True, slots=True)
class _Plain:
    """Turns inert values into those of ``model.values``. What cannot be is left out, with a notice."""

    numbers: Numbers | None
    place: str
    notices: list[str]

    def step(self, value: Value) -> float | int | None:
        plain = self.of(value, "step")
        if plain is None or plain is _DROPPED:
            return None
        if isinstance(plain, bool) or not isinstance(plain, (int, float)) or plain != plain or abs(plain) > 2**62:
            self.notices.append(f"{self.place}: step is no number of updates: {plain!r:.40}")
            return None
        return plain

    def of(self, value: Value, name: str) -> Any:
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, TensorRef):
            return self.drop(value, name) if self.numbers is None else self.numbers(value)
        if isinstance(value, Dtype):
            return f"torch.{value.name}"
        if isinstance(value, EnumValue):
            return value.value
        return self.nested(value, name)

    def nested(self, value: Value, name: str) -> Any:
        if isinstance(value, (list, tuple)):
            items = [self.of(item, f"{name}[{i}]") for i, item in enumerate(value)]
            kept = [item for item in items if item is not _DROPPED]
            return tuple(kept) if isinstance(value, tuple) else kept
        if isinstance(value, dict):
            pairs = {key: self.of(item, f"{name}.{key}") for key, item in value.items() if not isinstance(key, Record)}
            return {key: item for key, item in pairs.items() if item is not _DROPPED}
        return self.drop(value, name)

    def drop(self, value: Value, name: str) -> object:
        kind = str(value.type) if isinstance(value, Record) else type(value).__name__
        self.notices.append(f"{self.place}: {name} is left out: a value of type {kind}")
        return _DROPPED


def read_loss_scale(value: Value, numbers: Numbers | None = None) -> LossScale | None:
    """The state of a dynamic grad scaler; None for a constant one, which has no state.

    Raises ``CorruptError`` for a state that is not Megatron's.
    """
    value = unwrapped(value)
    if value is None or value == {}:
        return None
    if not isinstance(value, dict):
        raise CorruptError("the state of the grad scaler is no dict", found=type(value).__name__)
    scale, growth, hysteresis = (value.get(k) for k in ("scale", "growth_tracker", "hysteresis_tracker"))
    if isinstance(scale, TensorRef) and numbers is not None:
        scale = numbers(scale)
    if not isinstance(scale, (int, float)) or type(growth) is not int or type(hysteresis) is not int:
        found = ", ".join(f"{key}: {type(item).__name__}" for key, item in value.items())
        raise CorruptError("the state of the grad scaler is not Megatron's", found=found)
    return LossScale(float(scale), growth, hysteresis)


# ------------------------------------------------------------------------------------------------ which param in which


def assign_groups(params: Sequence[ParamSpec], groups: Sequence[Group]) -> tuple[tuple[int, ...], str | None]:
    """The group of each param by Megatron's rule, and a notice where that rule leaves more than one answer. Pure.

    The rule: a param is an expert's or not; it decays (``wd_mult`` not 0) unless it is a bias or has one dimension;
    word embeddings and the output layer are in the groups with a learning rate of their own (``is_decoupled_lr``),
    where there are any. Where it does not decide, the likeliest group that is not ruled out is taken, and the notice
    says for which params; it is a ``Doubt`` but for the norms of queries and keys, of which one choice is the default.
    """
    chosen, open_ = [], []
    for param in params:
        fitting = [i for i, group in enumerate(groups) if _fits(param, group, groups)]
        apart = [i for i in fitting if groups[i].get("is_decoupled_lr", False)]
        fitting = apart or fitting
        likely = [i for i in fitting if _is_plain(groups[i]) and _decays(groups[i]) != _without_decay(param)]
        chosen.append(min(likely or fitting, default=0))
        if len(fitting) != 1:
            open_.append(param.name)
    return tuple(chosen), _open_notice(open_, len(params), groups)


def _open_notice(names: Sequence[str], count: int, groups: Sequence[Group]) -> str | None:
    if not names or len(groups) == 1:
        return None
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    kind = str if all(_is_qk_layernorm(name) for name in names) else Doubt
    return kind(
        f"the file does not say which of its {len(groups)} optimizer groups holds each param, and Megatron's rule "
        f"leaves it open for {len(names)} of {count} ({shown})"
    )


def _fits(param: ParamSpec, group: Group, groups: Sequence[Group]) -> bool:
    """Whether the rule can put a param into a group."""
    if bool(group.get("is_expert_parallel", False)) != param.expert and _differ(groups, "is_expert_parallel"):
        return False
    settled = not _is_qk_layernorm(param.name) and _has_both_kinds(groups, param.expert)
    if settled and _decays(group) == _without_decay(param):
        return False
    return not group.get("is_decoupled_lr", False) or _is_embedding_or_output(param.name)


def _differ(groups: Sequence[Group], key: str) -> bool:
    return len({bool(group.get(key, False)) for group in groups}) > 1


def _has_both_kinds(groups: Sequence[Group], expert: bool) -> bool:
    """Whether groups with and without decay exist among those that a param can be in."""
    mine = [g for g in groups if bool(g.get("is_expert_parallel", False)) == expert] or groups
    return len({_decays(group) for group in mine}) > 1


def _decays(group: Group) -> bool:
    return _number(group, "wd_mult", 1.0) != 0


def _number(group: Mapping[str, Any], key: str, default: float) -> float:
    value = group.get(key, group.get(f"pre_{key}", default))
    return float(value) if isinstance(value, (int, float)) else default


def _is_plain(group: Group) -> bool:
    """A group without a learning rate of its own."""
    return _number(group, "lr_mult", 1.0) == 1.0 and not group.get("is_decoupled_lr", False)


def _without_decay(param: ParamSpec) -> bool:
    """A bias, or one dimension; experts that are stored stacked have one more."""
    stacked = "experts.experts." in param.name
    return param.name.endswith(".bias") or len(param.shape) - stacked == 1


def _is_qk_layernorm(name: str) -> bool:
    """Of these an option decides whether they decay (``apply_wd_to_qk_layernorm``)."""
    return name.endswith(("q_layernorm.weight", "k_layernorm.weight"))


def _is_embedding_or_output(name: str) -> bool:
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))
