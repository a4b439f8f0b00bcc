"""Every elementwise optimizer: what it has made is saved, what it has not made yet is absent, and both load."""

import pytest
import torch

import zero1ckpt
from tests.engine.harness import run_ranks
from tests.training.scenario import Net, decayed, make, same_state, same_weights, train, weights
from zero1ckpt.core.errors import UnsupportedError, UsageError


class Lion(torch.optim.Optimizer):
    """One moment, made at the first step; no step counter."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["moment"] = torch.zeros_like(p)
                    m = state["moment"]
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(torch.sign(b1 * m + (1 - b1) * p.grad), alpha=-group["lr"])
                    m.mul_(b2).add_(p.grad, alpha=1 - b2)


class Bf16Moment(Lion):
    """Keeps its moment in bf16."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    self.state[p]["moment"] = torch.zeros_like(p, dtype=torch.bfloat16)
        return super().step(closure)


KINDS = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True, "foreach": None}),
    "AdamW tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    "Adam": (torch.optim.Adam, {"betas": (0.8, 0.9)}),
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "NAdam": (torch.optim.NAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Lion": (Lion, {}),
    "Bf16Moment": (Bf16Moment, {}),
}
MAKES_STATE_LATE = {"SGD dampening", "Lion", "Bf16Moment"}


def whole(rank, dp, work, kind, before):
    cls, options = KINDS[kind]
    model, optimizer = make(cls, **options)
    train(model, optimizer, before, 0, rank, dp)
    optimizer.save(f"{work}/start{before}")
    train(model, optimizer, 4, before, rank, dp)
    optimizer.save(f"{work}/end{before}")
    return weights(model)


def again(rank, dp, work, kind, before, bucket_size):
    cls, options = KINDS[kind]
    model, optimizer = make(cls, bucket_size=bucket_size, **options)
    train(model, optimizer, 1, 50, rank, dp)
    optimizer.load(f"{work}/start{before}")
    optimizer.save(f"{work}/copy{before}-{dp}")
    train(model, optimizer, 4, before, rank, dp)
    optimizer.save(f"{work}/again{before}-{dp}")
    return weights(model)


@pytest.mark.dist
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_before_and_after_the_first_step(work, kind, before):
    ends = run_ranks(3, whole, 3, str(work), kind, before)
    bucket_size = 500 if kind == "AdamW fused" else 100  # its vector tails depend on where a tensor is cut
    for end, end_again in zip(ends, run_ranks(3, again, 3, str(work), kind, before, bucket_size), strict=True):
        same_weights(end, end_again)
    run_ranks(2, again, 2, str(work), kind, before, 64)
    same_state(work / f"copy{before}-3", work / f"start{before}")
    same_state(work / f"copy{before}-2", work / f"start{before}")
    same_state(work / f"again{before}-3", work / f"end{before}")
    slots = zero1ckpt.open(work / f"start{before}").slots
    if before == 0 and kind in MAKES_STATE_LATE:
        assert slots == ("fp32_param",)
    if kind == "AdamW amsgrad":
        assert slots == ("fp32_param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")


@pytest.fixture
def adamw(work):
    model, optimizer = make(amsgrad=True)
    train(model, optimizer, 3)
    optimizer.save(work / "c")
    return work / "c"


def untouched(make_one, load, error, words):
    """A refused load leaves an optimizer that steps on as if nothing had happened."""
    model, optimizer = make_one()
    twin, twins = make_one()
    train(model, optimizer, 2)
    train(twin, twins, 2)
    with pytest.raises(error, match=words) as caught:
        load(optimizer)
    assert "\n" not in str(caught.value)
    train(model, optimizer, 2, 2)
    train(twin, twins, 2, 2)
    same_weights(weights(model), weights(twin))


def test_a_slot_that_the_optimizer_has_not(adamw, work):
    untouched(make, lambda o: o.load(adamw), UsageError, "has not: max_exp_avg_sq")
    _, optimizer = make()
    optimizer.load(adamw, unexpected="drop")
    optimizer.save(work / "d")
    assert "max_exp_avg_sq" not in zero1ckpt.open(work / "d").slots
    assert torch.equal(*(zero1ckpt.open(p).read("mid.weight", "exp_avg") for p in (adamw, work / "d")))


