"""Hyper-parameters and schedulers: the first step after a load uses exactly what the uninterrupted run uses."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zero1ckpt
from tests.training.scenario import Net, decayed, make, same_state, same_weights, train, weights
from tests.training.test_optimizers import untouched
from zero1ckpt.core.errors import UnsupportedError, UsageError

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda s: 1 / (1 + s), lambda s: 0.9**s]),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 12, eta_min=1e-5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.01, 0.02], total_steps=20),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 8], gamma=0.3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ReduceLROnPlateau": lambda o: _Plateau(o, patience=1),
}


class _Plateau(lr_scheduler.ReduceLROnPlateau):
    def step(self, metrics=1.0):
        super().step(metrics)


@pytest.mark.parametrize("groups", ["file", "run"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_scheduler_goes_on(work, kind, groups):
    model, optimizer = make()
    scheduler = SCHEDULERS[kind](optimizer)
    train(model, optimizer, 5, 0, scheduler=scheduler)
    optimizer.save(work / "start", extra={"scheduler": scheduler.state_dict()})
    used = train(model, optimizer, 6, 5, scheduler=scheduler)

    other, resumed = make(lr=0.5, bucket_size=100)
    scheduler2 = SCHEDULERS[kind](resumed)
    if groups == "run":  # the scheduler alone brings the groups along from here on; weight decay is the run's
        for group, source in zip(resumed.param_groups, zero1ckpt.open(work / "start").groups, strict=True):
            group.update({k: v for k, v in source.items() if k != "params"})
    extra = resumed.load(work / "start", groups=groups)
    scheduler2.load_state_dict(extra["scheduler"])
    assert scheduler2.state_dict() == scheduler_state(work / "start", scheduler2)
    assert train(other, resumed, 6, 5, scheduler=scheduler2) == used
    same_weights(weights(model), weights(other))


def scheduler_state(path, scheduler):
    """What was saved, as Python values of the same types."""
    saved = zero1ckpt.open(path).extra["scheduler"]
    now = scheduler.state_dict()
    assert {k: type(v) for k, v in saved.items()} == {k: type(v) for k, v in now.items()}
    return saved


def test_milestones_keep_their_integer_keys(work):
    _, optimizer = make()
    scheduler = SCHEDULERS["MultiStepLR"](optimizer)
    optimizer.save(work / "c", extra={"scheduler": scheduler.state_dict()})
    assert optimizer.load(work / "c")["scheduler"]["milestones"] == {2: 1, 5: 1, 8: 1}


def test_groups_of_the_file_and_of_the_run(work):
    model, optimizer = make(lr=0.03, betas=(0.8, 0.95))
    optimizer.param_groups[1]["lr"] = 0.07
    optimizer.param_groups[0]["note"] = "kept"
    train(model, optimizer, 2)
    optimizer.save(work / "c")

    _, other = make(lr=0.5)
    groups = [id(group) for group in other.param_groups]
    other.load(work / "c")
    assert groups == [id(group) for group in other.param_groups]  # schedulers hold on to them
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in other.param_groups] == [
        (0.03, (0.8, 0.95), 0.1),
        (0.07, (0.8, 0.95), 0.0),
    ]
    assert type(other.param_groups[0]["betas"]) is tuple
    assert other.param_groups[0]["note"] == "kept"
    assert [g["lr"] for g in other.inner.param_groups] == [0.03, 0.07]

    _, third = make(lr=0.5)
    third.load(work / "c", groups="run")
    assert [g["lr"] for g in third.param_groups] == [0.5, 0.5]
    third.save(work / "d")
    assert [g["lr"] for g in zero1ckpt.open(work / "d").groups] == [0.5, 0.5]


def test_groups_are_matched_by_membership_not_by_order(work):
    _, optimizer = make()
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.save(work / "c")
    other = Net()
    swapped = zero1ckpt.Zero1Optimizer(decayed(other)[::-1], torch.optim.AdamW, model=other)
    swapped.load(work / "c")
    assert [(g["lr"], g["weight_decay"]) for g in swapped.param_groups] == [(0.01, 0.0), (0.25, 0.1)]


@pytest.mark.parametrize("moved", ["to the other", "into one", "into three"])
def test_other_membership_names_the_param(work, moved):
    model, optimizer = make()
    train(model, optimizer, 1)
    optimizer.save(work / "c")

    def grouped():
        other = Net()
        first, second = (group["params"] for group in decayed(other))
        groups = {
            "to the other": [first[1:], [*second, first[0]]],
            "into one": [[*first, *second]],
            "into three": [first[:1], first[1:], second],
        }[moved]
        groups = [{"params": params, "lr": 0.01} for params in groups]
        return other, zero1ckpt.Zero1Optimizer(groups, torch.optim.AdamW, model=other, foreach=False)

    names = r"(emb|mid|out|norm|gain)[.a-z]*: group \d has other params"
    untouched(grouped, lambda o: o.load(work / "c"), UnsupportedError, names)
    _, optimizer = grouped()
    optimizer.load(work / "c", groups="run")
    assert optimizer.applied_steps == 1


def test_more_and_fewer_params(work):
    """Each name that only one side has is told; state of the others is loaded when that was asked for."""

    def two(names, seed):
        generator = torch.Generator().manual_seed(seed)
        model = nn.ParameterDict({n: nn.Parameter(torch.randn(5, generator=generator)) for n in names})
        optimizer = zero1ckpt.Zero1Optimizer(model, torch.optim.AdamW, lr=0.1, foreach=False)
        sum(p.square().sum() for p in model.values()).backward()
        optimizer.step()
        return model, optimizer

    small, optimizer = two("ab", 0)
    optimizer.save(work / "small")
    large, optimizer = two("abcd", 1)
    optimizer.save(work / "large")

    with pytest.raises(UsageError, match="missing in the checkpoint: c, d"):
        optimizer.load(work / "small")
    before = weights(large)
    optimizer.load(work / "small", missing="init")
    after = weights(large)
    same_weights({n: after[n] for n in "ab"}, weights(small))
    same_weights({n: after[n] for n in "cd"}, {n: before[n] for n in "cd"})
    assert not optimizer.state[large["c"]]["exp_avg"].any() and optimizer.state[large["c"]]["step"] == 0
    assert optimizer.state[large["a"]]["step"] == 1

    _, optimizer = two("ab", 2)
    with pytest.raises(UsageError, match="that the optimizer has not: c, d"):
        optimizer.load(work / "large")
    optimizer.load(work / "large", unexpected="drop")
    optimizer.save(work / "dropped")
    for name in "ab":
        for slot in ("fp32_param", "exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(*(zero1ckpt.open(work / p).read(name, slot) for p in ("dropped", "large")))
    same_state(work / "dropped", work / "dropped")


def test_transposed_shape_of_the_same_numel_is_refused(work):
    def one(shape):
        model = nn.ParameterDict({"w": nn.Parameter(torch.randn(shape))})
        return model, zero1ckpt.Zero1Optimizer(model, torch.optim.AdamW, lr=0.1)

    one((3, 8))[1].save(work / "c")
    model, optimizer = one((8, 3))
    before = weights(model)
    for options in ({}, {"missing": "init", "unexpected": "drop"}):
        with pytest.raises((UnsupportedError, UsageError), match=r"w: .*3.*8.*8.*3"):
            optimizer.load(work / "c", **options)
    same_weights(weights(model), before)


@pytest.mark.parametrize("option", ["groups", "missing", "unexpected", "rank_state"])
def test_unknown_choice(work, option):
    _, optimizer = make()
    with pytest.raises(UsageError, match=f"{option} .*found never, expected one of"):
        optimizer.load(work / "none", **{option: "never"})


def test_an_unknown_part_is_named_with_those_that_there_are(work):
    _, optimizer = make()
    optimizer.save(work / "c")
    with pytest.raises(UsageError, match="found gen, expected one of ''"):
        optimizer.load(work / "c", part="gen")
