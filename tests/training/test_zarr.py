"""Saving zarr from ranks: one writer a shard, what travels counted, the same files as by ``write``; loading them."""

import itertools
import queue
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import zero1ckpt
from tests.engine.harness import run_ranks
from tests.training.scenario import make, same_weights, train, weights
from tests.training.test_bytes import Disk, Wire, bytes_of, large
from zero1ckpt.core.errors import CorruptError, LostRankError, OutputError, Zero1CkptError
from zero1ckpt.encodings.zarr_array.shards import ShardFile
from zero1ckpt.model.catalog import Catalog, Extents, TablePlacement
from zero1ckpt.model.state import ParamSpec, PartState, SlotSpec
from zero1ckpt.registry import find_format
from zero1ckpt.resharding.copying import PartCopy
from zero1ckpt.resharding.gathering import GatherPlan, gather_part
from zero1ckpt.resharding.plan import correspond
from zero1ckpt.storage.memory import MemoryBlobs
from zero1ckpt.storage.staging import Area

SMALL = zero1ckpt.FormatOptions(shard_bytes=1200, chunk_bytes=300)
ZARR = {"format": "fully_reshardable", "container": "zarr"}


def save_at(rank, dp, work, name, bucket_size, options):
    model, optimizer = make(bucket_size=bucket_size)
    train(model, optimizer, 2, 0, rank, dp)
    with Wire() as wire, Disk() as disk:
        handle = optimizer.save(f"{work}/{name}", extra={"t": torch.arange(3)}, options=options, **ZARR)
    shards = {path: spans for path, spans in disk.written.items() if "/c" in path}
    return handle.sent_bytes, wire.nbytes, shards, disk.read


@pytest.mark.dist
@pytest.mark.parametrize(("dp", "bucket_size"), [(1, "none"), (3, 500), (4, 1)])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_save_and_write_and_reshard_make_the_same_bytes(work, dp, bucket_size, compression):
    options = zero1ckpt.FormatOptions(SMALL.shard_bytes, SMALL.chunk_bytes, compression)
    ranks = run_ranks(dp, save_at, dp, str(work), "saved", bucket_size, options)
    saved = zero1ckpt.open(work / "saved")
    state = {name: {slot: saved.read(name, slot) for slot in saved.slots} for name in saved.names()}
    specs = {p.name: {"dtype": p.dtype, "grad_dtype": p.grad_dtype} for p in saved.state.params}
    keywords = {"groups": saved.groups, "step": saved.step, "extra": saved.extra, "params": specs}
    for workers in (1, 4):
        there = work / f"written{workers}"
        zero1ckpt.write(there, state, dp_size=2, options=options, workers=workers, **ZARR, **keywords)
    zero1ckpt.reshard(work / "saved", work / "between", to_dp=7, bucket_size=64, format="bucket_shards")
    zero1ckpt.reshard(work / "between", work / "back", options=options, **ZARR)
    first = bytes_of(work / "saved")
    for other in ("written1", "written4", "back"):
        assert bytes_of(work / other) == first, other
    assert zero1ckpt.verify(work / "saved", deep=True)
    assert {sent for sent, *_ in ranks} == {ranks[0][0]}, "all ranks are told the same"
    assert (ranks[0][0] > 0) == (dp > 1)


@pytest.mark.dist
@pytest.mark.parametrize("bucket_size", [500, "none"])
def test_a_shard_has_one_writer_and_what_others_hold_is_sent_once(work, bucket_size):
    ranks = run_ranks(3, save_at, 3, str(work), "saved", bucket_size, SMALL)
    written = [path for *_, shards, _ in ranks for path in shards]
    assert len(written) == len(set(written)) > 10
    assert all(read == 0 for *_, read in ranks)
    for *_, shards, _ in ranks:
        for spans in shards.values():
            spans = sorted(spans)
            assert spans[0][0] == 0 and all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
    sent = ranks[0][0]
    payload = sum(p.numel() for p in make()[0].parameters() if p.requires_grad) * 12
    wire = sum(nbytes for _, nbytes, *_ in ranks)
    assert 0 < sent < payload * 2 / 3
    assert 2 * sent <= wire < 2 * sent + 3 * 64 * 1024, "each byte is given to one send and one receive"


def save_large(rank, dp, work):
    model, optimizer = large("none")
    model(torch.ones(2, 600).bfloat16()).sum().backward()
    optimizer.step()
    return optimizer.save(f"{work}/large", options=zero1ckpt.FormatOptions(2**20, 2**18), **ZARR).sent_bytes


