"""``python -m zero1ckpt.demo``, which ``zero1ckpt demo`` starts.

Everything that it does is done by commands that it prints first, as a user would type them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from ..core.errors import OutputError, UsageError, VerificationError, Zero1CkptError
from .curves import Comparison, compare, show

__all__ = ["main"]

_BATCH = 16
_BUCKETS = 50_000, 120_000
"""Bucket sizes before and after, in elements."""


@dataclass
class _Shell:
    """Runs commands, each printed as it is. ``quiet``: nothing of theirs belongs on standard output."""

    console: Console
    quiet: bool
    commands: list[str] = field(default_factory=list)

    def torchrun(self, ranks: int, *options: object) -> None:
        start = ["--standalone", "--nproc-per-node", str(ranks), "-m", "zero1ckpt.demo.worker"]
        self._run("torchrun", [sys.executable, "-m", "torch.distributed.run"], [*start, *map(str, options)], ranks)

    def zero1ckpt(self, *options: object) -> None:
        self._run("zero1ckpt", [sys.executable, "-m", "zero1ckpt"], [str(option) for option in options], 1)

    def _run(self, name: str, program: list[str], arguments: list[str], processes: int) -> None:
        line = shlex.join([name, *arguments])
        self.commands.append(line)
        self.console.print(f"\n$ {line}", style="bold", soft_wrap=True)
        out = sys.stderr if self.quiet else None
        process = subprocess.Popen([*program, *arguments], env=_environment(processes), stdout=out)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            _end(process)
            raise
        if code:
            raise _CommandError(code, line)


class _CommandError(Zero1CkptError):
    """A command has failed, and has said why."""

    def __init__(self, code: int, line: str) -> None:
        super().__init__(f"the command ended with exit code {code}: {line}")
        self.exit_code = code if code > 0 else 128 - code


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks it to end, so that torchrun ends its ranks; makes it after a while."""
    process.terminate()
    try:
        process.wait(timeout=8)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where the resumed run does not go on like the uninterrupted one."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(stderr=options.json, highlight=False, markup=False)
    try:
        with _folder(options.out) as folder:
            _demo(options, folder, _Shell(console, options.json))
        if options.out is None:
            console.print("The checkpoints were in a temporary folder and are gone; --out DIR keeps them.")
    except Zero1CkptError as error:
        Console(stderr=True, highlight=False, markup=False).print(f"zero1ckpt: {error}", soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zero1ckpt demo", description="Trains, saves, reshards and resumes a model.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the checkpoints here (default: a temporary one)")
    parser.add_argument("--ranks", type=_positive, default=4, metavar="N", help="ranks that train first (4)")
    parser.add_argument("--to-ranks", type=_positive, default=2, metavar="N", help="ranks that go on (2)")
    parser.add_argument("--steps", type=_positive, default=40, metavar="N", help="steps before and after (40)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("expected a number from 1 on")
    return number


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """``out``, made if it is not there and refused unless it is empty; or a folder that is removed afterwards."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="zero1ckpt-demo-", ignore_cleanup_errors=True) as made:
            yield Path(made)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        full = any(out.iterdir())
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", file=out, hint="choose another place") from error
    if full:
        raise OutputError("exists and is not empty", file=out, hint="choose another place")
    yield out


def _demo(options: Any, folder: Path, shell: _Shell) -> None:
    ranks, to_ranks, steps = options.ranks, options.to_ranks, options.steps
    each = math.lcm(ranks, to_ranks)
    if each > 256:
        raise UsageError("no batch divides by both", found=f"{ranks} and {to_ranks} ranks", expected="smaller numbers")
    batch = -(-_BATCH // each) * each
    saved, moved = folder / f"step-{steps}-dp{ranks}", folder / f"step-{steps}-dp{to_ranks}-resharded"
    curves = folder / "uninterrupted.json", folder / "resumed.json"
    common = ["--steps", 2 * steps, "--batch", batch]

    shell.torchrun(
        ranks, *common, "--bucket-size", _BUCKETS[0], "--save-at", steps, "--save", saved, "--losses", curves[0]
    )
    shell.zero1ckpt("inspect", saved)
    shell.zero1ckpt("reshard", saved, moved, "--from-dp", ranks, "--to-dp", to_ranks, "--bucket-size", _BUCKETS[1])
    shell.zero1ckpt("verify", moved, "--deep", "--against", saved)
    shell.torchrun(to_ranks, *common, "--bucket-size", _BUCKETS[1], "--load", moved, "--losses", curves[1])

    whole, resumed = (json.loads(path.read_text()) for path in curves)
    found = compare(whole["losses"], resumed["losses"], resumed["first"])
    shell.console.print()
    show(shell.console, found, whole["losses"][: found.first], ranks, to_ranks)
    if options.json:
        sys.stdout.write(json.dumps(_document(options, found, whole["losses"], shell, saved, moved)) + "\n")
    if not found.holds:
        raise VerificationError("the resumed run does not go on like the uninterrupted one")


def _document(
    options: Any, found: Comparison, losses: list[float], shell: _Shell, saved: Path, moved: Path
) -> dict[str, Any]:
    return {
        "schema": "zero1ckpt.demo/1",
        "ok": found.holds,
        "ranks": options.ranks,
        "to_ranks": options.to_ranks,
        "first_resumed_step": found.first,
        "losses": losses,
        "resumed_losses": list(found.resumed),
        "max_difference": max(found.differences),
        "bounds": found.bounds,
        "checkpoints": None if options.out is None else [str(saved), str(moved)],
        "commands": shell.commands,
    }


def _environment(processes: int) -> dict[str, str]:
    """Finds this very package whatever the current folder is, and does not start more threads than there are cores."""
    package = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package, known] if known else [package]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes))),
    }


if __name__ == "__main__":
    sys.exit(main())
