"""Element types by the name that torch gives them, their sizes, and their safetensors codes.

The codes are those of the safetensors format description (the ``dtype`` field of a header entry).
"""

from __future__ import annotations

from .errors import UnsupportedError

__all__ = ["DTYPE_NAMES", "from_safetensors", "itemsize", "to_safetensors"]

_TABLE: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_BY_CODE = {code: name for name, (code, _) in _TABLE.items()}

DTYPE_NAMES = tuple(_TABLE)


def itemsize(dtype: str) -> int:
    """Bytes an element. Raises ``UnsupportedError`` for a dtype that no container can hold."""
    return _row(dtype)[1]


def to_safetensors(dtype: str) -> str:
    return _row(dtype)[0]


def from_safetensors(code: str) -> str:
    """The dtype name of a safetensors code; ``UnsupportedError`` for an unknown one."""
    name = _BY_CODE.get(code)
    if name is None:
        raise UnsupportedError("element type is not supported", found=code, expected=f"one of {', '.join(_BY_CODE)}")
    return name


def _row(dtype: str) -> tuple[str, int]:
    row = _TABLE.get(dtype)
    if row is None:
        raise UnsupportedError("element type is not supported", found=dtype, expected=f"one of {', '.join(_TABLE)}")
    return row
