"""fully_reshardable in zarr: what zarr-python and tensorstore see, layout, determinism, options, memory."""

import json
import os
import subprocess
import sys
import warnings
from math import prod

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zero1ckpt
from tests.strategies import finite, small_state, tree
from zero1ckpt.api import verify
from zero1ckpt.api.stored import describe
from zero1ckpt.core.errors import UsageError
from zero1ckpt.encodings.zarr_array.metadata import COMPRESSIONS, ArraySpec
from zero1ckpt.encodings.zarr_array.shards import Shard, ShardFile
from zero1ckpt.formats.fully_reshardable_zarr import FullyReshardableZarr, array_path
from zero1ckpt.model.manifest import FormatOptions

ZARR = {"format": "fully_reshardable", "container": "zarr"}
SMALL = FormatOptions(shard_bytes=2000, chunk_bytes=300)
CHOICES = [None, *COMPRESSIONS]
DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


def write(path, state, options=SMALL, **keywords):
    return zero1ckpt.write(path, state, dp_size=2, options=options, **{"workers": 1, **ZARR, **keywords})


def group(path):
    """The root group as zarr-python opens it, with no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return zarr.open_group(path, mode="r")


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).numpy() if tensor.ndim else tensor.reshape(1).view(torch.uint8).numpy()


# ------------------------------------------------------------------------------------------------------ other readers


@pytest.mark.parametrize("compression", CHOICES)
@settings(max_examples=15)
@given(st.data())
def test_zarr_python_and_tensorstore_read_every_value(compression, work, data):
    shapes = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from(DTYPES))
    chunk = data.draw(st.integers(1, 200))
    options = FormatOptions(data.draw(st.integers(chunk, 2000)), chunk, compression)
    state = {f"p{i}": {"fp32_param": finite(dtype, shape, i)} for i, shape in enumerate(shapes)}
    write(work / "a", state, options, overwrite=True)
    root = group(work / "a")
    for name, slots in state.items():
        wanted = slots["fp32_param"]
        array = root[f"{name}/fp32_param"]
        assert array.shape == tuple(wanted.shape)
        assert array.attrs["dtype"] == dtype and array.attrs["param"] == name
        raw = bits(wanted).tobytes()
        assert np.ascontiguousarray(array[...]).tobytes() == raw
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(work / "a" / name / "fp32_param")}}
        found = ts.open(spec | {"fill_missing_data_reads": False}, open=True).result()
        assert np.ascontiguousarray(found.read().result()).tobytes() == raw
    assert verify(work / "a", deep=True)


def test_a_group_of_groups_with_what_a_reader_needs(work):
    state = {
        "layers.0.weight": {"fp32_param": torch.randn(7, 5), "exp_avg": torch.randn(7, 5).bfloat16()},
        "empty": {"fp32_param": torch.empty(0, 3), "exp_avg": torch.empty(0, 3).bfloat16()},
        "scale": {"fp32_param": torch.tensor(2.0), "exp_avg": torch.tensor(3.0).bfloat16()},
    }
    for slots in state.values():
        slots["step"] = torch.tensor(4.0)
    write(work / "a", state, step=4)
    root = group(work / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of manifest.json, for one
        members = dict(root.members(max_depth=None))
    arrays = [f"{n}/{s}" for n in state for s in ("fp32_param", "exp_avg")]
    assert set(members) == {*state, *arrays}
    assert root.attrs["format"] == "fully_reshardable" and root.attrs["step"] == 4
    assert root["scale"].attrs["scalars"] == {"step": 4.0} and root["scale/fp32_param"][...] == 2.0
    assert root["empty/fp32_param"].shape == (0, 3)
    stored = root["layers.0.weight/exp_avg"]
    assert stored.dtype == np.uint16 and stored.attrs["dtype"] == "bfloat16", "bits of what zarr has no type for"
    again = torch.from_numpy(stored[...].view(np.int16)).view(torch.bfloat16)
    assert torch.equal(again, state["layers.0.weight"]["exp_avg"])
    for folder, _, files in os.walk(work / "a"):
        inside_array = "/c/" in f"{folder}/"
        assert inside_array or "zarr.json" in files, f"every level has its own: {folder}"
    one = zarr.open_group(work / "a" / "scale", mode="r")
    assert one["fp32_param"][...] == 2.0
    nodes = [json.loads(path.read_bytes()) for path in (work / "a").rglob("zarr.json")]
    assert all(node["zarr_format"] == 3 for node in nodes) and len(nodes) == 1 + 3 + 6


def test_names_that_zarr_or_the_folder_reserve(work):
    names = [
        "a/b",
        "..",
        ".",
        "...",
        "zarr.json",
        "manifest.json",
        "extra.safetensors",
        "__x",
        "part-x",
        "",
        "%",
        "ü",
        "c",
        "a b",
        "a\\b",
        "\\",
    ]
    paths = [array_path(name, "exp_avg") for name in names]
    assert len({path.split("/")[0] for path in paths}) == len(names)
    state = {name: {"fp32_param": torch.tensor([float(i)])} for i, name in enumerate(names)}
    ckpt = write(work / "a", state, extra={"t": torch.ones(2)})
    root = group(work / "a")
    for i, name in enumerate(names):
        array = root[array_path(name, "fp32_param")]
        assert array.attrs["param"] == name and array[0] == i and ckpt.read(name, "fp32_param") == i
    assert verify(work / "a", deep=True)
    assert sorted(work.iterdir()) == [work / "a"]


# ------------------------------------------------------------------------------------------------- layout of the bytes


@pytest.mark.parametrize("compression", CHOICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("shape", [(), (7,), (40, 9), (3, 5, 70), (6, 1, 4)])
def test_a_shard_holds_what_tensorstore_writes(work, shape, dtype, compression):
    """The index, but for the place of the chunks, and the chunks, byte by byte, of the array in its own shape."""
    values = finite(dtype, shape, 1)
    write(work / "a", {"w": {"fp32_param": values}}, FormatOptions(600, 100, compression))
    node = json.loads((work / "a/w/fp32_param/zarr.json").read_bytes())
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(work / "b")}, "metadata": node}
    array = ts.open(spec | {"store_data_equal_to_fill_value": True}, create=True).result()
    stored = bits(values).view(array.dtype.numpy_dtype).reshape(shape)
    array.write(stored).result()
    files = {p.relative_to(work / "b") for p in (work / "b").rglob("*") if p.is_file() and p.name != "zarr.json"}
    base = work / "a/w/fp32_param"
    assert files == {p.relative_to(base) for p in base.rglob("*") if p.is_file() and p.name != "zarr.json"}
    whole = np.array(node["chunk_grid"]["configuration"]["chunk_shape"], np.int64)
    slots = prod((whole // node["codecs"][0]["configuration"]["chunk_shape"]).tolist())
    for file in files:
        mine, theirs = (base / file).read_bytes(), (work / "b" / file).read_bytes()
        index, other = (np.frombuffer(data, "<u8", 2 * slots).reshape(-1, 2) for data in (mine, theirs))
        present = index[:, 1] != 2**64 - 1
        gap = index[0, 0] - other[0, 0]
        assert gap == len(mine) - len(theirs) and gap % 8 == 0
        assert (index[present] == other[present] + np.array([gap, 0], np.uint64)).all()
        assert (index[~present] == other[~present]).all()
        assert mine[int(index[0, 0]) :] == theirs[int(other[0, 0]) :]


def test_few_files_and_small_chunks():
    plugin = FullyReshardableZarr()
    chosen = plugin.normalize(FormatOptions())
    array = ArraySpec((32_000, 4096), "float32", chosen.chunk_bytes, chosen.shard_bytes)
    assert 8 <= array.shard_count <= 16 and array.slots * array.chunk_nbytes <= 64 * 2**20
    assert 2**19 <= array.chunk_nbytes <= 2**20 and array.chunks.count * array.chunk_nbytes == 32_000 * 4096 * 4
    assert ArraySpec((4096,), "float32", 2**20, 2**26).shard_count == 1
    assert ArraySpec((0, 4096), "float32", 2**20, 2**26).shard_count == 0


@given(
    st.lists(st.integers(1, 9), max_size=4).map(tuple), st.integers(1, 100), st.integers(1, 12), st.integers(0, 10**6)
)
def test_payloads_are_the_values_and_padding(shape, chunk, chunks, at):
    array = ArraySpec(shape, "uint8", chunk, chunk * chunks)
    position = 0
    for number in range(array.shard_count):
        shard = Shard(array, number, "w")
        runs = list(shard.runs(0, shard.payload_nbytes))
        assert [begin for begin, _, _ in runs] == [0, *(end for _, end, _ in runs[:-1])]
        assert runs[-1][1] == shard.payload_nbytes
        for begin, end, held in runs:
            if held is not None:
                assert held.start == position and held.size == end - begin
                position = held.end
        low, high = sorted((at % (shard.payload_nbytes + 1), at * 7 % (shard.payload_nbytes + 1)))
        some = [
            (max(b, low), min(e, high), None if h is None else (h.start + max(b, low) - b, h.end - e + min(e, high)))
            for b, e, h in runs
            if max(b, low) < min(e, high)
        ]
        assert [(b, e, None if h is None else (h.start, h.end)) for b, e, h in shard.runs(low, high)] == some
    assert position == prod(shape)


@pytest.mark.parametrize("compression", CHOICES)
def test_the_same_bytes_whatever_the_way_and_the_workers(work, compression):
    options = FormatOptions(3000, 500, compression)
    state = small_state(3, ((130, 24), (), (97,), (0,), (3, 5, 7)))
    write(work / "a", state, options)
    for i, (workers, limit) in enumerate([(1, None), (4, None), (2, 2**17)]):
        zero1ckpt.reshard(work / "a", work / f"s{i}", to_dp=3, bucket_size=64, format="bucket_shards", workers=workers)
        made = zero1ckpt.reshard(
            work / f"s{i}", work / f"z{i}", options=options, workers=workers, memory_limit=limit, **ZARR
        )
        assert tree(work / f"z{i}") == tree(work / "a") and made.digest == zero1ckpt.open(work / "a").digest


def test_every_pair_of_formats(work):
    pairs = [("bucket_shards", None), ("fully_reshardable", "safetensors"), ("fully_sharded_model_space", None)]
    write(work / "z", small_state(5), options=None)
    for i, (format, container) in enumerate(pairs):
        there = work / f"t{i}"
        zero1ckpt.reshard(work / "z", there, to_dp=3, bucket_size=100, format=format, container=container)
        zero1ckpt.reshard(there, work / f"z{i}", **ZARR)
        assert tree(work / f"z{i}") == tree(work / "z")
        assert verify(there, against=work / "z", deep=True)


def test_a_range_reads_the_chunks_that_hold_it(work):
    values = torch.randn(4000, 250)
    ckpt = write(work / "a", {"w": {"fp32_param": values}}, FormatOptions(2**20, 2**16))
    for start, end in ((0, 10), (16_000, 16_001), (250_000, 500_000), (16_380, 16_400)):
        before = _bytes_read()
        found = ckpt.read("w", "fp32_param", zero1ckpt.Range(start, end))
        read = _bytes_read() - before
        assert torch.equal(found, values.flatten()[start:end])
        shards = (end - 1) * 4 // 2**20 - start * 4 // 2**20 + 1
        assert read <= (end - start) * 4 + 2 * 2**16 + shards * 1024


def _bytes_read():
    name = "/tensorstore/kvstore/file/bytes_read"
    return sum(m["values"][0]["value"] for m in ts.experimental_collect_matching_metrics(name))


# --------------------------------------------------------------------------------------------------- options and costs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (FormatOptions(chunk_bytes=0), "chunk size"),
        (FormatOptions(chunk_bytes=100, shard_bytes=99), "shard size"),
        (FormatOptions(compression="lzma"), "compression.*zstd"),
    ],
)
def test_options_out_of_range(work, options, message):
    with pytest.raises(UsageError, match=message):
        write(work / "a", small_state(1), options)
    assert not list(work.iterdir())


def test_options_that_are_not_given(work):
    plugin = FullyReshardableZarr()
    assert plugin.normalize(FormatOptions(compression="none")).compression is None
    assert plugin.normalize(FormatOptions(chunk_bytes=2**30)).shard_bytes == 2**30
    made = write(work / "a", small_state(1), FormatOptions(compression="zstd", chunk_bytes=128))
    assert made.container == "zarr" and describe(work / "a").manifest.options.compression == "zstd"
    assert zero1ckpt.reshard(work / "a", work / "b").digest == made.digest
    assert tree(work / "a") == tree(work / "b"), "what is not given stays"


def test_a_limit_that_no_shard_fits_into_is_refused(work):
    zero1ckpt.write(work / "a", {"w": {"fp32_param": torch.ones(2**18)}}, dp_size=1)
    with pytest.raises(UsageError, match=r"memory limit is too small.*at least 2097152 bytes.*smaller shard"):
        zero1ckpt.reshard(work / "a", work / "b", memory_limit=2**20, workers=1, **ZARR)
    assert [p.name for p in work.iterdir()] == ["a"]
    small = FormatOptions(2**18, 2**16)
    zero1ckpt.reshard(work / "a", work / "b", memory_limit=2**20, workers=1, options=small, **ZARR)


def test_as_many_shards_in_flight_as_the_memory_allows(work, monkeypatch):
    zero1ckpt.write(work / "a", {f"w{i}": {"fp32_param": torch.ones(2**18)} for i in range(8)}, dp_size=1)
    held, most = set(), []
    init, seal = ShardFile.__init__, ShardFile.seal

    def counted(self, *args):
        init(self, *args)
        held.add(self)
        most.append(len(held))

    def sealed(self, *args):
        made = seal(self, *args)
        held.discard(self)
        return made

    monkeypatch.setattr(ShardFile, "__init__", counted)
    monkeypatch.setattr(ShardFile, "seal", sealed)
    zero1ckpt.reshard(work / "a", work / "b", memory_limit=5 * 2**20, workers=4, **ZARR)
    assert max(most) <= 2


def test_tensorstore_is_not_imported_to_look(work):
    write(work / "a", small_state(1))
    code = "import sys, zero1ckpt.api; zero1ckpt.open(sys.argv[1]).groups; print(*sys.modules)"
    for command in ([sys.executable, "-c", code], [sys.executable, "-X", "importtime", "-m", "zero1ckpt", "inspect"]):
        done = subprocess.run([*command, work / "a"], capture_output=True, text=True, check=True)
        assert "tensorstore" not in done.stdout + done.stderr


def test_inspect_lists_every_file(work):
    write(work / "a", small_state(1))
    done = subprocess.run(
        [sys.executable, "-m", "zero1ckpt", "inspect", work / "a", "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert (found["format"], found["container"]) == ("fully_reshardable", "zarr")
    assert {f["path"]: f["bytes"] for f in found["files"]} == {
        name: len(data) for name, data in tree(work / "a").items() if data is not None
    }
