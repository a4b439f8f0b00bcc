"""Every dtype has the size that torch gives it and the code that the safetensors reader knows."""

import pytest
import torch
from safetensors.torch import load, save

from zero1ckpt.core.dtypes import DTYPE_NAMES, from_safetensors, itemsize, to_safetensors
from zero1ckpt.core.errors import UnsupportedError


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_agrees_with_torch_and_safetensors(name):
    dtype = getattr(torch, name)
    assert itemsize(name) == torch.empty(0, dtype=dtype).element_size()
    raw = save({"x": torch.zeros(3, dtype=dtype)})
    assert f'"dtype":"{to_safetensors(name)}"'.encode() in raw
    assert load(raw)["x"].dtype == dtype
    assert from_safetensors(to_safetensors(name)) == name


def test_unknown_ones_are_refused():
    for call, value in ((itemsize, "complex64"), (to_safetensors, "float3"), (from_safetensors, "Q4")):
        with pytest.raises(UnsupportedError, match=f"found {value}"):
            call(value)
