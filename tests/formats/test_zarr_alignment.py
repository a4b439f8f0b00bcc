"""Values of a zarr shard are read into memory at any byte, not only where an element could begin."""

import numpy as np
import torch

import zero1ckpt
from zero1ckpt.api.stored import describe


def test_reads_into_memory_at_any_byte(tmp_path):
    zero1ckpt.write(
        tmp_path / "a",
        {"w": {"fp32_param": torch.arange(1000.0)}},
        dp_size=2,
        format="fully_reshardable",
        container="zarr",
    )
    stored = describe(tmp_path / "a")
    source = stored.source("")
    extent = stored.catalogs[""].placement.extents(0)
    begin = int(extent.at[0])
    for skip in range(8):
        memory = memoryview(bytearray(4000 + skip))[skip:]
        source.read_run(0, begin, [memory])
        assert np.frombuffer(bytes(memory), np.float32).tolist() == list(map(float, range(1000)))
