"""The copy loop: read once and little more, write once, in bounded memory; the plan says so beforehand."""

import gc
import os
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zero1ckpt
from tests.strategies import SIZES, finite, params, rules, tree
from zero1ckpt.api import plan_reshard
from zero1ckpt.core.digest import crc64
from zero1ckpt.core.errors import CorruptError, UnsupportedError
from zero1ckpt.core.layout import layout_params
from zero1ckpt.model.catalog import Catalog, Extents, TablePlacement, fold_pieces, piece_cuts
from zero1ckpt.model.manifest import FormatOptions
from zero1ckpt.model.state import ParamSpec, PartState, SlotSpec
from zero1ckpt.registry import FORMATS
from zero1ckpt.resharding.coalesce import runs
from zero1ckpt.resharding.execute import run_jobs
from zero1ckpt.resharding.plan import Moves, correspond, cut_moves, plan_blob, window_bounds
from zero1ckpt.storage.local import LocalStore

# ------------------------------------------------------------------------------------------------------- bytes counted


class Traffic:
    """Counts bytes read through any store, and which bytes of which file were written."""

    def __init__(self, monkeypatch):
        self.read = 0
        self.written = {}
        read, pwrite = LocalStore.readv_into, os.pwrite

        def counted_read(store, key, offset, buffers):
            self.read += sum(buffer.nbytes for buffer in buffers)
            return read(store, key, offset, buffers)

        def counted_write(fd, data, offset):
            done = pwrite(fd, data, offset)
            name = os.readlink(f"/proc/self/fd/{fd}")
            self.written.setdefault(name, []).append((offset, offset + done))
            return done

        monkeypatch.setattr(LocalStore, "readv_into", counted_read)
        monkeypatch.setattr(os, "pwrite", counted_write)


@pytest.fixture(scope="module")
def big():
    made = {}
    for i, n in enumerate((300_001, 64, 1, 0, 130_000, 257, 70_003)):
        made[f"w{i}"] = {slot: finite("float32", (n,), i * 3 + k) for k, slot in enumerate(("fp32_param", "m", "v"))}
    return made


PAYLOAD = (300_001 + 64 + 1 + 130_000 + 257 + 70_003) * 12


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((8, 40_000), (6, 10_000)),
        ((6, 10_000), (8, 40_000)),
        ((3, 1000), (5, "none")),
        ((5, "none"), (2, 1)),
        ((1, 1), (7, 64)),
    ],
)
def test_reads_what_is_needed_and_writes_every_byte_once(work, big, source, target, workers, monkeypatch):
    zero1ckpt.write(work / "a", big, dp_size=source[0], bucket_size=source[1])
    limit = 4 * 65_536
    plan = plan_reshard(
        work / "a", work / "b", to_dp=target[0], bucket_size=target[1], workers=workers, memory_limit=limit
    )
    totals = plan.totals()
    traffic = Traffic(monkeypatch)
    zero1ckpt.reshard(
        work / "a", work / "b", to_dp=target[0], bucket_size=target[1], workers=workers, memory_limit=limit
    )
    heads = sum(header_size(p) for p in (work / "a").glob("rank*")) + 2 * (work / "a" / "manifest.json").stat().st_size
    assert PAYLOAD <= traffic.read <= 1.05 * PAYLOAD + heads
    assert totals.bytes_read == PAYLOAD
    files = {os.path.basename(name).removesuffix(".part"): spans for name, spans in traffic.written.items()}
    blobs = [p for p in (work / "b").iterdir() if p.name.startswith("rank")]
    assert len(blobs) == totals.files_written == target[0]
    for path in blobs:
        spans = sorted(files[path.name])
        assert spans[0][0] == 0 and spans[-1][1] == path.stat().st_size
        assert all(a[1] == b[0] for a, b in pairwise(spans)), "each byte once, and every byte"
    assert totals.bytes_written == sum(p.stat().st_size for p in blobs) - sum(header_size(p) for p in blobs)


