"""Megatron-LM #5077: what is put back must be the truth, and nothing sound may be called damaged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.doctor.simulated import SLOTS, Job, Model, Simulated, simulate
from zero1ckpt.doctor import shifted_state
from zero1ckpt.doctor.casts import cast, widen
from zero1ckpt.doctor.shift_search import Unit, locate_shift

CASES = [
    (Model(), Job(bucket_size=2000)),
    (Model(tied=False), Job(bucket_size=2500, dp=3)),
    (Model(), Job(pp=2)),
    (Model(gated=True), Job(tp=2, bucket_size=2500)),
    (Model(layers=4), Job(tp=2, pp=2, dp=5)),
    (Model(layers=4, tied=False), Job(pp=4, dp=3, bucket_size=3000)),
    (Model(), Job(bucket_size=6000, dtype="float16")),
    (Model(), Job(bucket_size=6000, dtype="float32")),
    (Model(experts=4, ffn=20), Job(bucket_size=2000, dp=3)),
    (Model(experts=4, ffn=20), Job(bucket_size=1500, dp=3, ep=2)),
    (Model(hidden=40, ffn=48, vocab=200), Job(bucket_size=3000, dp=7)),
]


def wrong_after(made: Simulated) -> tuple[int, int]:
    """Elements that are wrong after mending though they are not said to be lost, and how many are said to be."""
    found = shifted_state.diagnose(made.subject)
    assert found is not None
    mended = {(one.param, one.slot): one.values for one in shifted_state.repair(made.subject, found)}
    wrong = lost = 0
    for (param, slot), truth in made.truth.items():
        gone = np.zeros(truth.size, np.bool_)
        for low, high in found.lost.get(param, ()):
            gone[low:high] = True
        values = mended.get((param, slot), made.subject.values.slot(param, slot))
        assert values is not None
        wrong += int((values.reshape(-1) != truth.reshape(-1))[~gone].sum())
        lost += int(gone.sum())
    return wrong, lost


@pytest.mark.parametrize(("model", "job"), CASES)
@pytest.mark.parametrize("young", [False, True])
def test_what_is_put_back_is_the_truth_and_all_that_is_left(model: Model, job: Job, young: bool) -> None:
    made = simulate(model, job, np.random.default_rng(1), young=young)
    assert made.shifted
    wrong, lost = wrong_after(made)
    assert wrong == 0
    assert lost == 3 * sum(int(mask.sum()) for mask in made.lost.values())


@pytest.mark.parametrize(("model", "job"), CASES[:5])
def test_a_version_without_the_fault_is_sound(model: Model, job: Job) -> None:
    made = simulate(model, job, np.random.default_rng(2), fixed=True)
    assert shifted_state.diagnose(made.subject) is None


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.builds(
        Model,
        layers=st.sampled_from([1, 2]),
        hidden=st.integers(8, 40).map(lambda n: 2 * n),
        ffn=st.sampled_from([16, 40]),
        vocab=st.sampled_from([64, 100, 132]),
        tied=st.booleans(),
        gated=st.booleans(),
    ),
    job=st.builds(
        Job, dp=st.integers(1, 8), tp=st.sampled_from([1, 2]), bucket_size=st.sampled_from([None, 2000, 3000, 6000])
    ),
    seed=st.integers(0, 1000),
    young=st.booleans(),
)
def test_whatever_the_job_nothing_is_put_back_wrong(model: Model, job: Job, seed: int, young: bool) -> None:
    made = simulate(model, job, np.random.default_rng(seed), young=young)
    if shifted_state.diagnose(made.subject) is not None:
        assert made.shifted
        assert wrong_after(made)[0] == 0


def test_weights_of_another_step_are_not_called_shifted() -> None:
    made = simulate(Model(), Job(), np.random.default_rng(3), fixed=True)
    weights = made.subject.values.weights  # type: ignore[attr-defined]
    weights[0] = weights[0] + 3
    assert shifted_state.diagnose(made.subject) is None


def test_lost_main_params_come_from_the_weights() -> None:
    made = simulate(Model(), Job(bucket_size=2000), np.random.default_rng(4))
    found = shifted_state.diagnose(made.subject)
    assert found is not None
    for one in shifted_state.repair(made.subject, found):
        weight = made.subject.values.weight(one.param)
        assert weight is not None
        flat = one.values.reshape(-1)
        for low, high in one.from_weights:
            assert one.slot == "fp32_param"
            assert (flat[low:high] == widen(weight.reshape(-1)[low:high], "bfloat16")).all()
        for low, high in one.zeroed:
            assert one.slot != "fp32_param" and not flat[low:high].any()
    assert {one.slot for one in shifted_state.repair(made.subject, found)} == set(SLOTS)


def test_a_shift_is_located_by_a_params_own_content() -> None:
    values = np.random.default_rng(5).standard_normal(500).astype(np.float32)
    weight = cast(values, "bfloat16")
    stored = np.concatenate((weight[37:], np.zeros(37, np.uint16)))
    assert locate_shift(Unit("w", weight, stored, stored != 0)) == 37
    flat = np.full(500, 0x3F80, np.uint16)
    assert locate_shift(Unit("norm", flat, flat, flat != 0)) is None