def load_large(rank, dp, work):
    import tensorstore

    model, optimizer = large(100_000)
    name = "/tensorstore/kvstore/file/bytes_read"
    before = _read(tensorstore, name)
    with Disk() as disk:
        optimizer.load(f"{work}/large")
    own = sum(f.param.size for f in optimizer.fragments) * sum(s.itemsize for s in optimizer.slot_specs())
    return own, _read(tensorstore, name) - before, disk.read, weights(model)


def _read(tensorstore, name):
    return sum(m["values"][0]["value"] for m in tensorstore.experimental_collect_matching_metrics(name))


@pytest.mark.dist
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_load_reads_the_chunks_that_hold_what_the_rank_needs(work, dp):
    (sent,) = set(run_ranks(3, save_large, 3, str(work)))
    payload = 12 * (600 * 700 + 700 + 700 * 601 + 601)
    assert 0 < sent <= 2 * 3 * 2**20 / 2, "where two ranks meet in a slot, no more than half a shard travels"
    ranks = run_ranks(dp, load_large, dp, str(work))
    fragments = 60  # a rank's fragments of two matrices in buckets of 100,000, of three slots; each has two edges
    for own, chunks, headers, params in ranks:
        assert own <= chunks < own + fragments * 2**18
        assert chunks < payload * (1 if dp == 1 else 0.9) + 2**18
        assert headers < 200_000
        same_weights(params, ranks[0][3])


def resume(rank, dp, work):
    model, optimizer = make(bucket_size=100)
    optimizer.load(f"{work}/saved")
    train(model, optimizer, 2, 2, rank, dp)
    return weights(model)


@pytest.mark.dist
def test_training_goes_on_at_another_dp_size(work):
    run_ranks(3, save_at, 3, str(work), "saved", 500, SMALL)
    model, optimizer = make()
    optimizer.load(work / "saved")
    train(model, optimizer, 2, 2)
    for params in run_ranks(2, resume, 2, str(work)):
        for name, value in weights(model).items():
            torch.testing.assert_close(params[name], value)


def fail(rank, dp, work):
    model, optimizer = make()
    train(model, optimizer, 1, 0, rank, dp)
    seal = ShardFile.seal

    def failing(self, pieces, shares=()):
        if rank == 1:
            raise OutputError("no space", file=self.path)
        return seal(self, pieces, shares)

    ShardFile.seal = failing
    told = ""
    try:
        optimizer.save(f"{work}/saved", options=SMALL, **ZARR)
    except Zero1CkptError as error:
        told = str(error)
    ShardFile.seal = seal
    optimizer.save(f"{work}/saved", options=SMALL, **ZARR)
    return told


@pytest.mark.dist
def test_a_rank_that_cannot_write_ends_the_save_on_all(work):
    for told in run_ranks(3, fail, 3, str(work)):
        assert "no space" in told
    assert zero1ckpt.verify(work / "saved", deep=True)
    assert sorted(p.name for p in work.iterdir()) == ["saved"]


# ----------------------------------------------------------------------------------------------------------- who owns


def source(held, numel=12):
    """One param of so many bytes; ``held``: the slices that each rank has."""
    state = PartState((ParamSpec("w", (numel,)),), (SlotSpec("exp_avg", "uint8"),))
    rows = []
    payloads = []
    for rank, slices in enumerate(held):
        at = 0
        for start, end in slices:
            rows.append((0, 0, start, end - start, rank, at, end - start))
            at += end - start
        payloads.append(at)
    table = Extents(*np.array(rows, np.int64).reshape(-1, 7).T)
    names = tuple(f"rank {r}" for r in range(len(held)))
    return Catalog("memory", "memory", "", state, None, TablePlacement(names, tuple(payloads), table, 1))


class Alone:
    rank, size = 0, 1


