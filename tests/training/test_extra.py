"""Extra state, state bound to a rank, and the model's own tensors: exact, once, and never dropped in silence."""

import pytest
import torch
from torch import nn

import zero1ckpt
from tests.engine.harness import run_ranks
from tests.training.scenario import Net, decayed, make, same_state, same_weights, train, weights
from zero1ckpt.core.errors import UnsupportedError, UsageError

EXTRA = {
    "scheduler": {"milestones": {2: 1, 8: 2}, "_last_lr": [0.1, 0.2], "betas": (0.9, (1, 2.5))},
    "dataloader": {"epoch": 3, "order": torch.arange(7), "half": torch.tensor([1.5, float("nan")]).bfloat16()},
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(4),
    "best": float("inf"),
    "big": 2**80,
    "note": "ä\n$x",
    "$odd": {None: 1, (1, 2): "pair", True: 0},
    "blob": b"\x00\xff",
    "dtype": torch.bfloat16,
}


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.nan_to_num(77), b.nan_to_num(77))
    elif isinstance(a, dict):
        assert [*a] == [*b] and [type(k) for k in a] == [type(k) for k in b]
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


def test_extra_comes_back_exactly(work):
    _, optimizer = make()
    optimizer.save(work / "c", extra=EXTRA)
    same(optimizer.load(work / "c"), EXTRA)
    zero1ckpt.reshard(work / "c", work / "d", to_dp=3)
    same(optimizer.load(work / "d"), EXTRA)
    optimizer.save(work / "e")
    assert optimizer.load(work / "e") == {}


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: None], ids=["object", "set", "function"])
def test_what_cannot_be_stored_is_named_by_its_place(work, value):
    _, optimizer = make()
    with pytest.raises(UsageError, match=r"extra\.a\[1\]\.b"):
        optimizer.save(work / "new" / "c", extra={"a": [0, {"b": value}]})
    with pytest.raises(UsageError, match=r"rank_extra\.a"):
        optimizer.save(work / "new" / "c", rank_extra={"a": value})
    assert not any(work.iterdir())


def save_extra(rank, dp, work, differ):
    _, optimizer = make()
    try:
        optimizer.save(f"{work}/c", extra={"t": torch.arange(3) + (rank == differ)} if rank != 2 else None)
    except UsageError as error:
        return str(error)


@pytest.mark.dist
def test_extra_that_differs_by_rank(work):
    told = run_ranks(3, save_extra, 3, str(work), 1)
    assert all(t is not None and "extra of rank 1 differs" in t and "rank_extra" in t for t in told)
    assert not any(work.iterdir())
    assert run_ranks(3, save_extra, 3, str(work), None) == [None] * 3


def save_rank_extra(rank, dp, work, name, who=None):
    _, optimizer = make()
    torch.manual_seed(100 + rank)
    own = {"rng": torch.get_rng_state(), "rank": rank, "shard": [f"file{rank}"]}
    try:
        optimizer.save(f"{work}/{name}", extra={"e": 1}, rank_extra=own if who is None or rank in who else None)
    except UsageError as error:
        return str(error)
    return torch.rand(2)


def load_rank_extra(rank, dp, work, name, choices):
    found = []
    for choice in choices:
        _, optimizer = make(bucket_size=90)
        train(_, optimizer, rank and 0, 0, rank, dp)
        try:
            found.append(optimizer.load(f"{work}/{name}", **({} if choice is None else {"rank_state": choice})))
        except UnsupportedError as error:
            found.append(str(error))
        if choice is None and isinstance(found[-1], dict):
            torch.set_rng_state(found[-1]["rank_extra"]["rng"])
            found.append(torch.rand(2))
    return found


@pytest.mark.dist
def test_rank_extra(work):
    drawn = run_ranks(3, save_rank_extra, 3, str(work), "c")
    zero1ckpt.reshard(work / "c", work / "two", to_dp=2, bucket_size=64)
    assert zero1ckpt.open(work / "two").layout.rules.dp_size == 2
    for path in ("c", "two"):  # at the number of ranks that saved, whatever the layout: each has its own again
        for rank, (own, again, dropped) in enumerate(run_ranks(3, load_rank_extra, 3, str(work), path, [None, "drop"])):
            assert own["e"] == 1 and own["rank_extra"]["rank"] == rank
            assert own["rank_extra"]["shard"] == [f"file{rank}"]
            assert torch.equal(again, drawn[rank])
            assert dropped == {"e": 1}
    seeds = []
    for _ in range(2):
        loaded = run_ranks(2, load_rank_extra, 2, str(work), "two", [None, "keep", "reseed"])
        for refused, kept, reseeded in loaded:
            assert "3 ranks" in refused and "has 2" in refused and "rank_state" in refused
            assert {rank: own["rank"] for rank, own in kept["rank_extra"].items()} == {0: 0, 1: 1, 2: 2}
            assert [*reseeded["rank_extra"]] == ["seed"]
        seeds.append([reseeded["rank_extra"]["seed"] for _, _, reseeded in loaded])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 2
    torch.Generator().manual_seed(seeds[0][0])


