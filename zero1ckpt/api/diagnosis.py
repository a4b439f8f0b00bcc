"""What ``doctor`` answers, and what it says of a mended copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..doctor.examine import Examination
from ..doctor.subject import Damage, Subject
from .stored import Stored
from .verification import Finding

__all__ = ["Diagnosis", "Mending"]


@dataclass(frozen=True, slots=True)
class Mending:
    """What was written to ``path``: counts of elements, over all slots, and where each came from.

    ``moved``: put back from another place. ``from_weights``: main params that are their weight, rounded to its dtype.
    ``zeroed``: moments that are lost and set to zero. Rows are (part, param, slot, ranges).
    """

    path: Path
    moved: int
    from_weights: int
    zeroed: int
    restored_rows: tuple[tuple[str, str, str, tuple[tuple[int, int], ...]], ...] = ()
    zeroed_rows: tuple[tuple[str, str, str, tuple[tuple[int, int], ...]], ...] = ()


@dataclass
class Diagnosis:
    """The answer of ``diagnose``: true where nothing is damaged. ``mends``: what mending would cost, a line each."""

    findings: list[Finding] = field(default_factory=list)
    notices: list[Finding] = field(default_factory=list)
    mends: list[str] = field(default_factory=list)
    mendable: list[str] = field(default_factory=list)
    examinations: dict[str, Examination] = field(default_factory=dict)
    subjects: dict[str, Subject] = field(default_factory=dict)
    stored: Stored | None = None

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def add(self, damages: Sequence[Damage]) -> None:
        for damage in damages:
            finding = Finding(
                damage.kind, damage.message, damage.part, damage.param, damage.slot, damage.range, damage.file
            )
            (self.findings if damage.grave else self.notices).append(finding)
            if damage.mends and damage.mends not in self.mends:
                self.mends.append(damage.mends)
