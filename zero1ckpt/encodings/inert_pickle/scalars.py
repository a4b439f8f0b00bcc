"""Opcodes that push a constant, a number, text or bytes; see ``opcodes``."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from ...core.errors import CorruptError
from .machine import Handler, Machine

__all__ = ["SCALARS"]

_MAX_INT_BYTES = 1024
_MAX_INT_DIGITS = 2400

_u2 = struct.Struct("<H").unpack_from
_u4 = struct.Struct("<I").unpack_from
_i4 = struct.Struct("<i").unpack_from
_u8 = struct.Struct("<Q").unpack_from
_f8 = struct.Struct(">d").unpack_from


def _proto(m: Machine, pos: int) -> int:
    if m.data[pos] > 5:
        raise CorruptError("the pickle has an unknown protocol", found=m.data[pos], expected="at most 5")
    return pos + 1


def _frame(m: Machine, pos: int) -> int:
    m.span(pos + 8, _u8(m.data, pos)[0])
    return pos + 8


def _none(m: Machine, pos: int) -> int:
    m.stack.append(None)
    return pos


def _true(m: Machine, pos: int) -> int:
    m.stack.append(True)
    return pos


def _false(m: Machine, pos: int) -> int:
    m.stack.append(False)
    return pos


def _binint1(m: Machine, pos: int) -> int:
    m.stack.append(m.data[pos])
    return pos + 1


def _binint2(m: Machine, pos: int) -> int:
    m.stack.append(_u2(m.data, pos)[0])
    return pos + 2


def _binint(m: Machine, pos: int) -> int:
    m.stack.append(_i4(m.data, pos)[0])
    return pos + 4


def _long1(m: Machine, pos: int) -> int:
    start = pos + 1
    end = m.span(start, m.data[pos])
    m.stack.append(int.from_bytes(m.data[start:end], "little", signed=True))
    return end


def _long4(m: Machine, pos: int) -> int:
    length = _i4(m.data, pos)[0]
    if not 0 <= length <= _MAX_INT_BYTES:
        raise CorruptError("the pickle has an integer that is too long", found=length, expected=_MAX_INT_BYTES)
    end = m.span(pos + 4, length)
    m.stack.append(int.from_bytes(m.data[pos + 4 : end], "little", signed=True))
    return end


def _number(text: bytes) -> int:
    digits = text.strip(b" \t\r")
    if len(digits) > _MAX_INT_DIGITS or not digits.lstrip(b"+-").isdigit():
        raise CorruptError("the pickle has a malformed or too long number", found=repr(digits[:40]))
    return int(digits)


def _int(m: Machine, pos: int) -> int:
    text, end = m.line(pos)
    m.stack.append({b"00": False, b"01": True}[text] if text in (b"00", b"01") else _number(text))
    return end


def _long(m: Machine, pos: int) -> int:
    text, end = m.line(pos)
    m.stack.append(_number(text.removesuffix(b"L")))
    return end


def _float(m: Machine, pos: int) -> int:
    text, end = m.line(pos)
    if len(text) > 100:
        raise CorruptError("the pickle has a malformed or too long number", found=repr(text[:40]))
    m.stack.append(float(text))
    return end


def _binfloat(m: Machine, pos: int) -> int:
    m.stack.append(_f8(m.data, pos)[0])
    return pos + 8


# ------------------------------------------------------------------------------------------------------ text and bytes


def _text_of(length: Callable[[bytes, int], int], width: int) -> Handler:
    def handler(m: Machine, pos: int) -> int:
        start = pos + width
        end = m.span(start, length(m.data, pos))
        m.stack.append(m.data[start:end].decode("utf-8"))
        return end

    return handler


def _bytes_of(length: Callable[[bytes, int], int], width: int, kind: type[bytes] | type[bytearray] = bytes) -> Handler:
    def handler(m: Machine, pos: int) -> int:
        start = pos + width
        end = m.span(start, length(m.data, pos))
        m.stack.append(kind(m.data[start:end]))
        return end

    return handler


def _old_string_of(length: Callable[[bytes, int], int], width: int) -> Handler:
    """Python 2's ``str``: text where it is UTF-8, as torch.load reads it; else bytes."""

    def handler(m: Machine, pos: int) -> int:
        start = pos + width
        nbytes = length(m.data, pos)
        if nbytes < 0:
            raise CorruptError("the pickle has a string of negative length", found=nbytes)
        end = m.span(start, nbytes)
        m.stack.append(_old_text(m.data[start:end]))
        return end

    return handler


def _old_text(raw: bytes) -> str | bytes:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|.|$)", re.DOTALL)
_ESCAPED = {b"\\": b"\\", b"'": b"'", b'"': b'"', b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _unescape(found: re.Match[bytes]) -> bytes:
    """The escapes that Python 2's ``repr`` of a string writes."""
    code = found[1]
    if len(code) == 3:
        return bytes([int(code[1:], 16)])
    if code not in _ESCAPED:
        raise CorruptError("the pickle has a string with an unknown escape", found=repr(found[0]))
    return _ESCAPED[code]


def _string(m: Machine, pos: int) -> int:
    text, end = m.line(pos)
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise CorruptError("the pickle has a string without quotes")
    m.stack.append(_old_text(_ESCAPE.sub(_unescape, text[1:-1])))
    return end


def _unicode(m: Machine, pos: int) -> int:
    text, end = m.line(pos)
    value = text.decode("raw-unicode-escape")
    value.encode("utf-8")  # no lone surrogates, as in the other opcodes for text
    m.stack.append(value)
    return end


def _n1(data: bytes, pos: int) -> int:
    return data[pos]


def _n4(data: bytes, pos: int) -> int:
    return int(_u4(data, pos)[0])


def _n4_signed(data: bytes, pos: int) -> int:
    return int(_i4(data, pos)[0])


def _n8(data: bytes, pos: int) -> int:
    return int(_u8(data, pos)[0])


SCALARS: dict[int, Handler] = {
    0x80: _proto, 0x95: _frame, 0x4E: _none, 0x88: _true, 0x89: _false, 0x4B: _binint1, 0x4D: _binint2, 0x4A: _binint,
    0x8A: _long1, 0x8B: _long4, 0x49: _int, 0x4C: _long, 0x46: _float, 0x47: _binfloat, 0x53: _string, 0x56: _unicode,
    0x54: _old_string_of(_n4_signed, 4), 0x55: _old_string_of(_n1, 1),
    0x42: _bytes_of(_n4, 4), 0x43: _bytes_of(_n1, 1), 0x8E: _bytes_of(_n8, 8), 0x96: _bytes_of(_n8, 8, bytearray),
    0x8C: _text_of(_n1, 1), 0x58: _text_of(_n4, 4), 0x8D: _text_of(_n8, 8),
}  # fmt: skip
