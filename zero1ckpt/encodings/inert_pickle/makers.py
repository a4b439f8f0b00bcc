"""The allow-list: what a call of a known class or function stands for, made here from checked plain arguments.

Each maker takes (budget, ref, args) of a ``REDUCE`` or ``NEWOBJ`` and returns a value, or None where the arguments are
not those that the writing library gives (the caller then refuses). Makers that copy charge the budget: a sound stream
copies each of its bytes at most once, so 4 bytes cannot ask for another megabyte.
"""

from __future__ import annotations

import datetime
import pathlib
from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np

from ...core.errors import CorruptError, UnsupportedError
from .records import Dtype, EnumValue, GlobalRef, NumpyArray, NumpyDtype, Opaque, Record, StorageRef, TensorRef, Value

__all__ = ["DTYPES", "MAKERS", "RECORD_TYPES", "STORAGE_DTYPES", "Budget", "Maker", "storage_of"]


class Budget:
    """Counts what makers copy, against the length of the stream; and tuples used as keys, see ``check_key``."""

    __slots__ = ("copied", "limit", "tuple_keys")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.copied = 0
        self.tuple_keys = 0

    def charge(self, amount: int) -> None:
        self.copied += amount
        if self.copied > self.limit:
            raise CorruptError("the pickle copies its content again and again (a memory bomb)", expected=self.limit)


Args = tuple[Value, ...]
Maker = Callable[[Budget, GlobalRef, Args], Value]

_MAX_TUPLE_KEYS = 10_000
_MAX_KEY_PARTS = 64
_MAX_KEY_INT = 2**61 - 1
_KEY_TYPES = (str, bytes, bool, type(None), float, Dtype, GlobalRef, EnumValue, Record, frozenset)


def check_key(budget: Budget, key: Value) -> None:
    """Refuses what is not a sound dict key or set member.

    Hashes of ints and of tuples can be made to collide and cost quadratic time, and a tuple's hash walks all that it
    holds (exponential for one that holds itself twice, and again); so their number and size are bounded.
    """
    parts = 0
    pending = [key]
    while pending:
        part = pending.pop()
        parts += 1
        if type(part) is tuple:
            budget.tuple_keys += 1
            pending += part[: _MAX_KEY_PARTS + 1]
        elif type(part) is int:
            if not -_MAX_KEY_INT < part < _MAX_KEY_INT:
                raise CorruptError("the pickle has a key that is too large a number")
        elif not isinstance(part, _KEY_TYPES) and not isinstance(part, (np.generic, pathlib.PurePath)):
            raise CorruptError("the pickle has a key that cannot be one", found=type(part).__name__)
        if parts > _MAX_KEY_PARTS or budget.tuple_keys > _MAX_TUPLE_KEYS:
            raise CorruptError("the pickle has too many tuples as keys, or too large ones", expected=_MAX_TUPLE_KEYS)


# ------------------------------------------------------------------------------------------------ torch's names, known

DTYPES = frozenset((
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    "bool", "complex32", "complex64", "complex128", "qint8", "quint8", "qint32", "quint4x2",
    "double", "float", "half", "long", "int", "short",
))  # fmt: skip
_ALIASES = {"double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32"}
_ALIASES["short"] = "int16"

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""Storage classes of ``torch`` and the dtype of their elements."""

_DCP = "torch.distributed.checkpoint."
_ENUMS = frozenset(
    {
        GlobalRef(_DCP + "metadata", "_MEM_FORMAT_ENCODING"),
        GlobalRef(_DCP + "planner", "WriteItemType"),
        GlobalRef(_DCP + "planner", "LoadItemType"),
        GlobalRef("signal", "Signals"),
        GlobalRef("signal", "Handlers"),
    }
)
_RECORD_NAMES = {
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    _DCP + "metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata",
    ),
    _DCP + "planner": ("BytesIOWriteData", "LoadPlan", "ReadItem", "SavePlan", "TensorWriteData", "WriteItem"),
    _DCP + "filesystem": ("_StorageInfo", "_StoragePrefix"),
}  # fmt: skip
RECORD_TYPES = frozenset(GlobalRef(module, name) for module, names in _RECORD_NAMES.items() for name in names)
"""Classes whose objects become a ``Record``; objects of any other become an ``Opaque``."""


def dtype_of(ref: GlobalRef) -> Dtype | None:
    """The dtype that a global of torch is, or None."""
    if ref.module != "torch" or ref.name not in DTYPES:
        return None
    return Dtype(_ALIASES.get(ref.name, ref.name))


def storage_of(pid: Value) -> StorageRef:
    """The storage that torch's persistent id ``('storage', class, key, location, numel)`` names."""
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        raise CorruptError("the pickle has a persistent id that is not one of a torch storage")
    _, kind, key, location, numel = pid[:5]
    if len(pid) == 6 and pid[5] is not None:
        raise CorruptError("the pickle has a view of a storage, as torch before 0.4 wrote", found=repr(key)[:40])
    if not (type(kind) is GlobalRef and type(key) is str and type(location) is str and _is_size(numel)):
        raise CorruptError("the pickle has a malformed reference to a torch storage")
    if kind in (GlobalRef("torch.storage", "UntypedStorage"), GlobalRef("torch", "UntypedStorage")):
        return StorageRef(key, None, numel, location)
    dtype = STORAGE_DTYPES.get(kind.name) if kind.module in ("torch", "torch.cuda") else None
    if dtype is None:
        raise CorruptError("the pickle has a storage of an unknown class", found=str(kind))
    return StorageRef(key, dtype, numel, location)


