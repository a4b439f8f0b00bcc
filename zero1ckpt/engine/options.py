"""The keywords of the optimizer, checked, and the layout that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import UnsupportedError, UsageError
from ..core.layout import Layout, LayoutRules, default_bucket_size, layout_params
from ..model.state import ParamSpec
from .experts import expert_layout
from .grad_scaler import make_scaler
from .reductions import REDUCTIONS

__all__ = ["EngineOptions", "check_elementwise_option", "choose_layout", "layout_rules"]


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
    reduce: str = "mean"
    loss_scale: Any = None
    max_grad_norm: float | None = None
    align_param_gather: bool = True
    offload: bool = False

    def __post_init__(self) -> None:
        size = self.bucket_size
        if isinstance(size, bool) or not (size is None or size == "none" or (isinstance(size, int) and size >= 1)):
            raise UsageError("bucket_size", found=repr(size), expected="a number of elements from 1, None or 'none'")
        if self.unused not in ("zero", "skip"):
            raise UsageError("unused", found=repr(self.unused), expected="'zero' or 'skip'")
        if self.reduce not in REDUCTIONS:
            raise UsageError("reduce", found=repr(self.reduce), expected=", ".join(map(repr, REDUCTIONS)))
        if self.reduce == "tree" and self.overlap_grad_reduce:
            raise UnsupportedError(
                "reduce='tree' adds up all micro-batches before a bucket can be sent",
                found="overlap_grad_reduce=True",
                expected="False",
            )
        make_scaler(self.loss_scale)
        if self.max_grad_norm is not None and not float(self.max_grad_norm) > 0:
            raise UsageError("max_grad_norm", found=self.max_grad_norm, expected="a number above 0, or None")


def layout_rules(options: EngineOptions, dp_size: int) -> LayoutRules:
    """Pure."""
    size = options.bucket_size
    if size is None:
        size = default_bucket_size(dp_size) if options.overlap_grad_reduce else "none"
    return LayoutRules(dp_size, size if isinstance(size, int) else None)


def choose_layout(
    given: Layout | None, options: EngineOptions, specs: Sequence[ParamSpec], dp_size: int, experts: int | None = None
) -> Layout:
    """The layout of ``specs`` by the rules of ``options``, or by those of a layout that was made before. Pure.

    ``experts``: ranks that expert buffers are laid out for.

    Raises ``UsageError`` for a layout of another dp size, or one in which a param lies elsewhere.
    """
    if given is None:
        made = layout_params(specs, layout_rules(options, dp_size))
        return made if experts is None else expert_layout(made, specs, experts)
    if experts is not None:
        raise UnsupportedError("a layout that was made before, beside an expert_group", expected="layout=None")
    if given.rules.dp_size != dp_size:
        raise UsageError(
            "the layout was made for another dp size than the group's",
            found=f"dp size {given.rules.dp_size}",
            expected=f"dp size {dp_size}",
            hint="use a layout of this dp size, or none",
        )
    made = layout_params(specs, given.rules)
    theirs = {name: place for buffer in given.buffers for name, place in buffer.param_index_map.items()}
    for buffer in made.buffers:
        for name, place in buffer.param_index_map.items():
            there = theirs.pop(name, None)
            if there != place:
                raise UsageError("param has another place in the layout", param=name, found=there, expected=place)
    for name in theirs:
        raise UsageError("param of the layout is not trained", param=name)
    return made


def check_elementwise_option(elementwise: bool | None) -> None:
    """Raises ``UnsupportedError`` for False."""
    if elementwise is False:
        raise UnsupportedError("an optimizer that is not elementwise cannot be sharded", found="elementwise=False")
