"""Extra state and group hyper-parameters as JSON, exactly: what goes in comes out, or is refused by its place.

JSON has fewer types than Python, and a lossy trip is how a scheduler's ``milestones`` lost their integer keys. Whatever
plain JSON would change stands as an object with one ``$`` key: ``$tuple``, ``$map`` (pairs, for dicts whose keys are
not all plain strings), ``$float`` (non-finite), ``$complex``, ``$bytes`` (hex), ``$dtype`` (a torch dtype by name) and
``$tensor`` (a key into the tensor file beside the JSON).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import CorruptError, UsageError

__all__ = ["Json", "decode_value", "encode_value", "is_text", "same_value"]

Json = Any
PutTensor = Callable[[Any, str], str]
"""Stores a tensor found at a place and returns its key."""
GetTensor = Callable[[str], Any]

_MAX_JSON_INT = 2**63
_MAX_INT_BITS = 4096  # Python itself refuses text of longer integers
_MAX_DEPTH = 100


def encode_value(value: Any, place: str, *, put_tensor: PutTensor | None = None) -> Json:
    """JSON of a value made of None, bool, int, float, complex, str, bytes, list, tuple, dict and tensors.

    Raises ``UsageError`` that names the place of anything else.
    """
    return _encode(value, place, put_tensor, 0)


def _encode(value: Any, place: str, put_tensor: PutTensor | None, depth: int) -> Json:
    if depth > _MAX_DEPTH:
        raise _refused(value, f"{place[:200]}...", f", more than {_MAX_DEPTH} levels deep, or in itself")
    if value is None or isinstance(value, bool):
        return value
    if type(value) is str:
        if not is_text(value):
            raise _refused(value, place, " that is no Unicode text (a lone surrogate)")
        return value
    if type(value) is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise _refused(value, place, f" of {value.bit_length()} bits")
        return value if -_MAX_JSON_INT <= value < _MAX_JSON_INT else {"$int": str(value)}
    if isinstance(value, float):  # numpy.float64 is one; other numpy scalars are not, and are refused
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if type(value) is complex:
        return {"$complex": [_encode(part, place, None, depth + 1) for part in (value.real, value.imag)]}
    if type(value) in (bytes, bytearray):
        return {"$bytes": bytes(value).hex()}
    if type(value) in (list, tuple):
        items = [_encode(item, f"{place}[{i}]", put_tensor, depth + 1) for i, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        return _encode_mapping(value, place, put_tensor, depth + 1)
    if put_tensor is not None and _is_tensor(value):
        return {"$tensor": put_tensor(value, place)}
    if _is_dtype(value):
        return {"$dtype": str(value).removeprefix("torch.")}
    raise _refused(value, place, " (a deque: pass list(value))" if isinstance(value, deque) else "")


def _refused(value: Any, place: str, more: str) -> UsageError:
    return UsageError(
        "value cannot be stored",
        param=place,
        found=type(value).__name__ + more,
        expected="None, bool, int, float, complex, str, bytes, list, tuple, dict or a tensor",
        hint="convert it before saving",
    )


def _encode_mapping(value: Mapping[Any, Any], place: str, put_tensor: PutTensor | None, depth: int) -> Json:
    plain = all(type(key) is str and not key.startswith("$") and is_text(key) for key in value)
    if plain:
        return {key: _encode(item, f"{place}.{key}", put_tensor, depth) for key, item in value.items()}
    pairs = [
        [_encode(key, f"{place} key {key!a}", None, depth), _encode(item, f"{place}[{key!r}]", put_tensor, depth)]
        for key, item in value.items()
    ]
    return {"$map": pairs}


def decode_value(value: Json, *, get_tensor: GetTensor | None = None) -> Any:
    """Inverse of ``encode_value``. Raises ``CorruptError`` for an unknown tag.

    Without ``get_tensor`` a tensor comes back as its ``{"$tensor": key}`` and a dtype as its name.
    """
    if isinstance(value, list):
        return [decode_value(item, get_tensor=get_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, body),) = value.items()
        if key.startswith("$"):
            return _decode_tag(key, body, get_tensor)
    return {key: decode_value(item, get_tensor=get_tensor) for key, item in value.items()}


def _decode_tag(tag: str, body: Json, get_tensor: GetTensor | None) -> Any:
    try:
        if tag == "$tuple":
            return tuple(decode_value(item, get_tensor=get_tensor) for item in body)
        if tag == "$map":
            return {decode_value(k): decode_value(v, get_tensor=get_tensor) for k, v in body}
        if tag == "$int":
            return int(body)
        if tag == "$float":
            return float(body)
        if tag == "$complex":
            real, imag = (decode_value(part) for part in body)
            return complex(real, imag)
        if tag == "$bytes":
            return bytes.fromhex(body)
        if tag in ("$tensor", "$dtype") and not isinstance(body, str):
            raise TypeError(f"{type(body).__name__} is no text")
        if tag == "$tensor":
            return get_tensor(body) if get_tensor else {tag: body}
        if tag == "$dtype":
            return get_tensor(f"dtype:{body}") if get_tensor else body
    except (TypeError, ValueError) as error:
        raise CorruptError(f"stored value with tag {tag} cannot be read: {error}") from error
    raise CorruptError("stored value has an unknown tag", found=tag)


def same_value(a: Json, b: Json) -> bool:
    """Whether two encoded values are the same, types included (``1`` is not ``True`` and not ``1.0``)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    return bool(a == b)


def is_text(value: str) -> bool:
    """Whether UTF-8, and so JSON, has it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr") and hasattr(value, "shape")


def _is_dtype(value: Any) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"