def header_size(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_memory_in_flight_is_bounded(work):
    state = {"w": {"fp32_param": finite("float32", (6_000_000,), 1)}}
    zero1ckpt.write(work / "a", state, dp_size=4)
    del state
    zero1ckpt.reshard(work / "a", work / "first", to_dp=2)  # what is imported and cached once is no data in flight
    for workers, limit in ((1, 2**20), (4, 2**20), (2, 4 * 2**20)):
        gc.collect()
        tracemalloc.start()
        zero1ckpt.reshard(work / "a", work / f"b{workers}-{limit}", to_dp=3, workers=workers, memory_limit=limit)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < limit + 2**20, (workers, limit, peak)


# --------------------------------------------------------------------------------------------------------------- plans


def catalog_of(made, rule, slots=(("x", "float32"), ("y", "bfloat16"))):
    specs = tuple(
        ParamSpec(p.name, (p.numel,), *p.buffer_key[:2], 0, p.buffer_key[2], p.shared_embedding) for p in made
    )
    state = PartState(specs, tuple(SlotSpec(*slot) for slot in slots))
    plugin = next(iter(FORMATS.values()))
    return plugin.plan(state, layout_params(specs, rule), "", "", plugin.normalize(FormatOptions()))


def tags(catalog):
    """(blob, payload byte) -> (param, slot, byte of the tensor), one byte at a time."""
    found = {}
    for blob in range(catalog.placement.blob_count):
        e = catalog.placement.extents(blob)
        for param, slot, start, _, _, at, nbytes in zip(*(c.tolist() for c in e.columns), strict=True):
            item = catalog.state.slots[slot].itemsize
            for k in range(nbytes):
                assert (blob, at + k) not in found, "two slices at one byte"
                found[blob, at + k] = (param, slot, start * item + k)
    return found


@settings(max_examples=40)
@given(params(5), rules(7, pad=False), rules(7, pad=False))
def test_plan_moves_every_byte_from_where_it_is(made, one, two):
    src, dst = catalog_of(made, one), catalog_of(made, two)
    have, want = tags(src), tags(dst)
    assert sorted(have.values()) == sorted(want.values()) and len(set(have.values())) == len(have)
    match = correspond(src.state, dst.state)
    moved = {}
    for blob in range(dst.placement.blob_count):
        moves = plan_blob(src, dst, match, blob)
        assert (np.diff(moves.dst_at) > 0).all()
        for b, s, d, n in zip(
            *(c.tolist() for c in (moves.src_blob, moves.src_at, moves.dst_at, moves.nbytes)), strict=True
        ):
            moved.update({(blob, d + k): have[b, s + k] for k in range(n)})
    assert moved == want


@settings(max_examples=40)
@given(params(5), rules(7, pad=False), st.integers(1, 500), st.lists(st.integers(0, 900), max_size=4))
def test_windows_and_cut_moves(made, rule, window, stops):
    src = catalog_of(made, rule)
    match = correspond(src.state, src.state)
    for blob in range(src.placement.blob_count):
        payload = src.placement.payload_nbytes(blob)
        bounds = window_bounds(payload, window, np.unique(np.array(stops, np.int64)))
        assert bounds[0] == 0 and bounds[-1] == payload
        steps = np.diff(bounds)
        assert (steps > 0).all() and (steps <= window).all()
        assert {s for s in stops if 0 < s < payload} <= set(bounds.tolist())
        moves = plan_blob(src, src, match, blob)
        cut, first = cut_moves(moves, bounds)
        assert int(cut.nbytes.sum()) == int(moves.nbytes.sum())
        for w in range(len(bounds) - 1):
            rows = cut.take(slice(int(first[w]), int(first[w + 1])))
            assert (rows.dst_at >= bounds[w]).all() and (rows.dst_at + rows.nbytes <= bounds[w + 1]).all()
            assert (rows.src_at == rows.dst_at).all() and (rows.nbytes > 0).all()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 9000), st.integers(1, 5000)), max_size=12))
