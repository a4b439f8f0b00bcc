"""Saves a run of several ranks as ``fully_reshardable``, by turns with dcp.save and with a gather on rank 0.

All ranks are processes on this machine over gloo; all sides end with fsync. The same whole tensors come out of each:
one for each param and slot. Prints seconds and the ratio to dcp.save, and the bytes of tensors that ranks sent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import save as saving
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from zero1ckpt import Zero1Optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=34_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "RANK" in os.environ:
        worker(args)
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), __file__]
        options = ["--params", str(args.params), "--rounds", str(args.rounds), "--dir", folder]
        subprocess.run([sys.executable, *launch, *options], check=True)
        common.report("save_ranks", json.loads((Path(folder) / "rows.json").read_text()), args.json)


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    optimizer = saving.make(args.params)
    target = args.dir / "out"
    sent: list[int] = []
    cases: dict[str, Callable[[], None]] = {
        "fully_reshardable": lambda: sent.append(optimizer.save(target, format="fully_reshardable").sent_bytes),
        "bucket_shards": lambda: saving.done(optimizer.save(target)),
        "dcp.save": lambda: dcp_save(optimizer, target),
        "gather on rank 0, torch.save": lambda: gather(optimizer, target),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, case in cases.items():
            if dist.get_rank() == 0:
                common.remove(target)
                os.sync()
            dist.barrier()
            begin = time.perf_counter()
            case()
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        median = common.medians(times)
        rows = [
            {"case": name, "ranks": dist.get_world_size(), "seconds": s, "ratio_to_dcp": s / median["dcp.save"]}
            for name, s in median.items()
        ]
        rows[0]["sent_bytes"] = max(sent)
        (args.dir / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def dcp_save(optimizer: Zero1Optimizer, target: Path) -> None:
    """torch's own distributed checkpoint of this optimizer: each rank writes the slices that it owns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"optimizer": optimizer}, checkpoint_id=str(target))
    dist.barrier()
    if dist.get_rank() == 0:
        common.fsync_tree(target)


def gather(optimizer: Zero1Optimizer, target: Path) -> None:
    """What many do: rank 0 collects every shard and writes one file."""
    whole: dict[str, Any] = {}
    for buffer, layout in enumerate(optimizer.layout.buffers):
        for bucket in range(layout.bucket_count):
            for slot in ("fp32_param", "exp_avg", "exp_avg_sq"):
                shard = optimizer.shard(slot, buffer, bucket).detach()
                parts = [torch.empty_like(shard) for _ in range(optimizer.dp_size)] if optimizer.rank == 0 else None
                dist.gather(shard, parts)
                if parts is not None:
                    whole[f"{buffer}.{bucket}.{slot}"] = torch.cat(parts)
    if optimizer.rank == 0:
        target.mkdir()
        torch.save(whole, target / "x.pt")
        common.fsync_tree(target)


if __name__ == "__main__":
    main()
