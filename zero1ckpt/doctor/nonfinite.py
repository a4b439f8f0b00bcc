"""NaN or infinity in state.

*How it arises.* An overflow that no loss scaler caught, a bad node, uninitialised memory written as state.
*What it looks like.* A value of a slot is no finite number. Not in padding: that belongs to no param.
*Whether it can be mended.* No: what the value was is in no file. Go back to an earlier checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .subject import Damage, Subject, View, ranges, some_ranges

__all__ = ["KIND", "detect"]

KIND = "nonfinite"


def detect(subject: Subject, view: View) -> Iterator[Damage]:
    for slot, values in view.slots.items():
        bad = ~np.isfinite(values)
        if bad.any():
            rows = ranges(bad)
            message = f"{view.param.name}: {slot}: {int(bad.sum())} of {values.size} values are NaN or infinite"
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
