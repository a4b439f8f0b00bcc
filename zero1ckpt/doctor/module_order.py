"""The orders in which a model may have registered its params, by their names alone.

A module's own params come before those of its modules, a module's params are together, numbered modules come in their
order, and modules that differ by their numbers only (layers) have the same order inside. What order the modules of one
parent have, no name tells: the choice is left open, and made by whoever walks.

Buffers hold params in reverse, so a walk goes from the end: the last module first, a module's own params last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Walk", "conventional", "walk", "without_fused_names"]

_OWN = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
"""In the order in which PyTorch's and Transformer Engine's modules register them."""
_FUSED = (
    (re.compile(r"(^|\.)self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"\1input_layernorm.\2"),
    (re.compile(r"(^|\.)mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"\1pre_mlp_layernorm.\2"),
)


def without_fused_names(name: str) -> str:
    """The name in a model whose norms are modules of their own, where the key says that they are part of the linear
    layer behind them. Megatron-Core stores both under the latter. Pure.
    """
    for pattern, plain in _FUSED:
        name = pattern.sub(plain, name)
    return name


def conventional(own: Sequence[str]) -> list[str]:
    """A module's own params in the usual order; others keep their place behind these. Pure."""
    return sorted(own, key=lambda name: _OWN.index(name) if name in _OWN else len(_OWN))


@dataclass(frozen=True)
class _Node:
    kind: tuple[str, frozenset[str]]
    """Path without numbers and names of the modules in it: nodes of one kind have one order."""
    own: tuple[int, ...]
    children: Mapping[str, _Node]
    least: float
    """The lowest place of its params in the preferred order."""


@dataclass(frozen=True)
class Walk:
    """A place in a walk. ``frames``: open modules, the innermost first, each with the modules and params still to come.

    ``chosen``: for each kind of module the order that was taken.
    """

    frames: tuple[tuple[_Node, tuple[str, ...], tuple[int, ...]], ...]
    chosen: tuple[tuple[tuple[str, frozenset[str]], tuple[str, ...]], ...] = ()

    def next(self) -> Iterator[tuple[int, Walk]]:
        """The params that may come next, each with the place behind it, preferred ones first."""
        if not self.frames:
            return
        (node, children, own), rest = self.frames[0], self.frames[1:]
        if children:
            for name, chosen in self._choices(node, children):
                child = node.children[name]
                left = tuple(other for other in children if other != name)
                inner = (child, _from_the_end(child), child.own[::-1])
                yield from Walk((inner, (node, left, own), *rest), chosen).next()
        elif own:
            yield own[0], Walk(((node, children, own[1:]), *rest), self.chosen)
        else:
            yield from Walk(rest, self.chosen).next()

    def _choices(
        self, node: _Node, children: tuple[str, ...]
    ) -> Iterator[tuple[str, tuple[tuple[tuple[str, frozenset[str]], tuple[str, ...]], ...]]]:
        numbered = [name for name in children if name.isdecimal()]
        if numbered:
            yield max(numbered, key=int), self.chosen
            return
        done = len(node.children) - len(children)
        table = dict(self.chosen)
        order = table.get(node.kind, ())
        if len(order) > done:
            yield order[done], self.chosen
            return
        for name in children:
            table[node.kind] = (*order, name)
            yield name, tuple(sorted(table.items(), key=lambda item: item[0][0]))

    @property
    def done(self) -> bool:
        return all(not children and not own for _, children, own in self.frames)

    @property
    def key(self) -> object:
        """What decides how it goes on."""
        frames = tuple((node.kind, id(node), children, own) for node, children, own in self.frames)
        return frames, tuple(item for item in self.chosen if "*" in item[0][0])


def walk(names: Sequence[str], preferred: Mapping[int, float] | None = None) -> Walk:
    """The beginning of a walk over params by name. ``preferred``: place of each in the buffer, where it is guessed."""
    rank = preferred or {i: float(-i) for i in range(len(names))}
    tree = _node([(name.split("."), i) for i, name in enumerate(names)], (), rank)
    return Walk(((tree, _from_the_end(tree), tree.own[::-1]),))


def _node(rows: Sequence[tuple[list[str], int]], path: tuple[str, ...], rank: Mapping[int, float]) -> _Node:
    own = {parts[0]: i for parts, i in rows if len(parts) == 1}
    inner: dict[str, list[tuple[list[str], int]]] = {}
    for parts, i in rows:
        if len(parts) > 1:
            inner.setdefault(parts[0], []).append((parts[1:], i))
    children = {name: _node(group, (*path, name), rank) for name, group in inner.items()}
    generic = ".".join("*" if part.isdecimal() else part for part in path)
    least = min((rank[i] for _, i in rows), default=0.0)
    return _Node((generic, frozenset(children)), tuple(own[name] for name in conventional(list(own))), children, least)


def _from_the_end(node: _Node) -> tuple[str, ...]:
    return tuple(sorted(node.children, key=lambda name: node.children[name].least))
