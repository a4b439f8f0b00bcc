"""Second moments below zero.

*How it arises.* Bit errors, or bytes of something else where the second moment should lie.
*What it looks like.* ``exp_avg_sq`` is a mean of squares; a value of it is negative.
*Whether it can be mended.* No. An optimizer makes NaN of it in its next step.
"""

from __future__ import annotations

from collections.abc import Iterator

from .subject import Damage, Subject, View, bad_values

__all__ = ["KIND", "detect"]

KIND = "negative_squares"
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq")


def detect(subject: Subject, view: View) -> Iterator[Damage]:
    for slot in _SQUARES:
        values = view.slots.get(slot)
        if values is None:
            continue
        bad = values < 0
        if bad.any():
            yield bad_values(subject, view, KIND, slot, bad, "negative")
