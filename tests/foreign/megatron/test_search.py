"""Names from order: trees of modules as Megatron-Core registers them, of which content tells only some params."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero1ckpt.core.boxes import Box
from zero1ckpt.foreign.megatron.model import KeyBox
from zero1ckpt.foreign.megatron.search import assign
from zero1ckpt.foreign.megatron.walk import Stretch
from zero1ckpt.foreign.megatron.weights import Unit

WORDS = ("a", "fc", "ln", "proj", "out", "norm", "mix")


def unit(name: str, shape: tuple[int, ...], start: int = 0) -> Unit:
    corner = (start, *(0 for _ in shape[1:]))
    return Unit(name, (KeyBox(name, Box(corner, shape)),), shape, "bfloat16", False)


def gpt(layers: int, *, bias: bool, fused: bool, qk: bool, final_bias: bool = True) -> list[tuple[str, int]]:
    """(name, elements) in registration order. ``fused``: LayerNorms lie in the linear layers behind them."""

    def norm(name: str) -> list[tuple[str, int]]:
        rows = [(f"{name}weight", 8)]
        return [*rows, (f"{name}bias", 8)] if bias else rows

    def linear(name: str, numel: int) -> list[tuple[str, int]]:
        rows = [(f"{name}.weight", numel)]
        return [*rows, (f"{name}.bias", 8)] if bias else rows

    rows = [("embedding.word_embeddings.weight", 100)]
    for i in range(layers):
        at, mlp = f"decoder.layers.{i}.self_attention", f"decoder.layers.{i}.mlp"
        first, second = norm(f"{at}.linear_qkv.layer_norm_"), norm(f"{mlp}.linear_fc1.layer_norm_")
        pair = [*norm(f"{at}.q_layernorm."), *norm(f"{at}.k_layernorm.")] if qk else []
        if fused:
            rows += [*linear(f"{at}.linear_proj", 64), *first, *linear(f"{at}.linear_qkv", 192), *pair]
            rows += [*second, *linear(f"{mlp}.linear_fc1", 256), *linear(f"{mlp}.linear_fc2", 257)]
        else:
            rows += [*first, *linear(f"{at}.linear_proj", 64), *linear(f"{at}.linear_qkv", 192), *pair]
            rows += [*second, *linear(f"{mlp}.linear_fc1", 256), *linear(f"{mlp}.linear_fc2", 257)]
    return [*rows, *norm("decoder.final_layernorm."), ("output_layer.weight", 101)]


def young(rows: Sequence[tuple[str, int]], shuffled: int) -> tuple[list[Unit], list[Stretch], list[int]]:
    """Units in an order of no meaning, stretches whose weights tell them apart, and norms and biases that do not."""
    found = [unit(name, (numel,)) for name, numel in rows]
    order = list(range(len(found)))
    random.Random(shuffled).shuffle(order)
    units = [found[i] for i in order]
    place = {old: new for new, old in enumerate(order)}

    def alike(i: int) -> tuple[int, ...]:
        name = rows[i][0]
        if rows[i][1] > 8:
            return (place[i],)
        kind = name.endswith("bias")
        same = [place[j] for j, (other, n) in enumerate(rows) if n == rows[i][1] and other.endswith("bias") == kind]
        return tuple(sorted(same))

    stretches = [Stretch(64 * i, rows[i][1], alike(i), True) for i in range(len(rows))]
    return units, stretches, [place[i] for i in range(len(rows))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("qk", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 12])
def test_young_transformers_are_named_by_their_order(layers: int, fused: bool, qk: bool, bias: bool) -> None:
    units, stretches, true = young(gpt(layers, bias=bias, fused=fused, qk=qk), layers)
    made = assign(stretches, units)
    assert made.complete
    wrong = [i for i, u in enumerate(made.units) if u != true[i] and i not in made.ambiguous]
    assert not wrong
    assert not made.ambiguous, [units[true[i]].name for i in sorted(made.ambiguous)]


def test_a_stage_without_embeddings_is_named_too() -> None:
    rows = [row for row in gpt(3, bias=True, fused=False, qk=False) if "embedding" not in row[0]]
    units, stretches, true = young(rows, 5)
    made = assign(stretches, units)
    assert list(made.units) == true and not made.ambiguous


def test_latent_attention_keeps_the_norms_of_a_layer_in_order() -> None:
    rows = [("embedding.word_embeddings.weight", 100)]
    for i in range(2):
        layer = f"decoder.layers.{i}"
        rows += [(f"{layer}.input_layernorm.weight", 8), (f"{layer}.self_attention.linear_proj.weight", 64 + i)]
        rows += [(f"{layer}.pre_mlp_layernorm.weight", 8), (f"{layer}.mlp.linear_fc1.weight", 256 + i)]
    rows += [("decoder.final_layernorm.weight", 8)]
    units, stretches, true = young(rows, 2)
    made = assign(stretches, units)
    assert list(made.units) == true and not made.ambiguous


# ------------------------------------------------------------------------------------------------------------ any trees


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...]]]:
    """Params of a tree of modules, registered depth first: a module's own params before its children's."""
    kinds: dict[int, list[tuple[str, tuple[int, ...]]]] = {}

    def module(prefix: str, depth: int) -> list[tuple[str, tuple[int, ...]]]:
        shape = draw(st.sampled_from([(4,), (4,), (4,), (8,), (2, 4)]))
        own = [(f"{prefix}weight", shape)] + ([(f"{prefix}bias", (4,))] if draw(st.booleans()) else [])
        if depth == 2:
            return own
        names = draw(st.lists(st.sampled_from(WORDS), unique=True, max_size=3))
        rows = own if draw(st.booleans()) or not names else []
        for name in names:
            rows = [*rows, *module(f"{prefix}{name}.", depth + 1)]
        if depth == 0 and draw(st.booleans()):
            block = kinds.setdefault(0, module("", 1))
            for i in range(draw(st.integers(1, 12))):
                rows = [*rows, *((f"{prefix}blocks.{i}.{name}", shape) for name, shape in block)]
        return rows

    return module("", 0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Unit], list[Stretch], list[int]]:
    """A buffer's stretches, of which content tells some; weights that are equal; cuts of a tensor-parallel rank."""
    rows = draw(trees())
    ranks = draw(st.sampled_from([1, 1, 2]))
    rank = draw(st.integers(0, ranks - 1))
    cut = [ranks > 1 and draw(st.booleans()) for _ in rows]
    values = [draw(st.integers(0, 2)) if len(rows) < 40 else i % 3 for i in range(len(rows))]
    units: list[Unit] = []
    content: list[tuple[int, object]] = []
    true = []
    for i, (name, shape) in enumerate(rows):
        for r in range(ranks if cut[i] else 1):
            if r == rank or not cut[i]:
                true.append(len(units))
            units.append(unit(name, shape, r * shape[0]))
            # 0: as all of its kind are (young), 1: equal to another rank's only, 2: like no other
            told = {0: "young", 1: ("same", i), 2: ("own", i, r)}[values[i]]
            content.append((prod(shape), told))
    frozen = draw(st.sets(st.integers(0, len(rows) - 1), max_size=2)) if len(rows) > 3 else set()
    kept = [t for i, t in enumerate(true) if i not in frozen]
    stretches = [
        Stretch(64 * k, units[t].numel, tuple(j for j, c in enumerate(content) if c == content[t]), True)
        for k, t in enumerate(kept)
    ]
    return units, stretches, kept


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_true_unit_is_chosen_or_said_to_be_open(made: tuple[list[Unit], list[Stretch], list[int]]) -> None:
    """But for what looks like a frozen weight: that is found by all parts together (``frozen``)."""
    units, stretches, true = made
    names = {units[t].name for t in true}
    frozen = {i for i, u in enumerate(units) if u.name not in names}
    found = assign(stretches, units, max_nodes=3000)
    for i, (chosen, right) in enumerate(zip(found.units, true, strict=True)):
        if i not in found.ambiguous and not frozen.intersection(stretches[i].units):
            assert chosen is None or chosen == right, (units[right].name, chosen)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_no_unit_is_given_twice(made: tuple[list[Unit], list[Stretch], list[int]]) -> None:
    units, stretches, _ = made
    chosen = [u for u in assign(stretches, units, max_nodes=500).units if u is not None]
    assert len({units[u].label for u in chosen}) == len(chosen)
