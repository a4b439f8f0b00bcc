"""Moments in another dtype than the rest.

*How it arises.* An optimizer that keeps its state in few bits, or a conversion that cast one slot.
*What it looks like.* Slots of one part have different dtypes. Optimizers do that on purpose too: a notice.
*Whether it can be mended.* It needs no mending where the optimizer that loads it keeps the same dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator

from .subject import Damage, Subject

__all__ = ["KIND", "detect"]

KIND = "moment_dtypes"


def detect(subject: Subject) -> Iterator[Damage]:
    kinds = set(subject.dtypes.values())
    if len(kinds) > 1:
        shown = ", ".join(f"{slot} {dtype}" for slot, dtype in subject.dtypes.items())
        yield Damage(KIND, f"slots have different dtypes: {shown}", False, subject.part)
