"""What the benchmarks share: synthetic state, alternated timing, cold caches, the load of the machine, results as JSON.

Absolute times on a shared machine mean nothing: every case is timed by turns with its reference in one run, and the
ratio of the medians is the figure.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def synthetic_state(payload_bytes: int, hidden: int = 1024) -> dict[str, dict[str, Any]]:
    """A transformer's fp32 main params and Adam moments of about ``payload_bytes`` bytes in all (three slots)."""
    import torch

    shapes = {"qkv": (3 * hidden, hidden), "proj": (hidden, hidden), "fc1": (4 * hidden, hidden), "ln": (hidden,)}
    generator = torch.Generator().manual_seed(0)
    state: dict[str, dict[str, Any]] = {}
    done = layer = 0
    while done < payload_bytes:
        for name, shape in shapes.items():
            slots = {slot: torch.randn(shape, generator=generator) for slot in ("fp32_param", "exp_avg")}
            slots["exp_avg_sq"] = torch.rand(shape, generator=generator)
            state[f"layers.{layer}.{name}.weight"] = slots
            done += sum(tensor.numel() * 4 for tensor in slots.values())
        layer += 1
    return state


def drop_caches(folder: Path) -> None:
    """Makes the next read of a folder's files come from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def warm(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            np.fromfile(path, np.uint8)


def fsync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def alternate(
    cases: Mapping[str, Callable[[], float | None]], rounds: int, before: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Runs all cases in turn, ``rounds`` times; seconds of each. A case may return its own time.

    Every other round goes backwards, since what one case leaves to the disk is paid for by the next.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, case in list(cases.items())[:: -1 if number % 2 else 1]:
            if before is not None:
                before()
            os.sync()
            begin = time.perf_counter()
            own = case()
            times[name].append(time.perf_counter() - begin if own is None else own)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def peak_memory(arguments: list[str]) -> int:
    """Largest resident memory of a Python process with ``arguments``, in bytes; it must succeed."""
    code = (
        "import resource, subprocess, sys; "
        "p = subprocess.run([sys.executable, *sys.argv[1:]], stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(p.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) * (1 if sys.platform == "darwin" else 1024)


def io_counters() -> dict[str, int]:
    """Bytes that this process has passed to read and write calls (Linux)."""
    rows = Path("/proc/self/io").read_text().split("\n")
    return {key: int(value) for key, value in (row.split(": ") for row in rows if row)}


def machine() -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "machine": platform.machine(),
        "page_limit": resource.getpagesize(),
    }


def report(name: str, rows: list[dict[str, Any]], out: Path | None) -> None:
    """Prints rows as a table, and writes them with the machine's load as JSON where asked."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_text(row.get(key, "")) for key in keys] for row in rows]
    widths = [max(len(key), *(len(row[i]) for row in cells)) for i, key in enumerate(keys)]
    print("  ".join(key.ljust(width) for key, width in zip(keys, widths, strict=True)))
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"load of the machine: {os.getloadavg()[0]:.2f} on {machine()['cpus']} cpus")
    if out is not None:
        out.write_text(json.dumps({"benchmark": name, "machine": machine(), "rows": rows}, indent=2) + "\n")


def _text(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
