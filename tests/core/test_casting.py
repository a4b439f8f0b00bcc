"""Comparison of cast values with stored ones, against torch."""

from __future__ import annotations

import pytest
import torch

from zero1ckpt.api.tensors import tensor_bytes
from zero1ckpt.core.casting import BITS, one_nan, same_after_cast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_of_torchs_casts_are_the_same_and_any_other_bit_is_not(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31 - 1, (20_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    weights = values.to(dtype)
    name = str(dtype).removeprefix("torch.")
    assert same_after_cast(tensor_bytes(values), "float32", tensor_bytes(weights), name).all()
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    other = (weights.view(kind) ^ 1).view(dtype)
    same = torch.from_numpy(same_after_cast(tensor_bytes(values), "float32", tensor_bytes(other), name))
    assert (same == (weights.isnan() & other.isnan())).all()
    ours, theirs = (one_nan(t.view(kind).numpy().view(BITS[name]), name) for t in (weights, other))
    assert ((ours == theirs) == same.numpy()).all()
    assert (torch.from_numpy(ours.view(f"i{ours.itemsize}")).view(dtype).isnan() == weights.isnan()).all()
