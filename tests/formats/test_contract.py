"""What every format promises; a new one is tested here by registering."""

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zero1ckpt
from tests.strategies import (
    BUCKET_SIZES,
    DP_SIZES,
    check_state,
    finite,
    flip,
    rules,
    small_state,
    states,
    tree,
)
from zero1ckpt.api import resharding as api_resharding
from zero1ckpt.api import verify
from zero1ckpt.api.stored import describe
from zero1ckpt.api.writing import build_state
from zero1ckpt.core.errors import UnsupportedError
from zero1ckpt.core.layout import layout_params
from zero1ckpt.model.manifest import FormatOptions
from zero1ckpt.registry import FORMATS, find_format

PAIRS = list(FORMATS)
every_format = pytest.mark.parametrize(("format", "container"), PAIRS, ids=["-".join(pair) for pair in PAIRS])


def write(path, state, dp, bucket, format, container, **keywords):
    return zero1ckpt.write(
        path, state, dp_size=dp, bucket_size=bucket, format=format, container=container, workers=1, **keywords
    )


def reshard(src, dst, dp, bucket, **keywords):
    keywords = {"workers": 1} | keywords
    return zero1ckpt.reshard(src, dst, to_dp=dp, bucket_size=bucket, **keywords)


# --------------------------------------------------------------------------------------------------- plan and describe


def assert_same_catalog(found, planned):
    assert (found.format, found.container, found.part) == (planned.format, planned.container, planned.part)
    assert found.state == planned.state
    assert (found.layout and found.layout.rules) == (planned.layout and planned.layout.rules)
    assert found.placement.blob_count == planned.placement.blob_count
    for blob in range(planned.placement.blob_count):
        assert found.placement.blob_key(blob) == planned.placement.blob_key(blob)
        assert found.placement.payload_nbytes(blob) == planned.placement.payload_nbytes(blob)
        for mine, theirs in zip(
            found.placement.extents(blob).columns, planned.placement.extents(blob).columns, strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)


@every_format
@settings(max_examples=40)
@given(states(), rules(17))
def test_describe_after_write_is_the_plan(format, container, work, made, rule):
    state, keywords = made
    path = work / "a"
    write(
        path,
        state,
        rule.dp_size,
        rule.bucket_size,
        format,
        container,
        pad_for_high_nccl_busbw=rule.pad_for_high_nccl_busbw,
        overwrite=True,
        **keywords,
    )
    wanted, _ = build_state(state, groups=keywords["groups"], step=keywords["step"], params=keywords["params"])
    plugin = FORMATS[format, container]
    layout = layout_params(wanted.params, rule)
    planned = plugin.plan(wanted, layout, "", "", plugin.normalize(FormatOptions()))
    stored = describe(path)
    assert_same_catalog(stored.catalogs[""], planned)
    assert set(stored.catalogs[""].digests) == {
        (i, k) for i in range(len(wanted.params)) for k in range(len(wanted.slots))
    } - set(wanted.absent)


@every_format
@settings(max_examples=40)
@given(states(), rules(17, pad=False), rules(17, pad=False), st.integers(1, 3))
def test_any_state_survives_any_reshard(format, container, work, made, one, two, workers):
    """Read back after write and after reshard; deep verify; equal state; A -> B equals a write of B, byte for byte."""
    state, keywords = made
    a, b, c, d = (work / name for name in "abcd")
    for path in (a, c):
        rule = one if path is a else two
        write(path, state, rule.dp_size, rule.bucket_size, format, container, overwrite=True, **keywords)
    check_state(zero1ckpt.open(a), state)
    bucket = "none" if two.bucket_size is None else two.bucket_size
    made = reshard(a, b, two.dp_size, bucket, workers=workers, overwrite=True)
    assert tree(b) == tree(c)
    assert (made.layout is None or made.layout.rules == two) and made.digest == zero1ckpt.open(a).digest
    check_state(made, state)
    back = "none" if one.bucket_size is None else one.bucket_size
    reshard(b, d, one.dp_size, back, overwrite=True)
    assert tree(a) == tree(d)
    answer = verify(b, deep=True, against=a)
    assert not answer.findings and not answer.notices
    assert made.groups == zero1ckpt.open(a).groups and made.step == keywords["step"]


# ------------------------------------------------------------------------------------------------------------- matrix


def matrix(work, format, container, sources, targets):
    state = small_state(3)
    for dp, bucket in {*sources, *targets}:
        write(work / f"w{dp}-{bucket}", state, dp, bucket, format, container, step=4)
    wanted = {key: tree(work / f"w{key[0]}-{key[1]}") for key in targets}
    digest = zero1ckpt.open(work / f"w{targets[0][0]}-{targets[0][1]}").digest
    for source in sources:
        for target in targets:
            made = reshard(work / f"w{source[0]}-{source[1]}", work / "out", *target, overwrite=True)
            assert tree(work / "out") == wanted[target], (source, target)
            assert made.digest == digest