@example([(0, 0, 500_000), (0, 4097, 500_000), (0, 4096, 500_000)])  # small in proportion, but more than is kept for it
@example([(0, 0, 1000), (0, 41, 20), (0, 40, 1000)])
def test_runs_waste_little(steps):
    at = 0
    rows = []
    for blob, gap, nbytes in steps:
        at = max(at + gap, 0)
        rows.append((blob, at, nbytes))
        at += nbytes
    table = np.array(rows, np.int64).reshape(-1, 3)
    moves = Moves(table[:, 0], table[:, 1], np.cumsum(table[:, 2]) - table[:, 2], table[:, 2])
    found = list(runs(moves))
    assert [i for first, last in found for i in range(first, last)] == list(range(len(rows)))
    for first, last in found:
        part = table[first:last]
        assert len(set(part[:, 0].tolist())) == 1
        useful = int(part[:, 2].sum())
        span = int(part[-1, 1] + part[-1, 2] - part[0, 1])
        gaps = part[1:, 1] - part[:-1, 1] - part[:-1, 2]
        assert (gaps >= 0).all() and (gaps <= 4096).all()
        assert span - useful <= 0.04 * useful


@given(params(5), rules(7, pad=False), st.integers(1, 300))
def test_pieces_lie_in_one_slice_or_in_padding(made, rule, piece):
    catalog = catalog_of(made, rule)
    where = tags(catalog)
    for blob in range(catalog.placement.blob_count):
        payload = catalog.placement.payload_nbytes(blob)
        cuts = piece_cuts(catalog.placement.extents(blob), payload, piece).tolist()
        assert cuts[0] == 0 and cuts[-1] == payload and cuts == sorted(set(cuts))
        for low, high in pairwise(cuts):
            assert high - low <= piece
            assert len({where.get((blob, k), (None, None))[:2] for k in range(low, high)}) == 1


@settings(max_examples=30)
@given(params(4), rules(5, pad=False), st.integers(1, 300), st.randoms(use_true_random=False))
def test_pieces_of_all_blobs_make_the_checksum_of_each_tensor(made, rule, piece, chance):
    catalog = catalog_of(made, rule)
    values = {
        (p, s): chance.randbytes(catalog.state.tensor_nbytes(p, s))
        for p in range(len(made))
        for s in range(len(catalog.state.slots))
    }
    total = {}
    for blob in range(catalog.placement.blob_count):
        table = catalog.placement.extents(blob)
        data = bytearray(catalog.placement.payload_nbytes(blob))
        for p, s, start, _, _, at, n in zip(*(c.tolist() for c in table.columns), strict=True):
            begin = start * catalog.state.slots[s].itemsize
            data[at : at + n] = values[p, s][begin : begin + n]
        cuts = piece_cuts(table, len(data), piece)
        crcs = [crc64(data[a:b]) for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)]
        for key, crc in fold_pieces(catalog.state, table, cuts, crcs).items():
            total[key] = total.get(key, 0) ^ crc
    assert total == {key: crc64(value) for key, value in values.items() if value}


# ------------------------------------------------------------------------------------------------- what must not match


TEN = ParamSpec("w", (10,))


def table_catalog(rows, specs=(TEN,)):
    columns = (
        [np.array(column, np.int64) for column in zip(*rows, strict=True)] if rows else [np.empty(0, np.int64)] * 7
    )
    state = PartState(tuple(specs), (SlotSpec("x", "float32"),))
    return Catalog("t", "t", "", state, None, TablePlacement(("b0", "b1"), (80, 80), Extents(*columns), 1))


WHOLE = table_catalog([(0, 0, 0, 10, 0, 0, 40)])


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [(0, 0, 0, 9, 0, 0, 36)],
        [(0, 0, 1, 9, 0, 0, 36)],
        [(0, 0, 0, 4, 0, 0, 16), (0, 0, 5, 5, 0, 20, 20)],
        [(0, 0, 0, 6, 0, 0, 24), (0, 0, 5, 5, 1, 0, 20)],
        [(0, 0, 0, 10, 0, 0, 40), (0, 0, 0, 10, 1, 0, 40)],
    ],
    ids=["nothing", "short", "late", "gap", "overlap", "twice"],
)
def test_a_source_that_does_not_cover_once_is_refused(rows):
    src = table_catalog(rows)
    with pytest.raises(CorruptError, match=r"w: slot x is not covered exactly once"):
        plan_blob(src, WHOLE, correspond(src.state, WHOLE.state), 0)


