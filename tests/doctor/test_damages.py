"""Each known damage is found where it is, and nowhere else."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from tests.doctor.simulated import MemoryValues
from zero1ckpt.core.casting import same_after_cast
from zero1ckpt.doctor import repeated_experts
from zero1ckpt.doctor.casts import cast, exact_in_bfloat16, ulps_apart, widen
from zero1ckpt.doctor.examine import examine, examine_together
from zero1ckpt.doctor.subject import Array, Subject, SubjectParam, View, ranges

SLOTS = ("fp32_param", "exp_avg", "exp_avg_sq")


def sound(
    shape: tuple[int, ...] = (40, 50), *, expert: bool = False, step: int = 3
) -> tuple[Subject, dict[str, Array]]:
    rng = np.random.default_rng(0)
    arrays = {slot: rng.standard_normal(shape).astype(np.float32) for slot in SLOTS}
    arrays["exp_avg_sq"] = np.square(arrays["exp_avg"])
    weight = cast(arrays["fp32_param"].reshape(-1), "bfloat16").reshape(shape)
    values = MemoryValues({(0, slot): array for slot, array in arrays.items()}, {0: weight})
    params = (SubjectParam("w", shape, "bfloat16", expert),)
    subject = Subject("", "bucket_shards", params, dict.fromkeys(SLOTS, "float32"), values, step, (step,), (0.1,))
    return subject, arrays


def kinds(subject: Subject) -> list[tuple[str, bool]]:
    return [(damage.kind, damage.grave) for damage in examine(subject).damages]


def test_sound_state_has_no_damage() -> None:
    assert kinds(sound()[0]) == []
    subject, arrays = sound((64,))
    for slot, value in (("fp32_param", 1.0), ("exp_avg", 0.0), ("exp_avg_sq", 0.0)):  # a norm that was never updated
        arrays[slot][:] = value
    subject.values.weights[0] = cast(arrays["fp32_param"], "bfloat16")  # type: ignore[attr-defined]
    assert kinds(subject) == []


@pytest.mark.parametrize(
    ("slot", "value", "kind"),
    [
        ("exp_avg", np.nan, "nonfinite"),
        ("exp_avg_sq", np.inf, "nonfinite"),
        ("exp_avg_sq", -1e-3, "negative_squares"),
        ("exp_avg_sq", 0.0, "zero_moments"),
        ("fp32_param", 7.0, "stale_main_param"),
    ],
)
def test_one_bad_value_is_found_where_it_is(slot: str, value: float, kind: str) -> None:
    subject, arrays = sound()
    arrays[slot][3, 7] = value
    (damage,) = examine(subject).damages
    assert (damage.kind, damage.grave, damage.param, damage.slot) == (kind, True, "w", slot)
    assert damage.range == (157, 158)


def test_a_weight_that_was_rounded_another_way_is_a_notice() -> None:
    subject, _ = sound()
    subject.values.weights[0][0, 0] += 1  # type: ignore[attr-defined]
    assert kinds(subject) == [("rounding", False)]


def test_main_params_that_are_their_weights_are_rebuilt_after_updates_alone() -> None:
    for step, lrs, grave in ((3, (0.1,), True), (0, (0.1,), False), (1, (0.1,), False), (3, (0.0,), False)):
        subject, arrays = sound(step=step)
        arrays["fp32_param"][:] = widen(cast(arrays["fp32_param"], "bfloat16"), "bfloat16")
        assert kinds(replace(subject, lrs=lrs)) == [("rebuilt_main_params", grave)]


def test_long_runs_of_one_moment_are_a_notice() -> None:
    subject, arrays = sound()
    arrays["exp_avg"][:30] = 0
    arrays["exp_avg_sq"][:30] = 0
    assert kinds(subject) == [("constant_range", False), ("constant_range", False)]


def test_experts_that_repeat_each_other() -> None:
    subject, arrays = sound((4, 8, 8), expert=True)
    arrays["fp32_param"][2] = arrays["fp32_param"][0]
    weight = cast(arrays["fp32_param"].reshape(-1), "bfloat16").reshape(4, 8, 8)
    subject.values.weights[0] = weight  # type: ignore[attr-defined]
    assert kinds(subject) == []  # copied from a dense layer
    for slot in ("exp_avg", "exp_avg_sq"):
        arrays[slot][2] = arrays[slot][0]
    (damage,) = examine(subject).damages
    assert (damage.kind, damage.range) == ("repeated_experts", (128, 192))


def test_experts_of_one_digest_that_differ_are_not_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_experts, "crc64", lambda data: 0)
    subject, _ = sound((4, 8, 8), expert=True)
    assert kinds(subject) == []


def test_experts_are_compared_without_copies_of_them_all() -> None:
    subject, arrays = sound((32, 64, 256), expert=True)
    view = View(0, subject.params[0], arrays)
    tracemalloc.start()
    try:
        assert list(repeated_experts.detect(subject, view)) == []
        assert tracemalloc.get_traced_memory()[1] < 3 * arrays["exp_avg"][0].nbytes
    finally:
        tracemalloc.stop()


def test_steps_and_dtypes() -> None:
    subject, _ = sound()
    assert [d.grave for d in examine_together([subject, subject])] == []
    other = replace(subject, part="b", steps=(4,))
    assert [d.message for d in examine_together([subject, other])] == ["groups state different steps: 3, 4"]
    missing = replace(subject, steps=(3, None))
    assert ["states no step" in d.message for d in examine_together([missing])] == [True]
    mixed = replace(subject, dtypes={"fp32_param": "float32", "exp_avg": "bfloat16", "exp_avg_sq": "float32"})
    assert kinds(mixed) == [("moment_dtypes", False)]


def test_casts_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(10_000) * 10.0 ** rng.integers(-42, 38, 10_000)).astype(np.float32)
    values[:4] = [0.0, -0.0, np.inf, -np.inf]
    for dtype in ("bfloat16", "float16"):
        wanted = torch.from_numpy(values).to(getattr(torch, dtype))
        assert (cast(values, dtype) == wanted.view(torch.uint16).numpy()).all()
        assert (widen(cast(values, dtype), dtype) == wanted.float().numpy()).all()
    assert exact_in_bfloat16(widen(cast(values, "bfloat16"), "bfloat16")) and not exact_in_bfloat16(values)
    near = np.array([0x0001, 0x8001, 0x3F80], np.uint16), np.array([0x0000, 0x0001, 0x3F82], np.uint16)
    assert ulps_apart(*near, "bfloat16").tolist() == [1, 2, 2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_nan_is_a_nan_whichever_it_is(dtype: str) -> None:
    """A weight may hold another NaN than the main param's cast: a device's choice, as in ``core.casting``."""
    subject, arrays = sound()
    arrays["fp32_param"][3, 7] = np.nan
    weight = cast(arrays["fp32_param"], dtype)
    weight[3, 7] = np.iinfo(weight.dtype).max >> 1  # 0x7FFF
    subject.values.weights[0] = weight  # type: ignore[attr-defined]
    subject = replace(subject, params=(replace(subject.params[0], dtype=dtype),))
    assert kinds(subject) == [("nonfinite", True)]
    main = arrays["fp32_param"].reshape(-1)
    same = same_after_cast(main.data, "float32", weight.reshape(-1).data, dtype)
    assert same.all() and not ulps_apart(cast(main, dtype), weight.reshape(-1), dtype).any()
    weight[3, 7] = 0
    assert ("stale_main_param", True) in kinds(subject)


def test_ranges() -> None:
    assert ranges(np.array([True, True, False, True])) == [(0, 2), (3, 4)]
    assert ranges(np.zeros(3, np.bool_)) == []
