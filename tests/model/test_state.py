"""What is stored, as a value."""

import pytest

from zero1ckpt.core.errors import UnsupportedError
from zero1ckpt.model.state import ParamSpec, PartState, Scalar, SlotSpec


def test_sizes():
    state = PartState(
        (ParamSpec("a", (2, 3)), ParamSpec("b", ()), ParamSpec("c", (0, 4))), (SlotSpec("x", "bfloat16"),)
    )
    assert [p.numel for p in state.params] == [6, 1, 0]
    assert [state.tensor_nbytes(i, 0) for i in range(3)] == [12, 2, 0]
    assert state.index == {"a": 0, "b": 1, "c": 2} and state.slot_index == {"x": 0}
    assert state.scalars_of(1) == {}


def test_scalars_belong_to_params():
    state = PartState((ParamSpec("a", ()),), (), scalars=({"step": Scalar("int64", 3)},))
    assert state.scalars_of(0)["step"].value == 3
    with pytest.raises(AssertionError):
        PartState((), (), scalars=({},))


def test_unknown_dtype():
    with pytest.raises(UnsupportedError):
        SlotSpec("x", "complex64").itemsize  # noqa: B018
