"""Foreign pickle streams as plain values: no code of a file runs, and nothing is imported by a name in it.

The opcodes of protocols 0 to 5 are interpreted here (``machine``, ``opcodes``) over an allow-list of constructors
(``makers``); what is not on it becomes an ``Opaque`` value that shows its name, and a hostile global is refused
(``policy``). What comes out is bounded in size and depth (``tree``). ``writer`` makes streams from the same values.
One exception leaves ``load``: ``CorruptError``, for a stream that is damaged, hostile or over a limit.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import CorruptError
from .machine import Machine
from .opcodes import OPCODES
from .records import (
    Dtype,
    EnumValue,
    GlobalRef,
    NumpyArray,
    NumpyDtype,
    Opaque,
    Record,
    StorageRef,
    TensorRef,
    Value,
)
from .tree import check_tree

__all__ = [
    "Dtype",
    "EnumValue",
    "GlobalRef",
    "NumpyArray",
    "NumpyDtype",
    "Opaque",
    "Record",
    "StorageRef",
    "TensorRef",
    "Value",
    "load",
    "load_first",
    "no_collector",
]

_DAMAGE = (
    IndexError,  # the stack, the memo or the stream ends
    KeyError,  # the memo has no such entry
    TypeError,
    ValueError,  # text that is not UTF-8, malformed numbers and dates
    OverflowError,
    struct.error,
)
"""What the interpreter raises on a stream that is no pickle."""


def load(
    data: bytes | bytearray | memoryview,
    *,
    file: object = None,
    max_bytes: int = 1 << 29,
    max_opcodes: int = 1 << 26,
    max_depth: int = 200,
    max_nodes: int | None = 1 << 26,
) -> Value:
    """The value of a whole stream. ``file`` is what errors call it.

    ``max_nodes`` bounds what a walk of the value meets, shared parts counted as often as they are met. With None the
    value is not walked: for a caller that takes a large one apart by itself, and bounds what it meets.
    Raises ``CorruptError``.
    """
    value, end = load_first(
        data, file=file, max_bytes=max_bytes, max_opcodes=max_opcodes, max_depth=max_depth, max_nodes=max_nodes
    )
    if end != memoryview(data).nbytes:
        raise CorruptError("bytes follow the end of the pickle", file=file, found=memoryview(data).nbytes - end)
    return value


def load_first(
    data: bytes | bytearray | memoryview,
    *,
    file: object = None,
    max_bytes: int = 1 << 29,
    max_opcodes: int = 1 << 26,
    max_depth: int = 200,
    max_nodes: int | None = 1 << 26,
) -> tuple[Value, int]:
    """The value of the stream that ``data`` begins with, and the bytes that it takes. Raises as ``load``."""
    nbytes = memoryview(data).nbytes
    if nbytes > max_bytes:
        raise CorruptError("the pickle is larger than the limit", file=file, found=nbytes, expected=max_bytes)
    try:
        with no_collector():
            value, end = Machine(bytes(data)).run(OPCODES, max_opcodes=max_opcodes)
            if max_nodes is not None:
                check_tree(value, max_depth=max_depth, max_nodes=max_nodes)
    except CorruptError as error:
        raise (error if file is None else error.at(file)) from error.__cause__
    except _DAMAGE as error:
        raise CorruptError(f"the pickle is damaged: {_reason(error)}", file=file) from error
    return value, end


@contextmanager
def no_collector() -> Iterator[None]:
    """Pauses Python's search for cyclic garbage: none is made here, and it is half of the time of a large stream."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no entry {error} in its memo"
    return str(error)[:200] or type(error).__name__
