"""The opcodes of pickle protocols 0 to 5, each a small function over plain values and records.

Written from the description of every opcode in the standard library's ``pickletools``, and from PEP 307 (protocol 2),
PEP 3154 (4) and PEP 574 (5).
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict

from ...core.errors import CorruptError
from .machine import Handler, Machine
from .makers import check_key, fill_array, storage_of
from .records import NumpyArray, NumpyDtype, Opaque, Record, Value
from .scalars import SCALARS

__all__ = ["OPCODES"]

_u4 = struct.Struct("<I").unpack_from

# ---------------------------------------------------------------------------------------------------------- containers


def _mark(m: Machine, pos: int) -> int:
    m.outer.append(m.stack)
    m.stack = []
    return pos


def _empty_tuple(m: Machine, pos: int) -> int:
    m.stack.append(())
    return pos


def _empty_list(m: Machine, pos: int) -> int:
    m.stack.append([])
    return pos


def _empty_dict(m: Machine, pos: int) -> int:
    m.stack.append({})
    return pos


def _empty_set(m: Machine, pos: int) -> int:
    m.stack.append(set())
    return pos


def _tuple(m: Machine, pos: int) -> int:
    items = tuple(m.pop_mark())
    m.stack.append(items)
    return pos


def _tuple1(m: Machine, pos: int) -> int:
    stack = m.stack
    stack[-1] = (stack[-1],)
    return pos


def _tuple2(m: Machine, pos: int) -> int:
    stack = m.stack
    stack[-2:] = [(stack[-2], stack[-1])]
    return pos


def _tuple3(m: Machine, pos: int) -> int:
    stack = m.stack
    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
    return pos


def _list(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    m.stack.append(items)
    return pos


def _dict(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    made: dict[Value, Value] = {}
    _set_items(m, made, items)
    m.stack.append(made)
    return pos


def _frozenset(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    for item in items:
        check_key(m.budget, item)
    m.stack.append(frozenset(items))
    return pos


def _append(m: Machine, pos: int) -> int:
    value = m.stack.pop()
    _extend(m.stack[-1], [value])
    return pos


def _appends(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    _extend(m.stack[-1], items)
    return pos


def _extend(target: Value, items: list[Value]) -> None:
    if type(target) is list:
        target.extend(items)
    elif isinstance(target, Record):
        if target._entries is None:
            target._entries = []
        target._entries.extend(items)
    else:
        raise CorruptError("the pickle appends to what is not a list", found=type(target).__name__)


def _setitem(m: Machine, pos: int) -> int:
    stack = m.stack
    value = stack.pop()
    key = stack.pop()
    _set_items(m, stack[-1], [key, value])
    return pos


def _setitems(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    _set_items(m, m.stack[-1], items)
    return pos


_PLAIN_KEYS = frozenset({str, Record})


def _set_items(m: Machine, target: Value, items: list[Value]) -> None:
    if len(items) % 2:
        raise CorruptError("the pickle has a key without a value")
    keys, values = items[0::2], items[1::2]
    if type(target) in (dict, OrderedDict, Counter):
        if not _PLAIN_KEYS.issuperset(map(type, keys)):
            for key in keys:
                check_key(m.budget, key)
        before = len(target)
        update = dict.update if type(target) is Counter else type(target).update  # Counter.update would add
        update(target, zip(keys, values, strict=True))
        if len(target) != before + len(keys):
            raise CorruptError("the pickle sets a key of a dict twice")
    elif isinstance(target, Record):
        if target._pairs is None:
            target._pairs = []
        target._pairs.extend(zip(keys, values, strict=True))
    else:
        raise CorruptError("the pickle sets items of what is not a dict", found=type(target).__name__)


def _additems(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    target = m.stack[-1]
    if type(target) is not set:
        raise CorruptError("the pickle adds to what is not a set", found=type(target).__name__)
    for item in items:
        check_key(m.budget, item)
    target.update(items)
    return pos


# ------------------------------------------------------------------------------------------------------ stack and memo


def _pop(m: Machine, pos: int) -> int:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()  # POP on a mark takes the mark
    return pos


def _pop_mark(m: Machine, pos: int) -> int:
    m.pop_mark()
    return pos


def _dup(m: Machine, pos: int) -> int:
    m.stack.append(m.stack[-1])
    return pos


def _memoize(m: Machine, pos: int) -> int:
    m.memo.append(m.stack[-1])
    return pos


def _binput(m: Machine, pos: int) -> int:
    m.memoize(m.data[pos])
    return pos + 1


def _long_binput(m: Machine, pos: int) -> int:
    m.memoize(_u4(m.data, pos)[0])
    return pos + 4


def _index(text: bytes) -> int:
    if not text.isdigit() or len(text) > 10:
        raise CorruptError("the pickle has a malformed memo number", found=repr(text[:20]))
    return int(text)


def _put(m: Machine, pos: int) -> int:
    text, end = m.line(pos)
    m.memoize(_index(text))
    return end


def _binget(m: Machine, pos: int) -> int:
    m.stack.append(m.memo[m.data[pos]])
    return pos + 1


def _long_binget(m: Machine, pos: int) -> int:
    m.stack.append(m.memo[_u4(m.data, pos)[0]])
    return pos + 4


def _get(m: Machine, pos: int) -> int:
    text, end = m.line(pos)
    m.stack.append(m.memo[_index(text)])
    return end


# ---------------------------------------------------------------------------------------------------- globals, objects


def _global(m: Machine, pos: int) -> int:
    module, pos = m.line(pos)
    name, pos = m.line(pos)
    m.stack.append(m.reference(module.decode("utf-8"), name.decode("utf-8")))
    return pos


def _stack_global(m: Machine, pos: int) -> int:
    name = m.stack.pop()
    module = m.stack.pop()
    if type(module) is not str or type(name) is not str:
        raise CorruptError("the pickle names a global by what is not text")
    m.stack.append(m.reference(module, name))
    return pos


def _reduce(m: Machine, pos: int) -> int:
    stack = m.stack
    args = stack.pop()
    stack[-1] = m.make("call", stack[-1], args)
    return pos


def _newobj(m: Machine, pos: int) -> int:
    stack = m.stack
    args = stack.pop()
    stack[-1] = m.make("new", stack[-1], args)
    return pos


def _newobj_ex(m: Machine, pos: int) -> int:
    kwargs, args = m.stack.pop(), m.stack.pop()
    made = m.make("new", m.stack.pop(), args)
    if type(kwargs) is not dict or not all(type(key) is str for key in kwargs):
        raise CorruptError("the pickle has malformed keyword arguments")
    if kwargs:
        if not isinstance(made, Record):
            raise CorruptError("the pickle gives keyword arguments to what takes none", found=type(made).__name__)
        made._kwargs = kwargs
    m.stack.append(made)
    return pos


def _inst(m: Machine, pos: int) -> int:
    module, pos = m.line(pos)
    name, pos = m.line(pos)
    called = m.reference(module.decode("utf-8"), name.decode("utf-8"))
    args = tuple(m.pop_mark())
    m.stack.append(m.make("call", called, args))
    return pos


def _obj(m: Machine, pos: int) -> int:
    items = m.pop_mark()
    m.stack.append(m.make("call", items[0], tuple(items[1:])))
    return pos


def _build(m: Machine, pos: int) -> int:
    state = m.stack.pop()
    target = m.stack[-1]
    kind = type(target)
    if kind is Record or kind is Opaque or kind is NumpyDtype:
        if target._state is not None:
            raise CorruptError("the pickle gives an object its state twice", found=repr(target))
        target._state = state
    elif kind is NumpyArray:
        fill_array(target, state)
    elif kind is OrderedDict:
        _set_attributes(target, state)
    else:
        raise CorruptError("the pickle gives a state to what takes none", found=kind.__name__)
    return pos


def _set_attributes(target: OrderedDict[Value, Value], state: Value) -> None:
    """A torch module's state dict has an attribute ``_metadata``; no other is read."""
    if type(state) is not dict or set(state) - {"_metadata"} or target.__dict__:
        raise CorruptError("the pickle gives an OrderedDict attributes that are not read")
    target.__dict__.update(state)


