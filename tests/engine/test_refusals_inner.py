"""Refused at construction: optimizers that are not elementwise, models that something else reduces, other layouts."""

import pytest
import torch
from torch import nn

from zero1ckpt.core.errors import UnsupportedError, UsageError
from zero1ckpt.core.layout import layout_params
from zero1ckpt.engine.zero1 import Zero1Optimizer


def make(params, cls=torch.optim.AdamW, **options):
    return Zero1Optimizer(params, cls, **options)


def weight(*shape, dtype=torch.float32):
    return nn.Parameter(torch.ones(shape, dtype=dtype))


class Rowwise(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["row"] = torch.zeros(2)


class TrustRatio(torch.optim.Optimizer):
    """As LAMB and LARS: the step depends on the norm of the whole param."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * float(p.norm() / p.grad.norm()))


class Distance(torch.optim.Optimizer):
    """As D-Adaptation and Prodigy: an estimate over all params in the group, which may not move the params yet."""

    def __init__(self, params):
        super().__init__(params, {"d": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] += sum(float(p.grad.abs().sum()) for p in group["params"])
            for p in group["params"]:
                p.sub_(p.grad, alpha=1e-3)


REFUSED = [
    (Rowwise, r"Rowwise.*row"),
    (torch.optim.LBFGS, "LBFGS"),
    (torch.optim.Adafactor, r"Adafactor is not elementwise.*elementwise=True"),
    (torch.optim.SparseAdam, "SparseAdam"),
    (TrustRatio, "TrustRatio is not elementwise: the param"),
    (Distance, "Distance is not elementwise: group value 'd'"),
]
if hasattr(torch.optim, "Muon"):
    REFUSED.append((torch.optim.Muon, "Muon is not elementwise"))


@pytest.mark.parametrize(("cls", "words"), REFUSED)
def test_optimizers_that_are_not_elementwise(cls, words):
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=words) as caught:
        make([weight(2)], cls)
    assert torch.equal(torch.get_rng_state(), state) and "\n" not in str(caught.value)


def test_what_is_elementwise_is_taken():
    for cls in ("AdamW", "Adam", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD", "SGD"):
        make([weight(2)], getattr(torch.optim, cls))
    for options in ({"fused": True}, {"foreach": True}, {"amsgrad": True, "maximize": True}):
        make([weight(2)], torch.optim.Adam, **options)
    make([weight(2)], TrustRatio, elementwise=True)
    make([weight(2)], torch.optim.Adafactor, elementwise=True)
    with pytest.raises(UsageError, match="a class"):
        make([weight(2)], torch.optim.SGD([weight(1)]))


def test_what_else_reduces_or_shards_the_gradients(work):
    torch.distributed.init_process_group("gloo", init_method=f"file://{work}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        for build in (lambda: make(wrapped), lambda: make(wrapped.parameters(), model=wrapped)):
            with pytest.raises(UsageError, match=r"DistributedDataParallel.*model\.module"):
                build()
        make(wrapped.module)
    finally:
        torch.distributed.destroy_process_group()


def test_a_layout_of_another_dp_size_or_model():
    params = [("a", weight(300)), ("b", weight(5))]
    made = make(params, bucket_size=4).layout
    again = make(params, layout=made)
    assert again.layout.rules == made.rules and again.layout.buffers[0].bucket_count == 2
    other = layout_params(again.param_specs, made.rules.with_dp(2))
    with pytest.raises(UsageError, match=r"another dp size.*dp size 2.*dp size 1"):
        make(params, layout=other)
    with pytest.raises(UsageError, match="a: param has another place"):
        make(params[::-1], layout=made)
    with pytest.raises(UsageError, match="a: param of the layout"):
        make(params[1:], layout=made)


@pytest.mark.parametrize(
    ("param", "words"),
    [
        (weight(2, dtype=torch.complex64), "q: .*complex64"),
        (nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn)), "q: .*float8"),
    ],
)
def test_complex_and_quantised(param, words):
    with pytest.raises(UnsupportedError, match=words):
        make([("q", param)])
    linear = nn.Linear(2, 2)  # a quantised param that is frozen is nobody's business
    linear.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    assert [spec.name for spec in make(linear).param_specs] == ["bias"]
