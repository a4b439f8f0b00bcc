"""The index of a 70 B model at TP 8 x PP 8 x DP 64: what is looked at grows with it, and no tensor is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zero1ckpt.foreign.megatron.reading import describe

from .synthetic import Run, layout_of, write_run


@pytest.mark.slow
def test_a_large_index_is_described(tmp_path: Path) -> None:
    run = write_run(tmp_path / "iter_0000007")
    checkpoint = describe(tmp_path / "iter_0000007", content=False)
    assert len(checkpoint.parts) == run.tp * run.pp and checkpoint.step == 7
    for name, part in checkpoint.parts.items():
        stage = part.group // run.tp
        layout = layout_of(run, stage)
        assert part.layout is not None and part.layout.dp_size == run.dp, name
        (buffer,) = part.layout.buffers
        assert [b.numel_unpadded for b in buffer.buckets] == layout.bucket_numel_unpadded.tolist()
        assert [part.local_params[i].numel for i in buffer.params] == (layout.end - layout.start).tolist()
        open_ = {*part.evidence.ambiguous, *part.evidence.unknown}
        named = zip((part.local_params[i].name for i in buffer.params), layout.names, strict=True)
        assert all(found == true or found in open_ for found, true in named)


def test_a_small_index_of_the_same_kind(tmp_path: Path) -> None:
    run = write_run(tmp_path / "iter_0000007", Run(4, 64, 192, 256, 2, 2, 4, 40_000))
    checkpoint = describe(tmp_path / "iter_0000007", content=False)
    assert {part.layout.dp_size for part in checkpoint.parts.values() if part.layout} == {4}
    for part in checkpoint.parts.values():
        assert part.layout is not None
        bounds = layout_of(run, part.group // run.tp).bucket_numel.tolist()
        assert [bucket.numel for bucket in part.layout.buffers[0].buckets] == bounds


def test_what_there_is_is_shown_without_the_files(tmp_path: Path) -> None:
    """Of a copy of ``.metadata`` and ``common.pt`` alone: buckets and names, and the exit code of a missing file."""
    write_run(tmp_path / "iter_0000007", Run(4, 64, 192, 256, 2, 2, 4, 40_000))
    for file in (tmp_path / "iter_0000007").glob("*.distcp"):
        file.unlink()
    command = [sys.executable, "-m", "zero1ckpt", "inspect", str(tmp_path / "iter_0000007")]
    for more in ([], ["--group", "dp_group_idx_3"], ["--param", "decoder.layers.1.mlp.linear_fc1.weight"]):
        done = subprocess.run([*command, *more, "--json"], capture_output=True, text=True, check=False)
        assert done.returncode == 3, done.stderr
        assert "a file that .metadata names is missing" in done.stderr and done.stderr.count("\n") == 1
        document = json.loads(done.stdout)
        assert all(part["dp_size"] == 4 for part in document["parts"].values())
