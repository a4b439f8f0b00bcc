"""Counts of updates that are missing or do not agree.

*How it arises.* Groups of other checkpoints put together, or a writer that drops ``step``.
*What it looks like.* A group or a part states no step, or another than the rest. Adam corrects its moments by it.
*Whether it can be mended.* Not from the file alone: the right count is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .subject import Damage, Subject

__all__ = ["KIND", "detect"]

KIND = "step"


def detect(subjects: Sequence[Subject]) -> Iterator[Damage]:
    for subject in subjects:
        if any(step is None for step in subject.steps):
            yield Damage(KIND, _of(subject, "a group states no step"), True, subject.part)
    stated = {subject.part: {step for step in subject.steps if step is not None} for subject in subjects}
    known = set().union(*stated.values()) if stated else set()
    if len(known) > 1:
        shown = ", ".join(f"{step:g}" for step in sorted(known))
        yield Damage(KIND, f"groups state different steps: {shown}", True)


def _of(subject: Subject, what: str) -> str:
    return f"part {subject.part}: {what}" if subject.part else what
