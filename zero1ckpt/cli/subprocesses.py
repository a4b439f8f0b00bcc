"""Runs a module of this package in a process of its own, so that what it imports stays out of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .environment import child_environment
from .exit_codes import INTERRUPTED

__all__ = ["run_module"]


def run_module(module: str, args: Sequence[str], *, quiet: bool) -> int:
    """Its exit code; 128 and the number where a signal ended it. ``quiet`` drops its standard output."""
    root = str(Path(__file__).resolve().parents[2])
    environment = child_environment()
    path = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdout=subprocess.DEVNULL if quiet else None,
        env=environment | {"PYTHONPATH": path},
    )
    try:
        code = process.wait()
    except KeyboardInterrupt:
        _end(process)
        raise
    if code < 0:
        return INTERRUPTED if -code in (signal.SIGINT, signal.SIGTERM) else 128 - code
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks it to end, and makes it after a while."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
