"""The bound on what a reader of the values meets: depth, size when walked as a tree, no cycles.

A stream of a kilobyte can build a list that holds a list twice, that holds a list twice, and so on: small in memory,
endless for anybody who walks it ("billion laughs"). So each container is counted once, bottom up, by what a walk meets.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from ...core.errors import CorruptError
from .records import NumpyArray, NumpyDtype, Opaque, Record, Value

__all__ = ["check_tree"]

_DICTS = frozenset((dict, OrderedDict, Counter))
_RECORDS = frozenset((Record, Opaque))
_CONTAINERS = frozenset((*_DICTS, *_RECORDS, tuple, list, set, frozenset, NumpyArray, NumpyDtype))
_SHORT = 8
"""Tuples of at most so many plain values are counted each time that they are met."""
_OPEN = (0, 0)


def check_tree(root: Value, *, max_depth: int, max_nodes: int) -> None:
    """Raises ``CorruptError`` where ``root`` is nested deeper, larger when walked, or holds itself."""
    if type(root) in _CONTAINERS:
        _Walk(max_depth, max_nodes).run(root)


class _Walk:
    """One walk. ``known`` is (height, nodes) by identity, ``_OPEN`` for what lies on the path from the root."""

    def __init__(self, max_depth: int, max_nodes: int) -> None:
        self.max_depth = max_depth
        self.max_nodes = max_nodes
        self.known: dict[int, tuple[int, int]] = {}
        self.path: list[_Node] = []

    def run(self, root: Value) -> None:
        self.push(root, _children(root))
        while self.path:
            node = self.path[-1]
            if not self.descend(node):
                self.path.pop()
                done = (node.height, node.nodes)
                self.known[id(node.value)] = done
                if self.path:
                    self.add(self.path[-1], done)

    def push(self, value: Value, children: list[Value]) -> None:
        if len(self.path) >= self.max_depth:
            raise CorruptError("the pickle is nested too deeply", expected=f"at most {self.max_depth} levels")
        self.known[id(value)] = _OPEN
        self.path.append(_Node(value, children))

    def descend(self, node: _Node) -> bool:
        """Counts children of a node; True where one had to be walked first."""
        known = self.known
        for child in node.rest:
            found = known.get(id(child))
            if found is None:
                children = _children(child)
                if children:
                    self.push(child, children)
                    return True
                found = (1, _width(child))
                if type(child) is not tuple or found[1] > _SHORT:
                    known[id(child)] = found
            elif found is _OPEN:
                raise CorruptError("the pickle holds a value that holds itself")
            self.add(node, found)
        return False

    def add(self, node: _Node, below: tuple[int, int]) -> None:
        node.height = max(node.height, below[0] + 1)
        node.nodes += below[1]
        if node.height > self.max_depth:
            raise CorruptError("the pickle is nested too deeply", expected=f"at most {self.max_depth} levels")
        if node.nodes > self.max_nodes:
            raise CorruptError(
                "the pickle is small but endless to walk: values shared many times over",
                expected=f"at most {self.max_nodes} values",
            )


class _Node:
    __slots__ = ("height", "nodes", "rest", "value")

    def __init__(self, value: Value, children: list[Value]) -> None:
        self.value = value
        self.rest: Iterator[Value] = iter(children)
        self.height = 1
        self.nodes = _width(value)


def _width(value: Value) -> int:
    return 1 + (len(value) if hasattr(value, "__len__") else 0)


def _children(value: Value) -> list[Value]:
    """The containers that a container holds."""
    kind = type(value)
    if kind is tuple or kind is list or kind is set or kind is frozenset:
        return [item for item in value if type(item) in _CONTAINERS]
    if kind in _DICTS:
        found = [item for item in value.values() if type(item) in _CONTAINERS]
        found += [key for key in value if type(key) in _CONTAINERS]
        if kind is OrderedDict and value.__dict__:
            found.append(value.__dict__["_metadata"])
        return found
    if kind in _RECORDS:
        parts = [value._args, value._state, value._kwargs, value._entries]
        for pair in value._pairs or ():
            parts += pair
        return [part for part in parts if part and type(part) in _CONTAINERS]
    if kind is NumpyDtype:
        return [part for part in (value._args, value._state) if type(part) in _CONTAINERS]
    return [part for part in (value._dtype, value._data) if type(part) in _CONTAINERS]
