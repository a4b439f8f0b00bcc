"""Hyper-parameters of param groups, as stored values and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .base import hyper_parameters

__all__ = ["plain_groups", "update_group"]


def plain_groups(groups: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Each group without params; tensors of one element as numbers."""
    return tuple({key: _plain(value) for key, value in hyper_parameters(group).items()} for group in groups)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return tuple(_plain(item) for item in value) if isinstance(value, tuple) else value


def update_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put ``values`` into ``group`` in place; a present tensor keeps its identity, a present tuple stays a tuple."""
    for key, value in values.items():
        group[key] = _like(group.get(key), value)


def _like(present: Any, value: Any) -> Any:
    if isinstance(present, torch.Tensor) and isinstance(value, int | float):
        return present.fill_(value)
    if isinstance(present, tuple) and isinstance(value, list | tuple):
        olds = present if len(present) == len(value) else (None,) * len(value)
        return tuple(_like(old, new) for old, new in zip(olds, value, strict=True))
    return value
