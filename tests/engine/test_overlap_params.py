"""Params gathered during the forward pass: nobody reads one that is still being written to."""

import copy
import io
import random

import pytest
import torch
from torch import nn

from tests.engine.harness import run_ranks
from tests.engine.models import bits_equal
from tests.engine.overlap_nets import ADAMW, WIDTH, Net, assert_same, batch, loss_of, params_of
from zero1ckpt.core.errors import UsageError, VerificationError
from zero1ckpt.engine.zero1 import Zero1Optimizer


def build(model, overlap=True, **options):
    given = {"bucket_size": 64, "overlap_param_gather": overlap, **ADAMW, **options}
    return Zero1Optimizer(model, given.pop("inner", torch.optim.AdamW), **given)


def hold_back(optimizer):
    """Gathers deliver only when they are waited for, into memory full of NaN: what is read too early shows."""
    comm = optimizer.comm
    original = comm.begin_all_gather

    class Late:
        def __init__(self, bucket):
            self.bucket, self.kept = bucket, bucket.clone()
            bucket.fill_(float("nan"))

        def wait(self):
            self.bucket.copy_(self.kept)
            original(self.bucket).wait()

    comm.begin_all_gather = Late
    return optimizer


def stepped(model, rank, step=0, **options):
    """An optimizer with all gathers of a step in flight, and what the params will be."""
    twin = copy.deepcopy(model)
    plain = build(twin, False, **{k: v for k, v in options.items() if k != "align_param_gather"})
    optimizer = hold_back(build(model, **options))
    for m, o in ((twin, plain), (model, optimizer)):
        m.loss(step, rank).backward() if hasattr(m, "loss") else loss_of(m, step, rank).backward()
        o.step()
    assert optimizer._params.gatherer.in_flight
    return optimizer, params_of(twin)


# ------------------------------------------------------------------------------------------------------------- equal


def equal_to_off(rank):
    for dtype in (torch.float32, torch.bfloat16):
        for align in (True, False):
            models = [Net(dtype), Net(dtype)]
            for on, model in zip((False, True), models, strict=True):
                optimizer = build(model, on, overlap_grad_reduce=on, align_param_gather=align)
                if on:
                    hold_back(optimizer)
                choose = random.Random(3)
                for step in range(8):
                    order = choose.sample(range(4), 3) * 2  # not the order of registration, each twice
                    if step % 3 == 2:
                        with torch.no_grad():
                            model(batch(step, 0), order=order[:1])
                    loss_of(model, step, rank, order=order, branch=step % 2 == 0).backward()
                    optimizer.step()
                    assert on == optimizer._params.gatherer.in_flight
                optimizer.verify_replicas()
            assert_same(params_of(models[0]), params_of(models[1]), (dtype, align))


def order_of_first_need(rank):
    model = Net()
    optimizer = build(model)
    gatherer = optimizer._params.gatherer
    assert gatherer.order == tuple(reversed(range(len(gatherer.order))))
    for step in range(4):
        loss_of(model, step, rank, order=[3, 1, 0, 2] if rank == 0 else [0, 1, 2, 3]).backward()
        optimizer.step()
    index = {spec.name: i for i, spec in enumerate(optimizer.param_specs)}
    needed = [gatherer.position[index[n]] for n in ("embed.weight", "layers.3.weight", "layers.1.weight")]
    assert [gatherer.order.index(p) for p in needed] == sorted(gatherer.order.index(p) for p in needed)
    assert sorted(gatherer.order) == list(range(len(gatherer.order)))
    optimizer.wait_for_params()


def launched_in_the_step(rank):
    """Aligned: all messages are out when step() returns, so that one rank can go on alone."""
    model = Net()
    optimizer = build(model)
    loss_of(model, 0, rank).backward()
    sent = optimizer.communicator.traffic
    sent.reset()
    optimizer.step()
    buckets = sum(b.bucket_count for b in optimizer.layout.buffers)
    assert sent.messages == 2 * buckets * (optimizer.dp_size - 1)
    if rank == 0:
        with torch.no_grad():
            assert model(batch(0, 0)).isfinite().all()
    one_by_one = build(Net(), align_param_gather=False)
    sent = one_by_one.communicator.traffic
    one_by_one.step()
    assert sent.messages == (buckets + 2) * (optimizer.dp_size - 1)
    one_by_one.wait_for_params()
    assert sent.messages == 2 * buckets * (optimizer.dp_size - 1)
    optimizer.wait_for_params()


# ---------------------------------------------------------------------------------------- every way to a param's value


