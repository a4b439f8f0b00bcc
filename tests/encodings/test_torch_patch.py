"""Elements changed inside an archive: torch reads the new ones, and the rest of the file is as it was."""

from __future__ import annotations

import os
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
import torch

from zero1ckpt.encodings.torch_archive import check_member, plan_tensor, read_archive
from zero1ckpt.encodings.torch_patch import checksum_places, patch
from zero1ckpt.storage.local import LocalStore


def by_torch() -> bytes:
    made = BytesIO()
    torch.save(torch.arange(100, dtype=torch.float32), made)
    return made.getvalue()


def by_us() -> bytes:
    import zlib

    payload = torch.arange(100, dtype=torch.float32).numpy().tobytes()
    plan = plan_tensor("float32", (100,))
    return plan.prefix + payload + plan.suffix(zlib.crc32(payload))


@pytest.mark.parametrize("archive", [by_torch(), by_us()], ids=["torch", "ours"])
@pytest.mark.parametrize("offset", [0, 77])
def test_new_elements_and_their_checksum(tmp_path: Path, archive: bytes, offset: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * offset + archive + b"behind")
    store = LocalStore(tmp_path)
    read = read_archive(store, "file", offset=offset, length=len(archive))
    member = read.storage(read.value.storage)
    places = checksum_places(store, "file", member, offset=offset, length=len(archive))
    fd = os.open(file, os.O_RDWR)
    patch(fd, places, member.offset + 40, torch.full((5,), -1.0).numpy().tobytes())
    os.close(fd)
    data = file.read_bytes()
    assert data[:offset] == b"x" * offset and data.endswith(b"behind")
    inner = data[offset : offset + len(archive)]
    wanted = torch.arange(100, dtype=torch.float32)
    wanted[10:15] = -1
    assert torch.equal(torch.load(BytesIO(inner), weights_only=True), wanted)
    assert zipfile.ZipFile(BytesIO(inner)).testzip() is None
    store = LocalStore(tmp_path)
    again = read_archive(store, "file", offset=offset, length=len(archive))
    check_member(store, "file", again.storage(again.value.storage))
    changed = [i for i, (a, b) in enumerate(zip(inner, archive, strict=True)) if a != b]
    assert len(changed) <= 20 + 4 * len(places.places)
