"""Formats whose files are written by several ranks: each its own bytes, and never a page of another over a network."""

from itertools import pairwise

import pytest
import torch

import zero1ckpt
from tests.engine.harness import run_ranks
from zero1ckpt.encodings.part_file import PartFile
from zero1ckpt.formats import fully_reshardable_torch_dist, payload_format


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 131), torch.nn.LayerNorm(131), torch.nn.Linear(131, 3))
    optimizer = zero1ckpt.Zero1Optimizer(model, torch.optim.AdamW, lr=1e-2, bucket_size=300, foreach=False)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return optimizer


def save(rank, path, local, options, container):
    """Bytes of tensors that this rank has sent, its (file, offset, bytes) of writes, and the total that is reported."""
    payload_format.is_local = fully_reshardable_torch_dist.is_local = lambda folder: local
    sent = []
    writes = []
    sync, write = PartFile.sync, PartFile.write_part

    def counted_sync(self):
        edges = sync(self)
        sent.extend(len(edge) for _, edge in edges)
        return edges

    def counted_write(self, at, data):
        writes.append((self.path.name, at, data.nbytes))
        write(self, at, data)

    PartFile.sync, PartFile.write_part = counted_sync, counted_write
    handle = trained().save(path, format="fully_reshardable", container=container, options=options)
    return sum(sent), writes, handle.sent_bytes


@pytest.mark.dist
@pytest.mark.parametrize("container", ["safetensors", "torch_dist"])
@pytest.mark.parametrize("shard_bytes", [10**9, 4000], ids=["one file", "many files"])
def test_ranks_write_their_own_bytes_and_share_pages_only_locally(tmp_path, shard_bytes, container):
    options = zero1ckpt.FormatOptions(shard_bytes=shard_bytes)
    local = run_ranks(3, save, str(tmp_path / "local"), True, options, container)
    shared = run_ranks(3, save, str(tmp_path / "shared"), False, options, container)
    assert [sent for sent, *_ in local] == [0, 0, 0] and {reported for *_, reported in local} == {0}
    spans = sorted((key, at, size) for _, writes, _ in local for key, at, size in writes)
    total = sum(size for *_, size in spans)
    assert total == 3 * 4 * sum(p.numel() for p in trained().param_groups[0]["params"])
    for (key, at, size), (other, begin, _) in pairwise(spans):
        assert key != other or at + size <= begin  # every byte has one writer
    assert all(0 < sent < total for sent, *_ in shared)
    assert {reported for *_, reported in shared} == {sum(sent for sent, *_ in shared)}  # counted
    names = sorted(path.name for path in (tmp_path / "local").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "shared").iterdir())
    for name in names:
        assert (tmp_path / "local" / name).read_bytes() == (tmp_path / "shared" / name).read_bytes()
    assert zero1ckpt.verify(tmp_path / "shared", deep=True)
