"""What the process exits with, and the one line that says why.

0 done; 1 the answer is no; 2 usage; 3 missing; 4 corrupt; 5 unsupported; 6 output; 130 interrupted: as each error of
``core.errors`` states. A mistake of our own is none of these, so it exits with 70, as sysexits.h names it.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ..core.errors import InterruptedRunError, Zero1CkptError
from .text import one_line

__all__ = ["DONE", "INTERNAL", "INTERRUPTED", "NO", "Interrupted", "explain", "resumable", "signals_interrupt"]

DONE = 0
NO = 1
USAGE = 2
OUTPUT = 6
INTERNAL = 70
INTERRUPTED = 130


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP, handled as Ctrl-C is."""


def explain(error: BaseException) -> tuple[int, str]:
    """Exit code and line of anything that ended a run. Pure."""
    if isinstance(error, Zero1CkptError):
        return error.exit_code, _as_options(one_line(str(error)))
    if isinstance(error, click.ClickException):
        return USAGE, _usage_line(error)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED, "interrupted; nothing was changed"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return OUTPUT, one_line(f"{error.filename or 'output'}: cannot be written: {error.strerror}; free some space")
    if isinstance(error, MemoryError):
        return INTERNAL, "out of memory; lower --memory-limit or --workers"
    what = one_line(f"{type(error).__name__}: {error}")
    return INTERNAL, f"internal error: {what}; please report it with the output of ZERO1CKPT_DEBUG=1"


_FORMAT_OPTIONS = {"shard_bytes": "--shard-size", "chunk_bytes": "--chunk-size", "compression": "--compression"}


def _as_options(line: str) -> str:
    """What the library calls a keyword, the command line calls an option."""
    for keyword, option in _FORMAT_OPTIONS.items():
        if line.startswith(f"{keyword} does not apply"):
            return option + line.removeprefix(keyword)
    return f"{line.removesuffix('overwrite')}--overwrite" if line.endswith(" pass overwrite") else line


def _usage_line(error: click.ClickException) -> str:
    line = one_line(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{line}; see `{context.command_path} --help`" if context is not None else line


@contextmanager
def resumable(dst: object) -> Iterator[None]:
    """An interrupt says what was left of ``dst`` and how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise InterruptedRunError(
            "interrupted, and nothing was published",
            file=dst,
            hint=f"go on with the same command and --resume, or remove what was made with `zero1ckpt clean {dst}`",
        ) from error


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does; a second signal ends it at once, which no state minds."""

    def interrupt(number: int, frame: object) -> None:
        for each in kept:
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(signal.Signals(number).name)

    kept = {}
    try:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) is not signal.SIG_IGN:  # nohup
                kept[each] = signal.signal(each, interrupt)
    except ValueError:  # not in the main thread: signals are its owner's business
        pass
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
