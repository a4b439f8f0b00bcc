"""Zarr: damage is found and named; what was killed is resumed; every file is durable and written once."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zero1ckpt
from tests.formats.test_zarr import CHOICES, SMALL, ZARR, group, write
from tests.strategies import finite, flip, small_state, tree
from zero1ckpt.api import verify
from zero1ckpt.api.stored import describe
from zero1ckpt.core.errors import CorruptError, MissingError
from zero1ckpt.encodings.zarr_array.shards import ShardFile
from zero1ckpt.model.manifest import FormatOptions
from zero1ckpt.storage.staging import Area

# -------------------------------------------------------------------------------------------------------------- damage


@pytest.fixture
def damaged(work):
    state = {"w": {"fp32_param": finite("float32", (30, 11), 1)}, "v": {"fp32_param": finite("float32", (9,), 2)}}
    write(work / "a", state, extra={"t": torch.ones(2)})
    return work


def refused(work, name, kinds=(CorruptError, MissingError)):
    """Verify names the file, and a reshard and a read that need it publish and return nothing."""
    answer = verify(work / "a", deep=True)
    assert name in {finding.file for finding in answer.findings}, answer.findings
    with pytest.raises(kinds, match=name.rpartition("/")[2]):
        zero1ckpt.reshard(work / "a", work / "b", to_dp=2, format="bucket_shards")
    assert sorted(p.name for p in work.iterdir()) == ["a"]


@pytest.mark.parametrize("compression", CHOICES)
@settings(max_examples=60)
@given(data=st.data())
def test_every_flipped_bit_of_a_shard_is_found(compression, work, data):
    """Of shards of several chunks: index, checksums, values, padding, compressed bytes."""
    path = work / "a"
    if not path.exists():
        write(path, {"w": {"fp32_param": finite("float32", (31, 11), 1)}}, FormatOptions(700, 150, compression))
    name = data.draw(
        st.sampled_from(
            sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if "c" in p.parts and p.is_file())
        )
    )
    byte, bit = data.draw(st.integers(0, (path / name).stat().st_size - 1)), data.draw(st.integers(0, 7))
    flip(path / name, byte, bit)
    try:
        findings = verify(path, deep=True).findings
        assert name in {f.file for f in findings}, findings
        try:
            zero1ckpt.reshard(path, work / "b", to_dp=2, format="bucket_shards")
        except CorruptError as error:
            assert name in str(error)
        else:
            assert compression is None and {f.kind for f in findings} == {"nonzero_padding"}
    finally:
        flip(path / name, byte, bit)
        for made in work.iterdir():
            if made.name == "b":
                shutil.rmtree(made)


def test_damage_is_named_by_element(damaged):
    file = damaged / "a/w/fp32_param/c/0/0"
    flip(file, file.stat().st_size - 4 * 11 * 3, 2)  # the first byte of the third row from the end
    (finding,) = verify(damaged / "a", deep=True).findings
    low, high = finding.range
    assert (finding.kind, finding.param, finding.slot) == ("damaged_data", "w", "fp32_param")
    assert low <= 27 * 11 < high and high - low <= 75, "no more than a chunk"


@pytest.mark.parametrize("flaw", ["cut", "longer", "gone", "empty", "swapped"])
def test_shards_that_are_no_longer_whole(damaged, flaw):
    name = "w/fp32_param/c/0/0"
    file = damaged / "a" / name
    data = file.read_bytes()
    if flaw == "gone":
        file.unlink()
    elif flaw == "swapped":
        other = {"w": {"fp32_param": finite("float32", (30, 11), 7)}, "v": {"fp32_param": finite("float32", (9,), 2)}}
        write(damaged / "x", other)
        file.write_bytes((damaged / "x" / name).read_bytes())
        shutil.rmtree(damaged / "x")
    else:
        file.write_bytes({"cut": data[:-1], "longer": data + b"\0", "empty": b""}[flaw])
    refused(damaged, name)
    with pytest.raises((CorruptError, MissingError)):
        zero1ckpt.open(damaged / "a").read("w", "fp32_param")


@pytest.mark.parametrize("compression", CHOICES)
def test_a_chunk_that_the_index_has_lost_is_not_zeros(work, compression):
    """Zarr reads a missing chunk as its fill value. The index is remade with a right CRC-32C."""
    from awscrt.checksums import crc32c

    values = finite("float32", (40, 4), 1)
    write(work / "a", {"w": {"fp32_param": values}}, FormatOptions(2000, 64, compression))
    file = work / "a/w/fp32_param/c/0/0"
    data = bytearray(file.read_bytes())
    slots = 10
    data[16:32] = b"\xff" * 16
    data[16 * slots : 16 * slots + 4] = crc32c(bytes(data[: 16 * slots])).to_bytes(4, "little")
    file.write_bytes(data)
    assert (group(work / "a")["w/fp32_param"][4:8] == 0).all(), "what others would see"
    refused(work, "w/fp32_param/c/0/0")
    with pytest.raises(CorruptError, match="header of the shard"):
        zero1ckpt.open(work / "a").read("w", "fp32_param")


@pytest.mark.parametrize("name", ["zarr.json", "w/zarr.json", "w/fp32_param/zarr.json"])
@pytest.mark.parametrize("flaw", ["altered", "gone", "cut"])
def test_metadata_that_is_not_what_it_was(damaged, name, flaw):
    file = damaged / "a" / name
    text = file.read_bytes()
    if flaw == "gone":
        file.unlink()
    else:
        file.write_bytes(
            text.replace(b'"w"', b'"x"').replace(b'"step":0', b'"step":1') if flaw == "altered" else text[:-9]
        )
    assert not file.exists() or file.read_bytes() != text
    refused(damaged, name)


# ------------------------------------------------------------------------------------------------ resume and durability


ROOT = Path(__file__).resolve().parents[2]
KILLED = """
import os, signal, sys
import zero1ckpt
from tests.faults import calls

