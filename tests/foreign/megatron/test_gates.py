"""Whether the first linear layer of an MLP is a fused gate, by the cuts of both layers."""

from __future__ import annotations

import numpy as np
import pytest

from zero1ckpt.foreign.megatron.entries import StoredTensor
from zero1ckpt.foreign.megatron.weights import _gate_of


def cut(key: str, shape: tuple[int, ...], axis: int, parts: int) -> StoredTensor:
    offsets = np.zeros((parts, len(shape)), np.int64)
    sizes = np.tile(np.array(shape, np.int64), (parts, 1))
    sizes[:, axis] //= parts
    offsets[:, axis] = np.arange(parts) * sizes[0, axis]
    return StoredTensor(key, "bfloat16", shape, offsets, sizes, np.arange(parts))


@pytest.mark.parametrize(
    ("tp", "pieces", "gate"), [(1, 1, False), (1, 2, True), (2, 2, False), (2, 4, True), (4, 6, None)]
)
def test_a_gate_shows_in_the_cuts_of_both_layers(tp: int, pieces: int, gate: bool | None) -> None:
    first, second = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
    tensors = {first: cut(first, (48, 8), 0, pieces), second: cut(second, (8, 24), 1, tp)}
    assert _gate_of(first, tensors, False) is gate
    assert _gate_of(second, tensors, False) is None
    assert _gate_of(first, {first: tensors[first]}, False) is None
