"""The keywords of the optimizer, checked; those whose feature is not part of this version are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.errors import UnsupportedError, UsageError
from ..core.layout import LayoutRules, default_bucket_size

__all__ = ["EngineOptions", "layout_rules", "refuse_unsupported"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What decides the layout and the step, besides the params and the inner optimizer.

    ``bucket_size``: elements, None for the default rule, "none" for one bucket a buffer. Both overlap options decide
    when messages are sent and never what a step computes; ``overlap_grad_reduce`` also chooses the default bucket size.
    """

    bucket_size: int | str | None = None
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    unused: str = "zero"

    def __post_init__(self) -> None:
        size = self.bucket_size
        if isinstance(size, bool) or not (size is None or size == "none" or (isinstance(size, int) and size >= 1)):
            raise UsageError("bucket_size", found=repr(size), expected="a number of elements from 1, None or 'none'")
        if self.unused not in ("zero", "skip"):
            raise UsageError("unused", found=repr(self.unused), expected="'zero' or 'skip'")


def layout_rules(options: EngineOptions, dp_size: int) -> LayoutRules:
    """Pure."""
    size = options.bucket_size
    if size is None:
        size = default_bucket_size(dp_size) if options.overlap_grad_reduce else "none"
    return LayoutRules(dp_size, size if isinstance(size, int) else None)


def refuse_unsupported(**given: tuple[Any, Any]) -> None:
    """Each keyword with (value, default): raise ``UnsupportedError`` for the first that is set."""
    for name, (value, default) in given.items():
        if value != default:
            raise UnsupportedError(
                f"{name} is not supported in this version", found=repr(value), expected=repr(default)
            )
