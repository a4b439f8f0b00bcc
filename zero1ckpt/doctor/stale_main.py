"""Main params that are not the weights beside them.

*How it arises.* The weights were replaced (converted, averaged, loaded from elsewhere) and the optimizer was saved with
the main params that it had; or the state belongs to another step, or to another param.
*What it looks like.* Cast to the weight's dtype, the main param differs from the weight by more than one rounding. On
load the main params win at the next step, and the model jumps.
*Whether it can be mended.* Not by itself: which of the two is meant, only the owner knows. ``shifted_state`` is looked
for first: it has a cause that can be mended.
"""

from __future__ import annotations

from collections.abc import Iterator

from .casts import cast, ulps_apart
from .subject import Damage, Subject, View, ranges, some_ranges

__all__ = ["KIND", "ROUNDING", "detect"]

KIND = "stale_main_param"
ROUNDING = "rounding"


def detect(subject: Subject, view: View) -> Iterator[Damage]:
    values = view.slots.get("fp32_param")
    if values is None or view.weight is None:
        return
    apart = ulps_apart(cast(values, view.param.dtype), view.weight, view.param.dtype)
    far = apart > 1
    if far.any():
        rows = ranges(far)
        message = f"{int(far.sum())} of {values.size} main params are not the weight beside them: {some_ranges(rows)}"
        yield Damage(
            KIND,
            f"{view.param.name}: {message}",
            True,
            subject.part,
            view.param.name,
            "fp32_param",
            rows[0],
            mends="cannot be mended by itself: keep the weights or the main params, whichever are meant",
        )
    elif apart.any():
        count = int((apart == 1).sum())
        yield Damage(
            ROUNDING,
            f"{view.param.name}: {count} of {values.size} weights are the main param rounded another way",
            False,
            subject.part,
            view.param.name,
            "fp32_param",
        )
