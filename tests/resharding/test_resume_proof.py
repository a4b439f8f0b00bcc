"""A resume takes over finished blobs only if their bytes are still what was written."""

import shutil

import pytest

import zero1ckpt
from tests.strategies import flip, small_state, tree
from zero1ckpt.api.resharding import execute, plan_reshard
from zero1ckpt.core.errors import Zero1CkptError
from zero1ckpt.registry import FORMATS
from zero1ckpt.resharding import copying
from zero1ckpt.storage.staging import partial_path


@pytest.mark.parametrize(("format", "container"), list(FORMATS), ids=["-".join(pair) for pair in FORMATS])
@pytest.mark.parametrize("damage", [False, True], ids=["sound", "damaged"])
def test_a_finished_blob_that_was_damaged_is_written_again(tmp_path, monkeypatch, format, container, damage):
    zero1ckpt.write(tmp_path / "a", small_state(3), dp_size=3, bucket_size=500)
    chunk = 500 if container == "zarr" else None
    small = zero1ckpt.FormatOptions(shard_bytes=2_000, chunk_bytes=chunk)
    options = small if format == "fully_reshardable" else None

    def plan():
        return plan_reshard(
            tmp_path / "a", tmp_path / "b", to_dp=2, format=format, container=container, options=options, workers=1
        )

    execute(plan())
    wanted = tree(tmp_path / "b")
    shutil.rmtree(tmp_path / "b")
    job, made = copying._job, []

    def stops_at_the_second(part, area, blob, *rest):
        if made:
            raise KeyboardInterrupt
        made.append(part.dst.placement.blob_key(blob))
        return job(part, area, blob, *rest)

    monkeypatch.setattr(copying, "_job", stops_at_the_second)
    with pytest.raises((KeyboardInterrupt, Zero1CkptError)):
        execute(plan())
    (left,) = partial_path(tmp_path / "b").glob(f"*/{made[0]}")
    assert left.exists()
    if damage:
        flip(left, left.stat().st_size // 2, 3)
    monkeypatch.setattr(copying, "_job", lambda *args: (made.append("again"), job(*args))[1])
    execute(plan(), resume=True)
    assert tree(tmp_path / "b") == wanted
    blobs = plan().catalogs[0].placement.blob_count
    assert made.count("again") == (blobs if damage else blobs - 1)  # nothing that is sound is done twice
