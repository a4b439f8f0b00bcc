"""Calm colours for params, each in two shades so that neighbouring ranks differ. Pure."""

from __future__ import annotations

__all__ = ["ink", "shade"]

# (even ranks, odd ranks): distinct in hue and in lightness, so that they differ for colour-blind readers too.
_SHADES = (
    ("#7aa6c9", "#6390b5"),
    ("#e0b36a", "#cb9d53"),
    ("#8fb58a", "#789f73"),
    ("#b79ac0", "#a184ab"),
    ("#d9907f", "#c37a69"),
    ("#8cc0ba", "#75aaa4"),
    ("#c9c07c", "#b3aa66"),
    ("#a8a8b3", "#92929d"),
)


def shade(index: int, odd: bool) -> str:
    """Background of the ``index``-th param, on an even or odd rank."""
    return _SHADES[index % len(_SHADES)][odd]


def ink(index: int) -> str:
    """A text colour that is readable on it."""
    return "#1c1c22"
