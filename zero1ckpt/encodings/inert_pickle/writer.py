"""Pickle streams (protocol 2, which torch writes) of plain values and records, the same bytes for the same value.

Text and globals are memoised by what they are and containers never, so that a stream does not depend on which objects
happened to be one and the same, as that of ``pickle.dumps`` does. Sets are written in an order of their own.
"""

from __future__ import annotations

import datetime
import pathlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ...core.errors import UsageError
from .makers import STORAGE_DTYPES
from .records import Dtype, EnumValue, GlobalRef, NumpyArray, NumpyDtype, Opaque, Record, StorageRef, TensorRef, Value

__all__ = ["dump"]

_MAX_DEPTH = 200
_STORAGE_CLASSES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
_PYTHON_2 = {"builtins": "__builtin__", "copyreg": "copy_reg"}
"""Protocol 2 names these modules as Python 2 did; every reader maps them back (``fix_imports``)."""
_LAYOUTS = frozenset({"strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"})

_MARK, _STOP, _TUPLE, _REDUCE, _NEWOBJ, _BUILD = b"(", b".", b"t", b"R", b"\x81", b"b"
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")


def dump(value: Value) -> bytes:
    """The stream of a value. Pure. Raises ``UsageError`` for a type that is none of ``records.Value``."""
    writer = _Writer()
    writer.write(value)
    return b"\x80\x02" + bytes(writer.out) + _STOP


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray()
        self.memo: dict[str | GlobalRef, bytes] = {}
        self.depth = 0

    def write(self, value: Value) -> None:
        emit = _EMITTERS.get(type(value)) or _emitter_of(value)
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise UsageError("a value is nested too deeply to be pickled", expected=f"at most {_MAX_DEPTH} levels")
        emit(self, value)
        self.depth -= 1

    def put(self, key: str | GlobalRef) -> None:
        index = len(self.memo)
        small = index < 256
        self.memo[key] = b"h" + bytes([index]) if small else b"j" + struct.pack("<I", index)
        self.out += b"q" + bytes([index]) if small else b"r" + struct.pack("<I", index)

    def reference(self, module: str, name: str) -> None:
        key = GlobalRef(_PYTHON_2.get(module, module), name)
        got = self.memo.get(key)
        if got is not None:
            self.out += got
            return
        self.out += b"c" + key.module.encode() + b"\n" + name.encode() + b"\n"
        self.put(key)

    def call(self, module: str, name: str, *args: Value) -> None:
        self.reference(module, name)
        self.write(args)
        self.out += _REDUCE

    def items(self, pairs: Iterable[tuple[Value, Value]]) -> None:
        """``SETITEMS`` of what lies on the stack."""
        start = len(self.out)
        self.out += _MARK
        for key, value in pairs:
            self.write(key)
            self.write(value)
        if len(self.out) == start + 1:
            del self.out[start:]
        else:
            self.out += b"u"

    def entries(self, values: Iterable[Value]) -> None:
        """``APPENDS`` to what lies on the stack."""
        start = len(self.out)
        self.out += _MARK
        for value in values:
            self.write(value)
        if len(self.out) == start + 1:
            del self.out[start:]
        else:
            self.out += b"e"


def _none(w: _Writer, value: None) -> None:
    w.out += b"N"


def _bool(w: _Writer, value: bool) -> None:
    w.out += b"\x88" if value else b"\x89"


def _int(w: _Writer, value: int) -> None:
    if 0 <= value < 1 << 8:
        w.out += b"K" + bytes([value])
    elif 0 <= value < 1 << 16:
        w.out += b"M" + struct.pack("<H", value)
    elif -(1 << 31) <= value < 1 << 31:
        w.out += b"J" + struct.pack("<i", value)
    else:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        w.out += b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw))
        w.out += raw


def _float(w: _Writer, value: float) -> None:
    w.out += b"G" + struct.pack(">d", value)


def _str(w: _Writer, value: str) -> None:
    got = w.memo.get(value)
    if got is not None:
        w.out += got
        return
    try:
        raw = value.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError("text with a lone surrogate cannot be pickled", found=ascii(value)[:80]) from None
    w.out += b"X" + struct.pack("<I", len(raw)) + raw
    w.put(value)


def _bytes(w: _Writer, value: bytes) -> None:
    w.call("_codecs", "encode", value.decode("latin-1"), "latin1")


def _tuple(w: _Writer, value: tuple[Value, ...]) -> None:
    if len(value) > 3:
        w.out += _MARK
    for item in value:
        w.write(item)
    w.out += _TUPLES[len(value)] if len(value) <= 3 else _TUPLE


def _list(w: _Writer, value: list[Value]) -> None:
    w.out += b"]"
    w.entries(value)


def _dict(w: _Writer, value: Mapping[Value, Value]) -> None:
    w.out += b"}"
    w.items(value.items())


def _ordered_dict(w: _Writer, value: OrderedDict[Value, Value]) -> None:
    w.call("collections", "OrderedDict")
    w.items(value.items())
    if value.__dict__:
        w.write(value.__dict__)
        w.out += _BUILD


def _set(w: _Writer, value: set[Value] | frozenset[Value]) -> None:
    members = sorted(value, key=lambda member: (type(member).__name__, repr(member)))
    w.call("builtins", type(value).__name__, members)


