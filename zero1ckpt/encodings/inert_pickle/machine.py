"""The machine that opcodes act on: stack, marks, memo, and what a global or a call of one stands for.

``stack`` holds the values since the topmost mark and ``outer`` the stacks below each mark, so that an opcode cannot
reach below a mark. Memory stays within 100 times the stream (250 for one of empty sets): each opcode makes at most one
small object, every length is checked against the bytes that are there before anything is allocated, makers that copy
are charged, and an object takes a state once. Time is linear for the same reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...core.errors import CorruptError
from .makers import MAKERS, RECORD_TYPES, Budget, dtype_of
from .policy import checked_global
from .records import GlobalRef, Opaque, Record, StorageRef, Value

__all__ = ["Handler", "Machine"]

_MAX_TEXT_LINE = 1 << 20


class _SparseMemo(dict[int, Value]):
    """A memo whose numbers are not 0, 1, 2, ...: a stream that ``pickletools.optimize`` went over, or protocol 0."""

    def append(self, value: Value) -> None:
        self[len(self)] = value


class Machine:
    """The state of one reading. ``run`` may be called once."""

    __slots__ = ("budget", "data", "memo", "outer", "refs", "stack", "storages")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[Value] = []
        self.outer: list[list[Value]] = []
        self.memo: list[Value] | _SparseMemo = []
        self.refs: dict[tuple[str, str], Value] = {}
        self.storages: dict[StorageRef, StorageRef] = {}
        self.budget = Budget(len(data))

    def run(self, table: Sequence[Handler], *, max_opcodes: int) -> tuple[Value, int]:
        """The value of the stream that the data begins with, and the position after its ``STOP``."""
        data, pos = self.data, 0
        for _ in range(max_opcodes):
            opcode = data[pos]
            if opcode == 46:  # STOP
                if self.outer or len(self.stack) != 1:
                    raise CorruptError("the pickle ends with values left on its stack")
                return self.stack[0], pos + 1
            if opcode == 0x94:  # MEMOIZE, by far the most frequent
                self.memo.append(self.stack[-1])
                pos += 1
            else:
                pos = table[opcode](self, pos + 1)
        raise CorruptError("the pickle makes more objects than the limit", expected=f"at most {max_opcodes} opcodes")

    def memoize(self, index: int) -> None:
        """Keeps the top of the stack under a number."""
        memo = self.memo
        if index == len(memo) and type(memo) is list:
            memo.append(self.stack[-1])
            return
        if type(memo) is list:
            memo = self.memo = _SparseMemo(enumerate(memo))
        memo[index] = self.stack[-1]

    def pop_mark(self) -> list[Value]:
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def span(self, pos: int, length: int) -> int:
        """The end of ``length`` bytes at ``pos``, which must be there."""
        end = pos + length
        if end > len(self.data):
            raise CorruptError(
                "the pickle declares more bytes than there are",
                found=length,
                expected=f"at most {len(self.data) - pos}",
            )
        return end

    def line(self, pos: int) -> tuple[bytes, int]:
        """A newline-terminated argument, without its newline, and the position after it."""
        end = self.data.find(b"\n", pos, pos + _MAX_TEXT_LINE)
        if end < 0:
            raise CorruptError("the pickle has a line without an end")
        return self.data[pos:end], end + 1

    def reference(self, module: str, name: str) -> Value:
        """What a global stands for: a dtype, or a reference."""
        found = self.refs.get((module, name))
        if found is None:
            ref = checked_global(module, name)
            found = dtype_of(ref) or ref
            self.refs[module, name] = found
        return found

    def make(self, how: str, called: Value, args: Value) -> Value:
        """What calling a global would give. Nothing is called but the allow-list's own makers."""
        if type(called) is not GlobalRef or type(args) is not tuple:
            raise CorruptError("the pickle calls what is not a global", found=_describe(called))
        if called.module == "copyreg":
            called, args, how = _by_copyreg(called, args)
        maker = MAKERS.get(called)
        if maker is None:
            return (Record if called in RECORD_TYPES else Opaque)(called, args, how)
        made = maker(self.budget, called, args)
        if made is None:
            raise CorruptError(f"the pickle calls {called} with arguments that it does not take")
        return made


def _describe(value: Value) -> str:
    return f"the result of {value.type}" if isinstance(value, Record) else type(value).__name__


def _by_copyreg(called: GlobalRef, args: tuple[Value, ...]) -> tuple[GlobalRef, tuple[Value, ...], str]:
    """Protocols 0 and 1 make objects through ``copyreg`` (PEP 307): the class and arguments behind such a call."""
    name = called.name
    cls = args[0] if args else None
    if type(cls) is not GlobalRef:
        raise CorruptError(f"the pickle calls {called} with arguments that it does not take")
    if name == "__newobj__":
        return cls, args[1:], "new"
    if name == "__newobj_ex__" and len(args) == 3 and args[2] == {} and type(args[1]) is tuple:
        return cls, args[1], "new"
    if name == "_reconstructor" and len(args) == 3:
        plain = args[1] == GlobalRef("builtins", "object") and args[2] is None
        return (cls, (), "new") if plain else (cls, args[1:], "reconstruct")
    raise CorruptError(f"the pickle calls {called}, which is not read")


Handler = Callable[[Machine, int], int]
"""One opcode: takes the machine and the position after the opcode, returns that after its argument."""