def _is_size(value: Value) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _sizes(value: Value) -> bool:
    return type(value) is tuple and len(value) <= 64 and all(map(_is_size, value))


def _tensor(storage: Value, dtype: str | None, args: Args) -> TensorRef | None:
    offset, shape, stride, requires_grad = args
    if type(storage) is not StorageRef or dtype is None or not (_is_size(offset) and _sizes(shape) and _sizes(stride)):
        return None
    if len(shape) != len(stride) or type(requires_grad) is not bool:
        return None
    return TensorRef(storage, dtype, offset, shape, stride, requires_grad)


def _rebuild_tensor_v2(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    if not 6 <= len(args) <= 7 or type(args[0]) is not StorageRef:
        return None
    return _tensor(args[0], args[0].dtype or "uint8", args[1:5])


def _rebuild_tensor_v3(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    if not 7 <= len(args) <= 8 or type(args[6]) is not Dtype:
        return None
    return _tensor(args[0], args[6].name, args[1:5])


def _rebuild_parameter(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    if len(args) < 3 or type(args[0]) is not TensorRef or type(args[1]) is not bool:
        return None
    t = args[0]
    return TensorRef(t.storage, t.dtype, t.offset, t.shape, t.stride, args[1], parameter=True)


def _torch_size(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    if not args:
        return ()
    if len(args) != 1 or type(args[0]) is not tuple:
        return None
    for size in args[0]:  # not all(map(...)): three of these a chunk
        if type(size) is not int or not 0 <= size < 2**63:
            return None
    return args[0]


def _get_layout(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    """Layouts are pickled by their name, ``'torch.strided'``."""
    if len(args) != 1 or type(args[0]) is not str or not args[0].startswith("torch."):
        return None
    name = args[0].removeprefix("torch.")
    return GlobalRef("torch", name) if name.isidentifier() else None


# ----------------------------------------------------------------------------------------------------- Python's classes


def _ordered_dict(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    made: OrderedDict[Value, Value] = OrderedDict()
    if not args:
        return made
    if len(args) != 1 or type(args[0]) not in (list, tuple):
        return None
    budget.charge(len(args[0]))
    for pair in args[0]:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            return None
        check_key(budget, pair[0])
        made[pair[0]] = pair[1]
    return made


def _set(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    if len(args) > 1 or (args and type(args[0]) not in (list, tuple)):
        return None
    members = args[0] if args else ()
    budget.charge(len(members))
    for member in members:
        check_key(budget, member)
    return frozenset(members) if ref.name == "frozenset" else set(members)


def _list(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    if len(args) > 1 or (args and type(args[0]) not in (list, tuple)):
        return None
    members = args[0] if args else ()
    budget.charge(len(members))
    return tuple(members) if ref.name == "tuple" else list(members)


def _dict(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    return None if args else {}


def _counter(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    """``Counter({...})``, as learning-rate schedulers keep their milestones in."""
    if len(args) != 1 or type(args[0]) is not dict or not all(type(count) is int for count in args[0].values()):
        return None
    budget.charge(len(args[0]))
    return Counter(args[0])


def _encode(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    """Protocols 0 to 2 have no bytes: they are latin-1 text and this call."""
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        return None
    budget.charge(len(args[0]))
    return args[0].encode("latin-1")


def _bytes(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    """Never ``bytes(n)``, which is n zeros."""
    kind: type[bytes] | type[bytearray] = bytes if ref.name == "bytes" else bytearray
    if not args:
        return kind()
    if type(args[0]) is str and len(args) == 2:
        made = _encode(budget, ref, args)
        return None if made is None else kind(made)
    if type(args[0]) is not bytes or len(args) != 1:
        return None
    budget.charge(len(args[0]))
    return kind(args[0])


def _complex(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    return complex(*args) if len(args) == 2 and all(type(part) is float for part in args) else None


def _small_numbers(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    """``range`` and ``slice`` stay what they are: nothing is expanded."""
    ok = all(part is None or type(part) is int for part in args) and 1 <= len(args) <= 3
    if not ok or (ref.name == "range" and None in args):
        return None
    return range(*args) if ref.name == "range" else slice(*args)


def _datetime(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    """The packed bytes of date, time and datetime objects (``datetime.__reduce_ex__``); opaque with a zone."""
    if len(args) == 2:
        return Opaque(ref, args, "call")
    if len(args) != 1 or type(args[0]) is not bytes:
        return None
    b = args[0]
    if ref.name == "date" and len(b) == 4:
        return datetime.date(b[0] << 8 | b[1], b[2], b[3])
    if ref.name == "time" and len(b) == 6:
        return datetime.time(b[0] & 127, b[1], b[2], b[3] << 16 | b[4] << 8 | b[5], fold=b[0] >> 7)
    if ref.name != "datetime" or len(b) != 10:
        return None
    micro = b[7] << 16 | b[8] << 8 | b[9]
    return datetime.datetime(b[0] << 8 | b[1], b[2] & 127, b[3], b[4], b[5], b[6], micro, fold=b[2] >> 7)


def _timedelta(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    return datetime.timedelta(*args) if len(args) == 3 and all(type(part) is int for part in args) else None


def _path(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    """A path as text: a pure path touches no file system."""
    if not all(type(part) is str for part in args):
        return None
    kind = pathlib.PureWindowsPath if "Windows" in ref.name else pathlib.PurePosixPath
    return kind(*args)


def _enum(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    return EnumValue(ref, args[0]) if len(args) == 1 and type(args[0]) in (int, str) else None


# -------------------------------------------------------------------------------------------------------------- numpy


def _array(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    """``_reconstruct(ndarray, (0,), b'b')``: an empty array, which ``BUILD`` gives its state."""
    return NumpyArray(ref) if len(args) == 3 else None


def _from_buffer(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    """``_frombuffer(buffer, dtype, shape, order)`` of protocol 5, with the buffer in the stream."""
    if len(args) != 4 or type(args[0]) not in (bytes, bytearray) or type(args[1]) is not NumpyDtype:
        return None
    made = NumpyArray(ref)
    fill_array(made, (1, args[2], args[1], args[3] == "F", args[0]))
    return made


def _numpy_dtype(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    return NumpyDtype(args) if args and type(args[0]) in (str, GlobalRef) else None


def _numpy_scalar(budget: Budget, ref: GlobalRef, args: Args) -> Value:
    if len(args) != 2 or type(args[0]) is not NumpyDtype or type(args[1]) is not bytes:
        return None
    try:
        dtype = args[0].numpy()
    except UnsupportedError:
        return Opaque(ref, args, "call")
    if dtype.itemsize != len(args[1]) or not dtype.itemsize:
        return None
    budget.charge(len(args[1]))
    scalar: np.generic = np.frombuffer(args[1], dtype)[0]
    return scalar


def fill_array(array: NumpyArray, state: Value) -> None:
    """Gives an array its state (version, shape, dtype, Fortran order, data), once."""
    if type(state) is not tuple or len(state) != 5 or array._dtype is not None:
        raise CorruptError("the pickle has a malformed numpy array")
    _, shape, dtype, fortran, data = state
    if type(dtype) is not NumpyDtype or not _sizes(shape) or type(data) not in (bytes, bytearray, list):
        raise CorruptError("the pickle has a malformed numpy array")
    array._shape, array._dtype, array._fortran, array._data = shape, dtype, bool(fortran), data


def _table() -> dict[GlobalRef, Maker]:
    rows: list[tuple[str, str, Maker]] = [
        ("collections", "OrderedDict", _ordered_dict),
        ("collections", "Counter", _counter),
        ("builtins", "set frozenset", _set),
        ("builtins", "list tuple", _list),
        ("builtins", "dict", _dict),
        ("builtins", "bytes bytearray", _bytes),
        ("builtins", "complex", _complex),
        ("builtins", "range slice", _small_numbers),
        ("_codecs", "encode", _encode),
        ("datetime", "date time datetime", _datetime),
        ("datetime", "timedelta", _timedelta),
        ("torch", "Size", _torch_size),
        ("torch.serialization", "_get_layout", _get_layout),
        ("torch._utils", "_rebuild_tensor_v2", _rebuild_tensor_v2),
        ("torch._utils", "_rebuild_tensor_v3", _rebuild_tensor_v3),
        ("torch._utils", "_rebuild_parameter", _rebuild_parameter),
        ("numpy", "dtype", _numpy_dtype),
    ]
    for module in ("pathlib", "pathlib._local"):
        rows.append((module, "PosixPath PurePosixPath WindowsPath PureWindowsPath", _path))
    for module in ("numpy.core", "numpy._core"):
        rows.append((f"{module}.multiarray", "_reconstruct", _array))
        rows.append((f"{module}.multiarray", "scalar", _numpy_scalar))
        rows.append((f"{module}.numeric", "_frombuffer", _from_buffer))
    table = {GlobalRef(module, name): maker for module, names, maker in rows for name in names.split()}
    return table | dict.fromkeys(_ENUMS, _enum)


MAKERS: dict[GlobalRef, Maker] = _table()
