"""What the formats in the safetensors container share: blobs that are taken over, and what is kept of many blobs."""

import dataclasses

import zero1ckpt
from tests.strategies import small_state
from zero1ckpt.api.stored import describe
from zero1ckpt.encodings import safetensors_file
from zero1ckpt.storage.staging import Area


def test_a_blob_with_another_number_of_checksums_is_not_taken_over(tmp_path, monkeypatch):
    zero1ckpt.write(tmp_path / "c", small_state(3), dp_size=2, bucket_size=200)
    stored = describe(tmp_path / "c")
    catalog = stored.catalogs[""]
    area = Area(tmp_path / "c", resumed=True)
    files, _ = stored.format.adopt(area, catalog, 0)
    assert files == [stored.files[catalog.placement.blob_key(0)]]
    read = safetensors_file.read_header

    def fewer(store, key):
        header = read(store, key)
        return dataclasses.replace(header, pieces=header.pieces[:-1])

    monkeypatch.setattr("zero1ckpt.formats.payload_format.read_header", fewer)
    assert stored.format.adopt(area, catalog, 0) is None


def test_slices_of_few_blobs_are_kept(tmp_path):
    zero1ckpt.write(tmp_path / "c", small_state(3), dp_size=200, bucket_size=200, format="fully_sharded_model_space")
    placement = describe(tmp_path / "c").catalogs[""].placement
    sizes = [placement.payload_nbytes(blob) for blob in range(200)]
    assert len(placement._held) <= 64
    assert sizes == [placement.payload_nbytes(blob) for blob in range(200)]
    assert zero1ckpt.verify(tmp_path / "c", deep=True)
