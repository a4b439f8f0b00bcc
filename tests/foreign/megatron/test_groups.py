"""Param groups, step and loss scale; which param is in which group."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero1ckpt.core.errors import CorruptError
from zero1ckpt.encodings.inert_pickle import Dtype, GlobalRef, Opaque
from zero1ckpt.encodings.torch_archive import read_archive
from zero1ckpt.foreign.megatron.groups import archive_numbers, assign_groups, read_groups, read_loss_scale
from zero1ckpt.foreign.megatron.model import Doubt
from zero1ckpt.foreign.megatron.torch_dist import open_torch_dist
from zero1ckpt.model.state import LossScale, ParamSpec
from zero1ckpt.model.values import encode_value
from zero1ckpt.storage.local import LocalStore

DECAY: dict[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
PLAIN = DECAY | {"wd_mult": 0.0}


def test_step_is_taken_out_and_made_an_int() -> None:
    found = read_groups({"optimizer": {"param_groups": [DECAY | {"step": 3.0, "params": [0, 1]}]}})
    assert (found.step, found.groups, found.notices) == (3, (DECAY,), ())


def test_a_list_of_one_is_unwrapped() -> None:
    assert read_groups([{"param_groups": [{"step": 7}]}]).step == 7


@pytest.mark.parametrize(
    ("groups", "part"),
    [
        ([{"step": 3}, {"step": 4}], "different steps: 3, 4"),
        ([{}, {}], "no optimizer group states its step"),
        ([{"step": 2.5}], "no count of updates: 2.5"),
        ([{"step": -1}], "no count of updates: -1"),
        ([{"step": float("nan")}], "no number of updates"),
        ([{"step": "3"}], "no number of updates"),
    ],
)
def test_a_step_that_is_not_known_is_none(groups: list[dict[str, Any]], part: str) -> None:
    found = read_groups({"param_groups": groups})
    assert found.step is None
    assert any(part in notice for notice in found.notices)


def test_a_group_without_step_takes_that_of_the_others() -> None:
    found = read_groups({"param_groups": [{"step": 5}, {}]})
    assert (found.step, found.steps) == (5, (5, None))
    assert found.notices == ("group 1 states no step; the others are at 5",)


def test_values_become_plain_and_unknown_ones_are_named() -> None:
    unknown = Opaque(GlobalRef("their", "Thing"), (), "call")
    found = read_groups({"param_groups": [{"step": 1, "betas": (0.9, 0.95), "dtype": Dtype("float32"), "x": unknown}]})
    assert found.groups == ({"betas": (0.9, 0.95), "dtype": "torch.float32"},)
    assert found.notices == ("group 0: x is left out: a value of type their.Thing",)
    encode_value(list(found.groups), "groups")


@pytest.mark.parametrize("value", [None, {}, {"optimizer": {}}, [1, 2], {"param_groups": {}}])
def test_no_groups_is_an_error(value: Any) -> None:
    with pytest.raises(CorruptError, match="param_groups"):
        read_groups(value)


def test_loss_scale() -> None:
    assert read_loss_scale({}) is None
    assert read_loss_scale(None) is None
    assert read_loss_scale({"scale": 4.0, "growth_tracker": 1, "hysteresis_tracker": 2}) == LossScale(4.0, 1, 2)
    with pytest.raises(CorruptError, match="grad scaler"):
        read_loss_scale({"scale": 4.0})


def spec(name: str, *shape: int, expert: bool = False) -> ParamSpec:
    return ParamSpec(name, shape, "bfloat16", "float32", expert=expert)


def test_biases_and_one_dimension_do_not_decay() -> None:
    params = [spec("a.weight", 3, 4), spec("a.bias", 3), spec("ln.weight", 3), spec("b.bias", 2, 2)]
    assert assign_groups(params, [DECAY, PLAIN]) == ((0, 1, 1, 1), None)
    assert assign_groups(params, [PLAIN, DECAY]) == ((1, 0, 0, 0), None)


def test_experts_are_apart() -> None:
    experts = [DECAY | {"is_expert_parallel": True}, PLAIN | {"is_expert_parallel": True}]
    params = [
        spec("w", 3, 4),
        spec("m.experts.experts.linear_fc1.weight", 2, 3, 4, expert=True),
        spec("m.experts.experts.linear_fc1.bias", 2, 3, expert=True),
    ]
    assert assign_groups(params, [DECAY, *experts]) == ((0, 1, 2), None)


def test_one_group_holds_all() -> None:
    assert assign_groups([spec("w", 2, 2), spec("b.bias", 2)], [DECAY]) == ((0, 0), None)


def test_what_the_rule_leaves_open_is_said() -> None:
    params = [spec("embedding.word_embeddings.weight", 9, 4), spec("w", 2, 2)]
    indices, notice = assign_groups(params, [DECAY, DECAY | {"is_decoupled_lr": True}])
    assert indices == (1, 0) and notice is None
    indices, notice = assign_groups([spec("w", 2, 2)], [DECAY, DECAY | {"lr_mult": 0.1}])
    assert indices == (0,) and isinstance(notice, Doubt) and "open for 1 of 1 (w)" in notice
    indices, notice = assign_groups([spec("a.q_layernorm.weight", 8)], [DECAY, PLAIN])
    assert indices == (1,) and notice is not None and not isinstance(notice, Doubt)


@pytest.mark.parametrize("save", ["dp_reshardable", "legacy_torch"])
def test_the_rule_against_the_truth(corpus: Callable[..., Path], save: str) -> None:
    """Every param of the real models is in the group that the live optimizer had it in."""
    tried = 0
    for folder in sorted(corpus("v0161_toy_dp2_b2500").parent.iterdir()):
        if not (folder / save).is_dir() or "ep2" in folder.name:
            continue
        truth = json.loads((folder / "truth.json").read_text())["params"]
        groups = _groups(corpus(folder.name, save), save)
        params = [ParamSpec(name, tuple(row["shape"])) for name, row in truth.items()]
        indices, notice = assign_groups(params, groups)
        assert notice is None
        assert list(indices) == [row["group"] for row in truth.values()], folder.name
        tried += len(params)
    assert tried > 10


def _groups(path: Path, save: str) -> Any:
    if save == "legacy_torch":
        file = next(p for p in sorted(path.glob("mp_rank_*/model_optim_rng.pt")))
        store = LocalStore(file.parent)
        archive = read_archive(store, file.name)
        found = read_groups(archive.value["optimizer"], archive_numbers(store, archive))
    else:
        entries = open_torch_dist(path)
        key = next(key for key in entries.objects if key.endswith(".optimizer/shard_0_1"))
        archive = entries.load_archive(key)
        found = read_groups(archive.value, archive_numbers(entries.store, archive))
    assert (found.step, found.notices) == (3, ())
    return found.groups


@pytest.mark.parametrize("save", ["dp_reshardable", "fully_reshardable"])
def test_grad_scaler_of_a_real_checkpoint(corpus: Callable[..., Path], save: str) -> None:
    entries = open_torch_dist(corpus("v0161_toy_fp16_dp2_b1", save))
    if save == "fully_reshardable":
        store = LocalStore(entries.path)
        archive = read_archive(store, "common.pt")
        value = archive.value["optimizer"]["grad_scaler"]
    else:
        key = next(key for key in entries.objects if ".grad_scaler/" in key)
        archive = entries.load_archive(key)
        value = archive.value
    assert read_loss_scale(value, archive_numbers(entries.store, archive)) == LossScale(256.0, 3, 2)
