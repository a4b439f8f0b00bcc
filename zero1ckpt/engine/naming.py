"""Names of params: those of ``named_parameters()`` without the wrappers around the model. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["strip_wrappers"]

_ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Added by torch.compile, FSDP and checkpoint_wrapper, around the model or any layer; no user names a module so."""
_LEADING = _ANYWHERE | {"module"}
"""``module`` is a wrapper only around the whole model: inside, it may be a layer's own name."""


def strip_wrappers(names: Sequence[str]) -> list[str]:
    """Each name without wrapper prefixes; all full names where stripping would make two names equal."""
    stripped = [_strip(name) for name in names]
    return stripped if len(set(stripped)) == len(set(names)) else list(names)


def _strip(name: str) -> str:
    parts = name.split(".")
    last = parts.pop()
    while parts and parts[0] in _LEADING:
        parts.pop(0)
    return ".".join([part for part in parts if part not in _ANYWHERE] + [last])