def reseed_twice(rank, dp, work):
    model, optimizer = make()
    first = optimizer.load(f"{work}/c", rank_state="reseed")
    train(model, optimizer, 2, 0, rank, dp)
    return first == optimizer.load(f"{work}/c", rank_state="reseed")


@pytest.mark.dist
def test_a_seed_depends_on_the_file_alone(work):
    run_ranks(3, save_rank_extra, 3, str(work), "c")
    assert run_ranks(2, reseed_twice, 2, str(work)) == [True, True]


@pytest.mark.dist
def test_rank_extra_of_some_ranks_only(work):
    told = run_ranks(3, save_rank_extra, 3, str(work), "c", (0, 2))
    assert all("rank_extra was not given by all ranks" in t for t in told)
    assert not any(work.iterdir())


def test_extra_may_not_hide_rank_extra(work):
    _, optimizer = make()
    with pytest.raises(UsageError, match="rank_extra"):
        optimizer.save(work / "c", extra={"rank_extra": 1}, rank_extra=2)


# ---------------------------------------------------------------------------------------------------- the model's own


class Carrier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net(norm=True)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("cache", torch.ones(5), persistent=False)

    def forward(self, tokens):
        return self.net(tokens)


def carrier(**options):
    return make(model=Carrier(), **options)


def save_model(rank, dp, work):
    model, optimizer = carrier()
    train(model, optimizer, 3, 0, rank, dp)
    model.steps += 5
    model.mask[1] = False
    with torch.no_grad():
        model.net.frozen += 0.25
    optimizer.save(f"{work}/c", model=model)
    return {k: v.clone() for k, v in model.state_dict().items()}


def load_model(rank, dp, work):
    model, optimizer = carrier(bucket_size=100)
    model.cache.fill_(9)
    optimizer.load(f"{work}/c")
    return {k: v.clone() for k, v in model.state_dict().items()}, model.cache


@pytest.mark.dist
def test_buffers_and_frozen_params_are_stored_once_and_come_back(work):
    saved, *others = run_ranks(3, save_model, 3, str(work))
    stored = zero1ckpt.open(work / "c").model_tensors()
    own = {
        "steps",
        "mask",
        "net.frozen",
        "net.norm.running_mean",
        "net.norm.running_var",
        "net.norm.num_batches_tracked",
    }
    assert set(stored) == own
    assert [p.name for p in work.glob("c/model*")] == ["model.safetensors"]
    assert not torch.equal(others[0]["net.norm.running_mean"], saved["net.norm.running_mean"])  # rank 0's are stored
    for state, cache in run_ranks(2, load_model, 2, str(work)):
        same_weights(state, saved)
        assert torch.equal(cache, torch.full((5,), 9.0))
    zero1ckpt.reshard(work / "c", work / "d", to_dp=1)
    same(zero1ckpt.open(work / "d").model_tensors(), stored)


def test_model_tensors_that_do_not_fit(work):
    model, optimizer = carrier()
    optimizer.save(work / "c", model=model)
    nameless = zero1ckpt.Zero1Optimizer(
        [(f"net.{n}", p) for n, p in Net(norm=True).named_parameters()], torch.optim.AdamW
    )
    with pytest.raises(UsageError, match=r"buffers and frozen params.*model="):
        nameless.load(work / "c", groups="run")

    other, optimizer = carrier()
    del other.mask
    with pytest.raises(UsageError, match=r"mask: .*the model has not"):
        optimizer.load(work / "c")
    optimizer.load(work / "c", unexpected="drop")

    other, optimizer = carrier()
    other.mask = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match=r"mask: .*bool\[4\].*bool\[2, 2\]"):
        optimizer.load(work / "c")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_model", [True, False])
def test_unfrozen_params_start_from_the_value_in_the_file(work, dtype, with_model):
    model, optimizer = make(dtype=dtype)
    with torch.no_grad():
        model.frozen.copy_(torch.arange(6.0).view(3, 2))
    train(model, optimizer, 2)
    optimizer.save(work / "c", model=model if with_model else None)

    other = Net(dtype)
    other.frozen.requires_grad_(True)
    _, unfrozen = make(model=other)
    with pytest.raises(UsageError, match="missing in the checkpoint: frozen"):
        unfrozen.load(work / "c")
    unfrozen.load(work / "c", missing="init")
    expected = weights(model)
    if not with_model:
        expected["frozen"] = weights(Net(dtype))["frozen"]
    same_weights(weights(other), expected)
    assert torch.equal(unfrozen.state[other.frozen]["fp32_param"].view(3, 2), expected["frozen"].float())
    assert not unfrozen.state[other.frozen]["exp_avg"].any()


