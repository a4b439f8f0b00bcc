"""``dp_zero_gather_scatter``: real checkpoints against their truth, and cuts of gathered buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.foreign.megatron.legacy_writer import Param, Style, gpt_layer, random_state, write_zarr_gathered
from tests.foreign.megatron.test_zero_gather import buffers
from tests.foreign.megatron.truth import part_truth, ranks_by_part
from zero1ckpt.core.errors import CorruptError, UnsupportedError
from zero1ckpt.core.layout import LayoutRules
from zero1ckpt.foreign.megatron.gathered import buffer_cuts
from zero1ckpt.foreign.megatron.model import MegatronCheckpoint, MegatronPart
from zero1ckpt.foreign.megatron.proving import prove
from zero1ckpt.foreign.megatron.reading import describe

SAVES = [
    ("v0123_toy_dp2_b2500", "zarr_dp_zero_gather_scatter"),
    ("v0153_toy_dp2_b2500", "dp_zero_gather_scatter"),
    ("v0161_gpt_moe_ep2_dp4_b1", "dp_zero_gather_scatter"),
    ("v0161_gpt_tp2_dp2_b1", "dp_zero_gather_scatter"),
    ("v0161_toy_dp2_b2500", "dp_zero_gather_scatter"),
    ("v0161_toy_dp3_b2500", "dp_zero_gather_scatter"),
    ("v0161_toy_fp32first_dp2_b1", "dp_zero_gather_scatter"),
    ("v0161_toy_tied_shared_dp2_b1", "dp_zero_gather_scatter"),
    ("v0161_toy_tinytail_dp2_b2500", "dp_zero_gather_scatter"),
    ("v0192_toy_dp2_b2500", "dp_zero_gather_scatter"),
]


def values(checkpoint: MegatronCheckpoint, part: MegatronPart, name: str, slot: str) -> np.ndarray:
    state = part.catalog.state
    param = state.index[name]
    numel = state.params[param].numel
    column = [np.array([v], np.int64) for v in (param, state.slot_index[slot], 0, numel)]
    _, found = part.catalog.placement.locate(*column)
    flat, held = np.zeros(numel, np.float32), np.zeros(numel, np.int64)
    for _, _, start, size, blob, at, nbytes in found.rows():
        data = bytearray(nbytes)
        checkpoint.source.read_run(blob, at, [memoryview(data)])
        flat[start : start + size] = np.frombuffer(data, np.float32)
        held[start : start + size] += 1
    assert (held == 1).all()
    return flat


@pytest.mark.parametrize(("case", "save"), SAVES)
def test_every_element_equals_the_truth(corpus: Callable[..., Path], case: str, save: str) -> None:
    checkpoint = prove(describe(corpus(case, save)))
    assert checkpoint.format == "megatron:dp_zero_gather_scatter"
    assert (checkpoint.step, checkpoint.iteration, checkpoint.notices) == (3, 3, ())
    ranks = ranks_by_part(corpus(case))
    assert set(checkpoint.parts) == set(ranks)
    for name, part in checkpoint.parts.items():
        evidence = part.evidence
        assert evidence.proved == evidence.elements
        assert (evidence.ambiguous, evidence.unproved, evidence.unknown) == ((), (), ())
        for param, slot, expected in part_truth(corpus(case), *ranks[name]):
            np.testing.assert_array_equal(values(checkpoint, part, param, slot), expected.numpy())


def test_buckets_that_places_do_not_show_follow_from_the_rule(corpus: Callable[..., Path]) -> None:
    part = describe(corpus("v0161_toy_dp2_b2500", "dp_zero_gather_scatter")).parts[""]
    assert part.layout is not None
    assert [bucket.numel_unpadded for bucket in part.layout.buffers[0].buckets] == [3144, 2560, 2520, 3144]
    assert (part.layout.bucket_size, part.layout.stated) == (2500, True)


@given(buffers())
def test_the_true_bounds_are_among_those_found(made: tuple[list[int], list[int], list[int], int]) -> None:
    sizes, starts, _, total = made
    at = dict(zip(starts, sizes, strict=True))
    found = buffer_cuts(total, sorted(set(sizes)), lambda start, size: at.get(start) == size)
    base, visible = 0, []
    for start in starts:
        if (start - base) % 64:
            base = start
            visible.append(start)
    assert tuple(visible) in [cut.bounds for cut in found]


@given(st.integers(1, 500))
def test_what_nothing_tiles_has_no_bounds(total: int) -> None:
    assert buffer_cuts(total, [total], lambda start, size: False) == []
    (cut,) = buffer_cuts(total, [total], lambda start, size: True)
    assert (cut.bounds, set(cut.edges)) == ((), {total})


@pytest.mark.parametrize("young", [False, True])
@pytest.mark.parametrize("bucket_size", [None, 1, 70, 200])
@pytest.mark.parametrize("told", [False, True])
def test_buckets_of_any_size(tmp_path: Path, bucket_size: int | None, told: bool, young: bool) -> None:
    """Whatever is read is right: params that the content leaves open are said to be so."""
    args = {"num_layers": 2, "data_parallel_size": 2, "overlap_grad_reduce": True, "ddp_bucket_size": bucket_size}
    model = [
        Param("embedding.weight", (11, 6)),
        *gpt_layer("decoder.layers.0"),
        *gpt_layer("decoder.layers.1"),
        Param("decoder.final_layernorm.weight", (6,)),
    ]
    state = random_state(model, young=young)
    style = Style(LayoutRules(2, bucket_size))
    write_zarr_gathered(tmp_path, model, state, args if told else {}, style)
    checkpoint = prove(describe(tmp_path))
    part = checkpoint.parts[""]
    assert (checkpoint.step, part.evidence.unproved, part.evidence.unknown) == (3, (), ())
    assert part.evidence.proved == part.evidence.elements
    sure = [name for name in part.catalog.state.index if name not in part.evidence.ambiguous]
    assert young or len(sure) == len(model)
    for name in sure:
        for slot, own in (("fp32_param", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            expected = state[name][own].reshape(-1).numpy()
            np.testing.assert_array_equal(values(checkpoint, part, name, slot), expected, name)


def test_gathered_state_that_is_not_known(tmp_path: Path) -> None:
    import torch

    model = [Param("a.weight", (4, 4))]
    write_zarr_gathered(tmp_path, model, random_state(model), {}, Style())
    file = tmp_path / "optimizer.distributed.dp_group_idx_0.param_state" / "shard_0_1.pt"
    torch.save({0: {}}, file)
    with pytest.raises(UnsupportedError, match="in a form that is not known"):
        describe(tmp_path)
    torch.save([1, 2], file)
    with pytest.raises(CorruptError, match="is no dict"):
        describe(tmp_path)


@pytest.mark.parametrize("bucket_size", [None, 1])
def test_params_that_nothing_tells_apart_are_not_certain(tmp_path: Path, bucket_size: int | None) -> None:
    """Biases that are all zero, in modules whose order no rule gives, while their moments differ."""
    model = [Param(f"m{i * 7 % 12}.bias", (6,)) for i in range(12)]
    write_zarr_gathered(tmp_path, model, random_state(model, young=True), {}, Style(LayoutRules(2, bucket_size)))
    part = describe(tmp_path).parts[""]
    assert set(part.catalog.state.index) <= {*part.evidence.ambiguous, *part.evidence.unknown}