def _datetime(w: _Writer, value: datetime.datetime | datetime.date | datetime.time) -> None:
    """The bytes that Python's own classes pickle themselves as, without a zone."""
    packed = value.__reduce__()[1]
    if not isinstance(packed, tuple) or len(packed) != 1:
        raise UsageError("a date with a time zone cannot be pickled", found=value)
    w.call("datetime", type(value).__name__, packed[0])


def _timedelta(w: _Writer, value: datetime.timedelta) -> None:
    w.call("datetime", "timedelta", value.days, value.seconds, value.microseconds)


def _path(w: _Writer, value: pathlib.PurePath) -> None:
    w.call("pathlib", type(value).__name__.removeprefix("Pure"), *value.parts)


def _scalar(w: _Writer, value: np.generic) -> None:
    w.call("numpy.core.multiarray", "scalar", _plain_dtype(value.dtype), value.tobytes())


def _plain_dtype(dtype: np.dtype[Any]) -> NumpyDtype:
    made = NumpyDtype((dtype.str[1:], False, True))
    made._state = (3, dtype.str[0], None, None, None, -1, -1, 0)
    return made


def _numpy_dtype(w: _Writer, value: NumpyDtype) -> None:
    w.call("numpy", "dtype", *value.args)
    if value.state is not None:
        w.write(value.state)
        w.out += _BUILD


def _numpy_array(w: _Writer, value: NumpyArray) -> None:
    if value.dtype is None:
        raise UsageError("a numpy array without content cannot be pickled")
    module = value.maker.module.rpartition(".")[0]
    w.call(f"{module}.multiarray", "_reconstruct", GlobalRef("numpy", "ndarray"), (0,), b"b")
    w.write((1, value.shape, value.dtype, value.fortran, value.data))
    w.out += _BUILD


def _global(w: _Writer, value: GlobalRef) -> None:
    if value.module == "torch" and value.name in _LAYOUTS:
        w.call("torch.serialization", "_get_layout", f"torch.{value.name}")
    else:
        w.reference(value.module, value.name)


def _storage(w: _Writer, value: StorageRef) -> None:
    name = "UntypedStorage" if value.dtype is None else _STORAGE_CLASSES[value.dtype]
    kind = GlobalRef("torch.storage" if value.dtype is None else "torch", name)
    w.write(("storage", kind, value.key, value.location, value.numel))
    w.out += b"Q"


def _tensor(w: _Writer, value: TensorRef) -> None:
    common = (value.storage, value.offset, value.shape, value.stride)
    hooks: OrderedDict[str, Value] = OrderedDict()
    if value.parameter:
        plain = TensorRef(value.storage, value.dtype, value.offset, value.shape, value.stride)
        w.call("torch._utils", "_rebuild_parameter", plain, value.requires_grad, hooks)
    elif value.storage.dtype is None:
        w.call("torch._utils", "_rebuild_tensor_v3", *common, value.requires_grad, hooks, Dtype(value.dtype))
    else:
        w.call("torch._utils", "_rebuild_tensor_v2", *common, value.requires_grad, hooks)


def _record(w: _Writer, value: Record) -> None:
    kind = value.type
    if value.kwargs:
        w.call("copyreg", "__newobj_ex__", kind, value.args, value.kwargs)
    elif value.how == "reconstruct":
        w.call("copyreg", "_reconstructor", kind, *value.args)
    else:
        w.reference(kind.module, kind.name)
        w.write(value.args)
        w.out += _NEWOBJ if value.how == "new" else _REDUCE
    w.entries(value.entries)
    w.items(value.pairs)
    if value.state is not None:
        w.write(value.state)
        w.out += _BUILD


Emitter = Callable[[_Writer, Any], None]

_EMITTERS: dict[type, Emitter] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: lambda w, value: w.call("builtins", "complex", value.real, value.imag),
    str: _str,
    bytes: _bytes,
    bytearray: lambda w, value: w.call("builtins", "bytearray", bytes(value)),
    tuple: _tuple,
    list: _list,
    dict: _dict,
    OrderedDict: _ordered_dict,
    Counter: lambda w, value: w.call("collections", "Counter", dict(value)),
    set: _set,
    frozenset: _set,
    range: lambda w, value: w.call("builtins", "xrange", value.start, value.stop, value.step),
    slice: lambda w, value: w.call("builtins", "slice", value.start, value.stop, value.step),
    datetime.datetime: _datetime,
    datetime.date: _datetime,
    datetime.time: _datetime,
    datetime.timedelta: _timedelta,
    GlobalRef: _global,
    Dtype: lambda w, value: w.reference("torch", value.name),
    EnumValue: lambda w, value: w.call(value.type.module, value.type.name, value.value),
    StorageRef: _storage,
    TensorRef: _tensor,
    NumpyDtype: _numpy_dtype,
    NumpyArray: _numpy_array,
    Record: _record,
    Opaque: _record,
}


def _emitter_of(value: Value) -> Emitter:
    """For values whose exact class is not in the table."""
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSU":
        return _scalar
    if isinstance(value, pathlib.PurePath):
        return _path
    raise UsageError("a value of this type cannot be pickled", found=type(value).__name__)
