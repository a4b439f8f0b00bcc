"""``zero1ckpt.diff``: what differs between the states of two checkpoints, whatever their layouts.

Digests decide equality; data is read only of tensors that differ or have no digest, both sides by the same flat ranges,
in windows. Bits decide whether an element is changed: -0.0 is not 0.0, and a NaN equals the same NaN only.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.dtypes import itemsize
from ..encodings.tensor_file import check_tensor_file
from ..model.catalog import Catalog
from ..model.protocols import Progress, Source
from ..model.state import PartState
from ..model.values import Json, decode_value, same_value
from .commit import window_bytes, workers_or_default
from .exporting import TensorReader, file_catalog, flat_windows
from .megatron_weights import weights_catalog
from .stored import EXTRA_FILE, MODEL_FILE, Stored, describe, rank_extra_file
from .verification import Finding, in_parallel

__all__ = ["Comparison", "Measure", "TensorDiff", "compare", "diff", "measure", "read_changed"]

_BLOCK = 2**13
"""Elements that are compared at once, so that what numpy makes on the way stays small."""
_KINDS = {"state": "different_values", "model": "different_model", "extra": "different_extra"}


# -------------------------------------------------------------------------------------------------------------- numbers


@dataclass(slots=True)
class Measure:
    """How far values are apart. ``first`` and ``last`` are flat indices of changed elements; ``values`` at ``first``.

    ``nan``: changed elements of which one at least is a NaN; ``max_abs`` and ``max_ulp`` leave them out.
    """

    changed: int = 0
    nan: int = 0
    max_abs: float | int = 0
    max_ulp: int | None = None
    first: int | None = None
    last: int | None = None
    values: tuple[Any, Any] | None = None

    def add(self, other: Measure) -> None:
        """Adds another range of the same tensor."""
        self.changed += other.changed
        self.nan += other.nan
        self.max_abs = max(self.max_abs, other.max_abs)
        if other.max_ulp is not None:
            self.max_ulp = max(self.max_ulp or 0, other.max_ulp)
        if other.first is not None and (self.first is None or other.first < self.first):
            self.first, self.values = other.first, other.values
        if other.last is not None:
            self.last = other.last if self.last is None else max(self.last, other.last)


def measure(a: memoryview, b: memoryview, dtype: str, start: int = 0) -> Measure:
    """Compares two runs of elements that begin at flat index ``start``. Pure.

    Rule for ulp: IEEE 754-2019 section 3.4, by which encodings of one sign are ordered as the integers that they are.
    The distance of two numbers is that of their integers, taken as sign and magnitude, so both zeros are 0, and the
    infinities follow the largest numbers (as ``numpy.testing.assert_array_max_ulp``).
    """
    bits = np.dtype(f"u{itemsize(dtype)}")
    x, y = np.frombuffer(a, bits), np.frombuffer(b, bits)
    total = Measure()
    for low in range(0, len(x), _BLOCK):
        part, other = x[low : low + _BLOCK], y[low : low + _BLOCK]
        at = np.flatnonzero(part != other)
        if len(at):
            total.add(_measure_changed(part[at], other[at], dtype, start + low + at))
    return total


def _measure_changed(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: str, at: npt.NDArray[np.int64]) -> Measure:
    x, y = _numbers(a, dtype), _numbers(b, dtype)
    found = Measure(len(at), first=int(at[0]), last=int(at[-1]), values=(x[0].item(), y[0].item()))
    if "float" not in dtype:
        found.max_abs = int(_distance(x, y).max())
        return found
    numbers = ~(np.isnan(x) | np.isnan(y))
    found.nan = len(at) - int(numbers.sum())
    if found.nan < len(at):
        with np.errstate(over="ignore"):
            found.max_abs = float(np.abs(x[numbers] - y[numbers]).max())
        found.max_ulp = int(_distance(_ordered(a[numbers]), _ordered(b[numbers])).max())
    return found


def _numbers(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Values of bit patterns: float64, or the integers themselves."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    if dtype == "float8_e4m3fn":
        magnitude = (bits & 0x7F).astype(np.int64)
        exponent, mantissa = magnitude >> 3, magnitude & 7
        value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * np.exp2(exponent - 7.0))
        signed = np.where(bits & 0x80, -value, value)
        return np.where(magnitude == 0x7F, np.nan, signed)
    values = bits.view("u1" if dtype == "bool" else dtype)
    return values.astype(np.float64) if values.dtype.kind == "f" else values


def _ordered(bits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Integers in the order of the values that the bit patterns encode."""
    width = bits.dtype.itemsize * 8
    magnitude = (bits & bits.dtype.type(2 ** (width - 1) - 1)).astype(np.int64)
    ordered: npt.NDArray[np.int64] = np.where(bits >> bits.dtype.type(width - 1), -magnitude, magnitude)
    return ordered


