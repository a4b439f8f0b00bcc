"""Saves a live optimizer on one rank, by turns with a plain write of the same bytes and with what else there is.

Cases: ``bucket_shards`` with digests and without (checksums switched off), a raw write (the faster of one and two
threads), torch.save, safetensors' save_file, torch.distributed.checkpoint; each with fsync and, with ``--no-fsync``,
without. Prints rates over the raw write's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from zero1ckpt import Zero1Optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=64_000_000, help="params of the model; 12 bytes of state each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-fsync", action="store_true")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        common.report("save", measure(Path(folder), args), args.json)


def measure(work: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    optimizer = make(args.params)
    tensors = {f"{name}.{slot}": t for name, slots in state_of(optimizer).items() for slot, t in slots.items()}
    target = work / "out"
    cases: dict[str, Callable[[], float | None]] = {
        "raw write, 1 thread": lambda: raw_write(target, tensors, 1),
        "raw write, 2 threads": lambda: raw_write(target, tensors, 2),
        "bucket_shards": lambda: done(optimizer.save(target)),
        "bucket_shards, no checksums": lambda: without_checksums(optimizer, target),
        "fully_reshardable": lambda: done(optimizer.save(target, format="fully_reshardable")),
        "safetensors save_file": lambda: synced(target, lambda: save_file(tensors, target / "x.safetensors")),
        "torch.save": lambda: synced(target, lambda: torch.save(tensors, target / "x.pt")),
        "dcp.save": lambda: synced(target, lambda: dcp_save(tensors, target)),
    }
    context: Any = no_fsync() if args.no_fsync else contextlib.nullcontext()
    with context:
        times = common.alternate(cases, args.rounds, lambda: common.remove(target))
    median = common.medians(times)
    raw = min(median["raw write, 1 thread"], median["raw write, 2 threads"])
    nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
    return [
        {
            "case": name,
            "fsync": not args.no_fsync,
            "seconds": seconds,
            "bytes": nbytes,
            "rate_over_raw": raw / seconds,
        }
        for name, seconds in median.items()
    ]


def make(params: int) -> Zero1Optimizer:
    width = 4096
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(max(params // width**2, 1))))
    optimizer = Zero1Optimizer(model, torch.optim.AdamW, lr=1e-3, bucket_size=40_000_000)
    for buffer in range(len(optimizer.layout.buffers)):
        for bucket in range(optimizer.layout.buffers[buffer].bucket_count):
            for slot in ("exp_avg", "exp_avg_sq"):
                optimizer.shard(slot, buffer, bucket).uniform_()
    return optimizer


def state_of(optimizer: Zero1Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {
        str(index): {slot: value for slot, value in state.items() if value.numel() > 1}
        for index, state in enumerate(optimizer.state.values())
    }


def raw_write(target: Path, tensors: dict[str, torch.Tensor], threads: int) -> None:
    target.mkdir()
    views = [t.detach().reshape(-1).view(torch.uint8).numpy() for t in tensors.values()]

    def work(index: int) -> None:
        fd = os.open(target / f"raw{index}", os.O_WRONLY | os.O_CREAT)
        for view in views[index::threads]:
            data = memoryview(view)
            while data.nbytes:
                data = data[os.write(fd, data[: 2**20]) :]
        os.fsync(fd)
        os.close(fd)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def done(handle: Any) -> None:
    handle.wait()


def without_checksums(optimizer: Zero1Optimizer, target: Path) -> None:
    with mock.patch("zero1ckpt.resharding.execute.crc64", lambda data: 0):
        optimizer.save(target).wait()


def synced(target: Path, save: Callable[[], object]) -> None:
    target.mkdir()
    save()
    common.fsync_tree(target)


def dcp_save(tensors: dict[str, torch.Tensor], target: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"state": dict(tensors)}, checkpoint_id=str(target), no_dist=True)


@contextlib.contextmanager
def no_fsync() -> Iterator[None]:
    with mock.patch("os.fsync", lambda fd: None):
        yield


if __name__ == "__main__":
    main()