@settings(max_examples=60)
@given(SIZES.filter(lambda n: 0 < n < 200), st.data())
def test_any_tiling_covers(numel, data):
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=5))})
    spans = data.draw(st.permutations(list(pairwise(cuts))))
    at, rows = [0, 0], []
    for low, high in spans:
        blob = data.draw(st.integers(0, 1))
        rows.append((0, 0, low, high - low, blob, at[blob], 4 * (high - low)))
        at[blob] += 4 * (high - low)
    src = table_catalog(rows, [ParamSpec("w", (numel,))])
    dst = table_catalog([(0, 0, 0, numel, 0, 0, 4 * numel)], [ParamSpec("w", (numel,))])
    moves = plan_blob(src, dst, correspond(src.state, dst.state), 0)
    where = {(r[4], r[5] + k): 4 * r[2] + k for r in rows for k in range(r[6])}
    for b, s, d, n in zip(
        *(c.tolist() for c in (moves.src_blob, moves.src_at, moves.dst_at, moves.nbytes)), strict=True
    ):
        assert [where[b, s + k] for k in range(n)] == list(range(d, d + n))


def test_other_shapes_and_dtypes_are_refused():
    a = PartState((ParamSpec("w", (2, 3)),), (SlotSpec("x", "float32"),))
    with pytest.raises(UnsupportedError, match=r"w: the param has another shape .*found \[2, 3\], expected \[3, 2\]"):
        correspond(a, PartState((ParamSpec("w", (3, 2)),), a.slots))
    with pytest.raises(UnsupportedError, match="nothing is cast"):
        correspond(a, PartState(a.params, (SlotSpec("x", "bfloat16"),)))
    match = correspond(a, PartState((ParamSpec("new", ()), *a.params), (SlotSpec("y", "int8"), *a.slots)))
    assert match.param.tolist() == [-1, 0] and match.slot.tolist() == [-1, 0]


# ------------------------------------------------------------------------------------------------------------- workers


class Failing:
    """A copier whose windows are numbers; some fail."""

    def __init__(self, bad):
        self.bad, self.done = bad, []

    def windows(self, job):
        return iter(job)

    def run(self, window):
        if window == self.bad:
            raise CorruptError(f"window {window}")
        self.done.append(window)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_first_error_stops_all_and_is_raised(workers):
    copier = Failing(3)
    with pytest.raises(CorruptError, match="window 3"):
        run_jobs(copier, iter([range(5), range(5, 100_000)]), workers)
    assert len(copier.done) < 100_000
    copier = Failing(None)
    run_jobs(copier, iter([range(5), range(5, 99)]), workers)
    assert sorted(copier.done) == list(range(99))


@pytest.mark.parametrize("workers", [1, 3])
def test_an_error_while_jobs_are_made_is_raised(workers):
    def jobs():
        yield range(3)
        raise UnsupportedError("no more")

    with pytest.raises(UnsupportedError, match="no more"):
        run_jobs(Failing(None), jobs(), workers)


def test_the_plan_is_made_without_a_write_and_says_what_will_be(work):
    zero1ckpt.write(work / "a", {"w": {"fp32_param": torch.ones(1000)}}, dp_size=2)
    before = tree(work)
    plan = plan_reshard(work / "a", to_dp=4, workers=2, memory_limit=2**20)
    totals = plan.totals()
    assert tree(work) == before
    assert (totals.bytes_read, totals.bytes_written, totals.files_written) == (4000, 4096, 4)
    assert totals.peak_memory <= 2**20 and plan.dst == work / "a-dp4"
