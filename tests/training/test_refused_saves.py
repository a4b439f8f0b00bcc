"""What only one rank finds wrong during a save: all ranks raise, none waits, and nothing is left."""

import pytest
import torch

import zero1ckpt
from tests.engine.harness import run_ranks
from zero1ckpt.core.errors import OutputError, UsageError, Zero1CkptError

FORMATS = [("bucket_shards", "safetensors"), ("fully_reshardable", "safetensors"), ("fully_reshardable", "zarr")]


def trained(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(31, 7)
    optimizer = zero1ckpt.Zero1Optimizer(model, torch.optim.SGD, lr=1e-2, momentum=0.9, bucket_size=50, timeout=60)
    model(torch.ones(2, 31)).sum().backward()
    optimizer.step()
    return optimizer


def outcome(path, optimizers, format, container, options=None):
    try:
        zero1ckpt.save(path, optimizers, format=format, container=container, options=options)
    except Zero1CkptError as error:
        return type(error), str(error)
    return None


def save_with_a_function(rank, path, format, container):
    optimizer = trained()
    if rank == 0:
        optimizer.param_groups[0]["note"] = outcome
    return outcome(path, {"": optimizer}, format, container)


@pytest.mark.dist
@pytest.mark.parametrize("format, container", FORMATS)
def test_a_hyper_parameter_that_cannot_be_stored(tmp_path, format, container):
    for kind, line in run_ranks(2, save_with_a_function, str(tmp_path / "c"), format, container):
        assert kind is UsageError and "note" in line
    assert not list(tmp_path.iterdir())


def save_half_absent(rank, path, format, container):
    optimizer = trained()
    if rank == 1:
        optimizer.local_absent = lambda: {(0, "momentum_buffer")}
    return outcome(path, {"": optimizer}, format, container)


@pytest.mark.dist
@pytest.mark.parametrize("format, container", FORMATS)
def test_a_slot_that_only_some_owners_have(tmp_path, format, container):
    for kind, line in run_ranks(2, save_half_absent, str(tmp_path / "c"), format, container):
        assert kind is UsageError and "weight" in line and "1 of 2 ranks" in line
    assert not list(tmp_path.iterdir())


def save_two_parts(rank, path):
    optimizers = {"a": trained(1), "b": trained(2)}
    if rank == 1:
        from zero1ckpt.formats.fully_reshardable_zarr import FullyReshardableZarr

        create = FullyReshardableZarr.create

        def full(self, area, catalog, blob):
            if catalog.part == "a":
                raise OutputError("no space")
            return create(self, area, catalog, blob)

        FullyReshardableZarr.create = full
    small = zero1ckpt.FormatOptions(shard_bytes=200, chunk_bytes=200)  # each rank writes some
    return outcome(path, optimizers, "fully_reshardable", "zarr", small)


@pytest.mark.dist
def test_a_rank_that_fails_in_one_part_takes_part_in_the_next(tmp_path):
    for kind, line in run_ranks(2, save_two_parts, str(tmp_path / "c")):
        assert kind is OutputError and "no space" in line
    assert not list(tmp_path.iterdir())


CALLS = [
    ("path", {"path": "other"}),
    ("format", {"format": "fully_reshardable"}),
    ("options", {"options": zero1ckpt.FormatOptions(shard_bytes=100)}),
    ("overwrite", {"overwrite": True}),
    ("keep", {"keep": 2, "latest": True}),
    ("asynchronous", {"asynchronous": True}),
]


def save_differently(rank, folder):
    optimizer = trained()
    lines = []
    for _, other in CALLS:
        keywords = {"format": "fully_reshardable"} if "options" in other else {}
        keywords |= {"path": "c"} | (other if rank else {})
        path = f"{folder}/{keywords.pop('path')}"
        try:
            optimizer.save(path, **keywords)
        except Zero1CkptError as error:
            lines.append((type(error), str(error)))
    optimizer.save(f"{folder}/x/../c" if rank else f"{folder}/c")
    return lines


@pytest.mark.dist
def test_ranks_that_call_with_other_arguments(tmp_path):
    for lines in run_ranks(2, save_differently, str(tmp_path)):
        assert [kind for kind, _ in lines] == [UsageError] * len(CALLS)
        for (name, _), (_, line) in zip(CALLS, lines, strict=True):
            assert f"{name} differs between rank 0 and rank 1" in line
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("path", [None, 3, b"c", "a\0b", "a\ud800"])
def test_a_path_that_is_none(path):
    with pytest.raises(UsageError, match="the path of a save"):
        trained().save(path)


@pytest.mark.parametrize("name", [None, 3, "a\ud800", ("a",)])
def test_a_part_name_that_is_no_text(tmp_path, name):
    with pytest.raises(UsageError, match="the name of a part"):
        zero1ckpt.save(tmp_path / "c", {name: trained()})


@pytest.mark.parametrize("format, container", FORMATS)
def test_parts_and_params_of_like_names_do_not_meet(tmp_path, format, container):
    """The part "" lies in the root, and part "x" in the folder part-x there."""
    plain = torch.nn.Module()
    plain.register_parameter("part-x", torch.nn.Parameter(torch.arange(6.0)))
    one = zero1ckpt.Zero1Optimizer(plain, torch.optim.SGD, lr=1e-2)
    two = trained()
    zero1ckpt.save(tmp_path / "c", {"": one, "x": two}, format=format, container=container)
    assert zero1ckpt.verify(tmp_path / "c", deep=True)
    saved = zero1ckpt.open(tmp_path / "c").parts
    assert saved[""].read("part-x", "fp32_param").tolist() == list(range(6))
    assert saved["x"].read("weight", "fp32_param").shape == (7, 31)
