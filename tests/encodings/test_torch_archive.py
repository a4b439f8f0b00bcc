"""Archives of ``torch.save``: real ones read in place, ours read by torch and zipfile, damage and attacks refused."""

import collections
import io
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero1ckpt.core.errors import CorruptError, UnsupportedError, UsageError, Zero1CkptError
from zero1ckpt.encodings.inert_pickle import Dtype, GlobalRef, Record, load
from zero1ckpt.encodings.torch_archive import (
    ALIGNMENT,
    check_member,
    combine_crc32,
    object_archive,
    plan_archive,
    plan_tensor,
    read_archive,
    read_member,
    tensor_itemsize,
    tensor_ref,
)
from zero1ckpt.storage.local import LocalStore

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT.parent / "shared/corpus/megatron"
DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128",
]  # fmt: skip
SHAPES = [(), (1,), (5,), (0,), (3, 4), (2, 0, 3), (1, 1), (2, 3, 5)]


def raw(tensor):
    """The bytes of a tensor's elements, row-major."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""


def bits(seed, dtype, shape):
    """A tensor of any bits of a dtype."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    size = tensor_itemsize(dtype)
    made = torch.randint(0, 2 if dtype == "bool" else 256, (count * size,), dtype=torch.uint8, generator=seed)
    return made.view(getattr(torch, dtype)).reshape(shape)


def assemble(plan, payloads):
    out = bytearray(b"?" * plan.nbytes)
    for hole, payload in zip(plan.holes, payloads, strict=True):
        assert len(payload) == hole.nbytes and hole.offset % ALIGNMENT == 0
        out[hole.offset : hole.offset + hole.nbytes] = payload
    covered = sum(hole.nbytes for hole in plan.holes)
    for at, run in plan.runs([zlib.crc32(payload) for payload in payloads]):
        out[at : at + len(run)] = run
        covered += len(run)
    assert covered == plan.nbytes
    return bytes(out)


def stored(work, data, name="x.pt"):
    (work / name).write_bytes(data)
    return LocalStore(work)


# ------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_that_we_write_is_read_by_torch_and_zipfile_and_us(work, dtype, shape):
    tensor = bits(torch.Generator().manual_seed(3), dtype, shape)
    plan = plan_tensor(dtype, shape)
    data = assemble(plan, [raw(tensor)])
    assert data == plan.prefix + raw(tensor) + plan.suffix(zlib.crc32(raw(tensor)))
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    for options in ({"weights_only": True}, {"weights_only": False}):
        made = torch.load(io.BytesIO(data), **options)
        assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert raw(made) == raw(tensor)
    store = stored(work, data)
    mapped = torch.load(work / "x.pt", mmap=True, weights_only=True)
    assert raw(mapped) == raw(tensor)
    archive = read_archive(store, "x.pt")
    found = archive.locate(archive.value)
    assert (found.dtype, found.shape, found.contiguous, found.offset) == (dtype, shape, True, plan.holes[0].offset)
    assert found.nbytes == len(raw(tensor))
    check_member(store, "x.pt", archive.storage(archive.value.storage))


def test_several_tensors_in_one_archive(work):
    made = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.zeros(0)}
    value = collections.OrderedDict(
        (name, tensor_ref(str(i), str(t.dtype)[6:], t.shape)) for i, (name, t) in enumerate(made.items())
    )
    value["step"] = 3
    plan = plan_archive([value], [(str(i), len(raw(t))) for i, t in enumerate(made.values())])
    data = assemble(plan, [raw(t) for t in made.values()])
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    (back,) = torch.load(io.BytesIO(data), weights_only=True)
    assert list(back) == ["a", "b", "c", "step"] and back["step"] == 3
    assert all(torch.equal(back[name], t) for name, t in made.items())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(-5, 5), inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=10,
)


@given(VALUES)
def test_plain_values_are_read_by_torch_with_weights_only(value):
    data = object_archive([value])
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    assert torch.load(io.BytesIO(data), weights_only=True) == [value]


