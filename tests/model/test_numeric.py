"""Infinities, NaNs and negative values are found from bits as torch finds them from values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero1ckpt.model.numeric import first_negative, first_nonfinite

KINDS = {"float64": torch.int64, "float32": torch.int32, "float16": torch.int16, "bfloat16": torch.int16}


@pytest.mark.parametrize("dtype", KINDS)
@given(data=st.data())
def test_equals_torch(dtype, data):
    info = torch.iinfo(KINDS[dtype])
    special = [
        0,
        1,
        -1,
        info.min,
        info.max,
        *torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, -1.0, 1e-8], dtype=getattr(torch, dtype))
        .view(KINDS[dtype])
        .tolist(),
    ]
    bits = data.draw(st.lists(st.one_of(st.sampled_from(special), st.integers(info.min, info.max)), max_size=9))
    values = torch.tensor(bits, dtype=KINDS[dtype]).view(getattr(torch, dtype))
    raw = memoryview(bytes(values.view(torch.uint8).numpy())) if bits else memoryview(b"")
    first = lambda mask: int(mask.nonzero()[0]) if mask.any() else None  # noqa: E731
    assert first_nonfinite(raw, dtype) == first(~values.isfinite())
    assert first_negative(raw, dtype) == first(values < 0)


def test_integers_are_never_either():
    raw = memoryview(bytes([255] * 8))
    assert first_nonfinite(raw, "int32") is None and first_negative(raw, "int64") is None
