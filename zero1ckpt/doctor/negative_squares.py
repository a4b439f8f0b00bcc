"""Second moments below zero.

*How it arises.* Bit errors, or bytes of something else where the second moment should lie.
*What it looks like.* ``exp_avg_sq`` is a mean of squares; a value of it is negative.
*Whether it can be mended.* No. An optimizer makes NaN of it in its next step.
"""

from __future__ import annotations

from collections.abc import Iterator

from .subject import Damage, Subject, View, ranges, some_ranges

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
            rows = ranges(bad)
            message = f"{view.param.name}: {slot}: {int(bad.sum())} of {values.size} values are negative"
            yield Damage(
                KIND,
                f"{message}: {some_ranges(rows)}",
                True,
                subject.part,
                view.param.name,
                slot,
                rows[0],
                mends="cannot be mended: restore an earlier checkpoint",
            )
