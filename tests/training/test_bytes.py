"""What a save sends, writes and leaves on disk, and what a load reads."""

import os
import pickle
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import zero1ckpt
from tests.engine.harness import run_ranks
from tests.training.scenario import make, same_weights, train, weights

SENDING = [
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


class Wire:
    """Counts the bytes of all tensors that are given to a collective while it is in force."""

    def __init__(self):
        self.nbytes = self.calls = 0

    def __enter__(self):
        self.saved = {name: getattr(distributed_c10d, name) for name in SENDING}
        for name, real in self.saved.items():
            self._set(name, self._counting(real))
        return self

    def __exit__(self, *error):
        for name, real in self.saved.items():
            self._set(name, real)

    def _set(self, name, function):
        setattr(distributed_c10d, name, function)
        setattr(dist, name, function)

    def _counting(self, real):
        def call(*args, **keywords):
            self.calls += 1
            stack = [args, list(keywords.values())]
            while stack:
                item = stack.pop()
                if isinstance(item, torch.Tensor):
                    self.nbytes += item.nbytes
                elif isinstance(item, list | tuple):
                    stack += item
            return real(*args, **keywords)

        return call


class Disk:
    """Counts bytes by file while it is in force. Positioned reads and writes are all that checkpoints are made of."""

    def __init__(self):
        self.written, self.read = {}, 0

    def __enter__(self):
        self.saved = os.pwrite, os.preadv

        def pwrite(fd, data, offset):
            done = self.saved[0](fd, data, offset)
            self.written.setdefault(os.readlink(f"/proc/self/fd/{fd}"), []).append((offset, offset + done))
            return done

        def preadv(fd, buffers, offset):
            done = self.saved[1](fd, buffers, offset)
            self.read += done
            return done

        os.pwrite, os.preadv = pwrite, preadv
        return self

    def __exit__(self, *error):
        os.pwrite, os.preadv = self.saved


def large(bucket_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 700), nn.Linear(700, 601)).bfloat16()
    optimizer = zero1ckpt.Zero1Optimizer(
        model, torch.optim.AdamW, lr=0.1, foreach=False, bucket_size=bucket_size, model=model
    )
    return model, optimizer


def save_counted(rank, dp, work, bucket_size):
    model, optimizer = large(bucket_size)
    model(torch.ones(2, 600).bfloat16()).sum().backward()
    optimizer.step()
    optimizer.communicator.traffic.reset()
    with Wire() as wire, Disk() as disk:
        optimizer.save(f"{work}/{bucket_size}", extra={"a": 1})
    state = sum(slot.itemsize for slot in optimizer.slot_specs()) * optimizer.layout.numel
    parts = {path: sorted(spans) for path, spans in disk.written.items() if "rank-" in path}
    return wire.nbytes, optimizer.communicator.traffic.elements_sent, state, parts, disk.read


@pytest.mark.dist
@pytest.mark.parametrize("bucket_size", [1000, 100_000, "none"])
def test_a_save_sends_no_tensor_and_writes_each_byte_once(work, bucket_size):
    ranks = run_ranks(3, save_counted, 3, str(work), bucket_size)
    for rank, (sent, traffic, state, parts, read) in enumerate(ranks):
        assert traffic == 0
        assert 0 < sent < 64 * 1024 < state / 100  # names, checksums and digests, whatever the size of the state
        assert read == 0
        ((path, spans),) = parts.items()
        assert f"rank-{rank:05d}" in path
        file = work / str(bucket_size) / f"rank-{rank:05d}-of-00003.safetensors"
        assert spans[0][0] == 0 and spans[-1][1] == file.stat().st_size
        assert all(end == start for (_, end), (start, _) in pairwise(spans))


