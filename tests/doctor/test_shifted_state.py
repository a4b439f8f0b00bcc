"""Megatron-LM #5077: what is put back must be the truth, and nothing sound may be called damaged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.doctor.simulated import SLOTS, Job, MemoryValues, Model, Simulated, simulate
from zero1ckpt.core.boxes import Box
from zero1ckpt.core.errors import UnsupportedError
from zero1ckpt.doctor import shifted_state
from zero1ckpt.doctor.casts import cast, widen
from zero1ckpt.doctor.shift_search import Placed, Search, Solution, Unit, locate_shift
from zero1ckpt.doctor.subject import Piece, Subject, SubjectParam

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
    found = shifted_state.diagnose(made.subject)
    if found is not None:
        assert made.shifted
        assert found.undecided or wrong_after(made)[0] == 0


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


def test_a_job_that_is_not_decided_forbids_the_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    made = simulate(*CASES[5], np.random.default_rng(1))
    whole = shifted_state.diagnose(made.subject)
    assert whole is not None and not whole.undecided
    monkeypatch.setattr(shifted_state, "_MOST_STATES", (3_000,))  # some jobs fit, others need more
    found = shifted_state.diagnose(made.subject)
    assert found is not None and 0 < found.layouts < whole.layouts and found.undecided
    damages = list(shifted_state.detect(made.subject, found))
    assert damages and all(damage.grave and "is not sure" in damage.message for damage in damages)
    assert {damage.mends[:11] for damage in damages} == {"not mended:"}
    with pytest.raises(UnsupportedError, match=r"not all layouts .* could be tried"):
        list(shifted_state.repair(made.subject, found))


def test_what_an_unfinished_search_found_is_told_and_not_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    made = simulate(*CASES[1], np.random.default_rng(1))

    def cut_short(*args: object, **options: object) -> Search:
        found = search(*args, **options)  # type: ignore[arg-type]
        return Search(found.solutions, complete=False)

    search = shifted_state.search
    monkeypatch.setattr(shifted_state, "search", cut_short)
    found = shifted_state.diagnose(made.subject)
    assert found is not None and found.undecided and found.affected
    with pytest.raises(UnsupportedError):
        next(shifted_state.repair(made.subject, found))


def three_norms(listed: list[int]) -> Simulated:
    """A large param that fills a bucket, and three norms behind it whose weights are all 1: several orders fit.

    ``listed``: the places of the params in the file's listing, which may be others than in the buffer.
    """
    rng = np.random.default_rng(6)
    sizes, tail = (1000, 64, 64, 64), 24
    truth: dict[tuple[int, str], np.ndarray] = {}
    stored: dict[tuple[int, str], np.ndarray] = {}
    for slot in SLOTS:
        parts = [rng.standard_normal(n).astype(np.float32) for n in sizes]
        if slot == SLOTS[0]:
            parts[1:] = [(part * np.float32(1e-5) + 1).astype(np.float32) for part in parts[1:]]
        compact = np.concatenate([*parts, np.zeros(tail, np.float32)])
        for i, (part, at) in enumerate(zip(parts, (0, 1024, 1088, 1152), strict=True)):
            truth[i, slot], stored[i, slot] = part, compact[at : at + len(part)]
    names = ("m.w.weight", "m.a.weight", "m.b.weight", "m.c.weight")
    pieces = [Piece(Box((0,), (n,)), 0, at) for n, at in zip(sizes, listed, strict=True)]
    params = tuple(
        SubjectParam(name, (n,), "bfloat16", False, (piece,))
        for name, n, piece in zip(names, sizes, pieces, strict=True)
    )
    weights = {i: cast(truth[i, SLOTS[0]], "bfloat16") for i in range(4)}
    values = MemoryValues(stored, weights)
    dtypes = dict.fromkeys(SLOTS, "float32")
    return Simulated(Subject("", "megatron:fully_reshardable", params, dtypes, values, 3, (3,)), truth, shifted=True)


@pytest.mark.parametrize("listed", [[0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0]])
def test_the_listing_excludes_no_layout_that_fits(listed: list[int]) -> None:
    made = three_norms(listed)
    found = shifted_state.diagnose(made.subject)
    assert found is not None and found.shifts == (0, 24)
    assert found.lost == {1: ((0, 64),), 2: ((0, 64),), 3: ((0, 24),)}  # either may even be in its place, before w
    assert wrong_after(made) == (0, 3 * (64 + 64 + 24))


def test_what_jobs_divide_differently_is_lost_where_it_is_damaged() -> None:
    params = tuple(SubjectParam(name, (8,), "bfloat16") for name in "xy")
    subject = Subject("", "megatron:fully_reshardable", params, {}, MemoryValues({}, {}))
    whole, halves = Box((0,), (8,)), (Box((0,), (4,)), Box((4,), (4,)))
    x = shifted_state._Part("x", 0, (whole,))
    one = shifted_state._Job((((x, shifted_state._Part("y", 1, (whole,))), True),))
    two = shifted_state._Job((((x, *(shifted_state._Part("y", 1, (half,)) for half in halves)), True),))
    shifted = Solution((Placed(0, 0, 0), Placed(1, 10, 8)), 2)
    right = Solution(tuple(Placed(i, 0, 0) for i in range(3)), 0)
    alone = shifted_state._agreed(subject, [(one, [Search([shifted])])], 0)
    assert alone is not None and alone.lost == {1: ((0, 2),)}
    both = shifted_state._agreed(subject, [(one, [Search([shifted])]), (two, [Search([right])])], 0)
    assert both is not None and both.lost == {1: ((0, 8),)} and both.affected == (1,)
    assert shifted_state._agreed(subject, [(two, [Search([right])])], 0) is None


@pytest.mark.parametrize("weight", [0x7FC0, 0x7FFF, 0xFFC1])
def test_any_nan_of_the_weights_is_that_of_the_main_params(weight: int) -> None:
    made = simulate(Model(), Job(bucket_size=2000), np.random.default_rng(1), fixed=True)
    values: MemoryValues = made.subject.values  # type: ignore[assignment]
    values.slots[0, SLOTS[0]][0, 0] = np.nan
    values.weights[0][0, 0] = weight
    assert shifted_state.diagnose(made.subject) is None
    assert not shifted_state._wrong(made.subject, 0)
