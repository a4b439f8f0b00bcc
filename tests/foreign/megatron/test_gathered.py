"""``dp_zero_gather_scatter``: real checkpoints against their truth, and cuts of gathered buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.foreign.megatron.test_zero_gather import buffers
from tests.foreign.megatron.truth import part_truth, ranks_by_part
from zero1ckpt.foreign.megatron.gathered import bucket_bounds
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
    found = bucket_bounds(total, sorted(set(sizes)), lambda start, size: at.get(start) == size)
    base, visible = 0, []
    for start in starts:
        if (start - base) % 64:
            base = start
            visible.append(start)
    assert tuple(visible) in found


@given(st.integers(1, 500))
def test_what_nothing_tiles_has_no_bounds(total: int) -> None:
    assert bucket_bounds(total, [total], lambda start, size: False) == []
    assert bucket_bounds(total, [total], lambda start, size: True) == [()]