def load_counted(rank, dp, work, bucket_size, names):
    found = []
    for name in names:
        model, optimizer = large(bucket_size)
        with Wire() as wire, Disk() as disk:
            optimizer.load(f"{work}/{name}")
        own = sum(f.param.size for f in optimizer.fragments) * sum(s.itemsize for s in optimizer.slot_specs())
        gathered = sum(b.numel for b in optimizer.layout.buffers) * 2
        found.append((disk.read / own, wire.nbytes, gathered, weights(model)))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_a_load_reads_what_the_rank_needs(work, dp):
    """At the same and at another dp and bucket size; what it sends is the model's params, gathered once."""
    sizes = [100_000, "none"]
    for bucket_size in sizes:
        run_ranks(3, save_counted, 3, str(work), bucket_size)
    for ranks in zip(*run_ranks(dp, load_counted, dp, str(work), 100_000, sizes), strict=True):
        for share, sent, gathered, params in ranks:
            assert 1.0 <= share <= 1.05
            assert dp == 1 or sent < 3 * gathered
            same_weights(params, ranks[0][3])


def save_at(rank, dp, work, name, dtype, bucket_size):
    model, optimizer = make(dtype=dtype, bucket_size=bucket_size)
    optimizer.param_groups[1]["lr"] = 0.125
    train(model, optimizer, 2, 0, rank, dp)
    optimizer.save(f"{work}/{name}", extra={"a": (1, 2), "t": torch.arange(3)})


def bytes_of(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.dist
@pytest.mark.parametrize(("dp", "bucket_size"), [(1, "none"), (3, 500), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_save_and_write_and_reshard_make_the_same_bytes(work, dtype, dp, bucket_size):
    run_ranks(dp, save_at, dp, str(work), "saved", dtype, bucket_size)
    run_ranks(dp, save_at, dp, str(work), "again", dtype, bucket_size)
    saved = zero1ckpt.open(work / "saved")
    state = {name: {slot: saved.read(name, slot) for slot in saved.slots} for name in saved.names()}
    specs = {p.name: {"dtype": p.dtype, "grad_dtype": p.grad_dtype} for p in saved.state.params}
    for workers in (1, 4):
        zero1ckpt.write(
            work / f"written{workers}",
            state,
            dp_size=dp,
            bucket_size=bucket_size,
            groups=saved.groups,
            step=saved.step,
            extra=saved.extra,
            params=specs,
            workers=workers,
        )
    zero1ckpt.reshard(work / "saved", work / "there", to_dp=7, bucket_size=64)
    zero1ckpt.reshard(work / "there", work / "back", to_dp=dp, bucket_size=bucket_size)
    first = bytes_of(work / "saved")
    assert len(first) == dp + 2
    for other in ("again", "written1", "written4", "back"):
        assert bytes_of(work / other) == first, other


def test_nothing_is_unpickled(work, monkeypatch):
    """``extra`` with tensors, rank-bound state and a model's buffers included."""
    model, optimizer = make()
    train(model, optimizer, 1)

    def refuse(*args, **keywords):
        raise AssertionError("unpickled")

    for module, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (pickle, "dumps"),
        (torch, "load"),
    ):
        monkeypatch.setattr(module, name, refuse)
    optimizer.save(work / "c", extra={"t": torch.ones(2)}, rank_extra={"rng": torch.get_rng_state()}, model=model)
    loaded = optimizer.load(work / "c", verify=True)
    assert torch.equal(loaded["extra" if "extra" in loaded else "t"], torch.ones(2))


def test_device_and_strided_values_are_saved_as_values(work):
    """Extra tensors that are views, transposed or shared."""
    base = torch.arange(12.0).view(3, 4)
    _, optimizer = make()
    optimizer.save(work / "c", extra={"t": base.T, "row": base[1], "same": base.T, "step": base[:, ::2]})
    loaded = optimizer.load(work / "c")
    assert torch.equal(loaded["t"], base.T) and torch.equal(loaded["row"], base[1])
    assert torch.equal(loaded["same"], base.T) and torch.equal(loaded["step"], base[:, ::2])
