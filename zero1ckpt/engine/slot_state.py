"""The inner optimizer's state, kept in shards: allocated where its start is known, else adopted once it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from ..core.errors import UnsupportedError, UsageError
from ..model.state import MAIN_PARAM, Scalar, SlotSpec
from .inner_state import InnerTemplate, known_start, scalar_of, value_of
from .params import dtype_name
from .shards import OwnedFragment, ShardStore

__all__ = ["SlotState"]


class SlotState:
    """Keeps every elementwise state tensor of ``inner`` a view of its shard, whatever the optimizer does with it.

    ``fragments[i].main`` are the inner optimizer's params. All ranks of a group hold the same slots after the same
    number of steps, also those that own only padding, since the template tells what a step makes.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        template: InnerTemplate,
        store: ShardStore,
        fragments: Sequence[OwnedFragment],
    ) -> None:
        self._inner, self._template, self._store = inner, template, store
        self._fragments = tuple(fragments)
        self._views: dict[tuple[int, str], torch.Tensor] = {}
        self._loaded: set[int] = set()
        self._start()

    # ------------------------------------------------------------------------------------------------- start and steps

    def _start(self) -> None:
        for at, group in enumerate(self._template.groups):
            known = known_start(self._inner, at, group)
            for slot, dtype in group.slots.items():
                if slot in known or slot in group.at_construction:
                    self._store.ensure(slot, dtype)
        self.adopt()
        for fragment in self._fragments:
            self._fill_known(fragment)

    def _fill_known(self, fragment: OwnedFragment, loaded: AbstractSet[str] = frozenset()) -> None:
        """Give ``fragment`` all state of a param before its first step, if it is known; less ``loaded`` slots."""
        group = self._template.groups[fragment.spec.group]
        known = known_start(self._inner, fragment.spec.group, group)
        if not known:
            return
        state = self._inner.state[fragment.main]
        for slot, value in known.items():
            if slot in group.scalars:
                state[slot] = value_of(Scalar("float64", value), group.scalars[slot])
            elif slot not in loaded:
                state[slot] = self._bind(fragment, slot, group.slots[slot]).fill_(value)

    def _bind(self, fragment: OwnedFragment, slot: str, dtype: torch.dtype) -> torch.Tensor:
        """The view of ``slot``'s shard that stands in the inner state of ``fragment``; the same one ever after."""
        key = (fragment.index, slot)
        if key not in self._views:
            self._store.ensure(slot, dtype)
            if self._store.dtype(slot) != dtype:
                raise UnsupportedError(
                    f"state {slot!r} has several dtypes",
                    param=fragment.spec.name,
                    found=dtype_name(dtype),
                    expected=dtype_name(self._store.dtype(slot)),
                )
            self._views[key] = self._store.view(slot, fragment)
        return self._views[key]

    def after_step(self) -> None:
        """Adopt what a real step has made or replaced."""
        for slot, dtype in self._template.slots.items():
            self._store.ensure(slot, dtype)
        self.adopt()

    def adopt(self) -> None:
        """Move state tensors that are not views of their shards into them. Slots that no template names come last."""
        foreign: list[tuple[str, OwnedFragment]] = []
        for fragment in self._fragments:
            for slot, value in self._state(fragment).items():
                if isinstance(value, torch.Tensor) and value is not self._views.get((fragment.index, slot)):
                    foreign.append((slot, fragment))
        known = {slot: nth for nth, slot in enumerate(self._template.slots)}
        foreign.sort(key=lambda item: (known.get(item[0], len(known)), item[0]))
        for slot, fragment in foreign:
            self._adopt_one(slot, fragment)

    def _adopt_one(self, slot: str, fragment: OwnedFragment) -> None:
        state = self._inner.state[fragment.main]
        value = state[slot]
        group = self._template.groups[fragment.spec.group]
        if value.dim() == 0 and slot not in group.slots:
            return
        if value.shape != fragment.main.shape:
            raise UnsupportedError(
                f"state {slot!r} has another shape than the param's part",
                param=fragment.spec.name,
                found=tuple(value.shape),
                expected=tuple(fragment.main.shape),
            )
        with torch.no_grad():
            state[slot] = self._bind(fragment, slot, value.dtype).copy_(value)

    def _state(self, fragment: OwnedFragment) -> Mapping[str, Any]:
        """Without making an entry: optimizers ask "p in self.state" before they initialise one."""
        state: Mapping[str, Any] = self._inner.state.get(fragment.main, {})
        return state

    # ---------------------------------------------------------------------------------------------------- what there is

    def slot_specs(self) -> tuple[SlotSpec, ...]:
        """``fp32_param``, the template's slots in the optimizer's order, then others by name."""
        order = {slot: nth for nth, slot in enumerate([MAIN_PARAM, *self._template.slots])}
        return tuple(sorted(self._store.slots, key=lambda spec: (order.get(spec.name, len(order)), spec.name)))

    def expected_specs(self) -> tuple[SlotSpec, ...]:
        """``slot_specs``, and the slots that the optimizer's first step will make."""
        known = {spec.name: spec.dtype for spec in self.slot_specs()}
        known.update({slot: dtype_name(dtype) for slot, dtype in self._template.slots.items() if slot not in known})
        return tuple(SlotSpec(name, dtype) for name, dtype in known.items())

    def scalars(self) -> dict[int, dict[str, Scalar]]:
        """Scalar state by param index, for the params that this rank owns a part of."""
        return {f.index: self._scalars_of(f) for f in self._fragments}

    def _scalars_of(self, fragment: OwnedFragment) -> dict[str, Scalar]:
        state = self._state(fragment)
        return {
            slot: scalar_of(slot, value)
            for slot, value in state.items()
            if value is not None and (fragment.index, slot) not in self._views
        }

    def scalar_samples(self, fragment: OwnedFragment) -> Mapping[str, Any]:
        """Scalars that the param of ``fragment`` has after a step, each with a value of its type."""
        return self._template.groups[fragment.spec.group].scalars

    def absent(self) -> set[tuple[int, str]]:
        """(param index, slot) of owned params without a value in an elementwise slot of ``slot_specs``."""
        slots = [spec.name for spec in self._store.slots if spec.name != MAIN_PARAM]
        return {
            (f.index, slot)
            for f in self._fragments
            for slot in slots
            if not isinstance(self._state(f).get(slot), torch.Tensor)
        }

    # --------------------------------------------------------------------------------------------------------- loading

    def check_load(self, slots: Sequence[SlotSpec], scalars: Sequence[Mapping[str, Scalar]]) -> None:
        """Raise for what cannot be loaded; changes nothing."""
        for spec in slots:
            self._check_slot(spec)
        for fragment in self._fragments:
            self._check_scalars(fragment, scalars)

    def begin_load(
        self,
        slots: Sequence[SlotSpec],
        absent: AbstractSet[tuple[int, str]],
        scalars: Sequence[Mapping[str, Scalar]],
        only: AbstractSet[int] | None = None,
    ) -> None:
        """Make room for ``slots`` and put ``scalars[param index]`` in; see ``Zero1Optimizer.begin_load``."""
        self.check_load(slots, scalars)
        for spec in slots:
            if spec.name != MAIN_PARAM:
                self._store.ensure(spec.name, self._known_dtype(spec.name))
        names = [spec.name for spec in slots if spec.name != MAIN_PARAM]
        self._loaded -= self._loaded if only is None else only
        for fragment in self._fragments:
            if only is not None and fragment.index not in only:
                continue
            present = [slot for slot in names if (fragment.index, slot) not in absent]
            self._clear(fragment, frozenset(present))
            given = scalars[fragment.index] if scalars else {}
            if present:
                self._loaded.add(fragment.index)
            if present or given:
                self._install(fragment, present, given)

    def _known_dtype(self, slot: str) -> torch.dtype:
        dtype = self._template.slots.get(slot)
        return self._store.dtype(slot) if dtype is None else dtype

    def _check_slot(self, spec: SlotSpec) -> None:
        if spec.name not in self._store and spec.name not in self._template.slots:
            raise UnsupportedError(
                f"{self._template.name} has no state {spec.name!r}",
                expected=", ".join([MAIN_PARAM, *self._template.slots]),
                hint="use the optimizer that wrote the state, or drop what is unexpected",
            )
        expected = dtype_name(self._known_dtype(spec.name))
        if spec.dtype != expected:
            raise UnsupportedError(f"state {spec.name!r} would be cast", found=spec.dtype, expected=expected)

    def _check_scalars(self, fragment: OwnedFragment, scalars: Sequence[Mapping[str, Scalar]]) -> None:
        known = self._template.groups[fragment.spec.group].scalars
        for slot, scalar in (scalars[fragment.index] if scalars else {}).items():
            if slot not in known and slot not in self._scalars_of(fragment):
                raise UnsupportedError(
                    f"{self._template.name} has no scalar state {slot!r}",
                    param=fragment.spec.name,
                    expected=", ".join(known) or "none",
                )
            value_of(scalar, known.get(slot))

    def _clear(self, fragment: OwnedFragment, loaded: AbstractSet[str]) -> None:
        """Back to the state before the first step: the known start, or nothing and zero in the shards.

        What the inner optimizer makes from the param when it is constructed cannot be made again, and stays. The
        memory of ``loaded`` slots is not touched: every byte of it is about to be written.
        """
        early = self._template.groups[fragment.spec.group].at_construction
        kept = {slot for slot, value in early.items() if value is None}
        for spec in self._store.slots:
            if spec.name != MAIN_PARAM and spec.name not in kept and spec.name not in loaded:
                self._store.view(spec.name, fragment).zero_()
        if fragment.main in self._inner.state:
            state = self._inner.state[fragment.main]
            for slot in [slot for slot in state if slot not in kept]:
                del state[slot]
        self._fill_known(fragment, loaded)

    def _install(self, fragment: OwnedFragment, slots: Sequence[str], scalars: Mapping[str, Scalar]) -> None:
        group = self._template.groups[fragment.spec.group]
        state = self._inner.state[fragment.main]
        for slot, scalar in scalars.items():
            state[slot] = value_of(scalar, group.scalars.get(slot))
        for slot in slots:
            state[slot] = self._bind(fragment, slot, self._known_dtype(slot))

    def fill_missing_step(self, step: int, given: Sequence[Mapping[str, Scalar]]) -> None:
        """Give ``step`` to params that were loaded without a ``step`` of their own (one for the whole run)."""
        for fragment in self._fragments:
            sample = self._template.groups[fragment.spec.group].scalars.get("step")
            if sample is None or fragment.index not in self._loaded or (given and "step" in given[fragment.index]):
                continue
            self._inner.state[fragment.main]["step"] = value_of(Scalar("int64", step), sample)


def require_same_length(groups: Sequence[Mapping[str, Any]], count: int) -> None:
    """Raise ``UsageError`` unless there are ``count`` groups."""
    if len(groups) != count:
        raise UsageError("param groups differ in number", found=len(groups), expected=count)