def ways_to_read(rank):
    def named(model):
        return dict(model.named_parameters())

    def pickled(model):
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        return dict(torch.load(stream, weights_only=False).named_parameters())

    def layer_by_layer(model):
        found = {}
        for name, module in model.named_modules():
            found.update({f"{name}.{k}" if name else k: getattr(module, k) for k in dict(module._parameters)})
        return found

    ways = {
        "named_parameters": named,
        "parameters": lambda m: dict(zip(dict(Net().named_parameters()), m.parameters(), strict=True)),
        "state_dict": lambda m: m.state_dict(),
        "deepcopy": lambda m: dict(copy.deepcopy(m).named_parameters()),
        "pickle": pickled,
        "attributes": layer_by_layer,
        "get_parameter": lambda m: {n: m.get_parameter(n) for n in dict(Net().named_parameters())},
        "dict": lambda m: {f"{n}.{k}": v for n, s in m.named_modules() for k, v in dict(s._parameters).items()},
        "copy": lambda m: {f"{n}.{k}": v for n, s in m.named_modules() for k, v in s._parameters.copy().items()},
    }
    for align in (True, False):
        for name, way in ways.items():
            model = Net()
            optimizer, expected = stepped(model, rank, align_param_gather=align)
            found = way(model)
            for param, value in expected.items():
                assert bits_equal(found[param], value), (name, param)
            optimizer.wait_for_params()
            assert all(type(m._parameters) is dict for m in model.modules())


def ways_to_go_on(rank):
    for way in ("step", "reload_model_params", "shard", "verify_replicas", "wait_for_params", "close", "drop", "again"):
        model = Net(torch.bfloat16)
        optimizer, expected = stepped(model, rank)
        raw = list(optimizer._table.tensors)
        names = [spec.name for spec in optimizer.param_specs]
        if way == "step":
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.param_groups[0]["weight_decay"] = 0.0
            optimizer.step()
            optimizer.wait_for_params()
        elif way == "shard":
            optimizer.shard("fp32_param", 0, 0)
        elif way == "drop":  # an optimizer that is gone leaves no torn model
            del optimizer
            expected_now = params_of(model)
            assert_same(expected_now, expected)
        elif way == "again":
            Zero1Optimizer(raw, torch.optim.SGD, lr=1.0)
        else:
            getattr(optimizer, way)()
        for name, tensor in zip(names, raw, strict=True):
            assert bits_equal(tensor, expected[name]), (way, name)


class Keeping(nn.Linear):
    """Reads its weight through a list that it keeps, as RNNs do with their flat weights."""

    def __init__(self):
        super().__init__(7, 7, bias=False)
        self.kept = [self.weight]

    def forward(self, x):
        return nn.functional.linear(x, self.kept[0])


