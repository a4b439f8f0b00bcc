"""Files open with the real safetensors reader and hold exactly the shards; headers are checked byte by byte."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zero1ckpt
from tests.strategies import rules, same_bits, states
from zero1ckpt.core.digest import crc64, parse_digest
from zero1ckpt.core.errors import CorruptError, UnsupportedError, Zero1CkptError
from zero1ckpt.encodings import safetensors_file
from zero1ckpt.encodings.safetensors_file import TensorEntry, build_header, lay_out, read_header, tensor_cuts
from zero1ckpt.encodings.tensor_file import check_tensor_file, copy_file, read_tensor, write_tensor_file
from zero1ckpt.model.manifest import FileEntry
from zero1ckpt.storage.local import LocalStore


@settings(max_examples=40)
@given(states(), rules(9, pad=False))
def test_real_reader_finds_the_shards(work, made, rule):
    """Every element of every tensor, looked up by the layout's own views in what the real reader returns."""
    state, keywords = made
    checkpoint = zero1ckpt.write(
        work / "a", state, dp_size=rule.dp_size, bucket_size=rule.bucket_size, overwrite=True, **keywords
    )
    layout, slots = checkpoint.layout, checkpoint.state.slots
    for rank in range(rule.dp_size):
        path = work / "a" / f"rank-{rank:05d}-of-{rule.dp_size:05d}.safetensors"
        files = load_file(path)
        wanted = {}
        for b, buffer in enumerate(layout.buffers):
            for bucket in buffer.buckets:
                for slot in slots:
                    wanted[f"buffer.{b}.bucket.{bucket.index}.{slot.name}"] = torch.zeros(
                        bucket.numel // rule.dp_size, dtype=getattr(torch, slot.dtype)
                    )
            for f in buffer.fragments(rank):
                for slot in slots:
                    if slot.name in state[f.name]:
                        part = state[f.name][slot.name].reshape(-1)[f.param.start : f.param.end]
                        wanted[f"buffer.{b}.bucket.{f.bucket}.{slot.name}"][f.gbuf_local.start : f.gbuf_local.end] = (
                            part
                        )
        assert files.keys() == wanted.keys()
        assert all(same_bits(files[name], wanted[name]) for name in files)
        raw = path.read_bytes()
        header = 8 + int.from_bytes(raw[:8], "little")
        assert header % 4096 == 0, "data starts on a page, for direct I/O"
        with safe_open(path, framework="pt") as opened:
            assert all(isinstance(value, str) for value in opened.metadata().values())


def test_alignment_of_every_shard_to_its_elements(work):
    state = {"w": {"fp32_param": torch.ones(70), "z": torch.ones(70, dtype=torch.int8), "d": torch.ones(70).double()}}
    zero1ckpt.write(work / "a", state, dp_size=3, bucket_size=1)
    header = read_header(LocalStore(work / "a"), "rank-00000-of-00003.safetensors")
    for entry in header.tensors:
        width = (entry.end - entry.begin) // max(entry.shape[0], 1)
        assert (header.payload + entry.begin) % width == 0


# -------------------------------------------------------------------------------------------------------- tensor files

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def raw(tensor):
    return memoryview(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b"")


@settings(max_examples=60)
@given(st.lists(SHAPES, max_size=5), st.data())
def test_tensor_file(work, shapes, data):
    dtypes = [data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.bool))) for _ in shapes]
    tensors = {
        f"t{i}": torch.ones(shape, dtype=dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }
    rows = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), raw(t)) for name, t in tensors.items()]
    entry = write_tensor_file(work / "x", "x", rows, {"who": "me"})
    found = load_file(work / "x")
    assert found.keys() == tensors.keys() and all(same_bits(found[name], tensors[name]) for name in tensors)
    content = (work / "x").read_bytes()
    assert entry.bytes == len(content) and parse_digest(entry.digest) == crc64(content)
    store = LocalStore(work)
    header = check_tensor_file(store, entry)
    assert header.metadata == {"who": "me"}
    for name, _, _, values in rows:
        assert bytes(read_tensor(store, "x", header, name)) == bytes(values)
    copy_file(store, entry, work / "y", window_bytes=data.draw(st.integers(1, 9000)), prove=True)
    assert (work / "y").read_bytes() == content
    if content:
        at = data.draw(st.integers(0, len(content) - 1))
        broken = bytearray(content)
        broken[at] ^= 1 << data.draw(st.integers(0, 7))
        (work / "x").write_bytes(broken)
        store = LocalStore(work)
        with pytest.raises(CorruptError, match="/x"):
            copy_file(store, entry, work / "z", window_bytes=100, prove=True)
        assert not list(work.glob("z*"))
        with pytest.raises(Zero1CkptError, match="/x"):
            again = check_tensor_file(store, entry)
            [read_tensor(store, "x", again, name) for name in tensors]
    for name in ("x", "y"):
        (work / name).unlink()


def test_every_header_byte_counts(work):
    rows = [("a", "float32", (3,), memoryview(bytes(12))), ("b", "int8", (2,), memoryview(b"xy"))]
    entry = write_tensor_file(work / "x", "x", rows)
    content = (work / "x").read_bytes()
    for at in range(entry.bytes - 14):
        for change in (1, 0x20, 0x80) if at < 600 else (1,):
            broken = bytearray(content)
            broken[at] ^= change
            (work / "x").write_bytes(broken)
            with pytest.raises(CorruptError, match="/x"):
                check_tensor_file(LocalStore(work), entry)


def test_a_file_of_other_pieces_is_refused_before_bounds_are_made(work):
    rows = [("a", "int8", (2**36,), 0, 2**36)]
    header = build_header(tuple(TensorEntry(*row) for row in rows), [], 1)
    with (work / "x").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2**36)
    entry = FileEntry("x", len(header) + 2**36, "0" * 16)
    with pytest.raises(CorruptError, match=r"/x: pieces of another size \(found 1, expected 4194304\)"):
        check_tensor_file(LocalStore(work), entry)


