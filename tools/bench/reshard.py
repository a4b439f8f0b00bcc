"""Reshards a checkpoint from dp 8 to dp 6 with another bucket size, by turns with ``cp`` of the same bytes.

Both sides end with fsync. Prints the ratio of the medians, bytes read and written over the payload, and the peak
resident memory over the interpreter's; ``--json FILE`` writes the same.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

import common

import zero1ckpt

RESHARD = ["-m", "zero1ckpt", "reshard", "{src}", "{dst}", "--to-dp", "6", "--bucket-size", "10000000"]
INSPECT = ["-m", "zero1ckpt", "inspect", "{src}", "--json"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1_400_000_000, help="payload of the checkpoint")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory-limit", type=int, default=128 * 2**20)
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--cold", action="store_true", help="drop the source from the page cache before each run")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        common.report("reshard", [measure(Path(folder), args)], args.json)


def measure(work: Path, args: argparse.Namespace) -> dict[str, object]:
    src, dst, copy = work / "src", work / "dst", work / "copy"
    zero1ckpt.write(src, common.synthetic_state(args.bytes), dp_size=8, bucket_size=40_000_000)
    payload = common.tree_bytes(src)

    def reshard() -> None:
        zero1ckpt.reshard(src, dst, to_dp=6, bucket_size=10_000_000, memory_limit=args.memory_limit)

    def cp() -> None:
        subprocess.run(["cp", "-r", "--reflink=never", src, copy], check=True)
        common.fsync_tree(copy)

    def clean() -> None:
        common.remove(dst)
        common.remove(copy)
        if args.cold:
            common.drop_caches(src)
        else:
            common.warm(src)

    times = common.alternate({"reshard": reshard, "cp": cp}, args.rounds, clean)
    median = common.medians(times)
    clean()
    before = common.io_counters()
    reshard()
    after = common.io_counters()
    written = common.tree_bytes(dst)
    clean()
    limit = ["--memory-limit", f"{args.memory_limit}B"]
    names = {"src": str(src), "dst": str(dst)}
    peak = common.peak_memory([part.format(**names) for part in [*RESHARD, *limit]])
    base = common.peak_memory([part.format(**names) for part in INSPECT])
    return {
        "case": f"reshard 8 -> 6, {'cold' if args.cold else 'warm'}",
        "payload_bytes": payload,
        "reshard_s": median["reshard"],
        "cp_s": median["cp"],
        "ratio": median["reshard"] / median["cp"],
        "read_over_payload": (after["rchar"] - before["rchar"]) / payload,
        "written_over_output": (after["wchar"] - before["wchar"]) / written,
        "peak_over_interpreter_bytes": peak - base,
        "memory_limit_bytes": args.memory_limit,
    }


if __name__ == "__main__":
    main()