def test_bytes_hold_no_clock_and_no_process(work):
    code = (
        "import sys; from zero1ckpt.encodings.torch_archive import *\n"
        "sys.stdout.write((object_archive({'a': {'x', 'y'}}) + plan_tensor('bfloat16', (3,)).suffix(7)).hex())"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(made) == 1 and made.pop()


def test_a_namespace_is_written_again(work):
    import argparse

    buffer = io.BytesIO()
    torch.save({"args": argparse.Namespace(lr=0.5, dtype=torch.float16), "iteration": 3}, buffer)
    value = read_archive(stored(work, buffer.getvalue()), "x.pt").value
    assert type(value["args"]) is Record and value["args"].get("dtype") == Dtype("float16")
    assert value["args"].type == GlobalRef("argparse", "Namespace")
    made = torch.load(io.BytesIO(object_archive(value)), weights_only=False)
    assert made == {"args": argparse.Namespace(lr=0.5, dtype=torch.float16), "iteration": 3}


@pytest.mark.parametrize("storages", [[("0", 1), ("0", 2)], [("../0", 1)], [("", 1)], [("a b", 1)]])
def test_storage_keys_must_be_words(storages):
    with pytest.raises(UsageError, match="different words"):
        plan_archive([], storages)


def test_layout_beyond_4_gib_is_zip64(work):
    """A sparse file: torch maps it, zipfile reads its directory and the member after the storage."""
    nbytes = 2**32 + 64
    plan = plan_archive(
        [tensor_ref("0", "uint8", (nbytes,)), tensor_ref("1", "uint8", (4,))], [("0", nbytes), ("1", 4)]
    )
    with open(work / "x.pt", "wb") as file:
        file.truncate(plan.nbytes)
        for at, run in plan.runs([123, zlib.crc32(b"abcd")]):
            file.seek(at)
            file.write(run)
        file.seek(plan.holes[1].offset)
        file.write(b"abcd")
    with zipfile.ZipFile(work / "x.pt") as archive:
        assert archive.read("archive/data/1") == b"abcd"
        assert archive.getinfo("archive/data/0").file_size == nbytes
    big, small = torch.load(work / "x.pt", mmap=True, weights_only=True)
    assert (big.numel(), bytes(small.numpy())) == (nbytes, b"abcd")
    archive = read_archive(LocalStore(work), "x.pt")
    assert archive.locate(archive.value[1]).offset == plan.holes[1].offset > 2**32
    assert archive.storage(archive.value[0].storage).crc == 123
    check_member(LocalStore(work), "x.pt", archive.storage(archive.value[1].storage))


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_runs_combine(first, second):
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_checksums_of_long_runs_combine():
    zeros = bytes(1 << 20)
    assert combine_crc32(zlib.crc32(b"a"), zlib.crc32(zeros), len(zeros)) == zlib.crc32(b"a" + zeros)


# ------------------------------------------------------------------------------------------------------------- reading


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def elements(store, key, found):
    """The elements at a location, by torch's own view of the bytes."""
    size = tensor_itemsize(found.dtype)
    reach = 1 + sum((n - 1) * s for n, s in zip(found.shape, found.stride, strict=True)) if found.nbytes else 0
    data = bytearray(reach * size)
    store.readv_into(key, found.offset, [memoryview(data)])
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    return flat.view(getattr(torch, found.dtype)).as_strided(found.shape, found.stride)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 7])
def test_tensors_that_torch_saved_are_located(work, dtype, offset):
    base = bits(torch.Generator().manual_seed(5), dtype, (6, 4))
    tensors = [base, base.t(), base[2:, 1], base[1:3].clone(), base[0, 0], base[:0], base[0, 0].clone()]
    store = stored(work, b"j" * offset + saved(tensors) + b"kk")
    archive = read_archive(store, "x.pt", offset=offset, length=(work / "x.pt").stat().st_size - offset - 2)
    for ref, tensor in zip(archive.value, tensors, strict=True):
        found = archive.locate(ref)
        assert (found.shape, found.stride) == (tuple(tensor.shape), tensor.stride())
        assert found.contiguous == tensor.is_contiguous()
        assert raw(elements(store, "x.pt", found)) == raw(tensor)
    for member in archive.members.values():
        check_member(store, "x.pt", member)
    assert read_member(store, "x.pt", archive.members["version"]) == b"3\n"


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not here")
def test_archives_nested_in_real_files_equal_torch_load():
    paths = [*CORPUS.rglob("__0_0.distcp"), *CORPUS.rglob("distrib_optim.pt")]
    count = 0
    for path in paths[:40]:
        store, size = LocalStore(path.parent), path.stat().st_size
        data = path.read_bytes()
        at = 0
        while at < size:
            end = data.index(b"PK\x05\x06", at) + 22
            archive = read_archive(store, path.name, offset=at, length=end - at)
            if path.suffix == ".pt" or type(archive.value).__name__ == "TensorRef":
                theirs = torch.load(io.BytesIO(data[at:end]), weights_only=True)
                count += compare(store, path.name, archive, archive.value, theirs)
            at = end
    assert count > 500


