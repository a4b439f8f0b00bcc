"""The metadata of torch.distributed.checkpoint: real ones become columns, ours is loaded by torch, damage is named."""

import pickle
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero1ckpt.core.errors import CorruptError, UsageError
from zero1ckpt.encodings.dcp_metadata import (
    BytesEntry,
    DcpMetadata,
    TensorEntry,
    dump_metadata,
    parse_metadata,
    whole_tensor,
)
from zero1ckpt.encodings.torch_archive import check_member, object_archive, plan_tensor, read_archive
from zero1ckpt.storage.local import LocalStore

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = sorted((ROOT / "tests/data/pickles").glob("*.metadata"))
CORPUS = ROOT.parent / "shared/corpus/megatron"


def raw(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def tensor_archive(tensor):
    plan = plan_tensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return plan.prefix + raw(tensor) + plan.suffix(zlib.crc32(raw(tensor)))


class Folder:
    """Writes a checkpoint folder by hand: archives one after the other, then the metadata."""

    def __init__(self, path):
        self.path = path
        self.data = {}

    def put(self, file, archive):
        content = self.data.setdefault(file, bytearray())
        at = len(content)
        content += archive
        return list(self.data).index(file), at, len(archive)

    def finish(self, tensors, objects, paths):
        for name, content in self.data.items():
            (self.path / name).write_bytes(content)
        metadata = DcpMetadata(tensors, objects, tuple(self.data), paths)
        (self.path / ".metadata").write_bytes(dump_metadata(metadata))
        return metadata


def in_two_chunks(folder, key, tensor):
    """The rows of a tensor in two files."""
    cut = tensor.shape[0] // 2
    places = [
        folder.put(f"__{i}_0.distcp", tensor_archive(part)) for i, part in enumerate((tensor[:cut], tensor[cut:]))
    ]
    zeros = [0] * (tensor.dim() - 1)
    offsets = np.array([[0, *zeros], [cut, *zeros]], np.int64)
    sizes = np.array([[cut, *tensor.shape[1:]], [tensor.shape[0] - cut, *tensor.shape[1:]]], np.int64)
    columns = np.array(places, np.int64).T
    return TensorEntry(key, str(tensor.dtype)[6:], tuple(tensor.shape), offsets, sizes, *columns)


# ------------------------------------------------------------------------------------------------------------- writing


def test_torch_loads_what_we_write_into_a_nested_state_dict(work):
    state = {
        "optimizer": {"state": {"exp_avg": {"w": torch.randn(6, 4), "b": torch.arange(3, dtype=torch.bfloat16)}}},
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "fp8": torch.randint(0, 99, (5,), dtype=torch.uint8).view(torch.float8_e4m3fn),
        "groups": [{"lr": 0.5, "betas": (0.9, 0.95)}],
    }
    nested = state["optimizer"]["state"]["exp_avg"]
    folder = Folder(work)
    tensors = {"optimizer.state.exp_avg.w": in_two_chunks(folder, "optimizer.state.exp_avg.w", nested["w"])}
    paths = {"optimizer.state.exp_avg.w": ("optimizer", "state", "exp_avg", "w")}
    paths["optimizer.state.exp_avg.b"] = ("optimizer", "state", "exp_avg", "b")
    for key, tensor in [
        ("optimizer.state.exp_avg.b", nested["b"]),
        *((k, state[k]) for k in ("empty", "scalar", "fp8")),
    ]:
        file, at, nbytes = folder.put("__0_0.distcp", tensor_archive(tensor))
        tensors[key] = whole_tensor(key, str(tensor.dtype)[6:], tuple(tensor.shape), file=file, at=at, nbytes=nbytes)
        paths.setdefault(key, (key,))
    objects = {}
    for key, value, path in [
        ("groups.0.lr", 0.5, ("groups", 0, "lr")),
        ("groups.0.betas", (0.9, 0.95), ("groups", 0, "betas")),
    ]:
        file, at, nbytes = folder.put("__1_0.distcp", object_archive(value))
        objects[key] = BytesEntry(key, file, at, nbytes)
        paths[key] = path
    written = folder.finish(tensors, objects, paths)

    read = dcp.FileSystemReader(work).read_metadata()
    assert set(read.state_dict_metadata) == set(paths) and read.planner_data == paths
    assert read.state_dict_metadata["empty"].properties.dtype is torch.float32
    assert read.state_dict_metadata["optimizer.state.exp_avg.w"].size == torch.Size([6, 4])

    target = {
        "optimizer": {"state": {"exp_avg": {"w": torch.zeros(6, 4), "b": torch.zeros(3, dtype=torch.bfloat16)}}},
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(0),
        "fp8": torch.zeros(5, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "groups": [{"lr": 0.0, "betas": (0.0, 0.0)}],
    }
    dcp.load(target, checkpoint_id=str(work))
    assert torch.equal(target["optimizer"]["state"]["exp_avg"]["w"], nested["w"])
    assert torch.equal(target["optimizer"]["state"]["exp_avg"]["b"], nested["b"])
    assert target["scalar"] == 7 and raw(target["fp8"]) == raw(state["fp8"])
    assert target["groups"] == state["groups"]
    assert_equal(parse_metadata((work / ".metadata").read_bytes()), written)


def test_torch_builds_the_nested_state_dict_from_our_paths(work):
    folder = Folder(work)
    tensor = torch.randn(4, 3)
    place = dict(zip(("file", "at", "nbytes"), folder.put("__0_0.distcp", tensor_archive(tensor)), strict=True))
    folder.finish({"a.b": whole_tensor("a.b", "float32", (4, 3), **place)}, {}, {"a.b": ("a", "b")})
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(work, work / "one.pt")
    assert torch.equal(torch.load(work / "one.pt")["a"]["b"], tensor)


def assert_equal(ours, theirs):
    assert (ours.files, ours.paths, ours.version, ours.objects) == (
        theirs.files,
        theirs.paths,
        theirs.version,
        theirs.objects,
    )
    assert list(ours.tensors) == list(theirs.tensors)
    for key, entry in ours.tensors.items():
        other = theirs.tensors[key]
        assert (entry.key, entry.dtype, entry.shape, entry.transforms) == (
            key,
            other.dtype,
            other.shape,
            other.transforms,
        )
        for column in ("offsets", "sizes", "files", "at", "nbytes"):
            assert np.array_equal(getattr(entry, column), getattr(other, column)), (key, column)


def test_the_same_metadata_gives_the_same_bytes_without_a_place_or_an_id(work):
    metadata = DcpMetadata({"a": whole_tensor("a", "float32", (2,), file=0, at=0, nbytes=9)}, {}, ("x.distcp",))
    data = dump_metadata(metadata)
    assert data == dump_metadata(parse_metadata(data))
    assert pickle.loads(data).storage_meta.save_id is None
    with pytest.raises(UsageError, match="tensor and an object"):
        dump_metadata(DcpMetadata(metadata.tensors, {"a": BytesEntry("a", 0, 0, 1)}, ("x.distcp",)))


# ------------------------------------------------------------------------------------------------------------- reading


def test_what_torch_saves_is_read(work):
    state = {
        "model": {"w": torch.randn(5, 3), "b": torch.zeros(2, dtype=torch.bfloat16)},
        "step": 3,
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0),
        "list": [1, {"a": torch.ones(1)}],
    }
    dcp.save(state, checkpoint_id=str(work))
    metadata = parse_metadata((work / ".metadata").read_bytes(), file=work / ".metadata")
    assert metadata.paths["model.w"] == ("model", "w")
    assert metadata.tensors["model.w"].shape == (5, 3) and metadata.tensors["model.b"].dtype == "bfloat16"
    assert metadata.tensors["scalar"].shape == () and len(metadata.tensors["scalar"]) == 1
    assert "step" in metadata.objects
    store = LocalStore(work)
    for key, tensor in [("model.w", state["model"]["w"]), ("scalar", state["scalar"]), ("empty", state["empty"])]:
        entry = metadata.tensors[key]
        file, at, nbytes = metadata.files[entry.files[0]], int(entry.at[0]), int(entry.nbytes[0])
        archive = read_archive(store, file, offset=at, length=nbytes)
        found = archive.locate(archive.value)
        data = bytearray(found.nbytes)
        store.readv_into(file, found.offset, [memoryview(data)])
        assert data == raw(tensor) and entry.coverage_problem() is None
    item = metadata.objects["step"]
    assert read_archive(store, metadata.files[item.file], offset=item.at, length=item.nbytes).value == 3


def all_metadata():
    found = list(FIXTURES)
    if CORPUS.is_dir():
        found += sorted(CORPUS.rglob(".metadata"))
    return found


@pytest.mark.parametrize("path", all_metadata(), ids=lambda p: p.name if p.name != ".metadata" else str(p)[-70:-25])
def test_real_metadata_of_megatron(path):
    metadata = parse_metadata(path.read_bytes(), file=path)
    assert metadata.tensors and metadata.objects
    assert [key for key, entry in metadata.tensors.items() if entry.coverage_problem()] == []
    assert_equal(parse_metadata(dump_metadata(metadata)), metadata)
    if path.name != ".metadata":
        return
    store = LocalStore(path.parent)
    for entry in metadata.tensors.values():
        for i in range(len(entry)):
            file = metadata.files[entry.files[i]]
            archive = read_archive(store, file, offset=int(entry.at[i]), length=int(entry.nbytes[i]))
            found = archive.locate(archive.value)
            assert (found.dtype, list(found.shape)) == (entry.dtype, entry.sizes[i].tolist())
            assert found.contiguous
    check_member(store, file, archive.storage(archive.value.storage))


def test_shapes_before_megatron_cut_the_axes_up():
    path = ROOT / "tests/data/pickles/core0110_model_space.metadata"
    metadata = parse_metadata(path.read_bytes())
    assert metadata.tensors["optimizer.state.exp_avg.head.weight"].shape != (131, 24)
    assert metadata.original_shape("optimizer.state.exp_avg.head.weight") == (131, 24)
    assert metadata.original_shape("head.weight") == (131, 24)
    again = parse_metadata(dump_metadata(metadata))
    assert again.original_shape("optimizer.state.exp_avg.head.weight") == (131, 24)


def synthetic(chunks, keys):
    """The metadata that torch would write of 1-D tensors in many chunks."""
    entries, places = {}, {}
    for k in range(keys):
        key = f"optimizer.distributed.dp_group_idx_{k}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
        rows = []
        for i in range(chunks // keys):
            offset = torch.Size([i * 70_000])
            rows.append(ChunkStorageMetadata(offset, torch.Size([70_000])))
            places[MetadataIndex(key, offset, i)] = _StorageInfo(f"__{k}_{i % 64}.distcp", i * 280_640, 280_640)
        size = torch.Size([len(rows) * 70_000])
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, rows)
    return Metadata(entries, {key: (key,) for key in entries}, places, StorageMeta())


def test_a_hundred_thousand_chunks_open_in_seconds():
    """A model of 70 B params at TP 8, PP 8, DP 64 has about so many."""
    data = pickle.dumps(synthetic(100_000, 192))
    start = time.process_time()
    metadata = parse_metadata(data)
    assert time.process_time() - start < 20
    assert sum(map(len, metadata.tensors.values())) == 100_000 // 192 * 192
    entry = next(iter(metadata.tensors.values()))
    assert entry.coverage_problem() is None and entry.offsets[3].tolist() == [210_000]


# ------------------------------------------------------------------------------------------------------------ coverage


def entry_of(shape, boxes):
    offsets = np.array([low for low, _ in boxes], np.int64).reshape(len(boxes), len(shape))
    sizes = np.array([size for _, size in boxes], np.int64).reshape(len(boxes), len(shape))
    zeros = np.zeros(len(boxes), np.int64)
    return TensorEntry("t", "float32", shape, offsets, sizes, zeros, zeros, zeros)


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((), [((), ())], None),
        ((0, 3), [((0, 0), (0, 3))], None),
        ((0, 3), [], None),
        ((4,), [((2,), (2,)), ((0,), (2,))], None),
        ((4,), [((0,), (2,))], "2 elements of 4"),
        ((4,), [((0,), (3,)), ((2,), (1,))], r"overlap at \(2,\)"),
        ((2, 4), [((0, 0), (2, 2)), ((0, 2), (1, 2)), ((1, 2), (1, 2))], None),
        ((2, 4), [((0, 0), (2, 2)), ((0, 1), (1, 2)), ((1, 2), (1, 2))], r"overlap at \(0, 1\)"),
        ((), [((), ()), ((), ())], "2 elements of 1"),
    ],
)
def test_coverage(shape, boxes, problem):
    found = entry_of(shape, boxes).coverage_problem()
    if problem is None:
        assert found is None
    else:
        assert found is not None and re.search(problem, found)