class Attending(nn.Module):
    """nn.MultiheadAttention never runs its out_proj; the encoder layer's fast path runs none of its children."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
            self.lstm = nn.LSTM(WIDTH, 7, num_layers=2, batch_first=True)
            self.keeping = Keeping()
            self.params = nn.ParameterList([nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(3))])

    def forward(self, x):
        x = self.encoder(self.attention(x, x, x, need_weights=False)[0])
        return self.keeping(self.lstm(x)[0]) * self.params[0] + self.params[1].sum()

    def loss(self, step, rank):
        return self(torch.arange(2 * 3 * WIDTH).reshape(2, 3, WIDTH).div(50.0 + rank + step)).square().mean()


def composite_modules(rank):
    for training in (True, False):
        model = Attending().train(training)
        optimizer, expected = stepped(model, rank)
        twin = Attending().train(training)
        twin.load_state_dict(expected)
        assert not model.keeping.kept[0].isfinite().all()
        with torch.no_grad() if not training else torch.enable_grad():
            assert bits_equal(model.loss(1, 0), twin.loss(1, 0))
        optimizer.wait_for_params()
    model = Attending()
    optimizer = hold_back(build(model, overlap_grad_reduce=True))
    for step in range(3):
        model.loss(step, rank).backward()
        optimizer.step()
    optimizer.verify_replicas()


def functional(rank):
    model = Net()
    optimizer, expected = stepped(model, rank)
    ids = batch(1, 0)
    swapped = torch.func.functional_call(model, {"last.bias": torch.zeros(WIDTH)}, (ids,))
    twin = Net()
    twin.load_state_dict(expected)
    assert bits_equal(swapped, torch.func.functional_call(twin, {"last.bias": torch.zeros(WIDTH)}, (ids,)))
    model(ids).sum().backward()
    optimizer.step()
    whole = torch.func.functional_call(model, dict(model.named_parameters()), (ids,))
    whole.sum().backward()
    optimizer.step()
    optimizer.verify_replicas()
    with torch.inference_mode():
        assert model(ids).isfinite().all()


def read_behind_its_back(rank):
    """What was taken out of the model earlier is not seen by any hook: the backward pass finds it."""
    model = Net()
    kept = model.branch.weight
    optimizer, expected = stepped(model, rank)
    assert not kept.isfinite().all()
    with pytest.raises(UsageError, match=r"branch.weight: param was used before it was gathered.*wait_for_params"):
        kept.sum().backward()
    squares = kept.square().sum()
    optimizer.wait_for_params()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    kept.grad = None
    assert bits_equal(kept, expected["branch.weight"])
    kept.sum().backward()
    optimizer.step()
    optimizer.wait_for_params()


def stale_graphs(rank):
    """Both the step and the arrival of gathered values count as writes."""
    for wait in (False, True):
        model = Net()
        optimizer = build(model)
        stale = model.last.weight.square().sum()
        loss_of(model, 0, rank).backward()
        optimizer.step()
        if wait:
            model(batch(0, 0))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()
        optimizer.wait_for_params()


# ----------------------------------------------------------------------------------------------- copies and one layer


def copies_and_files(rank):
    model = Net()
    optimizer, expected = stepped(model, rank)
    twin = copy.deepcopy(model)
    assert_same(params_of(twin), expected)
    for name, param in twin.named_parameters():
        assert not hasattr(param, "main_grad"), name
        assert param.untyped_storage().nbytes() == param.numel() * 4
    before = optimizer._collector.arrived
    loss_of(twin, 0, rank).backward()
    assert twin.last.weight.grad is not None and optimizer._collector.arrived == before
    assert all(type(m._parameters) is dict for m in twin.modules())
    stream = io.BytesIO()
    torch.save(model.last.state_dict(), stream)
    assert len(stream.getvalue()) < 4 * WIDTH * (WIDTH + 1) + 2000
    optimizer.wait_for_params()


# -------------------------------------------------------------------------------------------------------- torch.compile


def compiled(rank):
    """Compiled before or after the optimizer was made, in place or not, run before it or not."""

    def whole(model):
        return torch.compile(model, backend="eager", fullgraph=True)

    def inside(model):
        model.layers[0] = torch.compile(model.layers[0], backend="eager")
        model.last.compile(backend="eager")
        return model

    for how in (whole, inside):
        for when in ("before", "run before", "after", "in flight"):
            torch._dynamo.reset()
            model, twin = Net(), Net()
            runner = how(model) if "before" in when else model
            if when == "run before":
                loss_of(runner, 0, 0)
            optimizer, plain = hold_back(build(model, overlap_grad_reduce=True)), build(twin, False)
            if when == "after":
                runner = how(model)
            for step in range(4):
                if when == "in flight" and step == 2:
                    runner = how(model)
                for m, o in ((runner, optimizer), (twin, plain)):
                    loss_of(m, step, rank).backward()
                    o.step()
            optimizer.wait_for_params()
            found = {name.replace("_orig_mod.", ""): value for name, value in params_of(model).items()}
            assert_same(found, params_of(twin), (how.__name__, when))
            assert optimizer._params._guard._compiled


# ------------------------------------------------------------------------------------------------------------- replicas


def replicas(rank):
    model = Net()
    optimizer = build(model)
    optimizer.verify_replicas()
    if rank == 1:
        model.branch.bias.data[3] += 1
    with pytest.raises(VerificationError, match=r"branch\.bias: param differs on rank 1 from rank 0"):
        optimizer.verify_replicas()


def without_a_model(rank):
    """Nothing to hook: everything is gathered in step()."""
    model = Net()
    optimizer = build([p for p in model.parameters() if p.requires_grad])
    loss_of(model, 0, rank).backward()
    optimizer.step()
    assert not optimizer._params.gatherer.in_flight


CASES = [
    equal_to_off,
    order_of_first_need,
    launched_in_the_step,
    ways_to_read,
    ways_to_go_on,
    composite_modules,
    functional,
    read_behind_its_back,
    stale_graphs,
    copies_and_files,
    compiled,
    replicas,
    without_a_model,
]


def every_case(rank):
    for case in CASES:
        try:
            case(rank)
        except BaseException as error:
            raise AssertionError(f"{case.__name__}: {type(error).__name__}: {error}") from error


@pytest.mark.dist
def test_on_two_ranks():
    run_ranks(2, every_case)


@pytest.mark.dist
def test_equal_to_off_on_three_ranks():
    run_ranks(3, equal_to_off)