def compare(store, key, archive, ours, theirs):
    if isinstance(theirs, torch.Tensor):
        found = archive.locate(ours)
        assert found.dtype == str(theirs.dtype)[6:] and raw(elements(store, key, found)) == raw(theirs)
        return 1
    if isinstance(theirs, dict):
        assert len(ours) == len(theirs)
        return sum(
            compare(store, key, archive, mine, other)
            for mine, other in zip(ours.values(), theirs.values(), strict=True)
        )
    if isinstance(theirs, (list, tuple)):
        return sum(compare(store, key, archive, mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert isinstance(theirs, torch.dtype) or ours == theirs
    return 0


class CountingStore(LocalStore):
    read_bytes = 0

    def readv_into(self, key, offset, buffers):
        self.read_bytes += sum(b.nbytes for b in buffers)
        super().readv_into(key, offset, buffers)


def test_no_tensor_bytes_are_read(work):
    stored(work, saved([torch.zeros(1 << 22), torch.zeros(1 << 22)]))
    store = CountingStore(work)
    read_archive(store, "x.pt")
    assert store.read_bytes < 20_000


# ------------------------------------------------------------------------------------------------- damage and attacks


def test_a_flipped_payload_bit_is_found_by_its_checksum(work):
    data = bytearray(saved(torch.zeros(100)))
    store = stored(work, data)
    archive = read_archive(store, "x.pt")
    data[archive.locate(archive.value).offset + 5] ^= 4
    stored(work, data)
    with pytest.raises(CorruptError, match="data/0 does not match its checksum"):
        check_member(store, "x.pt", archive.storage(archive.value.storage))


@pytest.mark.parametrize("keep", [0, 3, 20, 100, -1, -21, -23, -60])
def test_truncated(work, keep):
    data = saved({"a": torch.zeros(3)})
    store = stored(work, data[:keep])
    with pytest.raises(CorruptError, match=r"x\.pt: .*(truncated|no archive)"):
        read_archive(store, "x.pt")


def test_the_file_ends_before_the_archive(work):
    store = stored(work, saved([1]))
    with pytest.raises(CorruptError, match="ends before the archive"):
        read_archive(store, "x.pt", offset=10, length=10_000)


def test_files_of_before_torch_1_6_are_named(work):
    buffer = io.BytesIO()
    torch.save([1], buffer, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"before torch 1\.6"):
        read_archive(stored(work, buffer.getvalue()), "x.pt")


def rezip(data, change, **options):
    """The same archive, written by zipfile, with members changed."""
    members = {info.filename: archive_bytes for info, archive_bytes in items(data)}
    change(members)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **options) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def items(data):
    archive = zipfile.ZipFile(io.BytesIO(data))
    return [(info, archive.read(info)) for info in archive.infolist()]


REFUSED = {
    "big endian": (lambda m: m.update({"archive/byteorder": b"big"}), {}, UnsupportedError, "big-endian"),
    "byte order": (lambda m: m.update({"archive/byteorder": b"odd"}), {}, CorruptError, "byte order"),
    "compressed": (lambda m: None, {"compression": zipfile.ZIP_DEFLATED}, UnsupportedError, "compressed"),
    "no pickle": (lambda m: m.pop("archive/data.pkl"), {}, CorruptError, r"no data\.pkl"),
    "a program": (lambda m: m.update({"archive/code/a.py": b""}), {}, UnsupportedError, "TorchScript"),
    "two folders": (lambda m: m.update({"other/data/1": b""}), {}, CorruptError, "outside of its folder"),
    "no folder": (lambda m: m.update({"data.pkl": b"N."}), {}, CorruptError, "outside of its folder"),
    "hostile": (
        lambda m: m.update({"archive/data.pkl": b"cos\nsystem\n."}), {}, CorruptError, r"os\.system, which can run",
    ),
    "trailing": (
        lambda m: m.update({"archive/data.pkl": m["archive/data.pkl"] + b"x"}), {}, CorruptError, "bytes follow",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(work, name):
    change, options, kind, message = REFUSED[name]
    store = stored(work, rezip(saved([torch.zeros(2)]), change, **options))
    with pytest.raises(kind, match=message) as error:
        read_archive(store, "x.pt")
    assert str(error.value).startswith(str(work))


def test_storages_that_do_not_fit(work):
    for change, message in [
        (lambda m: m.pop("archive/data/0"), "lacks a storage"),
        (lambda m: m.update({"archive/data/0": bytes(7)}), "another size"),
    ]:
        archive = read_archive(stored(work, rezip(saved(torch.zeros(2)), change)), "x.pt")
        with pytest.raises(CorruptError, match=message):
            archive.locate(archive.value)


def test_a_tensor_beyond_its_storage(work):
    data = saved(torch.zeros(4)[1:])
    pickled = next(content for info, content in items(data) if info.filename.endswith("data.pkl"))
    assert pickled.count(b"K\x01K\x03\x85") == 1
    grown = pickled.replace(b"K\x01K\x03\x85", b"K\x02K\x03\x85")
    archive = read_archive(stored(work, rezip(data, lambda m: m.update({"archive/data.pkl": grown}))), "x.pt")
    with pytest.raises(CorruptError, match=r"beyond storage 0 .*20 bytes, expected at most 16"):
        archive.locate(archive.value)


def test_members_that_overlap(work):
    """Two rows of the directory for the same bytes: how a small zip claims to hold much."""
    data = object_archive([1])
    start = data.index(b"PK\x01\x02")
    rows = data[start : data.index(b"PK\x05\x06")]
    one = rows[: rows.index(b"PK\x01\x02", 4)]
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 4, 4, len(one) + len(rows), start, 0)
    with pytest.raises(CorruptError, match=r"overlap|twice"):
        read_archive(stored(work, data[:start] + one + rows + end), "x.pt")


@settings(max_examples=300)
@given(st.data())
def test_mutated_archives_give_a_value_or_one_error(tmp_path_factory, data):
    base = saved([{"a": torch.arange(5.0), "b": "text"}])
    archive = bytearray(base)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(archive) - 1) | st.integers(max(0, len(archive) - 700), len(archive) - 1))
        archive[at] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("fuzz", numbered=True)
    try:
        made = read_archive(stored(folder, archive), "x.pt")
        for member in made.members.values():
            check_member(LocalStore(folder), "x.pt", member)
    except Zero1CkptError as error:
        assert error.exit_code in (4, 5) and "\n" not in str(error)


def test_the_pickle_of_an_archive_is_that_of_the_writer():
    data = object_archive({"a": 1})
    (pickled,) = [content for info, content in items(data) if info.filename == "archive/data.pkl"]
    assert load(pickled) == {"a": 1}
