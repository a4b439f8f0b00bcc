"""What a pickle stream turns into: Python's plain values, and these records for everything that would need code.

Nothing here can be called, imported or given an attribute by a stream. Values compare by content; what a stream makes
as an *object* (``Record``, ``Opaque``, ``NumpyArray``) compares by identity, as two unpickled objects without
``__eq__`` would, so that hashing one costs nothing whatever it holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import CorruptError, UnsupportedError

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
]

Value = Any
"""None, bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, OrderedDict, Counter, set, frozenset,
range, slice, a date or time, a pure path, a numpy scalar, or a type of this module."""


class GlobalRef(NamedTuple):
    """A class or function that a stream names. A name only: it is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype; ``name`` as in ``core.dtypes``."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class EnumValue:
    """A member of an enum that is known to be one, by its value. Members of unknown enums are ``Opaque``."""

    type: GlobalRef
    value: int | str


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A torch storage by the key that a persistent id gives it. ``dtype`` is None for an untyped one (of bytes)."""

    key: str
    dtype: str | None
    numel: int
    location: str = "cpu"

    @property
    def class_name(self) -> str:
        return "UntypedStorage" if self.dtype is None else self.dtype


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a view of a storage. ``offset`` and ``stride`` are in elements."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def contiguous(self) -> bool:
        """Row-major without gaps, as ``torch.Tensor.is_contiguous``."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


class Record:
    """An object of a known class: how it was made, and the state it was given. Read-only.

    ``how`` is ``"new"`` (``cls.__new__(cls, *args, **kwargs)``), ``"call"`` (``cls(*args)``) or ``"reconstruct"``
    (``copyreg._reconstructor(cls, *args)``). ``pairs`` and ``entries`` are what a stream set or appended to it as to a
    dict or a list.
    """

    __slots__ = ("_args", "_entries", "_how", "_kwargs", "_pairs", "_state", "_type")

    def __init__(self, type_: GlobalRef, args: tuple[Value, ...], how: str) -> None:
        self._type = type_
        self._args = args
        self._how = how
        self._kwargs: dict[str, Value] | None = None
        self._state: Value = None
        self._pairs: list[tuple[Value, Value]] | None = None
        self._entries: list[Value] | None = None

    @property
    def type(self) -> GlobalRef:
        return self._type

    @property
    def args(self) -> tuple[Value, ...]:
        return self._args

    @property
    def how(self) -> str:
        return self._how

    @property
    def kwargs(self) -> dict[str, Value]:
        return self._kwargs or {}

    @property
    def state(self) -> Value:
        return self._state

    @property
    def pairs(self) -> tuple[tuple[Value, Value], ...]:
        return tuple(self._pairs or ())

    @property
    def entries(self) -> tuple[Value, ...]:
        return tuple(self._entries or ())

    @property
    def fields(self) -> dict[str, Value]:
        """Attributes that the state gives: of ``__dict__`` and of ``__slots__`` (PEP 307); a new dict."""
        state = self._state
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        found: dict[str, Value] = {}
        for part in parts:
            if type(part) is dict:
                found.update((key, value) for key, value in part.items() if type(key) is str)
        return found

    def get(self, name: str, default: Value = None) -> Value:
        """One attribute."""
        state = self._state
        return state.get(name, default) if type(state) is dict else self.fields.get(name, default)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._type}>"


class Opaque(Record):
    """An object of a class, or the result of a function, that is not known: shown by name, with what it was given."""

    __slots__ = ()


_PLAIN_CODE = re.compile(r"[biufc](1|2|4|8|16)|b1|[?]|S\d{1,9}|U\d{1,9}|V\d{1,9}")


class NumpyDtype:
    """A numpy dtype as a stream states it. Read-only."""

    __slots__ = ("_args", "_state")

    def __init__(self, args: tuple[Value, ...]) -> None:
        self._args = args
        self._state: Value = None

    @property
    def args(self) -> tuple[Value, ...]:
        return self._args

    @property
    def state(self) -> Value:
        return self._state

    def numpy(self) -> np.dtype[Any]:
        """The dtype, if it is one of plain numbers or of text of fixed length; else ``UnsupportedError``."""
        code = self._args[0] if self._args else None
        order = "="
        if type(self._state) is tuple and len(self._state) > 1:
            order = self._state[1]
            if any(part is not None for part in self._state[2:5]):
                raise UnsupportedError("a structured numpy dtype is not read", found=code)
        if type(code) is not str or not _PLAIN_CODE.fullmatch(code) or order not in ("<", ">", "=", "|"):
            raise UnsupportedError("the numpy dtype is not read", found=repr(code)[:40])
        try:
            return np.dtype(("" if order == "|" else order) + code)
        except (TypeError, ValueError, OverflowError) as error:
            raise UnsupportedError(f"the numpy dtype is not read: {error}", found=code) from error

    def __repr__(self) -> str:
        return f"<NumpyDtype {self._args[:1]}>"


class NumpyArray:
    """A numpy array as a stream states it: dtype, shape and bytes. Read-only."""

    __slots__ = ("_data", "_dtype", "_fortran", "_maker", "_shape")

    def __init__(self, maker: GlobalRef) -> None:
        self._maker = maker
        self._dtype: NumpyDtype | None = None
        self._shape: tuple[int, ...] = (0,)
        self._fortran = False
        self._data: Value = b""

    @property
    def maker(self) -> GlobalRef:
        """The function that numpy's version named."""
        return self._maker

    @property
    def dtype(self) -> NumpyDtype | None:
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def fortran(self) -> bool:
        return self._fortran

    @property
    def data(self) -> Value:
        """The bytes of the elements; a list for an array of objects."""
        return self._data

    def array(self) -> NDArray[Any]:
        """A read-only numpy array over the same bytes. Raises ``UnsupportedError``, ``CorruptError``."""
        if self._dtype is None:
            raise CorruptError("a numpy array has no content")
        dtype = self._dtype.numpy()
        if type(self._data) not in (bytes, bytearray):
            raise UnsupportedError("a numpy array of objects is not read")
        count = 1
        for size in self._shape:
            count *= size
        if count * dtype.itemsize != len(self._data):
            raise CorruptError(
                "a numpy array's bytes do not fill its shape", found=len(self._data), expected=count * dtype.itemsize
            )
        try:
            flat = np.frombuffer(bytes(self._data), dtype) if count else np.zeros(0, dtype)
            flat.setflags(write=False)
            return flat.reshape(self._shape, order="F" if self._fortran else "C")
        except ValueError as error:
            raise CorruptError(f"a numpy array's shape cannot be: {error}") from error