def _binpersid(m: Machine, pos: int) -> int:
    storage = storage_of(m.stack[-1])
    m.stack[-1] = m.storages.setdefault(storage, storage)
    return pos


def _persid(m: Machine, pos: int) -> int:
    raise CorruptError("the pickle has a persistent id that is not one of a torch storage")


def _extension(m: Machine, pos: int) -> int:
    raise CorruptError(
        "the pickle calls a global by a code of the extension registry (copyreg), which hides its name",
        found=f"code {m.data[pos]}",
    )


def _next_buffer(m: Machine, pos: int) -> int:
    raise CorruptError("the pickle refers to a buffer outside of it (PEP 574), and there is none")


def _readonly_buffer(m: Machine, pos: int) -> int:
    if type(m.stack[-1]) not in (bytes, bytearray):
        raise CorruptError("the pickle makes read-only what is not a buffer")
    return pos


def _unknown(m: Machine, pos: int) -> int:
    raise CorruptError("the pickle has an unknown opcode", found=hex(m.data[pos - 1]), expected="protocols 0 to 5")


_OTHERS: dict[int, Handler] = {
    0x28: _mark, 0x29: _empty_tuple, 0x5D: _empty_list, 0x7D: _empty_dict, 0x8F: _empty_set,
    0x74: _tuple, 0x85: _tuple1, 0x86: _tuple2, 0x87: _tuple3, 0x6C: _list, 0x64: _dict, 0x91: _frozenset,
    0x61: _append, 0x65: _appends, 0x73: _setitem, 0x75: _setitems, 0x90: _additems,
    0x30: _pop, 0x31: _pop_mark, 0x32: _dup, 0x94: _memoize, 0x71: _binput, 0x72: _long_binput, 0x70: _put,
    0x68: _binget, 0x6A: _long_binget, 0x67: _get,
    0x63: _global, 0x93: _stack_global, 0x52: _reduce, 0x81: _newobj, 0x92: _newobj_ex, 0x69: _inst, 0x6F: _obj,
    0x62: _build, 0x51: _binpersid, 0x50: _persid, 0x82: _extension, 0x83: _extension, 0x84: _extension,
    0x97: _next_buffer, 0x98: _readonly_buffer,
}  # fmt: skip

OPCODES: list[Handler] = [(SCALARS | _OTHERS).get(code, _unknown) for code in range(256)]
"""Handler by opcode; ``STOP`` is the loop's own."""