def _distance(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Exact distances of integers: modulo 2**64 the difference of any two is right."""
    made: npt.NDArray[np.uint64] = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
    return made


# --------------------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """A value that differs: where it is, and what it is in each, None where there is nothing."""

    key: str
    a: str | None
    b: str | None

    def __str__(self) -> str:
        return f"{self.key} is {self.a or 'not there'} in one and {self.b or 'not there'} in the other"


_NOTHING = object()


def value_diffs(a: Json, b: Json, key: str) -> Iterator[ValueDiff]:
    """Places where two encoded values differ, as deep as both have the same structure. Tensors are compared by name."""
    items = _items(a), _items(b)
    if items[0] is None or items[1] is None or items[0][0] != items[1][0]:
        if a is _NOTHING or b is _NOTHING or not same_value(a, b):
            yield ValueDiff(key, _short(a), _short(b))
        return
    mine, theirs = items[0][1], items[1][1]
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        yield from value_diffs(mine.get(name, _NOTHING), theirs.get(name, _NOTHING), f"{key}{name}")


def _items(value: Json) -> tuple[str, dict[str, Json]] | None:
    """What a container is, and its items by how they are reached; None for anything else."""
    if isinstance(value, list):
        return "list", {f"[{i}]": item for i, item in enumerate(value)}
    if not isinstance(value, dict):
        return None
    tag, body = next(iter(value.items())) if len(value) == 1 else ("", ())
    if tag == "$tuple":
        return "tuple", {f"[{i}]": item for i, item in enumerate(body)}
    if tag == "$map":
        return "dict", {f"[{_short(name)}]": item for name, item in body}
    return None if tag.startswith("$") else ("dict", {f".{name}": item for name, item in value.items()})


def _short(value: Any) -> str | None:
    if value is _NOTHING:
        return None
    if isinstance(value, dict) and "$tensor" in value:
        return "a tensor"
    text = repr(decode_value(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---------------------------------------------------------------------------------------------------------------- state


@dataclass(slots=True)
class TensorDiff:
    """One tensor of the two. ``kind``: state (of an optimizer), model, extra or rank_extra; ``slot`` of state only.

    ``status``: equal, changed, missing (in the second), added (by it); None until data tells. ``measure``: None where
    nothing was read, or shapes or dtypes differ.
    """

    kind: str
    part: str
    param: str
    slot: str | None
    dtype: str
    shape: tuple[int, ...]
    status: str | None
    measure: Measure | None = None
    note: str = ""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def index(self, flat: int) -> tuple[int, ...]:
        """A flat index as an index."""
        return tuple(int(n) for n in np.unravel_index(flat, self.shape)) if self.shape else ()

    def message(self) -> str:
        name = f"{self.param}: {self.slot}" if self.slot else self.param
        if self.status != "changed":
            return f"{name} is only in the {'first' if self.status == 'missing' else 'second'}"
        found = self.measure
        if found is None or found.first is None:
            return f"{name} differs{self.note}"
        place = f"first at {list(self.index(found.first))}"
        if found.values is not None:
            place += f" ({found.values[0]:.9g} in one, {found.values[1]:.9g} in the other)"
        share = 100 * found.changed / self.numel
        text = f"{name}: {found.changed} of {self.numel} elements differ ({share:.3g} %), {place}"
        if found.changed > found.nan:
            text += f", by at most {found.max_abs:.6g}"
            text += "" if found.max_ulp is None else f" or {found.max_ulp} ulp"
        return text + (f", {found.nan} with a NaN" if found.nan else "")

    def finding(self) -> Finding:
        kind = {"missing": "missing_tensor", "added": "added_tensor"}.get(self.status or "")
        if kind is None:
            kind = "different_shape" if self.note else _KINDS.get(self.kind, "different_rank_extra")
        span = self.measure
        where = (span.first, span.last + 1) if span and span.first is not None and span.last is not None else None
        return Finding(kind, self.message(), self.part, self.param, self.slot, where)


@dataclass(frozen=True, slots=True)
class _Sides:
    """The same tensor in both: readers and indices of param and slot."""

    row: TensorDiff
    place: tuple[int, int]
    a: tuple[int, int]
    b: tuple[int, int]


@dataclass
class Comparison:
    """The answer of ``diff``: true where the two hold the same state."""

    tensors: list[TensorDiff] = field(default_factory=list)
    others: list[Finding] = field(default_factory=list)
    """What differs besides tensors: step, groups, params, scalars, extra state."""
    values: list[tuple[str, str, ValueDiff]] = field(default_factory=list)
    """(kind of finding, part, value) of hyper-parameters and extra state that differ."""
    notices: list[Finding] = field(default_factory=list)
    bytes_read: int = 0
    pending: list[_Sides] = field(default_factory=list)
    catalogs: list[tuple[tuple[Catalog, Source], tuple[Catalog, Source]]] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        return [*self.others, *(row.finding() for row in self.tensors if row.status != "equal")]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    @property
    def bytes_to_read(self) -> int:
        return 2 * sum(side.row.numel * itemsize(side.row.dtype) for side in self.pending)

    def found(self, kind: str, message: str, part: str = "", param: str | None = None, slot: str | None = None) -> None:
        self.others.append(Finding(kind, message, part, param, slot))

    def walk(self, kind: str, a: Json, b: Json, key: str, part: str = "", what: str = "") -> None:
        """Adds what differs between two encoded values."""
        for value in value_diffs(a, b, key):
            self.values.append((kind, part, value))
            self.found(kind, f"{what}{value}", part)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    workers: int | None = None,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """What differs between the states of two checkpoints: tensors, scalars, groups, step, extra state.

    Layouts, formats, containers and dp sizes do not matter. Raises ``MissingError`` or ``CorruptError`` for a
    checkpoint that cannot be read.
    """
    made = compare(describe(a), describe(b))
    read_changed(made, workers=workers, memory_limit=memory_limit, progress=progress)
    return made


def compare(a: Stored, b: Stored) -> Comparison:
    """Compares without reading data; what data must tell is ``pending``."""
    made = Comparison()
    if a.catalogs.keys().isdisjoint(b.catalogs):
        made.found("other_parts", _other_parts(a, b))
    for part in sorted(a.catalogs.keys() ^ b.catalogs.keys()):
        kind, where = ("missing_part", "first") if part in a.catalogs else ("added_part", "second")
        made.found(kind, f"part {part!r} is only in the {where}", part)
    for part, catalog in a.catalogs.items():
        if part in b.catalogs:
            _compare_states(made, part, catalog.state, b.catalogs[part].state, known=_stated_by(a, b, part))
            _match(made, "state", part, (catalog, a.source(part)), (b.catalogs[part], b.source(part)))
    _compare_extra(made, a, b)
    _compare_file(made, a, b, EXTRA_FILE, "extra")
    _compare_file(made, a, b, MODEL_FILE, "model")
    _compare_weights(made, a, b)
    _compare_carried(made, a, b)
    _compare_ranks(made, a, b)
    return made


def _other_parts(a: Stored, b: Stored) -> str:
    """Why two checkpoints without a common part cannot hold the same state tensor by tensor."""

    def cut(side: Stored) -> str:
        parts = ", ".join(map(repr, side.catalogs))
        return f"parts {parts}" if len(side.catalogs) > 1 or "" not in side.catalogs else "one part of global shapes"

    return (
        f"the first holds {cut(a)}, the second {cut(b)}: tensors of model-parallel ranks are not global ones;"
        " convert both to one format to compare them"
    )


def read_changed(
    made: Comparison,
    *,
    only_unknown: bool = False,
    workers: int | None = None,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Reads both sides of what is pending, and measures; with ``only_unknown`` only where there are no digests."""
    pending = [side for side in made.pending if side.row.status is None or not only_unknown]
    threads = workers_or_default(workers)
    share = window_bytes(memory_limit, threads)
    readers = [tuple(TensorReader(*side) for side in sides) for sides in made.catalogs]
    lock = threading.Lock()
    local = threading.local()

    def work(job: tuple[_Sides, int, int, Any, Any]) -> None:
        side, start, size, moves_a, moves_b = job
        nbytes = size * itemsize(side.row.dtype)
        buffers = getattr(local, "buffers", None)
        if buffers is None:
            buffers = local.buffers = [memoryview(np.empty(share // 4, np.uint8).data) for _ in range(2)]
        a, b = (buffer[:nbytes] for buffer in buffers)
        first, second = readers[side.place[0]]
        first.read(moves_a, a)
        second.read(moves_b, b)
        found = measure(a, b, side.row.dtype, start)
        with lock:
            assert side.row.measure is not None
            side.row.measure.add(found)
            made.bytes_read += 2 * nbytes
        if progress is not None:
            progress.advance(2 * nbytes)

    for side in pending:
        side.row.measure = Measure()
    in_parallel(_windows(pending, readers, share // 4), work, threads)
    for side in pending:
        assert side.row.measure is not None
        side.row.status = "changed" if side.row.measure.changed else "equal"


def _windows(
    pending: Sequence[_Sides], readers: Sequence[Sequence[TensorReader]], window: int
) -> Iterator[tuple[_Sides, int, int, Any, Any]]:
    """Ranges of at most ``window`` bytes of each pair of tensors, with where they lie on both sides."""
    for place, (first, second) in enumerate(readers):
        for nbytes in (1, 2, 4, 8):
            mine = [s for s in pending if s.place[0] == place and itemsize(s.row.dtype) == nbytes]
            where = np.array([(*side.a, *side.b) for side in mine], np.int64).reshape(-1, 4)
            for tensor, start, size in flat_windows([side.row.numel for side in mine], window // nbytes):
                pa, sa, pb, sb = where[tensor].T
                sides = [mine[i] for i in tensor.tolist()]
                found = first.locate(pa, sa, start, size), second.locate(pb, sb, start, size)
                yield from zip(sides, start.tolist(), size.tolist(), *found, strict=True)


def _match(
    made: Comparison, kind: str, part: str, a: tuple[Catalog, Source], b: tuple[Catalog, Source], prefix: str = ""
) -> None:
    """Matches the tensors of two parts by name; digests tell which are equal."""
    place = len(made.catalogs)
    made.catalogs.append((a, b))
    mine, theirs = _tensors(a[0]), _tensors(b[0])
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        catalog = a[0] if key in mine else b[0]
        p, s = mine.get(key) or theirs[key]
        shape, dtype = catalog.state.shape_of(p, s), catalog.state.slots[s].dtype
        row = TensorDiff(kind, part, prefix + key[0], key[1] if kind == "state" else None, dtype, shape, None)
        made.tensors.append(row)
        if key not in mine or key not in theirs:
            row.status = "added" if key in theirs else "missing"
            continue
        other = theirs[key]
        there = b[0].state.shape_of(*other), b[0].state.slots[other[1]].dtype
        digests = a[0].digests.get((p, s)), b[0].digests.get(other)
        if there != (shape, dtype):
            row.status, row.note = "changed", f": {dtype}{list(shape)} in one, {there[1]}{list(there[0])} in the other"
        elif None not in digests and digests[0] == digests[1]:
            row.status = "equal"
        else:
            row.status = None if None in digests else "changed"
            made.pending.append(_Sides(row, (place, 0), (p, s), other))


def _tensors(catalog: Catalog) -> dict[tuple[str, str], tuple[int, int]]:
    state = catalog.state
    return {
        (param.name, slot.name): (i, k)
        for i, param in enumerate(state.params)
        for k, slot in enumerate(state.slots)
        if (i, k) not in state.absent
    }


_ALL = ("shape", "dtype", "grad_dtype", "expert", "shared_embedding")
_ORDER = "order"


def _compare_extra(made: Comparison, a: Stored, b: Stored) -> None:
    """Extra state. How a Megatron run was started (its args) is told, and is no state."""
    mine, theirs = a.manifest.extra, b.manifest.extra
    if isinstance(mine, dict) and isinstance(theirs, dict) and _of_megatron(a) and _of_megatron(b):
        for value in value_diffs(mine.get("args"), theirs.get("args"), "extra.args"):
            made.notices.append(Finding("different_args", str(value)))
        mine, theirs = ({key: value for key, value in side.items() if key != "args"} for side in (mine, theirs))
    made.walk("different_extra", mine, theirs, "extra")


def _of_megatron(stored: Stored) -> bool:
    return stored.megatron is not None or any(stored.carried_files())


def _stated_by(a: Stored, b: Stored, part: str) -> frozenset[str]:
    """What both sides say of a part's params: in model space Megatron states no order and no buffers, and which params
    have a bucket of their own is derived.
    """
    megatron = [side.megatron for side in (a, b) if side.megatron is not None]
    if any(checkpoint.parts[part].layout is None for checkpoint in megatron):
        return frozenset(("shape", "dtype"))
    return frozenset((*_ALL, _ORDER)) - ({"shared_embedding"} if megatron else set())


def _compare_weights(made: Comparison, a: Stored, b: Stored) -> None:
    """The model's own tensors, where both are Megatron checkpoints."""
    if a.megatron is None and b.megatron is None:
        return
    if a.megatron is None or b.megatron is None or a.by_rank != b.by_rank:
        what = "main params only" if a.megatron is None or b.megatron is None else "them by rank"
        message = f"the model's own weights were not compared: one side has {what}"
        made.notices.append(Finding("weights_not_compared", message))
        return
    _match(
        made,
        "model",
        "",
        (weights_catalog(a.megatron), a.megatron.source),
        (weights_catalog(b.megatron), b.megatron.source),
    )


def _compare_carried(made: Comparison, a: Stored, b: Stored) -> None:
    """What native checkpoints keep of foreign ones."""
    if a.megatron is not None or b.megatron is not None:
        return
    mine, theirs = ({entry.path: entry for entry in side.carried_files()} for side in (a, b))
    for path in sorted(mine.keys() | theirs.keys()):
        if mine.get(path) != theirs.get(path):
            where = "differs" if path in mine and path in theirs else "is only in one"
            made.others.append(Finding("different_carried", f"{path} {where}", file=path))


def _compare_states(made: Comparison, part: str, a: PartState, b: PartState, *, known: frozenset[str]) -> None:
    if a.step != b.step:
        made.found("different_step", f"step is {a.step} in one and {b.step} in the other", part)
    if a.loss_scale != b.loss_scale:
        scales = f"{a.loss_scale} in one and {b.loss_scale} in the other"
        made.found("different_loss_scale", f"the dynamic loss scale is {scales}", part)
    common = [name for name in a.index if name in b.index]
    if _ORDER in known and common != [name for name in b.index if name in a.index]:
        made.found("different_order", "the params are registered in another order", part)
    for name in common:
        _compare_params(made, part, name, a, b, known)
    _compare_groups(made, part, a, b)


def _compare_params(made: Comparison, part: str, name: str, a: PartState, b: PartState, known: frozenset[str]) -> None:
    mine, theirs = a.params[a.index[name]], b.params[b.index[name]]
    for key in (key for key in _ALL if key in known):
        own, other = getattr(mine, key), getattr(theirs, key)
        if own != other:
            made.found("different_param", f"{name}: {key} is {own} in one and {other} in the other", part, name)
    scalars, others = a.scalars_of(a.index[name]), b.scalars_of(b.index[name])
    for slot in sorted(scalars.keys() | others.keys()):
        own, other = scalars.get(slot), others.get(slot)
        if repr(own) != repr(other):
            texts = [f"{s.value} ({s.dtype})" if s else "not there" for s in (own, other)]
            message = f"{name}: {slot} is {texts[0]} in one and {texts[1]} in the other"
            made.found("different_scalar", message, part, name, slot)


def _compare_groups(made: Comparison, part: str, a: PartState, b: PartState) -> None:
    """Groups are the same by their members; those that are left are paired by how many they have in common."""
    mine, theirs = _members(a), _members(b)
    pairs = _pair_groups(mine, theirs)
    for i in sorted(set(range(len(mine))) - pairs.keys()):
        made.found("missing_group", f"group {i} {_some(mine[i])} is only in the first", part)
    for j in sorted(set(range(len(theirs))) - set(pairs.values())):
        made.found("added_group", f"group {j} {_some(theirs[j])} is only in the second", part)
    if list(pairs.values()) != sorted(pairs.values()):
        made.found("different_order", "the groups are in another order", part)
    for i, j in pairs.items():
        moved = [name for name in mine[i] if name in b.index and name not in theirs[j]]
        if moved:
            made.found("different_membership", f"group {i} has {_some(moved)} in the first only", part, moved[0])
        moved = [name for name in theirs[j] if name in a.index and name not in mine[i]]
        if moved:
            made.found("different_membership", f"group {j} has {_some(moved)} in the second only", part, moved[0])
        made.walk("different_groups", dict(a.groups[i]), dict(b.groups[j]), f"groups[{i}]", part, f"{_some(mine[i])}: ")


def _members(state: PartState) -> list[dict[str, None]]:
    members: list[dict[str, None]] = [{} for _ in state.groups]
    for param in state.params:
        members[param.group][param.name] = None
    return members


def _pair_groups(a: Sequence[Mapping[str, None]], b: Sequence[Mapping[str, None]]) -> dict[int, int]:
    pairs: dict[int, int] = {}
    for exact in (True, False):
        for i, members in enumerate(a):
            common = {j: len(members.keys() & b[j].keys()) for j in set(range(len(b))) - set(pairs.values())}
            found = [j for j in sorted(common) if (members.keys() == b[j].keys() if exact else common[j])]
            if found and i not in pairs:
                pairs[i] = max(found, key=common.__getitem__)
    return dict(sorted(pairs.items()))


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 1} more" if len(listed) > 1 else ""
    return f"({listed[0]}{more})" if listed else "(no params)"


def _compare_file(made: Comparison, a: Stored, b: Stored, key: str, kind: str, prefix: str = "") -> None:
    """Tensors beside the state. Of extra state, what is in one only was found by the place that refers to it."""
    if a.files.get(key) == b.files.get(key):
        return
    kinds = {entry.name: entry.kind for side in (a, b) for entry in side.manifest.model}
    found = [file_catalog(side, key, kinds if kind == "model" else {}, kind) for side in (a, b)]
    known = next(side for side in found if side is not None)
    empty = replace(known[0], state=PartState((), ()), digests={})
    first, second = (side or (empty, known[1]) for side in found)
    before = len(made.tensors)
    _match(made, kind, "", first, second, prefix)
    if kind != "model":
        made.tensors[before:] = [row for row in made.tensors[before:] if row.status not in ("missing", "added")]


def _compare_ranks(made: Comparison, a: Stored, b: Stored) -> None:
    ranks = [0 if s.manifest.rank_extra is None else s.manifest.rank_extra.ranks for s in (a, b)]
    if ranks[0] != ranks[1]:
        message = f"rank-bound state is of {ranks[0]} ranks in one and of {ranks[1]} in the other"
        made.found("different_rank_extra", message)
        return
    for rank in range(ranks[0]):
        key = rank_extra_file(rank, ranks[0])
        if a.files.get(key) != b.files.get(key):
            first, second = (_metadata(side, key) for side in (a, b))
            made.walk("different_rank_extra", first, second, f"rank {rank}")
            _compare_file(made, a, b, key, "rank_extra", f"rank {rank}: ")


def _metadata(stored: Stored, key: str) -> Json:
    """What a file says of its tensors; rank-bound state is JSON there."""
    entry = stored.files.get(key)
    if entry is None:
        return {}
    found = check_tensor_file(stored.store, entry).metadata
    return {name.removeprefix("zero1ckpt."): json.loads(text) for name, text in sorted(found.items())}
