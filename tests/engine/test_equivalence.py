"""ZeRO-1 equals the inner optimizer on one process that is fed the same sums."""

import pytest
import torch

from tests.engine.harness import run_ranks
from tests.engine.models import SHAPES, Bag, bits_equal, dump, full_slots, grads_of, mean_in_rank_order
from zero1ckpt.engine.zero1 import Zero1Optimizer

STEPS = 20
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}
CASES = {
    "adamw": (torch.optim.AdamW, ADAMW),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "foreach": False}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "foreach": False}),
    "dampening": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "foreach": False}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "foreach": False}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.5, "foreach": False}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True, "foreach": False}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-2, "foreach": False}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2, "foreach": False}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2, "foreach": False}),
}
BUCKETS = (1, 64, 1000, "none")


def train(rank, size, cls, options, bucket_size, dtype=torch.float32):
    model = Bag(dtype)
    optimizer = Zero1Optimizer(model, cls, bucket_size=bucket_size, **options)
    for step in range(STEPS):
        model(grads_of(SHAPES, step, rank)).backward()
        optimizer.step()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    return params, dump(optimizer), optimizer.layout, optimizer.param_specs, optimizer.local_scalars()


def all_cases(rank, size):
    return {
        (name, bucket): train(rank, size, cls, options, bucket)
        for name, (cls, options) in CASES.items()
        for bucket in (BUCKETS if name in ("adamw", "dampening") else (64,))
    }


def reference(size, cls, options):
    model = Bag()
    optimizer = cls(model.parameters(), **options)
    for step in range(STEPS):
        mean = mean_in_rank_order([grads_of(SHAPES, step, r) for r in range(size)])
        for name, param in model.named_parameters():
            param.grad = mean[name]
        optimizer.step()
    return model, optimizer


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_bit_equal_to_one_process(size):
    ranks = run_ranks(size, all_cases, size)
    for case in ranks[0]:
        cls, options = CASES[case[0]]
        model, optimizer = reference(size, cls, options)
        results = [r[case] for r in ranks]
        _, _, layout, specs, _ = results[0]
        for name, param in model.named_parameters():
            for params, *_ in results:
                assert bits_equal(params[name], param), (case, name)
        for slot in results[0][1]:
            whole = full_slots([r[1] for r in results], layout, specs, slot)
            for name, param in model.named_parameters():
                if param.numel() and slot != "fp32_param":
                    assert bits_equal(whole[name], optimizer.state[param][slot].flatten()), (case, name, slot)
        for *_, scalars in results:
            for index, values in scalars.items():
                state = optimizer.state[model.get_parameter(specs[index].name)]
                expected = {k: v.item() for k, v in state.items() if v.dim() == 0 and k not in results[0][1]}
                assert {k: v.value for k, v in values.items()} == expected