left = int(sys.argv[1])

def before(name, args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

options = zero1ckpt.FormatOptions(shard_bytes=2000, chunk_bytes=300)
with calls(before):
    zero1ckpt.reshard(*sys.argv[2:], options=options, workers=1, format="fully_reshardable", container="zarr")
"""


def test_a_resume_takes_over_whole_shards(work, monkeypatch):
    state = {f"w{i}": {"fp32_param": finite("float32", (50, 7), i)} for i in range(4)}
    zero1ckpt.write(work / "src", state, dp_size=2)
    zero1ckpt.reshard(work / "src", work / "whole", options=SMALL, **ZARR)

    sealed = []
    seal = ShardFile.seal
    monkeypatch.setattr(ShardFile, "seal", lambda self, *a: (sealed.append(self.shard.key), seal(self, *a))[1])
    shards = [name for name in tree(work / "whole") if "/c/" in name and tree(work / "whole")[name]]
    moments = [20, 45, 70]
    for moment in moments:
        # In a process of its own: tensorstore does not survive a fork.
        done = subprocess.run([sys.executable, "-c", KILLED, str(moment), work / "src", work / "dst"], cwd=ROOT)
        assert done.returncode == -signal.SIGKILL, "it was interrupted"
        assert not (work / "dst").exists()
        (left,) = (work / ".dst.zero1ckpt-partial").iterdir()
        kept = {name for name in tree(left) if "/c/" in name and not name.endswith(".part")}
        sealed.clear()
        zero1ckpt.reshard(work / "src", work / "dst", options=SMALL, workers=1, resume=True, **ZARR)
        files = {name for name in kept if tree(work / "dst")[name] is not None}
        assert set(sealed) == set(shards) - files and (moment < 45 or files)
        assert tree(work / "dst") == tree(work / "whole")
        shutil.rmtree(work / "dst")


def test_a_half_written_or_foreign_shard_is_not_taken_over(work):
    state = {"w": {"fp32_param": finite("float32", (50, 7), 1)}}
    write(work / "a", state)
    stored = describe(work / "a")
    catalog, plugin = stored.catalogs[""], stored.format
    area = Area(work / "a")
    files, pieces = plugin.adopt(area, catalog, 0)
    assert files[0] == stored.files[files[0].path] and len(pieces) == len(plugin.cuts(catalog, 0)) - 1
    file = work / "a" / files[0].path
    data = file.read_bytes()
    for other in (data[:-1], data[:40], b"", b"\0" * len(data), data + b"\0"):
        file.write_bytes(other)
        assert plugin.adopt(area, catalog, 0) is None
    file.unlink()
    assert plugin.adopt(area, catalog, 0) is None


def test_every_file_is_durable_and_written_once(work, monkeypatch):
    synced, written = set(), {}
    fsync, pwrite = os.fsync, os.pwrite

    def counted_fsync(fd):
        synced.add(os.readlink(f"/proc/self/fd/{fd}").removesuffix(".part"))
        fsync(fd)

    def counted_pwrite(fd, data, offset):
        done = pwrite(fd, data, offset)
        written.setdefault(os.readlink(f"/proc/self/fd/{fd}").removesuffix(".part"), []).append((offset, offset + done))
        return done

    monkeypatch.setattr(os, "fsync", counted_fsync)
    monkeypatch.setattr(os, "pwrite", counted_pwrite)
    write(work / "a", small_state(1))
    (staging,) = {name.partition("/zarr.json")[0] for name in synced if re.search("-partial/[0-9a-f]+/zarr.json", name)}
    for path, content in tree(work / "a").items():
        place = f"{staging}/{path}" if path != "manifest.json" else f"{staging}/.manifest.json"
        if content is None:
            continue
        assert place in synced, path
        if path != "manifest.json":
            spans = sorted(written[place])
            assert spans[0][0] == 0 and spans[-1][1] == len(content)
            assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
