"""Two loss curves side by side, and whether they are the same run. Pure, but for printing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

__all__ = ["Comparison", "compare", "show"]

SHARE = 2**-10
"""The bound: a resumed loss may differ by this share of the loss.

A bf16 number is rounded by up to 2**-9 of its size. Another number of ranks adds up other parts of each batch first,
and what that changes stays about eight times below the bound for ``_STEPS`` steps. A checkpoint that forgot the step
count, its moments or the schedule leaves it: by factors of 7, 57 and 2.
"""
_STEPS = 40
_BARS = "▁▂▃▄▅▆▇█"
_ROWS, _WIDTH = 12, 60


@dataclass(frozen=True)
class Comparison:
    """The steps that both runs did, from ``first`` on."""

    first: int
    uninterrupted: tuple[float, ...]
    resumed: tuple[float, ...]
    share: float

    @property
    def differences(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.uninterrupted, self.resumed, strict=True)]

    @property
    def worst(self) -> int:
        """Index of the step that comes nearest to its bound."""
        shares = [d / bound for d, bound in zip(self.differences, self.bounds, strict=True)]
        return max(range(len(shares)), key=shares.__getitem__)

    @property
    def bounds(self) -> list[float]:
        return [abs(loss) * self.share for loss in self.uninterrupted]

    @property
    def holds(self) -> bool:
        """Not so where a loss is not a number."""
        return all(d <= bound for d, bound in zip(self.differences, self.bounds, strict=True))


def compare(uninterrupted: Sequence[float], resumed: Sequence[float], first: int) -> Comparison:
    """``uninterrupted`` from step 0, ``resumed`` from step ``first``. Raises ``ValueError`` if they end apart."""
    kept = tuple(uninterrupted[first:])
    if len(kept) != len(resumed) or not kept:
        raise ValueError(f"{len(kept)} steps against {len(resumed)}")
    return Comparison(first, kept, tuple(resumed), SHARE * max(1.0, len(kept) / _STEPS))


def show(console: Console, found: Comparison, before: Sequence[float], ranks: int, to_ranks: int) -> None:
    """A table of some of the steps, both curves as lines of bars, and the verdict."""
    table = Table(title="loss", title_justify="left")
    for heading in ("step", f"uninterrupted, {ranks} ranks", f"resumed, {to_ranks} ranks", "difference", "bound"):
        table.add_column(heading, justify="right")
    count = len(found.resumed)
    for i in sorted({round(k * (count - 1) / max(_ROWS - 1, 1)) for k in range(_ROWS)} | {found.worst}):
        table.add_row(
            str(found.first + i),
            f"{found.uninterrupted[i]:.5f}",
            f"{found.resumed[i]:.5f}",
            f"{found.differences[i]:.5f}",
            f"{found.bounds[i]:.5f}",
        )
    console.print(table)
    whole = [*before, *found.uninterrupted]
    every = -(-len(whole) // _WIDTH)
    scale = _means(whole, 0, every)
    blank = " " * (found.first // every)
    console.print(f"uninterrupted  {sparkline(scale, scale)}", soft_wrap=True)
    console.print(
        f"resumed        {blank}{sparkline(_means(found.resumed, found.first, every), scale)}", soft_wrap=True
    )
    i = found.worst
    word = "within" if found.holds else "NOT within"
    console.print(
        f"largest difference {found.differences[i]:.6f} at step {found.first + i}, {word} the bound of"
        f" {found.bounds[i]:.6f} ({found.share:.2%} of the loss)",
        soft_wrap=True,
    )


def _means(values: Sequence[float], first: int, every: int) -> list[float]:
    """The mean of each ``every`` steps, counted from step 0; ``values`` start at step ``first``."""
    groups: dict[int, list[float]] = {}
    for step, value in enumerate(values, first):
        groups.setdefault(step // every, []).append(value)
    return [sum(group) / len(group) for group in groups.values()]


def sparkline(values: Sequence[float], scale: Sequence[float]) -> str:
    """One bar a value, between the least and the greatest of ``scale``; a value outside gets the nearest bar."""
    low, high = min(scale), max(scale)
    top = len(_BARS) - 1
    width = (high - low) or 1.0
    return "".join(_BARS[max(0, min(top, round((v - low) / width * top)))] if v == v else "?" for v in values)