def test_the_owner_holds_most_and_of_several_is_the_first(work):
    src = source([[(0, 2), (11, 12)], [(2, 4), (4, 6)], [(6, 11)]])
    plugin = find_format("fully_reshardable", "zarr")
    dst = plugin.plan(src.state, None, "", "", plugin.normalize(zero1ckpt.FormatOptions(4, 2)))
    part = PartCopy(src, MemoryBlobs({}), dst, plugin, correspond(src.state, src.state))
    plan = GatherPlan(part, 3)
    assert plan.owners.tolist() == [0, 1, 2], "of the bytes 0 to 4, 4 to 8 and 8 to 12; ranks 0 and 1, and 1 and 2, tie"
    assert list(plan.rounds()) == [[0, 1, 2]] and plan.sent == 5
    whole = source([[(0, 12)]])
    data = bytes(range(12))
    one = PartCopy(whole, MemoryBlobs({0: [memoryview(data)]}), dst, plugin, correspond(src.state, src.state))
    reports = gather_part(one, Area(work), Alone())
    assert [file.path for report in reports for file in report.files] == [f"w/exp_avg/c/{i}" for i in range(3)]
    assert [(work / f"w/exp_avg/c/{i}").read_bytes()[-4:] for i in range(3)] == [data[i : i + 4] for i in (0, 4, 8)]


class Threads:
    """Peers that are threads. Each wait ends after 10 s, with an error of the queue."""

    def __init__(self, rank, boxes):
        self.rank, self.size, self.boxes = rank, len(boxes), boxes

    def _send(self, to, what):
        self.boxes[to][self.rank].put(what)

    def _take(self, origin):
        return self.boxes[self.rank][origin].get(timeout=10)

    def greet(self, to, origin, culprit):
        for other in (to, origin):
            if other >= 0:
                self._send(other, culprit)
        return tuple(self._take(other) if other >= 0 else -1 for other in (to, origin))

    def swap(self, to, out, origin, into):
        if out.nbytes:
            self._send(to, bytes(out))
        if into.nbytes:
            into[:] = self._take(origin)

    def lost(self, rank):
        return LostRankError(f"rank {rank} has failed")


class Unreadable(MemoryBlobs):
    def read_run(self, blob, at, buffers):
        raise CorruptError("a bad sector", file=self.label(blob))


@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_a_rank_that_fails_in_a_round_is_named_by_those_that_wait_for_it(work, bad):
    """Each rank holds a part of each of 9 shards; a rank fails when it first reads what another is to get."""
    held = [[(at, at + 1) for at in range(rank, 27, 3)] for rank in range(3)]
    src = source(held, numel=27)
    plugin = find_format("fully_reshardable", "zarr")
    dst = plugin.plan(src.state, None, "", "", plugin.normalize(zero1ckpt.FormatOptions(3, 3)))
    boxes = [[queue.Queue() for _ in range(3)] for _ in range(3)]

    def run(rank):
        data = bytes(at for start, end in held[rank] for at in range(start, end))
        kind = Unreadable if rank == bad else MemoryBlobs
        blobs = kind({r: [memoryview(data if r == rank else b"")] for r in range(3)})
        part = PartCopy(src, blobs, dst, plugin, correspond(src.state, src.state))
        try:
            return gather_part(part, Area(work), Threads(rank, boxes))
        except Zero1CkptError as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(run, range(3)))
    assert all(box.empty() for row in boxes for box in row), "all that was sent was taken"
    if bad is None:
        found = b"".join((work / f"w/exp_avg/c/{i}").read_bytes()[-3:] for i in range(9))
        assert found == bytes(range(27)) and sum(map(len, told)) == 9
        return
    assert isinstance(told.pop(bad), CorruptError)
    for error in told:
        assert isinstance(error, LostRankError) and f"rank {bad} has failed" in str(error)


def fail_to_read(rank, dp, work):
    from zero1ckpt.resharding import gathering

    model, optimizer = make()
    train(model, optimizer, 1, 0, rank, dp)
    read = gathering.read_moves
    if rank == 1:
        gathering.read_moves = lambda *args: (_ for _ in ()).throw(MemoryError("no memory"))
    told = ""
    try:
        optimizer.save(f"{work}/saved", options=SMALL, **ZARR)
    except (Zero1CkptError, MemoryError) as error:
        told = str(error)
    gathering.read_moves = read
    optimizer.save(f"{work}/saved", options=SMALL, **ZARR)
    return told


@pytest.mark.dist
def test_a_rank_that_fails_in_a_round_ends_the_save_on_all(work):
    for rank, told in enumerate(run_ranks(3, fail_to_read, 3, str(work))):
        assert "no memory" in told and ("rank 1" in told or rank == 1)
    assert zero1ckpt.verify(work / "saved", deep=True)
    assert sorted(p.name for p in work.iterdir()) == ["saved"]
