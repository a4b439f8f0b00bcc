"""Small models, gradients that are the same in every run, and the plain optimizer that the engine must equal."""

import torch
from torch import nn

SHAPES = {"a": (7, 5), "b": (5,), "scalar": (), "one": (1,), "none": (0, 3), "long": (301,), "c": (11, 13)}


class Bag(nn.Module):
    """Params of odd shapes, of 0 and of 1 elements; ``forward`` uses those that are named."""

    def __init__(self, dtype=torch.float32, shapes=SHAPES, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def forward(self, weights, names=None):
        total = torch.zeros((), dtype=torch.float32)
        for name, param in self.named_parameters():
            if names is None or name in names:
                total = total + (param.float() * weights[name]).sum()
        return total


def grads_of(shapes, step, rank, micro=0):
    """Float32 gradients by name."""
    generator = torch.Generator().manual_seed(1 + step * 1009 + rank * 101 + micro * 7)
    return {name: torch.randn(shape, generator=generator) * 10.0 ** (step % 4 - 2) for name, shape in shapes.items()}


def mean_in_rank_order(grads):
    """((g0 + g1) + g2) ... / n for each name."""
    total = {name: grad.clone() for name, grad in grads[0].items()}
    for other in grads[1:]:
        for name in total:
            total[name] += other[name]
    return {name: value / len(grads) for name, value in total.items()}


def full_slots(optimizers_shards, layout, specs, slot):
    """Joins ``shards[rank][buffer][bucket]`` of a slot into one flat tensor a param."""
    whole = {}
    for rank, shards in enumerate(optimizers_shards):
        for number, buffer in enumerate(layout.buffers):
            for part in buffer.fragments(rank):
                spec = specs[part.param_index]
                shard = shards[slot][number][part.bucket]
                flat = whole.setdefault(spec.name, torch.full((spec.numel,), float("nan"), dtype=shard.dtype))
                flat[part.param.start : part.param.end] = shard[part.gbuf_local.start : part.gbuf_local.end]
    return whole


def dump(optimizer):
    """All shards of this rank: slot -> [buffer][bucket]."""
    return {
        spec.name: [
            [optimizer.shard(spec.name, i, b).clone() for b in range(buffer.bucket_count)]
            for i, buffer in enumerate(optimizer.layout.buffers)
        ]
        for spec in optimizer.slot_specs()
    }


def bits_equal(a, b):
    """Same dtype, shape and bytes: tells -0.0 from 0.0 and takes NaN for equal to itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(raw), b.detach().contiguous().view(raw))
