"""The old zarr container: chunks at the edge, what is refused, and real files."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zero1ckpt.core.errors import CorruptError, MissingError, UnsupportedError
from zero1ckpt.encodings.torch_archive import object_archive
from zero1ckpt.foreign.megatron import zarr_v2
from zero1ckpt.foreign.megatron.entries import ChunkSource, Entries
from zero1ckpt.foreign.megatron.zarr_v2 import open_zarr


def write_array(folder: Path, values: np.ndarray, chunk: tuple[int, ...], **changed: Any) -> None:
    """A zarr v2 array as zarr-python writes it: chunks of full size, garbage beyond the edge."""
    folder.mkdir(parents=True)
    told = {"zarr_format": 2, "shape": list(values.shape), "chunks": list(chunk), "dtype": "<f4", "order": "C"}
    told |= {"compressor": None, "filters": None, "fill_value": None} | changed
    (folder / ".zarray").write_text(json.dumps(told))
    for index in product(*(range(-(-n // c)) for n, c in zip(values.shape, chunk, strict=True))):
        full = np.full(chunk, -7, values.dtype)
        part = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk, strict=True))]
        full[tuple(slice(0, n) for n in part.shape)] = part
        (folder / (".".join(map(str, index)) or "0")).write_bytes(full.tobytes())


def write_common(folder: Path, value: Any = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "common.pt").write_bytes(object_archive(value or {"iteration": 1}))


def read_whole(entries: Entries, key: str) -> np.ndarray:
    """A tensor assembled from its chunks; every element must be in exactly one."""
    tensor = entries.tensors[key]
    source = ChunkSource(entries.store, entries.chunks)
    dtype = {"float32": "<f4", "bfloat16": "<u2"}[tensor.dtype]
    found = np.zeros(tensor.shape, dtype)
    held = np.zeros(tensor.shape, np.int64)
    for offset, size, chunk in zip(tensor.offsets.tolist(), tensor.sizes.tolist(), tensor.chunks.tolist(), strict=True):
        data = bytearray(int(entries.chunks.nbytes[chunk]))
        source.read_run(chunk, 0, [memoryview(data)])
        box = tuple(slice(low, low + n) for low, n in zip(offset, size, strict=True))
        found[box] = np.frombuffer(data, dtype).reshape(size)
        held[box] += 1
    assert (held == 1).all()
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_element_is_found_at_any_edge(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=4)))
    chunk = tuple(data.draw(st.integers(1, n + 2)) for n in shape)
    values = np.arange(int(np.prod(shape)), dtype="<f4").reshape(shape)
    folder = tmp_path_factory.mktemp("zarr")
    write_common(folder)
    write_array(folder / "a.weight", values, chunk)
    np.testing.assert_array_equal(read_whole(open_zarr(folder), "a.weight"), values)


def test_objects_have_the_names_of_torch_dist(tmp_path: Path) -> None:
    write_common(tmp_path)
    (tmp_path / "rng_state").mkdir()
    (tmp_path / "rng_state" / "shard_0.0_1.1.pt").write_bytes(object_archive([{"a": 1}]))
    entries = open_zarr(tmp_path)
    assert list(entries.objects) == ["rng_state/shard_0.0_1.1"]
    assert entries.load_object("rng_state/shard_0.0_1.1") == [{"a": 1}]
    with pytest.raises(CorruptError, match="lacks an entry"):
        entries.load_object("other/shard_0_1")


def test_lock_folders_are_no_arrays(tmp_path: Path) -> None:
    write_common(tmp_path)
    write_array(tmp_path / "w", np.zeros((2, 2), "<f4"), (2, 2))
    (tmp_path / "w.sync").mkdir()
    (tmp_path / "w.sync" / ".zarray").touch()
    (tmp_path / "w.sync" / "0.0").touch()
    assert list(open_zarr(tmp_path).tensors) == ["w"]


def test_a_missing_chunk_is_not_filled_in(tmp_path: Path) -> None:
    write_common(tmp_path)
    write_array(tmp_path / "w", np.zeros((4, 2), "<f4"), (2, 2), fill_value=0.0)
    (tmp_path / "w" / "1.0").unlink()
    with pytest.raises(MissingError, match=r"1\.0: w: a chunk of the array is missing"):
        open_zarr(tmp_path)


def test_a_short_chunk_is_damage(tmp_path: Path) -> None:
    write_common(tmp_path)
    write_array(tmp_path / "w", np.zeros(4, "<f4"), (4,))
    (tmp_path / "w" / "0").write_bytes(b"\0" * 12)
    with pytest.raises(CorruptError, match="found 12 bytes, expected 16 bytes"):
        open_zarr(tmp_path)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"compressor": {"id": "blosc"}}, "compressed"),
        ({"filters": [{"id": "delta"}]}, "filtered"),
        ({"order": "F"}, "row by row"),
        ({"dtype": ">f4"}, "element type"),
        ({"dtype": [["a", "<f4"]]}, "element type"),
        ({"zarr_format": 3}, "another version"),
    ],
)
def test_what_megatron_does_not_write_is_refused(tmp_path: Path, changed: dict[str, Any], part: str) -> None:
    write_common(tmp_path)
    write_array(tmp_path / "w", np.zeros(4, "<f4"), (4,), **changed)
    with pytest.raises(UnsupportedError, match=part):
        open_zarr(tmp_path)


@pytest.mark.parametrize("changed", [{"chunks": [0]}, {"chunks": [1, 1]}, {"shape": "x"}, {"shape": [-4]}])
def test_metadata_that_cannot_be_is_damage(tmp_path: Path, changed: dict[str, Any]) -> None:
    write_common(tmp_path)
    write_array(tmp_path / "w", np.zeros(4, "<f4"), (4,), **changed)
    with pytest.raises(CorruptError):
        open_zarr(tmp_path)


def test_without_common_state(tmp_path: Path) -> None:
    write_array(tmp_path / "w", np.zeros(4, "<f4"), (4,))
    with pytest.raises(MissingError, match=r"common\.pt: the common state is missing"):
        open_zarr(tmp_path)


def test_real_arrays_against_the_truth(corpus: Callable[..., Path]) -> None:
    from safetensors.torch import load_file

    folder = corpus("v0123_toy_dp2_b2500")
    truth = load_file(folder / "truth.safetensors")
    entries = open_zarr(folder / "zarr_fully_sharded_model_space" / "iter_0000003")
    tried = 0
    for key, value in truth.items():
        if not key.startswith("local/tp0_pp0_ep0/"):
            continue
        name, _, field = key.removeprefix("local/tp0_pp0_ep0/").rpartition("/")
        stored = f"optimizer.state.{'fp32_param' if field == 'param' else field}.{name}"
        np.testing.assert_array_equal(read_whole(entries, stored), value.numpy())
        tried += 1
    assert tried == 33
    assert entries.tensors["embedding.weight"].dtype == "bfloat16"


def test_more_pieces_than_a_list_can_hold_are_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_common(tmp_path)
    write_array(tmp_path / "w", np.zeros((1000, 3), "<f4"), (1000, 4))
    assert len(open_zarr(tmp_path).tensors["w"].chunks) == 1000
    monkeypatch.setattr(zarr_v2, "_MAX_PIECES", 999)
    monkeypatch.setattr(zarr_v2, "_pieces", lambda *_: pytest.fail("pieces were made"))
    with pytest.raises(UnsupportedError, match=r"w: .*too many pieces \(found 1000 pieces"):
        open_zarr(tmp_path)


def test_the_limit_is_one_of_all_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_common(tmp_path)
    for key in "abc":
        write_array(tmp_path / key, np.zeros((4, 3), "<f4"), (4, 4))
    monkeypatch.setattr(zarr_v2, "_MAX_PIECES", 11)
    with pytest.raises(UnsupportedError, match=r"c: .*\(found 12 pieces"):
        open_zarr(tmp_path)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 11)), max_size=4))
def test_pieces_are_counted_as_they_are_made(rows: list[tuple[int, int]]) -> None:
    spec = zarr_v2._Spec("float32", tuple(n for n, _ in rows), tuple(c for _, c in rows), ".")
    grid = [range(-(-n // c)) for n, c in rows]
    made = sum(len(list(zarr_v2._runs("0", spec, index))) for index in product(*grid))
    assert zarr_v2._piece_count(spec) == made