@given(st.data())
def test_coverage_by_grid_and_by_sweep_agree_with_counting(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = []
    for _ in range(data.draw(st.integers(1, 5))):
        low = [data.draw(st.integers(0, n - 1)) for n in shape]
        boxes.append((low, [data.draw(st.integers(1, n - a)) for a, n in zip(low, shape, strict=True)]))
    grid = np.zeros(shape, int)
    for low, size in boxes:
        grid[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))] += 1
    entry = entry_of(shape, boxes)
    assert (entry.coverage_problem() is None) == bool((grid == 1).all())
    swept = entry._overlap_by_sweep(entry.offsets, entry.offsets + entry.sizes)
    assert (swept is None) == bool((grid <= 1).all())
    assert swept is None or grid[swept] > 1


# -------------------------------------------------------------------------------------------------------------- damage


def small():
    return synthetic(6, 2)


def first(metadata):
    return next(iter(metadata.state_dict_metadata.values()))


def change_place(metadata, **fields):
    info = next(iter(metadata.storage_data.values()))
    for name, value in fields.items():
        setattr(info, name, value)


def drop_place(metadata):
    metadata.storage_data.pop(next(iter(metadata.storage_data)))


def extra_place(metadata):
    metadata.storage_data[MetadataIndex("other", torch.Size([0]))] = _StorageInfo("x", 0, 1)


