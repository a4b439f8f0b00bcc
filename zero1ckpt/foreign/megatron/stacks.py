"""Keys that stand for one param of every layer: ``decoder.layers.mlp.linear_fc1.weight`` has a layer axis in front.

Megatron-Core's transformer blocks store their layers so unless they differ from each other or single shards are asked
for; then the number stands in the key. A key without a number behind ``layers`` may also be of a model's own module of
that name, so the name alone decides nothing: every chunk must hold one layer, or the axis must be as long as the number
of layers that the checkpoint's arguments state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .entries import StoredTensor

__all__ = ["layer_name", "stack_of", "stacked_keys"]

_STACK = re.compile(r"(?:.*?\.)??layers(?=\.(?!\d+(?:\.|$)))")


def stack_of(key: str) -> str | None:
    """The module that a key without a layer number lies in: ``decoder.layers``; None for other keys. Pure."""
    found = _STACK.match(key)
    return found[0] if found else None


def layer_name(key: str, layer: int) -> str:
    """The name of one layer's param of a stacked key. Pure."""
    stack = stack_of(key)
    assert stack is not None
    return f"{stack}.{layer}{key[len(stack) :]}"


def stacked_keys(tensors: Mapping[str, StoredTensor], num_layers: int | None = None) -> frozenset[str]:
    """Which keys of a model have an axis of layers in front. ``num_layers``: as the arguments state it. Pure."""
    members: dict[str, list[StoredTensor]] = {}
    for key, tensor in tensors.items():
        stack = stack_of(key)
        if stack is not None:
            members.setdefault(stack, []).append(tensor)
    return frozenset(tensor.key for group in members.values() if _is_stack(group, num_layers) for tensor in group)


def _is_stack(tensors: Iterable[StoredTensor], num_layers: int | None) -> bool:
    """Whether all tensors of a module have as many layers in front, and that is what their first axis is."""
    lengths = {tensor.shape[0] if tensor.shape else -1 for tensor in tensors}
    if len(lengths) != 1 or min(lengths) < 1:
        return False
    return lengths == {num_layers} or all((tensor.sizes[:, 0] == 1).all() for tensor in tensors)
