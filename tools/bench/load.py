"""Loads a checkpoint into a live optimizer on one rank, by turns with a plain read of the same bytes.

The checkpoint is one that dp 1 wrote, and one that dp 8 wrote; cold (dropped from the page cache before each run) or
warm. Also torch.load and torch.distributed.checkpoint.load of the same tensors. Prints rates over the raw read's, and
bytes read over bytes needed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import save as saving
import torch
import torch.distributed.checkpoint as dcp

import zero1ckpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=64_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        common.report("load", measure(Path(folder), args), args.json)


def measure(work: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    optimizer = saving.make(args.params)
    optimizer.save(work / "dp1")
    zero1ckpt.reshard(work / "dp1", work / "dp8", to_dp=8, bucket_size=10_000_000)
    tensors = {f"{n}.{s}": t for n, slots in saving.state_of(optimizer).items() for s, t in slots.items()}
    torch.save(tensors, work / "x.pt")
    saving.dcp_save(tensors, work / "dcp")
    needed = sum(t.numel() * t.element_size() for t in tensors.values())
    raw = torch.empty(needed, dtype=torch.uint8)
    raw.fill_(1)
    cases: dict[str, Callable[[], float | None]] = {
        "raw read": lambda: raw_read(work / "dp1", raw),
        "load, same dp": lambda: ignore(optimizer.load(work / "dp1")),
        "load, from dp 8": lambda: ignore(optimizer.load(work / "dp8")),
        "torch.load": lambda: ignore(torch.load(work / "x.pt")),
        "dcp.load": lambda: dcp_load(tensors, work / "dcp"),
    }
    prepare = common.drop_caches if args.cold else common.warm
    times = common.alternate(cases, args.rounds, lambda: prepare(work))
    median = common.medians(times)
    rows = []
    for name, seconds in median.items():
        before = common.io_counters()["rchar"]
        cases[name]()
        read = common.io_counters()["rchar"] - before
        rows.append(
            {
                "case": name,
                "cache": "cold" if args.cold else "warm",
                "seconds": seconds,
                "rate_over_raw": median["raw read"] / seconds,
                "read_over_needed": read / needed,
            }
        )
    return rows


def raw_read(folder: Path, out: torch.Tensor) -> None:
    """Reads the largest file of a folder into memory that is there already."""
    path = max(folder.iterdir(), key=lambda p: p.stat().st_size)
    data = memoryview(out.numpy())
    fd = os.open(path, os.O_RDONLY)
    at = 4096
    while data.nbytes:
        got = os.preadv(fd, [data[: 2**24]], at)
        if not got:
            break
        data, at = data[got:], at + got
    os.close(fd)


def ignore(value: object) -> None:
    """Cases return their own time, or None."""


def dcp_load(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"state": dict(tensors)}, checkpoint_id=str(folder), no_dist=True)


if __name__ == "__main__":
    main()