def extra_chunk_place(metadata):
    key = next(iter(metadata.state_dict_metadata))
    metadata.storage_data[MetadataIndex(key, torch.Size([5]))] = _StorageInfo("x", 0, 1)


def share_chunks(metadata):
    one, two = metadata.state_dict_metadata.values()
    two.chunks = one.chunks


DAMAGE = {
    "a place is missing": (drop_place, "does not say where a chunk lies"),
    "a key is missing": (extra_place, "other: storage_data has an entry"),
    "a chunk is missing": (extra_chunk_place, "chunk that the tensor does not have"),
    "file outside": (lambda m: change_place(m, relative_path="../../etc/passwd"), "outside of the checkpoint"),
    "absolute file": (lambda m: change_place(m, relative_path="/etc/passwd"), "outside of the checkpoint"),
    "file is no text": (lambda m: change_place(m, relative_path=3), "outside of the checkpoint"),
    "negative offset": (lambda m: change_place(m, offset=-1), "place in storage_data is malformed"),
    "offset is no number": (lambda m: change_place(m, offset="1"), "place in storage_data is malformed"),
    "huge offset": (lambda m: change_place(m, offset=2**70), "not what torch writes"),
    "shape is text": (lambda m: setattr(first(m), "size", "abc"), "shape or chunks"),
    "negative shape": (lambda m: setattr(first(m), "size", (-1,)), "shape or chunks"),
    "chunk beyond": (lambda m: setattr(first(m), "size", torch.Size([7])), "beyond its tensor"),
    "dimensions": (lambda m: setattr(first(m), "size", torch.Size([700, 900])), "number of dimensions"),
    "chunk is none": (lambda m: first(m).chunks.append(None), "shape or chunks"),
    "chunks shared": (share_chunks, "not a list of its own"),
    "chunk twice": (lambda m: first(m).chunks.append(first(m).chunks[0]), "begin at one place"),
    "dtype is text": (lambda m: setattr(first(m), "properties", "float32"), "not what torch writes"),
    "no storage data": (lambda m: setattr(m, "storage_data", None), "no storage_data"),
    "storage of others": (lambda m: m.storage_data.update({"a": 3}), "unknown kind"),
    "entry is none": (lambda m: m.state_dict_metadata.update({"a": None}), "unknown kind"),
    "key is a number": (lambda m: m.state_dict_metadata.update({3: None}), "not text"),
    "version is a number": (lambda m: setattr(m, "version", 3), "version is not text"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name):
    change, message = DAMAGE[name]
    metadata = small()
    change(metadata)
    with pytest.raises(CorruptError, match=message) as error:
        parse_metadata(pickle.dumps(metadata), file="run/.metadata")
    assert str(error.value).startswith("run/.metadata: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("value", [None, 3, [], {"state_dict_metadata": {}}, StorageMeta()], ids=repr)
def test_other_pickles_are_no_metadata(value):
    with pytest.raises(CorruptError, match="no metadata of torch"):
        parse_metadata(pickle.dumps(value))


def test_empty_chunks_of_ranks_without_a_part():
    """FSDP2 and ZeRO ranks that hold nothing of a tensor write a chunk of size 0, often several at one place."""
    metadata = small()
    size = first(metadata).size
    first(metadata).chunks += [ChunkStorageMetadata(size, torch.Size([0])) for _ in range(3)]
    key = next(iter(metadata.state_dict_metadata))
    metadata.storage_data[MetadataIndex(key, size)] = _StorageInfo("x", 0, 1)
    entry = parse_metadata(pickle.dumps(metadata)).tensors[key]
    assert len(entry) == 3 and entry.coverage_problem() is None


def test_transforms_are_kept():
    metadata = small()
    change_place(metadata, transform_descriptors=["zstd"])
    made = parse_metadata(pickle.dumps(metadata))
    entry = next(iter(made.tensors.values()))
    assert entry.transforms == {0: ("zstd",)}
    assert parse_metadata(dump_metadata(made)).tensors[entry.key].transforms == {0: ("zstd",)}


@settings(max_examples=150)
@given(st.sampled_from(FIXTURES), st.data())
def test_mutated_metadata_gives_columns_or_one_error(path, data):
    stream = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        metadata = parse_metadata(bytes(stream), max_opcodes=200_000)
        for entry in metadata.tensors.values():
            entry.coverage_problem()
            metadata.original_shape(entry.key)
        pickle.loads(dump_metadata(metadata)) if not metadata.extras else dump_metadata(metadata)
    except CorruptError as error:
        assert "\n" not in str(error)
    except UsageError as error:
        assert "cannot be pickled" in str(error)


def test_reading_needs_no_torch():
    code = (
        "import sys\n"
        "import zero1ckpt.encodings.torch_archive\n"
        "from zero1ckpt.encodings.dcp_metadata import parse_metadata\n"
        f"parse_metadata(open({str(FIXTURES[0])!r}, 'rb').read())\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
