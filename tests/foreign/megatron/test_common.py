"""The common state: what it says, and what it leaves open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero1ckpt.core.errors import CorruptError
from zero1ckpt.encodings.inert_pickle import Dtype, EnumValue, GlobalRef
from zero1ckpt.foreign.megatron.common import Args, chained_values, common_of, read_common
from zero1ckpt.foreign.megatron.torch_dist import open_torch_dist


def test_empty_common_state_says_nothing() -> None:
    common = common_of({})
    assert (common.iteration, common.sharding_type, common.scheduler) == (None, None, None)
    assert common.args.tensor_parallel is None
    assert common.args.transformer_impl is None


def test_args_of_another_type_are_absent() -> None:
    args = Args({"num_layers": True, "overlap_grad_reduce": 1, "transformer_impl": 3, "world_size": "8"})
    assert (args.num_layers, args.overlap_grad_reduce, args.transformer_impl, args.world_size) == (None,) * 4
    named = Args({"a": Dtype("bfloat16"), "b": EnumValue(GlobalRef("m", "E"), "local")})
    assert (named.text("a"), named.text("b")) == ("bfloat16", "local")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"optimizer": {"param_state_sharding_type": "dp_reshardable"}}, "dp_reshardable"),
        ({"optimizer": {0: {"param_state_sharding_type": "x"}, 1: {"param_state_sharding_type": "x"}}}, "x"),
        ({"content_metadata": {"distrib_optim_sharding_type": "y"}}, "y"),
        ({"args": {"ckpt_fully_parallel_save": True}}, "fully_sharded_model_space"),
        ({"args": {"ckpt_fully_parallel_save": False}}, "dp_zero_gather_scatter"),
    ],
)
def test_sharding_type(state: dict[str, Any], expected: str) -> None:
    assert common_of(state).sharding_type == expected


def test_optimizers_in_different_layouts_are_refused() -> None:
    with pytest.raises(CorruptError, match="different layouts"):
        common_of({"optimizer": {0: {"param_state_sharding_type": "a"}, 1: {"param_state_sharding_type": "b"}}})


def test_chained_values_are_in_order_of_their_number() -> None:
    assert chained_values({1: "b", 0: "a"}) == ("a", "b")
    assert chained_values(["a", "b"]) == ("a", "b")
    assert chained_values({"optimizer": 1}) == ({"optimizer": 1},)


@pytest.mark.parametrize(
    ("case", "save"),
    [
        ("v0161_gpt_moe_ep2_dp4_b1", "dp_zero_gather_scatter"),
        ("v0161_gpt_moe_ep2_dp4_b1", "fully_reshardable"),
        ("mlm0161_gpt_tp2_dp2_b1", "dp_reshardable"),
        ("v0192_toy_dp2_b2500", "dp_reshardable"),
        ("v0110_toy_dp2_b2500", "fully_sharded_model_space"),
        ("v090_toy_dp2_b2500", "fully_sharded_bucket_space"),
    ],
)
def test_real_common_states(corpus: Callable[..., Path], case: str, save: str) -> None:
    common = read_common(open_torch_dist(corpus(case, save)))
    assert common.sharding_type == save
    assert common.iteration == 3
    assert common.notices == ()
    assert common.scheduler is not None and common.scheduler["num_steps"] == 3
    assert common.args.tensor_parallel == (2 if "tp2" in case else 1)
    kinds = {entry.kind for entry in common.carried}
    assert kinds == {"common", "object", "tensor"}
    assert not any("optimizer.state." in e.key or "gbuf" in e.key for e in common.carried if e.kind == "tensor")
    assert any(e.key.startswith("rng_state/") and e.nbytes > 0 for e in common.carried)
