"""Values that many tests need: params, layouts, states, and what a folder holds."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st

from zero1ckpt.core.layout import BufferKey, LayoutRules

DP_SIZES = (1, 2, 3, 5, 8, 16, 48, 96)
BUCKET_SIZES = (1, 1000, 4096, "none")


KEYS = (
    BufferKey("bfloat16", "float32", False),
    BufferKey("float32", "float32", False),
    BufferKey("bfloat16", "bfloat16", False),
    BufferKey("bfloat16", "float32", True),
)


@dataclass(frozen=True)
class Param:
    """What a layout needs to know of a param."""

    name: str
    numel: int
    buffer_key: BufferKey = KEYS[1]
    shared_embedding: bool = False


SIZES = st.one_of(
    st.sampled_from((0, 1, 2, 63, 64, 65, 97, 127, 128, 129, 131, 251, 257, 509, 1009)), st.integers(0, 700)
)


@st.composite
def params(draw, max_params=12):
    """Params in registration order, of several buffers, with shared embeddings."""
    count = draw(st.integers(0, max_params))
    few = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3))
    return tuple(
        Param(f"p{i}", draw(SIZES), draw(st.sampled_from(few)), draw(st.integers(0, 5)) == 0) for i in range(count)
    )


@st.composite
def rules(draw, max_dp=96, pad=True):
    dp = draw(
        st.one_of(
            st.sampled_from([d for d in (1, 2, 3, 5, 7, 8, 16, 48, 89, 96) if d <= max_dp]), st.integers(1, max_dp)
        )
    )
    bucket = draw(st.one_of(st.none(), st.sampled_from((1, 10, 64, 128, 1000, 4096)), st.integers(1, 3000)))
    return LayoutRules(dp, bucket, pad_for_high_nccl_busbw=pad and draw(st.integers(0, 9)) == 0)


# ------------------------------------------------------------------------------------------------------------- states

FLOATS = {"float32": torch.int32, "float64": torch.int64, "float16": torch.int16, "bfloat16": torch.int16}


def finite(dtype, shape, seed, *, positive=False):
    """Random values of every finite magnitude that the dtype has: bits, not numbers."""
    made = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=made).bool()
    if dtype not in FLOATS:
        info = torch.iinfo(kind)
        return torch.randint(info.min, info.max, shape, generator=made, dtype=kind)
    integer = FLOATS[dtype]
    info = torch.iinfo(integer)
    bits = torch.randint(0 if positive else info.min, info.max, shape, generator=made, dtype=integer)
    values = bits.view(kind)
    return torch.where(values.isfinite(), values, torch.ones((), dtype=kind))


SHAPES = ((), (1,), (0,), (3, 0), (1, 1), (7,), (64,), (5, 13), (131, 3), (2, 3, 4), (257,), (128, 2), (641,))


def small_state(seed=0, shapes=((40, 24), (64,), (0,), (), (1,), (31, 17), (7,), (3, 5, 7)), slots=None):
    """A state with Adam's slots."""
    kinds = slots or {"fp32_param": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
    return {
        f"layers.{i}.weight": {
            slot: finite(dtype, shape, seed * 1009 + i * 31 + k, positive=slot == "exp_avg_sq")
            for k, (slot, dtype) in enumerate(kinds.items())
        }
        for i, shape in enumerate(shapes)
    }


@st.composite
def states(draw, max_params=7):
    """``(state, keywords of write)``: odd shapes, several dtypes, absent slots, scalar steps, groups, flags."""
    count = draw(st.integers(1, max_params))
    kinds = {"fp32_param": "float32"} | {
        slot: draw(st.sampled_from(("float32", "bfloat16", "float16", "float64", "int8", "int64", "bool", "uint8")))
        for slot in draw(st.lists(st.sampled_from(("exp_avg", "exp_avg_sq", "momentum_buffer", "z")), unique=True))
    }
    if draw(st.booleans()):
        kinds["fp32_param"] = draw(st.sampled_from(("float64", "bfloat16", "float16")))
    scalar = draw(st.sampled_from((None, "int64", "float32")))
    lazy = draw(st.booleans())
    seed = draw(st.integers(0, 2**20))
    state, info = {}, {}
    for i in range(count):
        name = f"blocks.{i}.w"
        shape = draw(st.sampled_from(SHAPES))
        own = {
            slot: finite(dtype, shape, seed + 97 * i + k, positive=slot == "exp_avg_sq")
            for k, (slot, dtype) in enumerate(kinds.items())
            if slot == "fp32_param" or not lazy or draw(st.booleans())
        }
        if scalar and (not lazy or draw(st.booleans())):
            own["step"] = torch.tensor(draw(st.integers(0, 9)), dtype=getattr(torch, scalar))
        state[name] = own
        info[name] = {
            "dtype": draw(st.sampled_from(("bfloat16", "float32", "float16"))),
            "grad_dtype": "float32",
            "expert": draw(st.booleans()),
            "shared_embedding": draw(st.integers(0, 4)) == 0,
        }
    names = list(state)
    cut = draw(st.integers(0, count))
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.95), "params": names[:cut]},
        {"lr": draw(st.sampled_from((0.3, float("inf"), 1e-30))), "weight_decay": 0, "params": names[cut:]},
    ]
    keywords = {"params": draw(st.sampled_from((info, None))), "groups": draw(st.sampled_from((groups, None)))}
    keywords["step"] = draw(st.integers(0, 5))
    keywords["extra"] = draw(st.sampled_from((None, {"a": (1, None)}, {"t": torch.arange(5), 3: [torch.ones(2, 2)]})))
    return state, keywords


def same_bits(a, b):
    """Whether two tensors have the same shape, dtype and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bytes(a.contiguous().reshape(-1).view(torch.uint8).numpy()) == bytes(
        b.contiguous().reshape(-1).view(torch.uint8).numpy()
    )


# ------------------------------------------------------------------------------------------------------------ folders


def tree(path):
    """Every file below a folder with its bytes, and every folder with None."""
    found = {}
    for folder, folders, files in os.walk(path):
        for name in folders:
            found[os.path.relpath(os.path.join(folder, name), path)] = None
        for name in files:
            full = Path(folder, name)
            found[os.path.relpath(full, path)] = full.read_bytes()
    return found


def flip(path, byte, bit=0):
    """Flips one bit of a file in place."""
    data = bytearray(Path(path).read_bytes())
    data[byte] ^= 1 << bit
    Path(path).write_bytes(data)


def check_state(checkpoint, state):
    """Asserts that a checkpoint holds exactly a state."""
    assert checkpoint.names() == list(state)
    for name, slots in state.items():
        for slot in checkpoint.slots:
            if slot in slots:
                assert same_bits(checkpoint.read(name, slot), slots[slot]), (name, slot)
