"""NaN or infinity in state.

*How it arises.* An overflow that no loss scaler caught, a bad node, uninitialised memory written as state.
*What it looks like.* A value of a slot is no finite number. Not in padding: that belongs to no param.
*Whether it can be mended.* No: what the value was is in no file. Go back to an earlier checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .subject import Damage, Subject, View, bad_values

__all__ = ["KIND", "detect"]

KIND = "nonfinite"


def detect(subject: Subject, view: View) -> Iterator[Damage]:
    for slot, values in view.slots.items():
        bad = ~np.isfinite(values)
        if bad.any():
            yield bad_values(subject, view, KIND, slot, bad, "NaN or infinite")
