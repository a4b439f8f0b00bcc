"""Converts every format and container into every other, by turns with ``cp`` of the source's bytes, both with fsync."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import common

import zero1ckpt
from zero1ckpt.registry import FORMATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=400_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--to", default="", help="only targets whose format/container has this in its name")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        common.report("pairs", measure(Path(folder), args), args.json)


def measure(work: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    state = common.synthetic_state(args.bytes)
    sources = {}
    for name, container in FORMATS:
        path = work / f"{name}-{container}"
        zero1ckpt.write(path, state, dp_size=8, bucket_size=10_000_000, format=name, container=container)
        sources[name, container] = path
    targets = [pair for pair in FORMATS if args.to in "/".join(pair)]
    return [one_pair(work, sources[src], src, dst, args.rounds) for src in FORMATS for dst in targets]


def one_pair(work: Path, path: Path, src: tuple[str, str], dst: tuple[str, str], rounds: int) -> dict[str, Any]:
    out, copy = work / "out", work / "copy"

    def convert() -> None:
        zero1ckpt.reshard(path, out, to_dp=6, bucket_size=20_000_000, format=dst[0], container=dst[1])

    def cp() -> None:
        subprocess.run(["cp", "-r", "--reflink=never", path, copy], check=True)
        common.fsync_tree(copy)

    def clean() -> None:
        common.remove(out)
        common.remove(copy)
        common.warm(path)

    median = common.medians(common.alternate({"convert": convert, "cp": cp}, rounds, clean))
    clean()
    return {"from": "/".join(src), "to": "/".join(dst), "ratio": median["convert"] / median["cp"]}


if __name__ == "__main__":
    main()
