"""``Zero1Optimizer.load`` of a Megatron checkpoint: main params, slots, groups, step and the model's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zero1ckpt
from tests.foreign.megatron.tiny import NAMES, by_name, write_iteration, write_run
from zero1ckpt.core.errors import UnsupportedError, UsageError


def build(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """A model of params by name, bfloat16."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for step in path:
            if step not in dict(module.named_children()):
                module.add_module(step, nn.Module())
            module = getattr(module, step)
        module.register_parameter(leaf, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))
    return root


def make(shapes: dict[str, tuple[int, ...]]) -> tuple[nn.Module, zero1ckpt.Zero1Optimizer]:
    model = build(shapes)
    params = dict(model.named_parameters())
    groups = [
        {"params": [p for p in params.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    made = zero1ckpt.Zero1Optimizer(groups, torch.optim.AdamW, model=model, lr=0.1, bucket_size=200, foreach=False)
    return model, made


def assert_loaded(optimizer: zero1ckpt.Zero1Optimizer, saved: Path, source: zero1ckpt.Checkpoint) -> None:
    """What the optimizer holds now, as it saves it, is what the source holds."""
    optimizer.save(saved)
    found = zero1ckpt.open(saved)
    assert found.step == source.step and set(found.names()) == set(source.names())
    for name in source.names():
        for slot in ("fp32_param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found.read(name, slot), source.read(name, slot)), (name, slot)
        assert found.read(name, "step").item() == source.step


def test_small(work):
    values = write_run(work / "run")
    model, optimizer = make(NAMES)
    extra = optimizer.load(work / "run")
    assert extra["iteration"] == 3 and extra["opt_param_scheduler"]["max_lr"] == 0.001
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.001]
    for name, param in model.named_parameters():
        assert torch.equal(param, by_name(values, name, "fp32_param").bfloat16())
    assert_loaded(optimizer, work / "saved", zero1ckpt.open(work / "run"))
    for param in model.parameters():
        param.grad = None
    sum(param.float().sum() for param in model.parameters()).backward()
    optimizer.step()


def test_names_that_differ_are_named(work):
    write_run(work / "run")
    _, optimizer = make({name: shape for name, shape in NAMES.items() if name != "output.weight"})
    with pytest.raises(UsageError, match=r"output\.weight"):
        optimizer.load(work / "run")


def test_an_unproved_map_is_not_loaded(work):
    write_iteration(work / "iter_0000003", weights={"output.weight": torch.ones(24, 8).bfloat16()})
    _, optimizer = make(NAMES)
    with pytest.raises(UnsupportedError, match="not proved"):
        optimizer.load(work / "iter_0000003")


@pytest.mark.parametrize("save", ["dp_reshardable", "dp_zero_gather_scatter", "legacy_torch"])
def test_real(corpus, work, save):
    source = zero1ckpt.open(corpus("v0161_toy_dp2_b2500") / save)
    shapes = {param.name: param.shape for param in source.state.params}
    model, optimizer = make(shapes)
    optimizer.load(source.path)
    assert_loaded(optimizer, work / "saved", source)
    for name, param in model.named_parameters():
        assert torch.equal(param, source.read(name, "fp32_param").bfloat16())