@every_format
def test_matrix_small(format, container, work):
    """A -> B is what a write of B gives; so A -> B -> A gives A, and A -> B -> C equals A -> C."""
    some = [(dp, bucket) for dp, bucket in zip((1, 3, 5, 8, 48), (4096, "none", 1, 1000, "none"), strict=True)]
    matrix(work, format, container, some, some)


@pytest.mark.slow
@every_format
@pytest.mark.parametrize("dp", DP_SIZES)
def test_matrix_whole(format, container, work, dp):
    every = [(target, bucket) for target in DP_SIZES for bucket in BUCKET_SIZES]
    matrix(work, format, container, [(dp, bucket) for bucket in BUCKET_SIZES], every)


@every_format
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 5, 6, 7, 12, 24])
def test_there_and_back_by_way_of_the_files(format, container, work, dp):
    """The literal statement, without ``write`` of the target: A -> B -> A and A -> B -> C against A -> C."""
    a = write(work / "a", small_state(9), dp, 1000, format, container).path
    reshard(a, work / "b", 16, 1)
    reshard(work / "b", work / "a2", dp, 1000)
    assert tree(a) == tree(work / "a2")
    reshard(work / "b", work / "c", 24, "none")
    reshard(a, work / "c2", 24, "none")
    assert tree(work / "c") == tree(work / "c2")


@every_format
def test_bucket_size_alone_and_what_is_not_given_stays(format, container, work):
    state = small_state(1)
    write(work / "a", state, 4, 1000, format, container, pad_for_high_nccl_busbw=True)
    made = zero1ckpt.reshard(work / "a", to_dp=4, dst=work / "b")
    assert tree(work / "a") == tree(work / "b")
    assert made.layout is None or (made.layout.rules.bucket_size == 1000 and made.layout.rules.pad_for_high_nccl_busbw)
    zero1ckpt.reshard(work / "a", work / "c", to_dp=4, bucket_size="none")
    rules = getattr(zero1ckpt.open(work / "c").layout, "rules", None)
    assert rules is None or rules.bucket_size is None
    assert zero1ckpt.open(work / "c").digest == made.digest


# -------------------------------------------------------------------------------------------------- memory and workers


@every_format
@pytest.mark.parametrize("window", [1, 2, 3, 7, 61, 255, 4097, 65_537])
@pytest.mark.parametrize("workers", [1, 3])
def test_windows_and_workers_leave_no_trace(format, container, work, window, workers, monkeypatch):
    shapes = ((9,), (131, 2), (0,), (), (70,)) if window < 16 else ((130, 24), (), (97,), (0,), (3, 5, 7))
    state = small_state(2, shapes)
    state["odd"] = {"fp32_param": finite("float32", (33,), 8), "exp_avg": finite("float32", (33,), 9)}
    write(work / "a", state, 3, 64, format, container, extra={"t": state["odd"]["fp32_param"]})
    write(work / "b", state, 2, 100, format, container, extra={"t": state["odd"]["fp32_param"]})
    monkeypatch.setattr(api_resharding, "window_bytes", lambda limit, workers: window)
    reshard(work / "a", work / "out", 2, 100, workers=workers)
    assert tree(work / "out") == tree(work / "b")


@every_format
def test_memory_limit(format, container, work):
    state = small_state(2)
    write(work / "a", state, 3, 64, format, container)
    outs = []
    for limit, workers in ((65_536, 1), (65_537, 1), (131_073, 2), (2**40, 5)):
        outs.append(work / f"o{limit}")
        zero1ckpt.reshard(work / "a", outs[-1], to_dp=5, memory_limit=limit, workers=workers)
    assert all(tree(out) == tree(outs[0]) for out in outs)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="memory limit is too small") as caught:
        zero1ckpt.reshard(work / "a", work / "x", to_dp=5, memory_limit=65_536, workers=2)
    assert caught.value.exit_code == 2 and not (work / "x").exists()


# ------------------------------------------------------------------------------------------------- content and naming


@every_format
def test_digest_is_of_the_content_alone(format, container, work):
    state = small_state(6)
    one = write(work / "a", state, 2, 1, format, container)
    two = write(work / "b", state, 7, "none", format, container, extra={"x": 1}, step=3)
    assert one.digest == two.digest
    name = next(iter(state))
    assert one.digest_of(name, "exp_avg") == two.digest_of(name, "exp_avg")
    changed = {n: dict(s) for n, s in state.items()}
    changed[name] = {slot: t.reshape(24, 40) for slot, t in state[name].items()}
    three = write(work / "c", changed, 2, 1, format, container)
    assert three.digest != one.digest, "another shape of as many elements is another tensor"
    assert not verify(work / "c", against=work / "a")