def test_tied_params_are_one(work):
    model, optimizer = make()
    train(model, optimizer, 2)
    optimizer.save(work / "c", model=model)
    names = zero1ckpt.open(work / "c").names()
    assert "emb.weight" in names and "head.weight" not in names
    other, resumed = make()
    resumed.load(work / "c")
    assert other.head.weight is other.emb.weight
    same_weights(weights(other), weights(model))


def test_wrapped_models_have_the_same_names(work):
    """Saved from a compiled model, loaded into a plain one."""
    wrapped = nn.Module()
    wrapped._orig_mod = Net(norm=True)
    optimizer = zero1ckpt.Zero1Optimizer(decayed(wrapped._orig_mod), torch.optim.AdamW, model=wrapped)
    optimizer.save(work / "c", model=wrapped)
    plain, loaded = make(model=Net(norm=True))
    loaded.load(work / "c", groups="run")
    loaded.save(work / "d", model=plain)
    assert set(zero1ckpt.open(work / "d").model_tensors()) == set(zero1ckpt.open(work / "c").model_tensors())
    assert zero1ckpt.open(work / "d").digest == zero1ckpt.open(work / "c").digest


# --------------------------------------------------------------------------------------------------------- parts


def gan(seed):
    torch.manual_seed(seed)
    gen, dis = Net(), nn.Linear(5, 7)
    return (
        zero1ckpt.Zero1Optimizer(gen, torch.optim.AdamW, lr=0.1, bucket_size=200),
        zero1ckpt.Zero1Optimizer(dis, torch.optim.SGD, lr=0.2, momentum=0.9, model=dis),
        gen,
        dis,
    )


def parts_run(rank, dp, work, load, save):
    opt_g, opt_d, gen, dis = gan(dp)
    if load:
        assert opt_g.load(f"{work}/{load}", part="gen") == {"epoch": 4}
        opt_d.load(f"{work}/{load}", part="dis")
    else:
        train(gen, opt_g, 2, 0, rank, dp)
        dis(torch.ones(1, 5)).sum().backward()
        opt_d.step()
    zero1ckpt.save(f"{work}/{save}", {"gen": opt_g, "dis": opt_d}, extra={"epoch": 4})
    return opt_g.applied_steps, opt_d.applied_steps


@pytest.mark.dist
def test_several_optimizers_are_parts(work):
    assert run_ranks(3, parts_run, 3, str(work), None, "c") == [(2, 1)] * 3
    assert run_ranks(2, parts_run, 2, str(work), "c", "d") == [(2, 1)] * 2
    zero1ckpt.reshard(work / "d", work / "e", to_dp=4, bucket_size=64)
    for path in ("d", "e"):
        assert not zero1ckpt.verify(work / path, deep=True, against=work / "c").findings
    parts = zero1ckpt.open(work / "c").parts
    assert [*parts] == ["gen", "dis"] and parts["dis"].slots == ("fp32_param", "momentum_buffer")
    _, opt_d, _, _ = gan(0)
    with pytest.raises(UsageError, match="found other, expected one of 'gen', 'dis'"):
        opt_d.load(work / "c", part="other")
    with pytest.raises(UsageError, match="missing in the checkpoint"):
        opt_d.load(work / "c", part="gen")


def test_tensors_in_the_groups_of_several_parts(work):
    """Each part's are its own, though groups and keys have the same names."""
    made = {name: make()[1] for name in ("a", "b/c", "")}
    for i, optimizer in enumerate(made.values()):
        optimizer.param_groups[0]["target"] = torch.arange(3.0) * i
    zero1ckpt.save(work / "c", made)
    assert not zero1ckpt.verify(work / "c", deep=True).findings
    for i, name in enumerate(made):
        _, loaded = make()
        loaded.load(work / "c", part=name)
        assert torch.equal(loaded.param_groups[0]["target"], torch.arange(3.0) * i)


def test_no_parts_at_all(work):
    with pytest.raises(UsageError, match="no optimizers"):
        zero1ckpt.save(work / "c", {})


def test_a_checkpoint_with_one_default_part(work):
    model, optimizer = make()
    train(model, optimizer, 1)
    zero1ckpt.save(work / "a", {"": optimizer})
    optimizer.save(work / "b")
    same_state(work / "a", work / "b")
    assert (work / "a" / "manifest.json").read_bytes() == (work / "b" / "manifest.json").read_bytes()
