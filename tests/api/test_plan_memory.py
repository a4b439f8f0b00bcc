"""``core.memory`` and ``api.planning`` against the worked examples of the literature, and against layouts."""

import json

import pytest
import torch

import zero1ckpt
from zero1ckpt.api.planning import plan_checkpoint, plan_count, plan_model, read_shapes
from zero1ckpt.core.errors import CorruptError, MissingError, UnsupportedError, UsageError
from zero1ckpt.core.layout import LayoutRules, layout_params
from zero1ckpt.core.memory import Memory, Recipe, Stage, smallest_dp
from zero1ckpt.model.state import ParamSpec

GB = 1e9
HALF = {"param_dtype": "float16", "grad_dtype": "float16"}


def by_stage(plan):
    return {choice.stage: choice for choice in plan.choices}


def test_seven_billion_params_at_dp_8():
    """ZeRO paper: 12 bytes a param of optimizer state, of which each of 8 ranks keeps an eighth."""
    found = by_stage(plan_count(7_000_000_000, dp_size=8, **HALF))
    assert found[Stage.DDP].memory.optimizer == 84 * GB
    assert found[Stage.ZERO_1].memory.optimizer == 10.5 * GB


def test_ddp_to_zero_3_for_4_375_billion_params_a_card_at_dp_8():
    found = by_stage(plan_count(4_375_000_000, dp_size=8, **HALF))
    totals = [found[stage].memory.total / GB for stage in Stage]
    assert totals == pytest.approx([70.0, 24.0625, 16.40625, 8.75])
    for stage in (Stage.ZERO_1, Stage.ZERO_2, Stage.ZERO_3):
        memory = found[stage].memory
        assert memory.temporary_main_grads / GB == pytest.approx(2.1875)  # float32 of 1/8 of the grads
        assert memory.peak == memory.total + memory.temporary_main_grads


@pytest.mark.parametrize("dp_size", [1, 2, 8, 64])
@pytest.mark.parametrize(
    ("param", "grad", "plain", "fixed", "shared"),
    [
        ("float16", "float16", 20, 4, 16),
        ("bfloat16", "float32", 18, 6, 12),
        ("float32", "float32", 16, 8, 8),
    ],
)
def test_the_table_of_bytes_a_param(dp_size, param, grad, plain, fixed, shared):
    """Megatron-Core: fp16 params and grads 4 + 16/d, bf16 params with fp32 grads 6 + 12/d, fp32 8 + 8/d."""
    numel = 64 * 1024
    found = by_stage(plan_count(numel, dp_size=dp_size, param_dtype=param, grad_dtype=grad))
    assert found[Stage.DDP].memory.peak == plain * numel
    assert found[Stage.ZERO_1].memory.peak == fixed * numel + shared * numel // dp_size


def test_bytes_on_the_wire():
    numel, dp = 8_000_000, 8
    found = {stage: c.wire_bytes for stage, c in by_stage(plan_count(numel, dp_size=dp, **HALF)).items()}
    once = numel * 2 * (dp - 1) // dp
    assert found == {Stage.DDP: 2 * once, Stage.ZERO_1: 2 * once, Stage.ZERO_2: 2 * once, Stage.ZERO_3: 3 * once}
    assert all(c.wire_bytes == 0 for c in plan_count(numel, dp_size=1, **HALF).choices)


PARAMS = [
    ParamSpec("emb", (97, 24), "bfloat16", "float32"),
    ParamSpec("norm", (24,), "float32", "float32"),
    ParamSpec("head", (131, 24), "bfloat16", "float32", shared_embedding=True),
    ParamSpec("empty", (0, 3), "float32", "float32"),
]


@pytest.mark.parametrize("dp_size", [1, 3, 8])
@pytest.mark.parametrize("bucket_size", [None, 1, 1000, "none"])
def test_padding_is_that_of_the_layout(dp_size, bucket_size):
    plan = plan_model(PARAMS, dp_size=dp_size, bucket_size=bucket_size)
    layout = layout_params(PARAMS, LayoutRules(dp_size, None if bucket_size == "none" else bucket_size))
    numel = sum(param.numel for param in PARAMS)
    assert plan.numel == numel and plan.padding == layout.numel - numel
    assert plan.buckets == sum(buffer.bucket_count for buffer in layout.buffers)
    wide, narrow = layout.buffers[1].numel, layout.buffers[0].numel
    memory = by_stage(plan)[Stage.ZERO_1].memory
    assert memory == Memory(
        2 * narrow + 4 * wide, 4 * (narrow + wide), 4 * narrow // dp_size, 8 * layout.shard_numel(), 0
    )
    assert by_stage(plan)[Stage.ZERO_1].messages == 2 * plan.buckets