@every_format
def test_no_file_says_where_when_or_from_what(format, container, work, monkeypatch):
    state = small_state(5)
    write(work / "here", state, 3, 64, format, container)
    monkeypatch.setenv("USER", "somebody-else")
    (work / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(work / "deep")
    write("er/there", state, 3, 64, format, container)
    assert tree(work / "here") == tree(work / "deep/er/there")
    everything = b"".join(data for data in tree(work / "here").values() if data)
    for secret in (str(work).encode(), b"somebody-else", socket.gethostname().encode()):
        assert len(secret) < 4 or secret not in everything


@every_format
def test_padding_is_zero_on_disk(format, container, work):
    """All stored values are ones, so every other byte of a payload must be zero, where the format says so."""
    if not FORMATS[format, container].zero_padding:
        pytest.skip("what lies between tensors is structure of the container")
    state = {f"w{i}": {"fp32_param": torch.full((n,), 1.0)} for i, n in enumerate((1, 70, 0, 129, 300))}
    write(work / "a", state, 5, 64, format, container)
    reshard(work / "a", work / "b", 3, "none")
    for path in (work / "a", work / "b"):
        stored = describe(path)
        catalog = stored.catalogs[""]
        ones = 0
        for blob in range(catalog.placement.blob_count):
            raw = (path / catalog.placement.blob_key(blob)).read_bytes()
            words = np.frombuffer(raw[len(raw) - catalog.placement.payload_nbytes(blob) :], "<f4")
            assert set(words.tolist()) <= {0.0, 1.0}
            ones += int(words.sum())
        assert ones == 500


def bits_of(path):
    return [(name, byte) for name, data in tree(path).items() if data is not None for byte in range(len(data))]


@every_format
@settings(max_examples=150)
@given(data=st.data())
def test_every_flipped_bit_is_found(format, container, work, data):
    """Any bit of any file: deep verify says no or refuses, and a reshard that reads it publishes nothing."""
    source = work / "a"
    if not source.exists():
        write(source, small_state(4), 3, 1000, format, container, extra={"t": small_state(1)["layers.1.weight"]})
        reshard(source, work / "wanted", 2, "none")
    wanted = tree(work / "wanted")
    places = [name for name, content in tree(source).items() if content is not None]
    name = data.draw(st.sampled_from(sorted(places)))
    size = (source / name).stat().st_size
    byte, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    flip(source / name, byte, bit)
    try:
        before = tree(work)
        try:
            answer = verify(source, deep=True)
        except zero1ckpt.Zero1CkptError as error:
            assert name == "manifest.json" and error.exit_code in (3, 4), error
            assert name in str(error)
        else:
            assert not answer.ok
            assert any(f.file == name for f in answer.findings), answer.findings
        try:
            reshard(source, work / "out", 2, "none", overwrite=True)
        except zero1ckpt.Zero1CkptError as error:
            assert error.exit_code == 4 and name in str(error) and "\n" not in str(error)
            assert tree(work) == before
        else:
            catalog = describe(source, check_files=False).catalogs[""]
            blobs = {catalog.placement.blob_key(blob) for blob in range(catalog.placement.blob_count)}
            harmless = ("nonzero_padding", "damaged_structure")  # no value hangs on it
            assert all(f.kind in harmless or f.file not in blobs for f in answer.findings), answer.findings
            assert tree(work / "out") == wanted
    finally:
        flip(source / name, byte, bit)
        shutil.rmtree(work / "out", ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------- registry


@every_format
def test_registry(format, container):
    plugin = find_format(format, container)
    assert (plugin.name, plugin.container) == (format, container)
    assert find_format(format).name == format
    with pytest.raises(UnsupportedError, match="does not come in this container") as caught:
        find_format(format, "punched cards")
    assert caught.value.exit_code == 5
    with pytest.raises(UnsupportedError, match=f"did you mean {format}"):
        find_format(format[:-1] + "x")


def test_no_format_name_is_compared_outside_the_registry():
    root = Path(zero1ckpt.__file__).parent
    for path in root.rglob("*.py"):
        if path.name == "registry.py" or path.parent.name == "formats":
            continue
        for line in path.read_text().splitlines():
            for name in FORMATS:
                quoted = any(f"{mark} {q}{name}{q}" in line for mark in ("==", "!=", "in", "case") for q in "\"'")
                assert not quoted, f"{path}: {line}"
