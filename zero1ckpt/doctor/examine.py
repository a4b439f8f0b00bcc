"""Looks at a part with all that is known: the registry of damages.

A new one is a file here, with its docstring, and a line below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from . import (
    moment_dtypes,
    negative_squares,
    nonfinite,
    rebuilt_main,
    repeated_experts,
    shifted_state,
    stale_main,
    zero_moments,
)
from . import steps as stated_steps
from .shifted_state import ShiftDiagnosis
from .subject import Damage, Subject, View

__all__ = ["OF_PARAMS", "Examination", "examine", "examine_together"]

OF_PARAMS: tuple[Callable[[Subject, View], Iterator[Damage]], ...] = (
    nonfinite.detect,
    negative_squares.detect,
    zero_moments.detect,
    repeated_experts.detect,
    stale_main.detect,
)
"""What is looked for in one param."""

_SHIFTS = ("megatron:fully_reshardable",)
"""Formats in which state may be shifted."""


@dataclass
class Examination:
    """What was found in one part, and the diagnosis from which shifted state is mended."""

    damages: list[Damage] = field(default_factory=list)
    shift: ShiftDiagnosis | None = None


def examine(subject: Subject, seen: Callable[[int], None] = lambda param: None) -> Examination:
    """Looks at every param of a part. ``seen`` is told of each. Reads all state, one param at a time."""
    found = Examination()
    stale: list[Damage] = []
    rebuilt = rebuilt_main.Rebuilt(subject)
    for index in range(len(subject.params)):
        view = _view(subject, index)
        rebuilt.look(view)
        for detect in OF_PARAMS:
            (stale if detect is stale_main.detect else found.damages).extend(detect(subject, view))
        seen(index)
    if stale and subject.format in _SHIFTS:
        found.shift = shifted_state.diagnose(subject)
        found.damages = [*shifted_state.detect(subject, found.shift), *found.damages]
        if found.shift is None:
            found.damages += shifted_state.unexplained(subject)
    explained = {subject.params[i].name for i in found.shift.affected} if found.shift is not None else set()
    found.damages += [damage for damage in stale if damage.param not in explained]
    found.damages += [*rebuilt.answer(), *moment_dtypes.detect(subject)]
    return found


def examine_together(subjects: Sequence[Subject]) -> list[Damage]:
    """What concerns all parts. Reads nothing."""
    return list(stated_steps.detect(subjects))


def _view(subject: Subject, index: int) -> View:
    arrays = {slot: subject.values.slot(index, slot) for slot in subject.slots}
    present = {slot: values for slot, values in arrays.items() if values is not None}
    return View(index, subject.params[index], present, subject.values.weight(index))
