"""Main params that were made anew from the weights.

*How it arises.* A resume without optimizer state, or a conversion of weights alone: each main param is its bfloat16
weight, and the bits below are lost.
*What it looks like.* After an update the main params of bfloat16 weights have bits that bfloat16 has no room for. Here
no param has any, though updates were made. Before the first update it is as it should be: a notice.
*Whether it can be mended.* No, and training goes on; it has lost what the main params were for, once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .casts import exact_in_bfloat16
from .subject import Damage, Subject, View

__all__ = ["KIND", "Rebuilt"]

KIND = "rebuilt_main_params"
_LEAST = 64
_FIRST_STEPS = 1
"""Warm-up may begin with a learning rate of zero: the first update then changes nothing."""


class Rebuilt:
    """Looks at the params of one part, one after the other, and answers at the end."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.exact: list[str] = []
        self.other = False

    def look(self, view: View) -> None:
        values = view.slots.get("fp32_param")
        if values is None or view.param.dtype != "bfloat16" or values.size < _LEAST:
            return
        if not exact_in_bfloat16(values):
            self.other = True
        elif len(np.unique(values)) > 1:
            self.exact.append(view.param.name)

    def answer(self) -> Sequence[Damage]:
        if self.other or not self.exact:
            return []
        step, lrs = self.subject.step or 0, self.subject.lrs
        updated = step > _FIRST_STEPS and (not lrs or any(lrs))
        what = (
            f"every main param is its bfloat16 weight, after {step} updates"
            if updated
            else (f"every main param is its bfloat16 weight, as is right at step {step}")
        )
        return [
            Damage(
                KIND,
                f"{what}: {self.exact[0]} and {len(self.exact) - 1} more",
                updated,
                self.subject.part,
                slot="fp32_param",
                mends="cannot be mended: the lost bits are in no file" if updated else "",
            )
        ]