def test_what_suits_is_the_least_that_fits():
    def suits(limit, dp_size=8):
        return plan_count(4_375_000_000, dp_size=dp_size, limit=int(limit * GB), **HALF).suits

    assert suits(88) is Stage.DDP
    assert suits(80) is Stage.ZERO_1
    assert suits(20) is Stage.ZERO_2
    assert suits(11) is Stage.ZERO_3
    assert suits(10) is None
    plan = plan_count(4_375_000_000, dp_size=8, limit=int(10 * GB), **HALF)
    assert suits(10, plan.dp_needed) is Stage.ZERO_3 and suits(10, plan.dp_needed - 1) is None
    assert smallest_dp(plan.buffers, plan.recipe, 1, Stage.ZERO_3, 99_999) is None


def test_other_optimizers():
    found = by_stage(
        plan_count(1000, dp_size=1, recipe=Recipe("bfloat16", ("bfloat16",)), **HALF | {"param_dtype": "bfloat16"})
    )
    assert found[Stage.DDP].memory == Memory(2000, 2000, 0, 2000, 2000)  # float16 grads are copied to be stepped
    found = by_stage(plan_count(1000, dp_size=4, recipe=Recipe(states=()), **HALF))
    assert found[Stage.ZERO_1].memory.optimizer == 1000


def test_a_checkpoint_tells_its_own_numbers(work):
    state = {
        "a": {"fp32_param": torch.zeros(70, 3), "exp_avg": torch.zeros(70, 3, dtype=torch.bfloat16)},
        "b": {"fp32_param": torch.zeros(11), "exp_avg": torch.zeros(11, dtype=torch.bfloat16)},
    }
    zero1ckpt.write(
        work / "a", state, dp_size=2, bucket_size=100, params={"a": {"dtype": "bfloat16", "grad_dtype": "float32"}}
    )
    zero1ckpt.reshard(work / "a", work / "b", format="fully_reshardable")
    plan = plan_checkpoint(work / "a", dp_size=3)
    assert (plan.numel, plan.bucket_size, plan.recipe) == (221, 100, Recipe("float32", ("bfloat16",)))
    layout = zero1ckpt.reshard(work / "a", work / "c", to_dp=3).layout
    assert plan.padding == layout.numel - 221
    assert plan_checkpoint(work / "b", dp_size=3, bucket_size=100).choices == plan.choices


def test_shapes_from_a_file(work):
    rows = {"a": [3, 4], "b": {"shape": [5], "dtype": "float32", "shared_embedding": True}, "c": []}
    (work / "shapes.json").write_text(json.dumps(rows))
    a, b, c = read_shapes(work / "shapes.json")
    assert a == ParamSpec("a", (3, 4), "bfloat16", "float32") and c.shape == ()
    assert b == ParamSpec("b", (5,), "float32", "float32", shared_embedding=True)
    (work / "list.json").write_text(json.dumps([{"name": "a", "shape": [3, 4], "grad_dtype": "bfloat16"}]))
    assert read_shapes(work / "list.json") == [ParamSpec("a", (3, 4), "bfloat16", "bfloat16")]


@pytest.mark.parametrize("text", ["[", "3", "[3]", '{"a": [-1]}', '{"a": 3}', '{"a": [true]}', '[{"shape": [1]}]'])
def test_what_is_no_list_of_shapes(work, text):
    (work / "shapes.json").write_text(text)
    with pytest.raises(CorruptError, match=r"shapes\.json"):
        read_shapes(work / "shapes.json")


def test_refusals(work):
    with pytest.raises(MissingError):
        read_shapes(work / "nowhere.json")
    with pytest.raises(UsageError):
        plan_count(10, dp_size=0)
    with pytest.raises(UsageError):
        plan_count(-1, dp_size=1)
    with pytest.raises(UnsupportedError, match="float7"):
        plan_count(10, dp_size=1, param_dtype="float7")
