"""What the optimizer leaves on a model, when it lets go, and what must not be done to a model behind its back."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.engine.harness import run_ranks
from tests.engine.overlap_nets import ADAMW, WIDTH, Net, loss_of
from zero1ckpt.core.errors import UsageError
from zero1ckpt.engine.zero1 import Zero1Optimizer

BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 64, **ADAMW}


def trained(model, steps=2, **options):
    optimizer = Zero1Optimizer(model, torch.optim.AdamW, **{**BOTH, **options})
    for step in range(steps):
        loss_of(model, step, 0).backward()
        optimizer.step()
    return optimizer


def hooks_of(model):
    on_modules = sum(len(m._forward_pre_hooks) for m in model.modules())
    on_params = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return on_modules, on_params


# ------------------------------------------------------------------------------------------------------------ lifetime


def test_close_takes_everything_off_the_model():
    model = Net()
    optimizer = trained(model)
    assert all(hooks_of(model)) and hasattr(model.last.weight, "main_grad")
    optimizer.close()
    assert hooks_of(model) == (0, 0)
    assert not hasattr(model.last.weight, "main_grad") and not hasattr(model.last.weight, "grad_added_to_main_grad")
    assert all(type(m._parameters) is dict for m in model.modules())
    with pytest.raises(UsageError, match="closed"):
        optimizer.step()
    loss_of(model, 0, 0).backward()
    assert model.last.weight.grad is not None


@pytest.mark.parametrize("first", ["optimizer", "optimizer, in flight", "model"])
def test_nothing_is_kept_alive(first):
    model = Net()
    optimizer = trained(model)
    assert optimizer._params.gatherer.in_flight
    dead = {
        "model": weakref.ref(model),
        "optimizer": weakref.ref(optimizer),
        "buffer": weakref.ref(optimizer.buffers[0].grads),
        "param": weakref.ref(model.last.weight),
    }
    if first != "model":
        if first == "optimizer":
            optimizer.wait_for_params()
        del optimizer
        gc.collect()
        if first != "optimizer":
            assert dead["optimizer"]() is None and dead["buffer"]() is not None
            list(model.parameters())  # the gathers go on without it until they are waited for
            gc.collect()
        assert hooks_of(model) == (0, 0)
        assert [name for name, r in dead.items() if r() is None] == ["optimizer", "buffer"]
        loss_of(model, 0, 0).backward()
        assert model.last.weight.grad is not None
        del model
    else:
        del model
        loss = optimizer.step()
        assert loss is None
        del optimizer
    gc.collect()
    assert [name for name, r in dead.items() if r() is not None] == []


def test_a_later_optimizer_takes_the_hooks_over():
    model = Net()
    first = trained(model)
    loss_of(model, 0, 0).backward()
    second = trained(model)
    for module in model.modules():
        assert len(module._forward_pre_hooks) <= 1
    for param in model.parameters():
        assert len(param._post_accumulate_grad_hooks or ()) <= 1
    with pytest.raises(UsageError, match="made later"):
        first.step()
    second.step()


# ------------------------------------------------------------------------------------------ params that left or changed


def halve(model):
    model.half()


def assign(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def put_data(model):
    model.last.weight.data = model.last.weight.data.clone()


def transpose(model):
    model.last.weight.data = model.last.weight.data.t()


def weight_norm(model):
    nn.utils.parametrizations.weight_norm(model.last)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def with_inverse(model):
    parametrize.register_parametrization(model.last, "weight", Doubled())


def replace(model):
    model.last.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def remove(model):
    model.last.weight = None


@pytest.mark.parametrize("how", [halve, assign, put_data, transpose, weight_norm, with_inverse, replace, remove])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_param_that_left_its_buffer(how, overlap):
    model = Net()
    optimizer = trained(model, overlap_param_gather=overlap)
    how(model)
    with pytest.raises(
        UsageError, match=r"last\.weight: param is no longer in the optimizer's buffer.*build a new one"
    ):
        optimizer.step()
    with pytest.raises(UsageError, match=r"no longer"):
        optimizer.reload_model_params()


def test_what_does_not_move_a_param_is_no_error():
    model = Net()
    optimizer = trained(model)
    model.float().to("cpu").train()
    model.requires_grad_(True)

    class Scaled(nn.Module):
        def forward(self, x):
            return 2 * x

    loss_of(model, 0, 0).backward()
    optimizer.step()
    parametrize.register_parametrization(model.last, "weight", Scaled())  # keeps the param, under another name
    with pytest.raises(UsageError, match=r"last\.weight: param was written"):
        optimizer.step()
    optimizer.reload_model_params()
    optimizer.step()
    for step in range(2):
        loss_of(model, step, 0).backward()
        assert model.last.parametrizations.weight.original.main_grad.any()
        optimizer.step()
    del model.branch
    loss_of(model, 0, 0, branch=False).backward()
    optimizer.step()
    assert "branch.weight" in optimizer.last.unused


def load_in_place(model):
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


def write(model):
    with torch.no_grad():
        model.embed.weight.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [load_in_place, write])
def test_a_param_that_was_written_to(how, dtype):
    model = Net(dtype)
    optimizer = trained(model)
    loss_of(model, 0, 0).backward()
    how(model)
    written = r"(last|embed)\.weight: param was written to since the last step.*reload_model_params"
    for _ in range(2):
        with pytest.raises(UsageError, match=written):
            optimizer.step()
    wanted = model.embed.weight.detach().clone()
    optimizer.reload_model_params()
    optimizer.param_groups[0]["lr"] = 0.0
    applied = optimizer.applied_steps
    optimizer.step()
    assert optimizer.applied_steps == applied + 1 and "embed.weight" not in optimizer.last.unused
    assert torch.equal(model.embed.weight, wanted)
    optimizer.step()


def one_rank_writes(rank):
    model = Net()
    optimizer = trained(model)
    if rank == 1:
        write(model)
    with pytest.raises(UsageError, match=r"embed\.weight: param was written" if rank == 1 else "another rank refuses"):
        optimizer.step()
    if rank == 1:
        optimizer.reload_model_params()
    optimizer.step()
    optimizer.close()


@pytest.mark.dist
def test_all_ranks_refuse_together():
    run_ranks(2, one_rank_writes)