def test_a_header_that_readers_would_refuse_is_not_written(monkeypatch):
    tensors = lay_out([(f"t{i}", "int8", (1,)) for i in range(200)])
    build_header(tensors, [0] * 200, 4096)
    monkeypatch.setattr("zero1ckpt.encodings.safetensors_file._MAX_HEADER", 5000)
    with pytest.raises(UnsupportedError, match="header is longer than the format allows"):
        build_header(tensors, [0] * 200, 4096)


# -------------------------------------------------------------------------------------------------------------- headers


def test_header_has_its_size_before_its_checksums():
    tensors = lay_out([("a", "float32", (5000,)), ("b", "bfloat16", ())])
    sizes = {len(build_header(tensors, [crc] * 9, 4096)) for crc in (0, 1, 2**64 - 1)}
    assert len(sizes) == 1 and sizes.pop() % 4096 == 0
    assert tensor_cuts(tensors, 4096).tolist() == [0, 4096, 8192, 12288, 16384, 20000, 20002]
    assert tensor_cuts((), 4096).tolist() == [0]


def test_foreign_files_are_read_too(work):
    save_file({"b": torch.arange(6).reshape(2, 3), "a": torch.ones(0)}, work / "x", {"format": "pt"})
    header = read_header(LocalStore(work), "x")
    assert {t.name: t.shape for t in header.tensors} == {"a": (0,), "b": (2, 3)}
    assert header.metadata == {"format": "pt"} and header.pieces == ()


def forge(work, table, payload=b"", length=None):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    data = (len(text) if length is None else length).to_bytes(8, "little") + text + payload
    (work / "x").write_bytes(data)


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("table", "payload"),
    [
        (b"", b""),
        (b"{", b""),
        (b"[]", b""),
        (b'{"a": 1}', b""),
        (b"\xff\xfe{}", b""),
        ({"a": {**ROW, "dtype": "F99"}}, bytes(8)),
        ({"a": {**ROW, "dtype": 3}}, bytes(8)),
        ({"a": {**ROW, "shape": [3]}}, bytes(8)),
        ({"a": {**ROW, "shape": [-2]}}, bytes(8)),
        ({"a": {**ROW, "shape": [2.0]}}, bytes(8)),
        ({"a": {**ROW, "shape": ["2"]}}, bytes(8)),
        ({"a": {**ROW, "shape": 2}}, bytes(8)),
        ({"a": {**ROW, "data_offsets": [8, 16]}}, bytes(16)),
        ({"a": {**ROW, "data_offsets": [8, 0]}}, bytes(8)),
        ({"a": {**ROW, "data_offsets": [0]}}, bytes(8)),
        ({"a": {**ROW, "data_offsets": [-8, 0]}}, bytes(8)),
        ({"a": {"dtype": "F32"}}, b""),
        ({"a": ROW, "b": {**ROW, "data_offsets": [4, 12]}}, bytes(12)),
        ({"a": ROW, "b": {**ROW, "data_offsets": [9, 17]}}, bytes(17)),
        ({"a": ROW}, bytes(7)),
        ({"a": ROW}, bytes(9)),
        ({"a": ROW, "__metadata__": {"x": 1}}, bytes(8)),
        ({"a": ROW, "__metadata__": {"zero1ckpt.pieces": "12"}}, bytes(8)),
        ({"a": ROW, "__metadata__": {"zero1ckpt.piece_bytes": "0"}}, bytes(8)),
        ({"a": ROW, "__metadata__": {"zero1ckpt.piece_bytes": "x"}}, bytes(8)),
        ({"a": ROW, "__metadata__": {"zero1ckpt.checksum": "md5"}}, bytes(8)),
        ({"a": {**ROW, "shape": [2**62, 4], "data_offsets": [0, 2**66]}}, bytes(8)),
    ],
)
def test_headers_that_are_none_are_refused(work, table, payload):
    forge(work, table, payload)
    with pytest.raises(CorruptError, match="/x") as caught:
        read_header(LocalStore(work), "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 100, 3])
def test_header_length_is_not_trusted(work, length):
    forge(work, {"a": ROW}, bytes(8), length)
    with pytest.raises(CorruptError, match="/x"):
        read_header(LocalStore(work), "x")


@given(st.binary(max_size=100))
def test_any_bytes_are_a_header_or_refused(work, data):
    (work / "x").write_bytes(data)
    try:
        header = read_header(LocalStore(work), "x")
    except CorruptError:
        return
    assert header.payload + header.payload_nbytes == len(data)


def test_nothing_is_unpickled(work):
    import pickle

    (work / "x").write_bytes(pickle.dumps({"a": np.ones(3)}))
    with pytest.raises(CorruptError):
        read_header(LocalStore(work), "x")


def test_many_small_tensors_are_read_in_linear_time(tmp_path, monkeypatch):
    """The bounds of pieces are made once a file, not once a tensor, and the header is read once a checkpoint."""
    made = []
    cuts = safetensors_file.tensor_cuts
    monkeypatch.setattr(safetensors_file, "tensor_cuts", lambda *args: (made.append(1), cuts(*args))[1])
    extra = {f"t{i}": torch.full((i % 3,), i) for i in range(300)}
    state = {"w": {"fp32_param": torch.zeros(4)}}
    zero1ckpt.write(tmp_path / "c", state, dp_size=1, extra=extra)
    made.clear()
    back = zero1ckpt.open(tmp_path / "c").extra
    assert all(torch.equal(back[name], value) for name, value in extra.items()) and len(made) == 1
