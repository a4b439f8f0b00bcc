"""A run that can be stopped and taken up: models, data that depends on the step alone, and comparison of states.

The batch of a step is the same for any number of ranks: rank r takes the r-th part of it.
"""

import torch
from torch import nn

import zero1ckpt
from tests.engine.models import bits_equal

BATCH = 60  # divides by 1, 2, 3, 4 and 5
STEP_LR = 1e-2


class Net(nn.Module):
    """A BatchNorm's buffers, a tied weight, a frozen param, a param of one element; sizes are odd."""

    def __init__(self, dtype=torch.float32, norm=False):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.emb = nn.Embedding(37, 17)
        self.mid = nn.Linear(17, 33)
        self.norm = nn.BatchNorm1d(33) if norm else nn.LayerNorm(33)
        self.out = nn.Linear(33, 17)
        self.head = nn.Linear(17, 37, bias=False)
        self.head.weight = self.emb.weight
        self.gain = nn.Parameter(torch.ones(1))
        with torch.no_grad():
            for name, param in self.named_parameters():
                if param.dim() > 1 or name.endswith("bias"):
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
        self.frozen = nn.Parameter(torch.full((3, 2), 0.5), requires_grad=False)
        self.to(dtype)

    def forward(self, tokens):
        hidden = self.emb(tokens)
        hidden = hidden + self.out(torch.tanh(self.norm(self.mid(hidden)))) * self.gain
        return self.head(hidden)


def decayed(model):
    """Two groups: matrices with weight decay, the rest without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def make(cls=torch.optim.AdamW, *, dtype=torch.float32, bucket_size=500, model=None, lr=STEP_LR, **options):
    """A model and its ``Zero1Optimizer``."""
    model = Net(dtype) if model is None else model
    if cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        options.setdefault("foreach", False)
    return model, zero1ckpt.Zero1Optimizer(decayed(model), cls, model=model, lr=lr, bucket_size=bucket_size, **options)


def train(model, optimizer, steps, start=0, rank=0, dp=1, scheduler=None):
    """Steps ``start`` to ``start + steps``; returns what each used: loss of this rank, lr and weight decay."""
    used = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(1000 + step)
        tokens, targets = torch.randint(0, 37, (2, BATCH), generator=generator)
        tokens, targets = tokens.chunk(dp)[rank], targets.chunk(dp)[rank]
        loss = nn.functional.cross_entropy(model(tokens).float(), targets)
        loss.backward()
        used.append((loss.item(), *((g["lr"], g["weight_decay"]) for g in optimizer.param_groups)))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return used


def weights(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def state_of(path):
    """Everything of a checkpoint, whatever its layout: (name, slot) -> tensor."""
    checkpoint = zero1ckpt.open(path)
    found = {}
    for name in checkpoint.names():
        own = checkpoint.state.scalars_of(checkpoint.state.index[name])
        for slot in checkpoint.slots:
            index = checkpoint.state.slot_index.get(slot)
            there = (
                slot in own if index is None else (checkpoint.state.index[name], index) not in checkpoint.state.absent
            )
            if there:
                found[name, slot] = checkpoint.read(name, slot)
    return found


def same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert bits_equal(a[name], b[name]), name


def same_state(a, b):
    """Asserts that two checkpoints hold the same values, groups and step, bit for bit, by two independent ways."""
    assert not zero1ckpt.verify(a, against=b).findings
    left, right = state_of(a), state_of(b)
    assert left.keys() == right.keys()
    for key in left:
        assert bits_equal(left[key], right[key]), key
    assert zero1ckpt.open(a).step == zero1ckpt.open(b).step
