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
