"""Keeps modules from reading params that are still being gathered.

Two nets, since each has holes that the other closes:

- A forward pre-hook on every module that holds params waits for their buckets. It is there for modules that keep other
  references to their params (``nn.LSTM``'s flat weights), and is all that a module under ``torch.compile`` would have.
- While a gather is in flight, the module's dict of params is a ``_Guarded`` one, which waits when a param is read:
  ``nn.MultiheadAttention`` reads ``out_proj.weight`` and a tied head reads ``embedding.weight`` without running that
  module; ``state_dict()``, ``parameters()``, ``functional_call``, ``copy.deepcopy`` and pickling read through it too.

torch.compile bakes hooks in when it traces, and reads the dict in its own way. So the hook, which dynamo evaluates as
it traces, notes the module as compiled and leaves nothing in the graph; the buckets of compiled modules are waited for
in ``step()``. What was traced before the hooks were there is traced again (``torch._dynamo.reset``).

What reads a param through a reference that it took before is not seen: ``optimizer.wait_for_params()`` is for that, and
``ParamGatherer.check_arrival`` finds it in the backward pass.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, finalize, ref

import torch
from torch import nn

from .overlap_params import ParamGatherer
from .param_places import ParamPlaces, Place

__all__ = ["ParamGuard"]


class ParamGuard:
    """Hooks on the modules of ``places`` for as long as it lives; guarded dicts from ``arm`` until all is gathered."""

    def __init__(self, places: ParamPlaces, gatherer: ParamGatherer) -> None:
        self._places, self._gatherer = places, gatherer
        self._revision = -1
        self._tracked: list[_Tracked] = []
        self._at: dict[int, list[_Tracked]] = {}
        self._compiled: set[int] = set()
        self._handles: list[Any] = []
        self._token = next(_TOKENS)
        _GUARDS[self._token] = self
        self._cleanup = finalize(self, _remove, self._handles)
        gatherer.on_gathered = self._on_gathered
        self._follow()
        _forget_traces()

    def _follow(self) -> None:
        """Hook the modules that hold params now."""
        if self._revision == self._places.revision:
            return
        self._revision = self._places.revision
        _remove(self._handles)
        self._tracked = [_Tracked(place, self._positions(place)) for place in self._places.places]
        self._at = {}
        for number, tracked in enumerate(self._tracked):
            for position in tracked.positions:
                self._at.setdefault(position, []).append(tracked)
            module = tracked.place.module()
            if module is not None:
                hook = _NeedHook(ref(self), self._token, number)
                self._handles.append(module.register_forward_pre_hook(hook))

    def _positions(self, place: Place) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._gatherer.position[index] for index in place.params.values()))

    # ------------------------------------------------------------------------------------------------ from step to use

    def arm(self) -> None:
        """Gathers have been launched: guard what is in flight, wait for what cannot be guarded."""
        self._follow()
        self._gatherer.need(sorted(self._compiled))
        held = {index for tracked in self._tracked for index in tracked.place.params.values()}
        self._gatherer.need([p for index, p in enumerate(self._gatherer.position) if index not in held])
        for tracked in self._tracked:
            if not tracked.arm(self):
                self._gatherer.need(tracked.positions)

    def _on_gathered(self, position: int) -> None:
        for tracked in self._at.get(position, ()):
            tracked.waiting.discard(position)
            tracked.disarm()

    def need(self, number: int) -> None:
        """Module ``number`` is about to read its params."""
        if self._gatherer.in_flight:
            self._gatherer.need(self._tracked[number].positions)

    def found_compiled(self, number: int) -> None:
        """Module ``number`` is being traced: its compiled code will not ask."""
        self._compiled.update(self._tracked[number].positions)
        self.need(number)

    def close(self) -> None:
        """Remove everything from the model."""
        self._gatherer.wait_all()
        self._cleanup()
        self._tracked, self._at = [], {}


class _Tracked:
    """One place, and its dict of params while a bucket of it is in flight."""

    def __init__(self, place: Place, positions: tuple[int, ...]) -> None:
        self.place, self.positions = place, positions
        self.waiting: set[int] = set()
        self._guarded: _Guarded | None = None

    def arm(self, guard: ParamGuard) -> bool:
        """False where the module cannot be guarded."""
        module = self.place.module()
        if module is None:
            return True
        self.waiting = {position for position in self.positions if guard._gatherer.is_pending(position)}
        if not self.waiting:
            return True
        plain: Any = module.__dict__.get("_parameters")
        if type(plain) not in (dict, OrderedDict):
            return False
        self._guarded = _Guarded(plain, lambda: guard._gatherer.need(self.positions))
        module.__dict__["_parameters"] = self._guarded
        return True

    def disarm(self) -> None:
        if self._guarded is None or self.waiting:
            return
        module = self.place.module()
        guarded, self._guarded = self._guarded, None
        if module is not None and module.__dict__.get("_parameters") is guarded:
            module.__dict__["_parameters"] = guarded.plain


class _Guarded(dict[str, Any]):
    """Stands for ``plain`` and waits before a value is read. Writes go to ``plain`` too.

    It keeps the engine alive while it stands: an optimizer that is dropped with gathers in flight leaves no torn model.
    """

    def __init__(self, plain: dict[str, Any], wait: Callable[[], None]) -> None:
        super().__init__(plain)
        self.plain, self._wait = plain, wait

    def _now(self) -> dict[str, Any]:
        self._wait()
        return self.plain

    def __getitem__(self, key: str) -> Any:
        return self._now()[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self._now().get(key, default)

    def values(self) -> Any:
        return self._now().values()

    def items(self) -> Any:
        return self._now().items()

    def copy(self) -> dict[str, Any]:
        return self._now().copy()

    def pop(self, key: str, *default: Any) -> Any:
        super().pop(key, None)
        return self._now().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        super().popitem()
        return self._now().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        super().setdefault(key, default)
        return self._now().setdefault(key, default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.plain[key] = value

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        del self.plain[key]

    def clear(self) -> None:
        super().clear()
        self.plain.clear()

    def __iter__(self) -> Iterator[str]:  # without one of its own, dict(self) copies the values unseen
        return iter(self.plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self._now(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.plain), (list(self._now().items()),)


class _NeedHook:
    """The forward pre-hook of one module. A copy or pickle of the module gets one that does nothing."""

    def __init__(self, guard: ref[ParamGuard], token: int, number: int) -> None:
        self._guard, self._token, self._number = guard, token, number

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            _traced(self._token, self._number)
            return
        guard = self._guard()
        if guard is not None:
            guard.need(self._number)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[nn.Module, Any], Any]:
        return _do_nothing

    def __reduce__(self) -> Any:
        return getattr, ({}, "get")  # called with (module, args) it returns args; needs no import when unpickled


def _do_nothing(module: nn.Module, args: Any) -> None:
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # has no types
def _traced(token: int, number: int) -> bool:
    """Run by dynamo while it traces, once, and not part of the graph."""
    guard = _GUARDS.get(token)
    if guard is not None:
        guard.found_compiled(number)
    return True


_TOKENS = count()
_GUARDS: WeakValueDictionary[int, ParamGuard] = WeakValueDictionary()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _forget_traces() -> None:
    """Compiled code does not look whether hooks were added since it was traced."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
