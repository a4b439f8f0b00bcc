"""Models and helpers for the overlap tests: modules in any order, tied, frozen and unused params."""

import torch
from torch import nn

from tests.engine.models import bits_equal

ADAMW = {"lr": 1e-2, "foreach": False}
WIDTH = 12


class Net(nn.Module):
    """An embedding tied to the head, a frozen layer, layers in any order and number, and a branch that may be unused.

    The head reads ``embed.weight`` without running ``embed``; ``last`` is registered first.
    """

    def __init__(self, dtype=torch.float32, layers=4, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.last = nn.Linear(WIDTH, WIDTH)
            self.embed = nn.Embedding(17, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
            self.norm = nn.LayerNorm(WIDTH)
            self.branch = nn.Linear(WIDTH, WIDTH)
            self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, ids, order=None, branch=True):
        x = self.embed(ids)
        for number in order if order is not None else range(len(self.layers)):
            x = x + torch.tanh(self.layers[number](x))
        if branch:
            x = x + self.branch(x)
        x = self.last(self.frozen(self.norm(x)))
        return nn.functional.linear(x, self.embed.weight).float()


def batch(step, rank, micro=0):
    generator = torch.Generator().manual_seed(step * 1009 + rank * 101 + micro * 7)
    return torch.randint(0, 17, (5,), generator=generator)


def loss_of(model, step, rank, micro=0, **options):
    ids = batch(step, rank, micro)
    return nn.functional.cross_entropy(model(ids, **options), ids.flip(0))


def params_of(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_same(a, b, what=""):
    assert a.keys() == b.keys()
    for name in a:
        assert bits_equal(a[name], b[name]), (what, name)