def test_a_slot_that_the_checkpoint_has_not(work):
    model, optimizer = make()
    train(model, optimizer, 3)
    optimizer.save(work / "c")
    untouched(lambda: make(amsgrad=True), lambda o: o.load(work / "c"), UsageError, "missing .*: max_exp_avg_sq")
    model, optimizer = make(amsgrad=True)
    train(model, optimizer, 1)
    optimizer.load(work / "c", missing="init")
    optimizer.save(work / "d")
    assert not zero1ckpt.open(work / "d").read("mid.weight", "max_exp_avg_sq").any()


def test_another_dtype_of_a_slot_is_refused_not_cast(work):
    model, optimizer = make(Lion)
    train(model, optimizer, 3)
    optimizer.save(work / "c")
    untouched(lambda: make(Bf16Moment), lambda o: o.load(work / "c"), UnsupportedError, "moment.*float32.*bfloat16")


def test_a_scalar_that_the_optimizer_has_not(work):
    """Saved by an optimizer that counts, loaded by one that does not."""

    class Counting(Lion):
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state["count"] = state.get("count", 0) + 1

    model, optimizer = make(Counting)
    train(model, optimizer, 3)
    optimizer.save(work / "c")
    assert zero1ckpt.open(work / "c").read("gain", "count") == 3
    untouched(lambda: make(Lion), lambda o: o.load(work / "c"), (UnsupportedError, UsageError), "count")


def test_skipped_params_keep_their_own_step(work):
    """With unused="skip" each param counts its own steps, and one that has none yet has none after a load."""

    def run(steps, optimizer, model):
        for step in range(steps):
            model.zero_grad()
            (model.mid(torch.ones(2, 17)) if step else model.gain).sum().backward()
            optimizer.step()

    made = [make(unused="skip") for _ in range(2)]
    run(3, made[0][1], made[0][0])
    made[0][1].save(work / "c")
    made[1][1].load(work / "c")
    made[1][1].save(work / "d")
    same_state(work / "c", work / "d")
    steps = {n: zero1ckpt.open(work / "d").read(n, "step").item() for n in ("gain", "mid.weight", "out.bias")}
    assert steps == {"gain": 1, "mid.weight": 2, "out.bias": 0}
    for model, optimizer in made:
        run(3, optimizer, model)
    same_weights(weights(made[0][0]), weights(made[1][0]))


def test_a_second_load_into_the_same_optimizer(work):
    model, optimizer = make(torch.optim.SGD, momentum=0.9, dampening=0.1)
    optimizer.save(work / "fresh")
    start = weights(model)
    train(model, optimizer, 3)
    optimizer.save(work / "used")
    end = weights(model)
    for path, expected in (("fresh", start), ("used", end), ("used", end), ("fresh", start)):
        optimizer.load(work / path)
        same_weights(weights(model), expected)
    train(model, optimizer, 3)
    same_weights(weights(model), end)


def test_state_tensors_of_the_user_see_the_load(work):
    """``state[p]`` is by reference before and after."""
    model, optimizer = make()
    train(model, optimizer, 2)
    moment = optimizer.state[model.gain]["exp_avg"]
    value = moment.clone()
    optimizer.save(work / "c")
    train(model, optimizer, 1, 5)
    optimizer.load(work / "c")
    assert torch.equal(optimizer.state[model.gain]["exp_avg"], value)


def test_float64(work):
    made = []
    for _ in range(2):
        model = Net(torch.float64)
        made.append((model, zero1ckpt.Zero1Optimizer(decayed(model), torch.optim.AdamW, model=model, foreach=False)))
    train(*made[0], 3)
    made[0][1].save(work / "c")
    assert zero1ckpt.open(work / "c").read("gain", "exp_avg").dtype == torch.float64
    made[1][1].load(work / "c")
    for model, optimizer in made:
        train(model, optimizer, 3, 3)
    same_weights(weights(made[0][0]), weights(made[1][0]))
