"""It is a ``torch.optim.Optimizer``: schedulers, step hooks and proxied state, with identities that outlive a load."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from tests.engine.models import SHAPES, Bag, bits_equal, grads_of
from zero1ckpt import Zero1Optimizer
from zero1ckpt.engine.zero1 import Zero1Optimizer as Engine

ADAMW = {"lr": 1e-2, "foreach": False}
SCHEDULERS = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, [lambda n: 1 / (1 + n), lambda n: 0.5**n]),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.5, total_iters=3),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 4, power=2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 1e-4, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, [1e-2, 3e-2], total_steps=6),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, cooldown=1),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1), lrs.ExponentialLR(o, 0.9)], [2]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1), lrs.ExponentialLR(o, 0.9)], o),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


def groups(model):
    return [{"params": [model.a, model.long]}, {"params": [model.b, model.c], "weight_decay": 0.0, "lr": 3e-3}]


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_schedulers(name):
    model, plain = Bag(), Bag()
    ours = Engine(groups(model), torch.optim.AdamW, model=model, bucket_size=64, **ADAMW)
    theirs = torch.optim.AdamW(groups(plain), **ADAMW)
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (ours, theirs)]
    for step in range(5):
        for net, optimizer, scheduler in zip((model, plain), (ours, theirs), schedulers, strict=True):
            net(grads_of(SHAPES, step, 0), ("a", "long", "b", "c")).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert (mine["lr"], mine["betas"]) == (other["lr"], other["betas"])
        assert all(bits_equal(p, plain.get_parameter(n)) for n, p in model.named_parameters())
    state = schedulers[0].state_dict()
    SCHEDULERS[name](Engine(groups(Bag()), torch.optim.AdamW, **ADAMW)).load_state_dict(state)


def test_every_scheduler_of_torch_is_tried():
    known = {
        name
        for name, value in vars(lrs).items()
        if isinstance(value, type) and issubclass(value, lrs.LRScheduler) and not name.startswith("_")
    }
    assert known - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("cls", [Engine, Zero1Optimizer])
def test_step_hooks_run_once(cls):
    model = nn.Linear(3, 2)
    Engine(nn.Linear(1, 1), torch.optim.AdamW)  # torch wraps step() of the class that is made first
    optimizer = cls(model, torch.optim.AdamW, **ADAMW)
    calls = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(("pre", o is optimizer, o.applied_steps)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(("post", o is optimizer, o.applied_steps)))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert calls == [("pre", True, 0), ("post", True, 1)]

    def closure():
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None and optimizer.applied_steps == 2


def test_state_and_groups_are_proxied_and_keep_their_identity(work):
    model = Bag()
    optimizer = Zero1Optimizer(groups(model), torch.optim.AdamW, model=model, bucket_size=64, **ADAMW)
    state, outer = optimizer.state, optimizer.param_groups
    inner = [id(group) for group in outer]
    views = {param: id(values) for param, values in state.items()}
    moments = {param: values["exp_avg"].data_ptr() for param, values in state.items()}
    used = ("a", "long", "b", "c")
    model(grads_of(SHAPES, 0, 0), used).backward()
    optimizer.step()
    optimizer.save(work / "ckpt")
    kept = {param: values["exp_avg"].clone() for param, values in state.items()}
    outer[0]["lr"] = 5.0
    model(grads_of(SHAPES, 1, 0), used).backward()
    optimizer.step()
    assert optimizer.inner.param_groups[0]["lr"] == 5.0
    optimizer.load(work / "ckpt")
    assert optimizer.state is state and optimizer.param_groups is outer and [id(g) for g in outer] == inner
    assert outer[0]["lr"] == optimizer.inner.param_groups[0]["lr"] == 1e-2
    for param, values in state.items():
        assert views[param] == id(values) and values["exp_avg"].data_ptr() == moments[param]
        assert bits_equal(values["exp_avg"], kept[param])
    assert {id(p) for p in state} == {id(p) for g in outer for p in g["params"]} and model.one not in state
    state[model.long]["exp_avg"].zero_()  # by reference: what is written here is what the next step uses
    assert not optimizer.shard("exp_avg", 0, optimizer.param_index_map[model.long][2]).any()
    with pytest.raises(KeyError):
        state[model.one]
