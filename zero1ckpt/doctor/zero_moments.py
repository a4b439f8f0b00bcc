"""Moments that are zero where they cannot be, or in whole stretches.

*How it arises.* A file with a hole, a copy that broke off, an optimizer that was loaded without its state.
*What it looks like.* ``exp_avg`` is not zero and ``exp_avg_sq`` is: the mean of a gradient without that of its square.
Zeros in both, or one value all along, may be right: a row of an embedding, or an expert, that no token reached.
*Whether it can be mended.* The contradiction cannot; zeros in both are what a new optimizer begins with.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .subject import Array, Damage, Subject, View, ranges, some_ranges

__all__ = ["KIND", "STRETCH", "detect"]

KIND = "zero_moments"
STRETCH = "constant_range"
_SQUARE_UNDERFLOWS = 1e-15
"""A mean of gradients above this has squares whose mean float32 can hold, whatever the usual betas."""
_LONG = 1024


def detect(subject: Subject, view: View) -> Iterator[Damage]:
    first, second = view.slots.get("exp_avg"), view.slots.get("exp_avg_sq")
    if first is not None and second is not None:
        yield from _contradictions(subject, view, first, second)
    if subject.step:
        for slot, values in view.slots.items():
            if slot.startswith("exp_avg"):
                yield from _stretches(subject, view, slot, values.reshape(-1))


def _contradictions(subject: Subject, view: View, first: Array, second: Array) -> Iterator[Damage]:
    bad = (np.abs(first) > _SQUARE_UNDERFLOWS) & (second == 0) & np.isfinite(first)
    if bad.any():
        rows = ranges(bad)
        message = f"exp_avg_sq is zero where exp_avg is not, in {int(bad.sum())} of {first.size} elements"
        yield Damage(
            KIND,
            f"{view.param.name}: {message}: {some_ranges(rows)}",
            True,
            subject.part,
            view.param.name,
            "exp_avg_sq",
            rows[0],
            mends="cannot be mended: restore an earlier checkpoint",
        )


def _stretches(subject: Subject, view: View, slot: str, flat: Array) -> Iterator[Damage]:
    """Long runs of one value, beside others."""
    if flat.size <= _LONG or (flat == flat[0]).all():
        return
    rows = [(low, high + 1) for low, high in ranges(flat[1:] == flat[:-1]) if high + 1 - low >= _LONG]
    if rows:
        share = sum(high - low for low, high in rows) / flat.size
        message = f"{slot} is one value all along for {share:.1%} of it: {some_ranges(rows)}"
        yield Damage(
            STRETCH,
            f"{view.param.name}: {message}; right where no gradient came",
            False,
            subject.part,
            view.param.name,
            slot,
            rows[0],
        )
