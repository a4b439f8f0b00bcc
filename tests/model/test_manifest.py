"""manifest.json: round trip, and no altered byte that is accepted."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero1ckpt.core.digest import crc64, format_digest
from zero1ckpt.core.errors import CorruptError, UnsupportedError, Zero1CkptError
from zero1ckpt.core.layout import LayoutRules
from zero1ckpt.model.manifest import (
    FileEntry,
    FormatOptions,
    ModelTensor,
    RankExtra,
    decode_manifest,
    encode_manifest,
    make_part,
    new_manifest,
    whole_digest,
)
from zero1ckpt.model.state import ParamSpec, PartState, Scalar, SlotSpec

DTYPES = ("float32", "bfloat16", "int64")
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def parts(draw, name):
    count = draw(st.integers(0, 4))
    names = draw(st.lists(NAMES, min_size=count, max_size=count, unique=True))
    slots = tuple(
        SlotSpec(slot, draw(st.sampled_from(DTYPES))) for slot in draw(st.lists(NAMES, max_size=3, unique=True))
    )
    groups = tuple(
        {"lr": draw(st.floats(allow_nan=False, allow_infinity=False))} for _ in range(draw(st.integers(1, 2)))
    )
    specs = tuple(
        ParamSpec(
            name,
            tuple(draw(st.lists(st.integers(0, 5), max_size=3))),
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from(DTYPES)),
            draw(st.integers(0, len(groups) - 1)),
            draw(st.booleans()),
            draw(st.booleans()),
        )
        for name in names
    )
    pairs = [(i, k) for i in range(count) for k in range(len(slots))]
    absent = frozenset(pair for pair in pairs if draw(st.integers(0, 3)) == 0)
    kinds = {"step": ("int64", st.integers(0, 2**60)), "mu": ("float64", st.floats()), "on": ("bool", st.booleans())}
    own = tuple(
        {s: Scalar(dtype, draw(values)) for s, (dtype, values) in kinds.items() if draw(st.booleans())} for _ in names
    )
    state = PartState(specs, slots, draw(st.integers(0, 9)), groups, own if any(own) else (), absent)
    digests = {pair: draw(st.integers(0, 2**64 - 1)) for pair in pairs if pair not in absent}
    rule = LayoutRules(draw(st.integers(1, 9)), draw(st.sampled_from((None, 1, 99))))
    return state, rule, digests, make_part(name, state, rule, digests)


@st.composite
def manifests(draw):
    names = draw(st.sampled_from(([""], ["dis", "gen"], ["a"])))
    made = [draw(parts(name)) for name in names]
    files = [
        FileEntry(f"f/{i}.x", draw(st.integers(0, 2**50)), format_digest(i)) for i in range(draw(st.integers(0, 3)))
    ]
    extra = draw(st.sampled_from((None, {"a": [1, {"$tuple": [2.5, None]}]}, "text", 3)))
    model = draw(st.sampled_from(([], [ModelTensor("bn", "buffer", "float32", [3], "0" * 16)])))
    ranks = draw(st.sampled_from((None, RankExtra(4))))
    options = draw(st.sampled_from((FormatOptions(), FormatOptions(shard_bytes=5), FormatOptions(None, 9, "zstd"))))
    built = new_manifest(
        "bucket_shards",
        "safetensors",
        [part for *_, part in made],
        files,
        extra=extra,
        model=model,
        rank_extra=ranks,
        options=options,
    )
    return made, built


def plain(state):
    """A state as text, in which a NaN equals itself."""
    return repr(
        (
            state.params,
            state.slots,
            state.step,
            state.groups,
            [dict(sorted(s.items())) for s in state.scalars],
            sorted(state.absent),
        )
    )


@settings(max_examples=150)
@given(manifests())
def test_round_trip(made):
    rows, manifest = made
    data = encode_manifest(manifest)
    read = decode_manifest(data, "m")
    assert read.manifest == manifest and encode_manifest(read.manifest) == data
    for (state, rule, digests, part), back in zip(rows, read.manifest.parts, strict=True):
        assert back == part
        found = back.state()
        if not state.params:
            continue
        scalars = state.scalars or ({},) * len(state.params)
        normal = PartState(state.params, state.slots, state.step, state.groups, scalars, state.absent)
        again = PartState(
            found.params,
            found.slots,
            found.step,
            found.groups,
            found.scalars or ({},) * len(found.params),
            found.absent,
        )
        assert plain(again) == plain(normal)
        assert back.rules() == rule and back.tensor_digests() == digests
    json.loads(data, parse_constant=pytest.fail)  # plain JSON for any reader


def small():
    state = PartState(
        (ParamSpec("w", (2, 3)), ParamSpec("b", (3,))), (SlotSpec("fp32_param", "float32"),), 3, ({"lr": 0.1},)
    )
    part = make_part("", state, LayoutRules(2, 100), {(0, 0): 1, (1, 0): 2})
    return new_manifest("bucket_shards", "safetensors", [part], [FileEntry("a", 1, "0" * 16)], options=FormatOptions())


DATA = encode_manifest(small())


@settings(max_examples=200)
@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_one_altered_byte_is_refused(at, change):
    data = bytearray(DATA)
    data[at] ^= change
    with pytest.raises(CorruptError, match=r"m/manifest\.json") as caught:
        decode_manifest(bytes(data), "m/manifest.json")
    assert caught.value.exit_code == 4


def test_every_flipped_bit_is_refused():
    for at in range(len(DATA)):
        for bit in range(8):
            data = bytearray(DATA)
            data[at] ^= 1 << bit
            with pytest.raises(CorruptError):
                decode_manifest(bytes(data), "m")


def test_every_truncation_and_addition_is_refused():
    for keep in range(len(DATA)):
        with pytest.raises(CorruptError, match="cut off"):
            decode_manifest(DATA[:keep], "m")
        with pytest.raises(CorruptError):
            decode_manifest(DATA[keep + 1 :], "m")
    for more in (b"\n", b" ", b"}", b"\0", DATA):
        with pytest.raises(CorruptError):
            decode_manifest(DATA + more, "m")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_one_line(data):
    with pytest.raises(Zero1CkptError) as caught:
        decode_manifest(data, "m")
    assert caught.value.exit_code == 4 and "\n" not in str(caught.value)


def forged(change):
    """A manifest with a change and a digest that fits: what a program with a fault, or malice, would write."""
    tree = msgspec.json.decode(DATA)
    tree.pop("manifest_digest")
    change(tree)
    body = msgspec.json.encode(tree)[:-1] + b",\n"
    return body + b'"manifest_digest": "' + format_digest(crc64(body)).encode() + b'"\n}\n'


def put(path, value):
    def change(tree):
        *way, last = path
        for step in way:
            tree = tree[step]
        tree[last] = value

    return change


def test_a_forged_one_without_a_change_is_accepted():
    assert decode_manifest(forged(lambda tree: None), "m").manifest == small()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (put(["schema"], "zero1ckpt.manifest/2"), 5),
        (put(["schema"], "other"), 5),
        (put(["checksum"], "md5"), 5),
        (put(["piece_bytes"], 0), 5),
        (put(["piece_bytes"], 2**50), 5),
        (put(["parts", 0, "slots", 0, "dtype"], "float3"), 5),
        (put(["parts", 0, "params", 0, "dtype"], "float3"), 5),
        (put(["unknown"], 1), 4),
        (put(["parts", 0, "unknown"], 1), 4),
        (put(["parts"], []), 4),
        (put(["parts", 0, "step"], -1), 4),
        (put(["parts", 0, "step"], "3"), 4),
        (put(["parts", 0, "step"], 2.5), 4),
        (put(["parts", 0, "layout", "dp_size"], 0), 4),
        (put(["parts", 0, "layout", "bucket_size"], 0), 4),
        (put(["parts", 0, "layout", "param_align"], -64), 4),
        (put(["parts", 0, "params", 0, "shape"], [-2, 3]), 4),
        (put(["parts", 0, "params", 0, "group"], 1), 4),
        (put(["parts", 0, "params", 0, "group"], -1), 4),
        (put(["parts", 0, "params", 0, "digests"], {"exp_avg": "0" * 16}), 4),
        (put(["parts", 0, "params", 0, "digests"], {"fp32_param": "xyz"}), 4),
        (put(["parts", 0, "params", 0, "scalars"], {"lost": 1}), 4),
        (put(["parts", 0, "scalars"], [{"name": "fp32_param", "dtype": "float32", "value": 1}]), 4),
        (put(["parts", 0, "params", 1, "name"], "w"), 4),
        (put(["parts", 0, "digest"], "0"), 4),
        (put(["digest"], "G" * 16), 4),
        (put(["files", 0, "path"], "../../etc/passwd"), 4),
        (put(["files", 0, "path"], "/etc/passwd"), 4),
        (put(["files", 0, "path"], "a/../../b"), 4),
        (put(["files", 0, "path"], "a//b"), 4),
        (put(["files", 0, "path"], ""), 4),
        (put(["files", 0, "path"], "a\0b"), 4),
        (put(["files", 0, "bytes"], -1), 4),
        (put(["files", 0, "digest"], ""), 4),
        (lambda tree: tree["files"].append(tree["files"][0]), 4),
        (lambda tree: tree["parts"].append(tree["parts"][0]), 4),
        (lambda tree: tree["parts"][0]["slots"].append(tree["parts"][0]["slots"][0]), 4),
        (lambda tree: tree.pop("files"), 4),
        (lambda tree: tree.pop("schema"), 4),
    ],
)
def test_inconsistent_ones_are_refused(change, code):
    with pytest.raises(Zero1CkptError) as caught:
        for part in decode_manifest(forged(change), "m").manifest.parts:
            [slot.itemsize for slot in part.state().slots]
    assert caught.value.exit_code == code, caught.value


def test_newer_schema_says_what_to_do():
    with pytest.raises(UnsupportedError, match="newer"):
        decode_manifest(forged(put(["schema"], "zero1ckpt.manifest/2")), "m")


def test_deep_nesting_is_refused():
    body = b'{"schema": ' + b"[" * 100_000 + b",\n"
    data = body + b'"manifest_digest": "' + format_digest(crc64(body)).encode() + b'"\n}\n'
    with pytest.raises(CorruptError):
        decode_manifest(data, "m")


def test_digest_of_several_parts_depends_on_names_not_on_order():
    part = small().parts[0]
    assert whole_digest([part]) == part.digest
    a, b = (msgspec.structs.replace(part, name=name) for name in "ab")
    assert whole_digest([a, b]) == whole_digest([b, a]) != whole_digest([a]) != part.digest


def test_size_at_scale():
    """10,000 params with 3 slots at DP 4,096: rules and placement, never a row a fragment."""
    slots = tuple(SlotSpec(name, "float32") for name in ("fp32_param", "exp_avg", "exp_avg_sq"))
    specs = tuple(
        ParamSpec(f"decoder.layers.{i // 12}.self_attention.linear_qkv_{i}.weight", (4096, 4096 + i))
        for i in range(10_000)
    )
    step = tuple({"step": Scalar("float32", 1000.0)} for _ in specs)
    state = PartState(specs, slots, 1000, ({"lr": 1e-4},), step)
    digests = {(i, k): 2**64 - 1 - i * 3 - k for i in range(len(specs)) for k in range(3)}
    part = make_part("", state, LayoutRules(4096, 40_000_000), digests)
    files = [FileEntry(f"rank-{r:05d}-of-04096.safetensors", 2**36 + r, format_digest(r)) for r in range(4096)]
    data = encode_manifest(new_manifest("bucket_shards", "safetensors", [part], files, options=FormatOptions()))
    assert len(data) < 20_000_000
    assert data.count(b"\n") < 10_000 + 4096 + 100, "a line for each param and file, to be read by a person"
    assert decode_manifest(data, "m").manifest.parts[0].state() == state
