"""Makes vectors/ and broken/ of each format in formats/: tiny checkpoints, sound ones and ones with one flaw each.

    python tools/generate_vectors.py            writes them
    python tools/generate_vectors.py --check    compares with what is there, writes nothing, exits 1 on a difference

The same code makes the same bytes: no clock, no random numbers. Vectors of a released version are frozen; --check then
says whether today's writer still makes them.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, whichever is installed

import torch  # noqa: E402

import zero1ckpt  # noqa: E402
from zero1ckpt.api.stored import Stored, describe  # noqa: E402
from zero1ckpt.core.digest import crc64, format_digest  # noqa: E402
from zero1ckpt.encodings.safetensors_file import (  # noqa: E402
    TensorEntry,
    build_header,
    file_crc,
    lay_out,
    read_header,
    tensor_cuts,
)
from zero1ckpt.model.catalog import PIECE_BYTES  # noqa: E402
from zero1ckpt.model.manifest import FormatOptions  # noqa: E402

HOME = ROOT / "formats"
SHARDS, WHOLE, SLICES = "bucket_shards", "fully_reshardable", "fully_sharded_model_space"
ZARR, TORCH_DIST = f"{WHOLE}/zarr", f"{WHOLE}/torch_dist"
State = dict[str, dict[str, torch.Tensor]]
Params = dict[str, dict[str, Any]]

# -------------------------------------------------------------------------------------------------------------- values


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Exact numbers that differ from place to place: k/64 between -16 and 16, none of them zero."""
    numel = 1
    for n in shape:
        numel *= n
    numbers = [((seed * 7919 + i * 104_729) % 2047 - 1023 or 1) / 64 for i in range(numel)]
    return torch.tensor(numbers, dtype=torch.float64).to(dtype).reshape(shape)


def adam(seed: int, *shape: int, step: float | None = None) -> dict[str, torch.Tensor]:
    slots = {
        "fp32_param": values(seed, *shape),
        "exp_avg": values(seed + 1, *shape) / 1024,
        "exp_avg_sq": (values(seed + 2, *shape) / 1024) ** 2,
    }
    return slots if step is None else {**slots, "step": torch.tensor(step)}


# ------------------------------------------------------------------------------------------------------------- vectors


def no_params(path: Path, **into: str) -> None:
    zero1ckpt.write(path, {}, dp_size=2, **into)


def plain(path: Path, **into: str) -> None:
    state = {
        "embed.weight": adam(10, 11, 4, step=3.0),
        "fc.weight": adam(20, 6, 4, step=3.0),
        "fc.bias": adam(30, 6, step=3.0),
    }
    group = {"lr": 0.001, "betas": (0.9, 0.95), "eps": 1e-08, "weight_decay": 0.1}
    zero1ckpt.write(path, state, dp_size=2, groups=[group], step=3, **into)


def several_buckets(path: Path, **into: str) -> None:
    state = {f"layers.{i}.weight": adam(40 + 10 * i, 5 + 8 * i, 7) for i in range(5)}
    zero1ckpt.write(path, state, dp_size=2, bucket_size=200, step=7, **into)


def dp_that_does_not_divide(path: Path, **into: str) -> None:
    state = {"a": adam(100, 13, 11), "b": adam(110, 101), "c": adam(120, 37)}
    zero1ckpt.write(path, state, dp_size=3, bucket_size=100, step=1, **into)


def several_buffers(path: Path, **into: str) -> None:
    shapes = {"embed": (9, 8), "router": (3, 8), "norm": (8,), "experts.w": (2, 8, 5), "head": (9, 8)}
    state = {name: adam(130 + 10 * i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    half = {"dtype": "bfloat16", "grad_dtype": "float32"}
    params: Params = {"embed": half, "head": half, "router": {"dtype": "float32"}, "norm": half}
    params["experts.w"] = {**half, "expert": True}
    zero1ckpt.write(path, state, dp_size=2, params=params, step=12, **into)


def tiny_params(path: Path, **into: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {"scale": (), "empty": (0, 3), "one": (1,), "tail": (2, 1), "last.empty": (0,)}
    state = {name: adam(200 + 10 * i, *shape, step=2.0) for i, (name, shape) in enumerate(shapes.items())}
    zero1ckpt.write(path, state, dp_size=4, step=2, **into)


def absent_slots(path: Path, **into: str) -> None:
    state = {"trained": adam(300, 4, 5, step=9.0), "late": adam(310, 9, step=2.0), "never": adam(320, 6, 3)}
    del state["never"]["exp_avg"], state["never"]["exp_avg_sq"]
    state["trained"]["max_exp_avg_sq"] = state["trained"]["exp_avg_sq"] * 2
    zero1ckpt.write(path, state, dp_size=2, step=9, **into)


def two_groups(path: Path, **into: str) -> None:
    state = {
        "w1": {"fp32_param": values(400, 8, 3), "momentum_buffer": values(401, 8, 3)},
        "b1": {"fp32_param": values(402, 3), "momentum_buffer": values(403, 3)},
        "w2": {"fp32_param": values(404, 5, 3), "momentum_buffer": values(405, 5, 3)},
    }
    groups = [
        {"params": ["w1", "w2"], "lr": torch.tensor(0.25), "momentum": 0.9, "weight_decay": 0.01},
        {"params": ["b1"], "lr": 0.5, "momentum": 0.9, "weight_decay": 0.0, "nesterov": True},
    ]
    zero1ckpt.write(path, state, dp_size=2, groups=groups, step=5, **into)


def extra_with_tensors(path: Path, **into: str) -> None:
    extra = {
        "scheduler": {"last_epoch": 4, "milestones": {10: 1, 20: 2}, "base_lrs": [0.1], "best": float("-inf")},
        "tuple": (1, 2.0, "drei"),
        "big": 2**70,
        "complex": 1 - 2j,
        "raw": b"\x00\xff",
        "dtype": torch.bfloat16,
        "dollar": {"$tensor": "only a key that looks like a tag"},
        "ema": values(500, 3, 2, dtype=torch.bfloat16),
        "seen": [torch.tensor([3, 1, 2]), torch.tensor(True), torch.zeros(0, 4)],
    }
    zero1ckpt.write(path, {"w": adam(510, 4, 4)}, dp_size=2, step=4, extra=extra, **into)


def own_buckets(path: Path, **into: str) -> None:
    state = {f"layers.{i}": adam(600 + 10 * i, 10 + 23 * i) for i in range(3)}
    state = {"word_embeddings": adam(590, 7, 10), **state, "tail": adam(640, 100)}
    params: Params = {"word_embeddings": {"shared_embedding": True}, "layers.1": {"shared_embedding": True}}
    zero1ckpt.write(path, state, dp_size=2, params=params, step=1, **into)


def other_dtypes(path: Path, **into: str) -> None:
    def slots(seed: int, n: int) -> dict[str, torch.Tensor]:
        codes = (torch.arange(n) * 37 + seed) % 256
        return {
            "fp32_param": values(seed, n, dtype=torch.float64),
            "exp_avg": values(seed + 1, n, dtype=torch.bfloat16),
            "exp_avg_sq": values(seed + 2, n, dtype=torch.float16) ** 2,
            "codes": codes.to(torch.uint8),
            "frozen": codes % 3 == 0,
            "hits": codes - 128,
        }

    zero1ckpt.write(path, {"a": slots(700, 33), "b": slots(710, 130)}, dp_size=3, step=6, **into)


def unusual_names(path: Path, **into: str) -> None:
    names = ["blocks.0.été", 'quo"te\\back', "tab\tdel\x7f", "emoji \U0001f9ca/slash"]
    state = {name: adam(800 + 10 * i, 3) for i, name in enumerate(names)}
    zero1ckpt.write(path, state, dp_size=2, step=1, **into)


def padded_for_high_busbw(path: Path, **into: str) -> None:
    state = {
        name: {"exp_avg": values(900, n, dtype=torch.bfloat16).to(torch.int8)} for name, n in (("a", 70), ("b", 5))
    }
    zero1ckpt.write(path, state, dp_size=2, pad_for_high_nccl_busbw=True, step=1, **into)


class Momentum(torch.optim.Optimizer):
    """Exact in the numbers used here, with few hyper-parameters, so that no version of torch makes other bytes."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                slots = self.state[param]
                average = slots.setdefault("momentum_buffer", torch.zeros_like(param))
                average.mul_(0.5).add_(param.grad)
                param.sub_(average * group["lr"])


def several_parts(path: Path, **into: str) -> None:
    """Two optimizers, one with a dynamic loss scale; the model's own tensors; state of a rank; extra with a tensor."""
    gen = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)).half()
    other = torch.nn.Linear(4, 7)
    model = torch.nn.ModuleDict({"gen": gen, "other": other, "frozen": torch.nn.Linear(2, 2)})
    for i, tensor in enumerate([*model.parameters(), *model.buffers()]):
        tensor.data.copy_(values(1000 + i, *tensor.shape))
    optimizers = {
        "gen": zero1ckpt.Zero1Optimizer(gen, Momentum, lr=0.5, loss_scale="dynamic"),
        "other/é": zero1ckpt.Zero1Optimizer(other, Momentum, lr=0.25),
    }
    for seed, optimizer in enumerate(optimizers.values()):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        loss = sum((p.float() * values(1100 + 10 * seed + i, *p.shape) / 256).sum() for i, p in enumerate(params))
        optimizer.scale(loss).backward()  # so gradients are those values
        optimizer.step()
        assert not optimizer.last.skipped
    with tempfile.TemporaryDirectory() as temporary:
        one = path if into["format"] == WHOLE else Path(temporary) / "one"
        zero1ckpt.save(
            one,
            optimizers,
            extra={"ema": values(1200, 3)},
            rank_extra={"rng": torch.arange(5, dtype=torch.uint8), "at": (1, 2.5)},
            model=model,
            **into,
        )
        if one != path:
            zero1ckpt.reshard(one, path, to_dp=2)


def factored_slots(path: Path, **into: str) -> None:
    """As Adafactor keeps them: of a matrix, a second moment of its rows and one of its columns; of a vector, all."""

    def matrix(seed: int, rows: int, columns: int) -> dict[str, torch.Tensor]:
        return {
            "fp32_param": values(seed, rows, columns),
            "exp_avg_sq_row": values(seed + 1, rows) ** 2,
            "exp_avg_sq_col": values(seed + 2, columns) ** 2,
            "step": torch.tensor(4.0),
        }

    def vector(seed: int, n: int) -> dict[str, torch.Tensor]:
        return {"fp32_param": values(seed, n), "exp_avg_sq": values(seed + 1, n) ** 2, "step": torch.tensor(4.0)}

    state = {
        "embed": matrix(1300, 11, 14),
        "norm": vector(1310, 7),
        "fc.w": matrix(1320, 9, 6),
        "fc.b": vector(1330, 9),
    }
    zero1ckpt.write(path, state, dp_size=3, step=4, **into)


def block_quantised(path: Path, **into: str) -> None:
    """Moments in 8 bits with a scale for each block of 16: once in the param's shape, once in whole blocks.

    ``a`` with a slot ``b.c`` and ``a.b`` with a slot ``c``: names of tensors must tell them apart.
    """

    def slots(seed: int, *shape: int) -> dict[str, torch.Tensor]:
        main = values(seed, *shape)
        blocks = -(-main.numel() // 16)
        codes = (torch.arange(blocks * 16) * 37 + seed) % 256
        return {
            "fp32_param": main,
            "exp_avg": (codes[: main.numel()] - 128).to(torch.int8).reshape(shape),
            "exp_avg.absmax": values(seed + 1, blocks).abs(),
            "exp_avg_sq": codes.to(torch.uint8).reshape(blocks, 16),
            "exp_avg_sq.absmax": values(seed + 2, blocks, dtype=torch.bfloat16).abs(),
        }

    state = {"w": slots(1400, 5, 19), "empty": slots(1410, 0, 3), "v": slots(1420, 33)}
    state["a"] = {"fp32_param": values(1430, 3), "b.c": values(1431, 2), "c": values(1432, 3, 1, 2)}
    state["a.b"] = {"fp32_param": values(1440, 4), "b.c": values(1441, 1, 5), "c": values(1442, 2)}
    zero1ckpt.write(path, state, dp_size=2, step=8, **into)


def several_files(path: Path, **into: str) -> None:
    """A new file is begun at 300 bytes; one tensor is larger, and one of 0 elements follows it."""
    state = {
        "embed": adam(1500, 6, 4, step=3.0),
        "fc.weight": adam(1510, 4, 6, step=3.0),
        "fc.bias": adam(1520, 7, step=3.0),
        "large": {"fp32_param": values(1530, 10, 9)},
        "empty": adam(1540, 0, 9, step=3.0),
        "tail": adam(1550, 2, step=3.0),
    }
    zero1ckpt.write(path, state, dp_size=2, step=3, options=FormatOptions(shard_bytes=300), **into)


def two_files(path: Path, **into: str) -> None:
    state = {"embed": adam(1500, 6, 4, step=3.0), "fc.weight": adam(1510, 4, 6, step=3.0)}
    zero1ckpt.write(path, state, dp_size=2, step=3, options=FormatOptions(shard_bytes=300), **into)


def cut_params(path: Path, **into: str) -> None:
    """``w`` is cut in the middle, and both ranks hold as many bytes."""
    state = {"c": adam(1600, 5, step=2.0), "w": adam(1610, 8, 32, step=2.0), "b": adam(1620, 5, step=2.0)}
    zero1ckpt.write(path, state, dp_size=2, groups=[{"lr": 0.001}], step=2, **into)


INTO = {
    SHARDS: {"format": SHARDS},
    WHOLE: {"format": WHOLE},
    SLICES: {"format": SLICES},
    ZARR: {"format": WHOLE, "container": "zarr"},
    TORCH_DIST: {"format": WHOLE, "container": "torch_dist"},
}
"""How to write what lies below a folder of ``formats/``; a format's other containers have folders in the format's."""
VECTORS: dict[str, tuple[Callable[..., None], ...]] = {
    SHARDS: (
        no_params,
        plain,
        several_buckets,
        dp_that_does_not_divide,
        several_buffers,
        tiny_params,
        absent_slots,
        two_groups,
        extra_with_tensors,
        own_buckets,
        other_dtypes,
        unusual_names,
        padded_for_high_busbw,
        factored_slots,
        block_quantised,
        several_parts,
    ),
    WHOLE: (
        no_params,
        two_files,
        several_files,
        tiny_params,
        absent_slots,
        extra_with_tensors,
        other_dtypes,
        unusual_names,
        factored_slots,
        block_quantised,
        several_parts,
    ),
    SLICES: (
        no_params,
        cut_params,
        dp_that_does_not_divide,
        several_buffers,
        tiny_params,
        absent_slots,
        unusual_names,
        factored_slots,
        block_quantised,
        several_parts,
    ),
}
# ------------------------------------------------------------------------------------------- what a vector is expected


def facts(path: Path) -> dict[str, Any]:
    """What `inspect --json` says of a vector, and all values; with several parts, under their names in ``parts``."""
    stored = describe(path)
    parts = {name: part_facts(ckpt) for name, ckpt in zero1ckpt.open(path).parts.items()}
    own = parts.pop("", {})
    files = [{"path": f.path, "bytes": f.bytes} for f in stored.manifest.files]
    found = {"format": stored.manifest.format, "container": stored.manifest.container}
    if parts:
        return {**found, "digest": stored.manifest.digest, "files": files, "parts": parts}
    values = own.pop("values")
    return {**found, **own, "files": files, "values": values}


def part_facts(ckpt: zero1ckpt.Checkpoint) -> dict[str, Any]:
    layout, state = ckpt.layout, ckpt.state
    return {
        "step": ckpt.step,
        "dp_size": None if layout is None else layout.rules.dp_size,
        "bucket_size": None if layout is None else layout.rules.bucket_size,
        "digest": ckpt.digest,
        "slots": list(ckpt.slots),
        "slot_dtypes": {slot.name: slot.dtype for slot in state.slots},
        "params": [param_facts(ckpt, i) for i in range(len(state.params))],
        "buffers": [
            {
                "param_dtype": buffer.key.param_dtype,
                "grad_dtype": buffer.key.grad_dtype,
                "numel": buffer.numel,
                "numel_unpadded": buffer.numel_unpadded,
                "buckets": [
                    {"index": b.index, "offset": b.offset, "numel": b.numel, "numel_unpadded": b.numel_unpadded}
                    for b in buffer.buckets
                ],
            }
            for buffer in (layout.buffers if layout else ())
        ],
        "ranks": [
            {
                "rank": rank,
                "shards": [
                    {
                        "name": f.name,
                        "buffer": b,
                        "bucket": f.bucket,
                        "gbuf_world": [f.gbuf_world.start, f.gbuf_world.end],
                        "gbuf_world_in_bucket": [f.gbuf_world_in_bucket.start, f.gbuf_world_in_bucket.end],
                        "gbuf_local": [f.gbuf_local.start, f.gbuf_local.end],
                        "param": [f.param.start, f.param.end],
                    }
                    for b, buffer in enumerate(layout.buffers)
                    for f in buffer.fragments(rank)
                ],
            }
            for rank in (range(layout.rules.dp_size) if layout else ())
        ],
        "values": [value(ckpt, name, slot) for name, slot in ckpt.tensors()],
    }


def param_facts(ckpt: zero1ckpt.Checkpoint, index: int) -> dict[str, Any]:
    """``shapes``: of whole slots."""
    state = ckpt.state
    spec = state.params[index]
    shapes = {s.name: list(state.shapes[index, k]) for k, s in enumerate(state.slots) if (index, k) in state.shapes}
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "numel": spec.numel,
        "group": spec.group,
        "digests": {s.name: d for s in state.slots if (d := ckpt.digest_of(spec.name, s.name))},
        "scalars": {name: scalar.value for name, scalar in state.scalars_of(index).items()},
        **({"shapes": shapes} if shapes else {}),
    }


def value(ckpt: zero1ckpt.Checkpoint, name: str, slot: str) -> dict[str, Any]:
    """A tensor exactly (its bytes, row-major, little-endian, in hex), and its first elements for people."""
    tensor = ckpt.read(name, slot).reshape(-1)
    return {
        "param": name,
        "slot": slot,
        "hex": tensor.view(torch.uint8).numpy().tobytes().hex() if tensor.numel() else "",
        "first": tensor[:3].tolist(),
    }


# -------------------------------------------------------------------------------------------------------------- broken

RANK0, RANK1 = "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"
Expect = tuple[str, int, list[str]]
"""Command, exit code, what the message holds."""
Make = Callable[[Path], None]


class Flaw(NamedTuple):
    """``make`` puts it into a copy of the vector ``base`` of the same folder."""

    make: Make
    base: str
    what: str
    expect: tuple[Expect, ...]


VECTORS[ZARR] = VECTORS[TORCH_DIST] = (no_params, plain, tiny_params, absent_slots, other_dtypes, several_parts)
BROKEN: dict[str, dict[str, Flaw]] = {home: {} for home in INTO}


def flaw(what: str, *expect: Expect, home: str = SHARDS, base: str = "plain") -> Callable[[Make], Make]:
    """Registers a function that puts one flaw into a copy of a vector; its name names the flaw."""

    def register(make: Make) -> Make:
        BROKEN[home][make.__name__] = Flaw(make, base, what, expect)
        return make

    return register


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def reseal(folder: Path, *changes: tuple[str, str]) -> None:
    """Changes the manifest's text, each once, and gives it the digest that fits."""
    path = folder / "manifest.json"
    body = path.read_text().rpartition('"manifest_digest"')[0]
    for old, new in changes:
        assert body.count(old) == 1, (folder, old, body.count(old))
        body = body.replace(old, new)
    path.write_text(f'{body}"manifest_digest": "{format_digest(crc64(body.encode()))}"\n}}\n')


def stated(folder: Path, key: str) -> str:
    return next(f.digest for f in describe(folder, check_files=False).manifest.files if f.path == key)


def swap_header_text(folder: Path, old: str, new: str, key: str = RANK1) -> None:
    """Changes a file's header, by default rank 1's, and states the digest of the changed file."""
    path = folder / key
    before, data = stated(folder, key), path.read_bytes()
    head, payload = data[:4096], data[4096:]
    assert head.count(old.encode()) == 1
    text = head[8:].replace(old.encode(), new.encode()).rstrip(b" ").ljust(4088)
    path.write_bytes(head[:8] + text + payload)
    reseal(folder, (before, format_digest(crc64(path.read_bytes()))))


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Stored]:
    stored = describe(folder, check_files=False)
    yield stored
    stored.store.close()


OTHER_SAVE = "not the one that the manifest describes"


@flaw(
    "the last 100 bytes of rank 1's file are gone",
    ("open", 4, [RANK1, "truncated", "5532 bytes", "5632 bytes"]),
    ("verify", 1, [RANK1, "found", "expected"]),
    ("reshard", 4, [RANK1, "truncated"]),
)
def truncated_file(folder: Path) -> None:
    data = (folder / RANK1).read_bytes()
    (folder / RANK1).write_bytes(data[:-100])


@flaw(
    "four zero bytes too many at the end of rank 1's file",
    ("open", 4, [RANK1, "longer"]),
    ("verify", 1, [RANK1, "found", "expected"]),
)
def long_file(folder: Path) -> None:
    (folder / RANK1).write_bytes((folder / RANK1).read_bytes() + bytes(4))


@flaw(
    "rank 0's file is not there",
    ("open", 3, [RANK0, "missing"]),
    ("verify", 1, [RANK0, "missing"]),
    ("reshard", 3, [RANK0, "missing"]),
)
def missing_file(folder: Path) -> None:
    (folder / RANK0).unlink()


@flaw(
    "one bit of exp_avg of embed.weight in rank 1's file; only reading the data finds it",
    ("open", 0, []),
    ("verify", 0, []),
    ("verify --deep", 1, [RANK1, "embed.weight", "exp_avg", "elements 0 to 44", "checksum"]),
    ("reshard", 4, [RANK1, "embed.weight", "exp_avg"]),
)
def flipped_bit_in_data(folder: Path) -> None:
    with opened(folder) as stored:
        table = stored.catalogs[""].placement.extents(1)
    row = next(i for i in range(len(table)) if (table.param[i], table.slot[i]) == (0, 1))
    flip(folder / RANK1, 4096 + int(table.at[row]) + 21)


@flaw(
    "one bit of the stored checksums in rank 1's header",
    ("open", 0, []),
    ("verify", 1, [RANK1, OTHER_SAVE]),
    ("reshard", 4, [RANK1, OTHER_SAVE]),
)
def flipped_bit_in_header(folder: Path) -> None:
    mark = b'"zero1ckpt.pieces":"'
    flip(folder / RANK1, (folder / RANK1).read_bytes().index(mark) + len(mark) + 5)


@flaw(
    "one bit of the space that pads rank 1's header",
    ("verify", 1, [RANK1]),
    ("reshard", 4, [RANK1]),
)
def flipped_bit_in_header_padding(folder: Path) -> None:
    flip(folder / RANK1, 4000)


@flaw(
    "one bit of a digit of the learning rate",
    ("open", 4, ["manifest.json", "does not match its own digest"]),
    ("verify", 4, ["manifest.json", "does not match its own digest"]),
)
def flipped_bit_in_manifest(folder: Path) -> None:
    mark = b'"lr":0.00'
    flip(folder / "manifest.json", (folder / "manifest.json").read_bytes().index(mark) + len(mark))


@flaw(
    "the manifest ends in the middle",
    ("open", 4, ["manifest.json", "cut off"]),
    ("verify", 4, ["manifest.json", "cut off"]),
)
def cut_off_manifest(folder: Path) -> None:
    data = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(data[: len(data) // 2])


@flaw(
    "the files of rank 0 and 1 have each other's names",
    ("open", 0, []),
    ("verify", 1, [RANK0, OTHER_SAVE]),
    ("reshard", 4, ["rank-0000", OTHER_SAVE]),
)
def swapped_rank_files(folder: Path) -> None:
    first, second = (folder / RANK0).read_bytes(), (folder / RANK1).read_bytes()
    (folder / RANK0).write_bytes(second)
    (folder / RANK1).write_bytes(first)


@flaw(
    "the manifest is that of a later save of the same model",
    ("open", 0, []),
    ("verify", 1, [RANK0, OTHER_SAVE]),
    ("reshard", 4, ["rank-0000", OTHER_SAVE]),
)
def manifest_of_another_save(folder: Path) -> None:
    state = {"embed.weight": adam(11, 11, 4), "fc.weight": adam(21, 6, 4), "fc.bias": adam(31, 6)}
    with tempfile.TemporaryDirectory() as other:
        zero1ckpt.write(Path(other) / "later", state, dp_size=2, step=4)
        shutil.copyfile(Path(other) / "later" / "manifest.json", folder / "manifest.json")


@flaw(
    "there is no manifest: the save was never committed",
    ("open", 3, ["no committed checkpoint", "manifest.json"]),
    ("verify", 3, ["no committed checkpoint", "manifest.json"]),
    ("reshard", 3, ["no committed checkpoint", "manifest.json"]),
)
def uncommitted(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@flaw(
    "a byte of the padding of rank 1's shard is 1; all checksums agree with it",
    ("open", 0, []),
    ("verify", 0, []),
    ("verify --deep", 1, [RANK1, "padding", "not zero"]),
)
def nonzero_padding(folder: Path) -> None:
    with opened(folder) as stored:
        catalog, entry = stored.catalogs[""], stored.files[RANK1]
        header, cuts = read_header(stored.store, RANK1), stored.format.cuts(catalog, 1)
        table = catalog.placement.extents(1)
        bounds = cuts.tolist()
        payload = bytearray((folder / RANK1).read_bytes()[header.payload :])
        inside = {int(at) for at in table.at}
        piece = next(i for i, low in enumerate(bounds[:-1]) if low not in inside)
        payload[bounds[piece] + 3] = 1
        crcs = list(header.pieces)
        crcs[piece] = crc64(payload[bounds[piece] : bounds[piece + 1]])
        head = build_header(header.tensors, crcs, PIECE_BYTES)
        (folder / RANK1).write_bytes(head + payload)
        reseal(folder, (entry.digest, format_digest(file_crc(crc64(head), cuts, crcs))))


@flaw(
    "the manifest has a schema that this version does not know",
    ("open", 5, ["manifest.json", "zero1ckpt.manifest/2", "zero1ckpt.manifest/1"]),
)
def unknown_schema(folder: Path) -> None:
    reseal(folder, ("zero1ckpt.manifest/1", "zero1ckpt.manifest/2"))


@flaw(
    "the manifest has a field that the schema does not know",
    ("open", 4, ["manifest.json", "created_at"]),
)
def unknown_field(folder: Path) -> None:
    reseal(folder, ('"checksum":', '"created_at": "yesterday",\n"checksum":'))


@flaw("the format has a name that nobody gave it", ("open", 5, ["manifest.json", "bucket_shard", "did you mean"]))
def unknown_format(folder: Path) -> None:
    reseal(folder, ('"bucket_shards"', '"bucket_shard"'))


@flaw("bucket_shards does not come in zarr", ("open", 5, ["manifest.json", "zarr", "safetensors"]))
def wrong_container(folder: Path) -> None:
    reseal(folder, ('"container": "safetensors"', '"container": "zarr"'))


@flaw("the checksums are of another kind", ("open", 5, ["manifest.json", "crc32c", "crc64nvme"]))
def unknown_checksum(folder: Path) -> None:
    reseal(folder, ('"crc64nvme"', '"crc32c"'))


@flaw("a slot has an element type that does not exist", ("open", 5, ["manifest.json", "float128"]))
def unknown_dtype(folder: Path) -> None:
    reseal(folder, ('{"name":"exp_avg","dtype":"float32"}', '{"name":"exp_avg","dtype":"float128"}'))


@flaw("the pieces are of another size", ("open", 5, ["manifest.json", "1048576", "4194304"]))
def wrong_piece_bytes(folder: Path) -> None:
    reseal(folder, ('"piece_bytes": 4194304', '"piece_bytes": 1048576'))


@flaw(
    "the manifest does not list rank 1's file, which is there",
    ("open", 4, ["manifest.json", "does not list", RANK1]),
    ("verify", 4, ["manifest.json", "does not list", RANK1]),
)
def unlisted_blob(folder: Path) -> None:
    lines = (folder / "manifest.json").read_text().split("\n")
    row = next(line for line in lines if RANK1 in line)
    reseal(folder, (",\n" + row, ""))


@flaw("a listed file lies outside of the folder", ("open", 4, ["manifest.json", "../" + RANK1]))
def path_leaving_folder(folder: Path) -> None:
    reseal(folder, (f'"{RANK1}"', f'"../{RANK1}"'))


@flaw("two params have the same name", ("open", 4, ["manifest.json", "fc.weight", "twice"]))
def duplicate_param(folder: Path) -> None:
    reseal(folder, ('"name":"fc.bias"', '"name":"fc.weight"'))


@flaw("a param is in a group that does not exist", ("open", 4, ["manifest.json", "fc.bias", "group"]))
def group_out_of_range(folder: Path) -> None:
    row = '"shape":[6],"dtype":"float32","grad_dtype":"float32"'
    reseal(folder, (row, row + ',"group":1'))


@flaw("a dynamic loss scale is 0", ("open", 4, ["manifest.json", "loss scale", "0.0"]))
def loss_scale_of_zero(folder: Path) -> None:
    row = '"loss_scale": {"scale":0.0,"finite_steps":0,"hysteresis_left":0},\n'
    reseal(folder, ('"groups": [', row + '"groups": ['))


@flaw(
    "the manifest states a bucket size that the files were not written with",
    ("open", 0, []),
    ("verify", 1, [RANK0, "buffer.0.bucket.0.fp32_param", "layout"]),
    ("reshard", 4, ["rank-0000", "layout"]),
)
def wrong_layout_rules(folder: Path) -> None:
    reseal(folder, ('"bucket_size":null', '"bucket_size":10'))


@flaw(
    "a param has another shape of the same size",
    ("open", 0, []),
    ("verify", 1, ["fc.weight", "digest"]),
    ("reshard", 4, ["fc.weight", "digest"]),
)
def transposed_shape(folder: Path) -> None:
    reseal(folder, ('"name":"fc.weight","shape":[6,4]', '"name":"fc.weight","shape":[4,6]'))


@flaw(
    "the part's digest is not that of its tensors",
    ("open", 0, []),
    ("verify", 1, ["digest"]),
)
def wrong_part_digest(folder: Path) -> None:
    with opened(folder) as stored:
        digest = stored.manifest.digest
    part = f'"step": 3, "digest": "{digest}"'
    whole = f'"piece_bytes": {PIECE_BYTES},\n"digest": "{digest}"'
    reseal(folder, (whole, whole.replace(digest, "0" * 16)), (part, part.replace(digest, "f" * 16)))


@flaw(
    "the length in front of rank 1's header is 2**40",
    ("open", 0, []),
    ("verify", 1, [RANK1, "header", str(2**40)]),
    ("reshard", 4, [RANK1, "header", str(2**40)]),
)
def header_too_long(folder: Path) -> None:
    data = (folder / RANK1).read_bytes()
    (folder / RANK1).write_bytes((2**40).to_bytes(8, "little") + data[8:])


@flaw(
    "rank 1's header is no JSON",
    ("verify", 1, [RANK1, "header cannot be parsed"]),
    ("reshard", 4, [RANK1, "header cannot be parsed"]),
)
def header_is_no_json(folder: Path) -> None:
    swap_header_text(folder, '{"__metadata__"', '("__metadata__"')


@flaw(
    "two tensors of rank 1's file overlap; its digest agrees",
    ("verify", 1, [RANK1, "buffer.0.bucket.0.exp_avg"]),
    ("reshard", 4, [RANK1, "buffer.0.bucket.0.exp_avg"]),
)
def overlapping_tensors(folder: Path) -> None:
    with opened(folder) as stored:
        entry = next(t for t in read_header(stored.store, RANK1).tensors if t.name.endswith(".exp_avg"))
    old, new = [entry.begin, entry.end], [entry.begin - 4, entry.end - 4]
    swap_header_text(folder, json.dumps(old, separators=(",", ":")), json.dumps(new, separators=(",", ":")))


@flaw(
    "rank 1's header has one checksum too few; its digest agrees",
    ("verify", 1, [RANK1, OTHER_SAVE]),
    ("reshard", 4, [RANK1, OTHER_SAVE]),
)
def checksum_missing(folder: Path) -> None:
    with opened(folder) as stored:
        last = format_digest(read_header(stored.store, RANK1).pieces[-1])
    swap_header_text(folder, last + '"', '"')


# ------------------------------------------------------------------------------------- broken, of the other two formats

SHARD = "optimizer-{:05d}-of-00002.safetensors".format
INDEX = "optimizer.safetensors.index.json"


def rewrite(folder: Path, key: str, change: Callable[[list[tuple[TensorEntry, bytes]]], None]) -> None:
    """Changes the tensors of a file that is cut at its tensors only, and has all checksums and sizes agree."""
    path, store = folder / key, describe(folder, check_files=False).store
    header, data = read_header(store, key), path.read_bytes()
    store.close()
    rows = [(t, data[header.payload + t.begin : header.payload + t.end]) for t in header.tensors]
    change(rows)
    entries = lay_out([(t.name, t.dtype, t.shape) for t, _ in rows])
    payload = b"".join(value for _, value in rows)
    cuts = tensor_cuts(entries, PIECE_BYTES)
    crcs = [crc64(payload[low:high]) for low, high in pairwise(cuts.tolist())]
    whole = build_header(entries, crcs, PIECE_BYTES) + payload
    old = f'"bytes":{len(data)},"digest":"{stated(folder, key)}"'
    path.write_bytes(whole)
    reseal(folder, (old, f'"bytes":{len(whole)},"digest":"{format_digest(crc64(whole))}"'))


def rename(rows: list[tuple[TensorEntry, bytes]], old: str, new: str) -> None:
    at = next(i for i, (t, _) in enumerate(rows) if t.name == old)
    rows[at] = (replace(rows[at][0], name=new), rows[at][1])


def flaws_of_files(home: str, base: str, first: str, second: str, inside: str, line: str, later: State) -> None:
    """What can befall files of any format. ``first`` and ``second`` are files of one size; ``inside``: of ``second``,
    a tensor of the param ``w`` or what is like it; ``line``: how a message names it; ``later``: state of a later save.
    """

    def own(what: str, *expect: Expect) -> Callable[[Make], Make]:
        return flaw(what, *expect, home=home, base=base)

    @own(
        "the last 100 bytes of a file are gone",
        ("open", 4, [second, "truncated"]),
        ("verify", 1, [second, "found", "expected"]),
        ("reshard", 4, [second, "truncated"]),
    )
    def truncated_file(folder: Path) -> None:
        (folder / second).write_bytes((folder / second).read_bytes()[:-100])

    @own(
        "a file is not there",
        ("open", 3, [first, "missing"]),
        ("verify", 1, [first, "missing"]),
        ("reshard", 3, [first, "missing"]),
    )
    def missing_file(folder: Path) -> None:
        (folder / first).unlink()

    @own(
        "one bit of a value; only reading the data finds it",
        ("open", 0, []),
        ("verify", 0, []),
        ("verify --deep", 1, [second, line, "checksum"]),
        ("reshard", 4, [second, line.split(":")[0]]),
    )
    def flipped_bit_in_data(folder: Path) -> None:
        with opened(folder) as stored:
            header = read_header(stored.store, second)
        entry = next(t for t in header.tensors if t.name == inside)
        flip(folder / second, header.payload + entry.begin + 5)

    @own(
        "one bit of the stored checksums in a header",
        ("open", 0, []),
        ("verify", 1, [second, OTHER_SAVE]),
        ("reshard", 4, [second, OTHER_SAVE]),
    )
    def flipped_bit_in_header(folder: Path) -> None:
        mark = b'"zero1ckpt.pieces":"'
        flip(folder / second, (folder / second).read_bytes().index(mark) + len(mark) + 5)

    @own(
        "two files of one size have each other's names",
        ("open", 0, []),
        ("verify", 1, [first, "not what the layout says"]),
        ("reshard", 4, ["is not what the layout says"]),
    )
    def swapped_files(folder: Path) -> None:
        one, two = (folder / first).read_bytes(), (folder / second).read_bytes()
        assert len(one) == len(two)
        (folder / first).write_bytes(two)
        (folder / second).write_bytes(one)

    @own(
        "a file is that of a later save of the same model",
        ("open", 0, []),
        ("verify", 1, [second, OTHER_SAVE]),
        ("reshard", 4, [second, OTHER_SAVE]),
    )
    def file_of_another_save(folder: Path) -> None:
        with opened(folder) as stored:
            options = stored.manifest.options
        with tempfile.TemporaryDirectory() as other:
            zero1ckpt.write(Path(other) / "later", later, dp_size=2, step=4, options=options, **INTO[home])
            shutil.copyfile(Path(other) / "later" / second, folder / second)

    @own(
        "two tensors of a file overlap; its digest agrees",
        ("verify", 1, [second, "header cannot be parsed"]),
        ("reshard", 4, [second, "header cannot be parsed"]),
    )
    def overlapping_tensors(folder: Path) -> None:
        move(folder, -4)

    @own(
        "there are bytes between two tensors of a file that are of neither; its digest agrees",
        ("verify", 1, [second, "header cannot be parsed"]),
        ("reshard", 4, [second, "header cannot be parsed"]),
    )
    def gap_between_tensors(folder: Path) -> None:
        move(folder, 4)

    def move(folder: Path, by: int) -> None:
        with opened(folder) as stored:
            entry = next(t for t in read_header(stored.store, second).tensors if t.name == inside)
        old, new = (json.dumps([entry.begin + n, entry.end + n], separators=(",", ":")) for n in (0, by))
        swap_header_text(folder, old, new, second)

    @own(
        "a file lacks a tensor; its digest agrees",
        ("verify", 1, [second, inside, "found none"]),
        ("reshard", 4, [second, inside, "found none"]),
    )
    def tensor_missing(folder: Path) -> None:
        rewrite(folder, second, lambda rows: rows.remove(next(row for row in rows if row[0].name == inside)))

    @own(
        "a file has a tensor that the manifest knows nothing of; its digest agrees",
        ("verify", 1, [second, "stowaway", "expected none"]),
        ("reshard", 4, [second, "stowaway", "expected none"]),
    )
    def foreign_tensor(folder: Path) -> None:
        entry = TensorEntry("stowaway", "int64", (1,), 0, 8)
        rewrite(folder, second, lambda rows: rows.append((entry, (2**40).to_bytes(8, "little"))))

    @own(
        "a tensor has another dtype of the same size; the file's digest agrees",
        ("verify", 1, [second, inside, "int32", "float32"]),
        ("reshard", 4, [second, inside, "int32", "float32"]),
    )
    def wrong_dtype(folder: Path) -> None:
        swap_header_text(folder, f'"{inside}":{{"dtype":"F32"', f'"{inside}":{{"dtype":"I32"', second)

    @own(
        "the values of a tensor are others, and the file's checksums agree; the tensor's digest does not",
        ("open", 0, []),
        ("verify", 1, [line.split(":")[0], "digest"]),
        ("reshard", 4, [line.split(":")[0], "digest"]),
    )
    def wrong_tensor_digest(folder: Path) -> None:
        def change(rows: list[tuple[TensorEntry, bytes]]) -> None:
            at = next(i for i, (t, _) in enumerate(rows) if t.name == inside)
            rows[at] = (rows[at][0], rows[at][1][4:] + rows[at][1][:4])

        rewrite(folder, second, change)


flaws_of_files(
    WHOLE,
    "two_files",
    SHARD(1),
    SHARD(2),
    "fc.weight/exp_avg",
    "fc.weight: exp_avg elements 0 to 24",
    {"embed": adam(1501, 6, 4, step=4.0), "fc.weight": adam(1511, 4, 6, step=4.0)},
)
flaws_of_files(
    SLICES,
    "cut_params",
    RANK0,
    RANK1,
    "w/exp_avg/128:256",
    "w: exp_avg elements 128 to 256",
    {"c": adam(1601, 5, step=4.0), "w": adam(1611, 8, 32, step=4.0), "b": adam(1621, 5, step=4.0)},
)


def whole_flaw(what: str, *expect: Expect, base: str = "two_files") -> Callable[[Make], Make]:
    return flaw(what, *expect, home=WHOLE, base=base)


def slice_flaw(what: str, *expect: Expect, base: str = "cut_params") -> Callable[[Make], Make]:
    return flaw(what, *expect, home=SLICES, base=base)


NOT_DERIVED = "not what follows from the manifest"


@whole_flaw("the index is not there", ("open", 3, [INDEX, "missing"]), ("verify", 1, [INDEX, "missing"]))
def missing_index(folder: Path) -> None:
    (folder / INDEX).unlink()


@whole_flaw("one bit of the index", ("open", 0, []), ("verify", 1, [INDEX, NOT_DERIVED]))
def flipped_bit_in_index(folder: Path) -> None:
    flip(folder / INDEX, 40)


@whole_flaw(
    "the index says of a tensor that it lies in another file; its digest agrees",
    ("open", 0, []),
    ("verify", 1, [INDEX, NOT_DERIVED]),
)
def wrong_index(folder: Path) -> None:
    before, text = stated(folder, INDEX), (folder / INDEX).read_text()
    row = f'"fc.weight/exp_avg": "{SHARD(2)}"'
    assert text.count(row) == 1
    (folder / INDEX).write_text(text.replace(row, row.replace(SHARD(2), SHARD(1))))
    reseal(folder, (before, format_digest(crc64((folder / INDEX).read_bytes()))))


@whole_flaw(
    "the digest that the manifest states for the index is not that of the index, which is sound",
    ("open", 0, []),
    ("verify", 1, [INDEX, "digest"]),
)
def wrong_index_digest(folder: Path) -> None:
    reseal(folder, (stated(folder, INDEX), "0" * 16))


@whole_flaw("the manifest does not list the index", ("open", 4, ["manifest.json", "does not list", INDEX]))
def unlisted_index(folder: Path) -> None:
    lines = (folder / "manifest.json").read_text().split("\n")
    at = next(i for i, line in enumerate(lines) if f'"{INDEX}"' in line)
    old, new = ",\n" + lines[at], ""
    reseal(folder, (old, new))


@whole_flaw(
    "files are begun at another size than the manifest states",
    ("open", 4, ["manifest.json", "does not list", "optimizer-00001-of-"]),
)
def wrong_shard_bytes(folder: Path) -> None:
    reseal(folder, ('"shard_bytes":300', '"shard_bytes":200'))


@whole_flaw("files would hold no bytes", ("open", 4, ["manifest.json", "shard size", "found 0"]))
def shard_bytes_of_zero(folder: Path) -> None:
    reseal(folder, ('"shard_bytes":300', '"shard_bytes":0'))


@whole_flaw(
    "an option stands in the manifest that the format does not have",
    ("open", 4, ["manifest.json", "compression"]),
)
def option_of_another_format(folder: Path) -> None:
    reseal(folder, ('"shard_bytes":300', '"shard_bytes":300,"compression":"zstd"'))


LAYOUT = '"layout": {"dp_size":2,"bucket_size":null,"param_align":64,"bucket_align":128}'


@whole_flaw("a layout is stated, and the format has none", ("open", 4, ["manifest.json", "states a layout"]))
def layout_stated(folder: Path) -> None:
    reseal(folder, ('"layout": null', LAYOUT))


@whole_flaw(
    "a param has another shape of the same size",
    ("open", 0, []),
    ("verify", 1, ["fc.weight/", "[4, 6]", "[6, 4]"]),
    ("reshard", 4, ["fc.weight/", "[4, 6]", "[6, 4]"]),
)
def wrong_shape(folder: Path) -> None:
    reseal(folder, ('"name":"fc.weight","shape":[4,6]', '"name":"fc.weight","shape":[6,4]'))


@whole_flaw(
    "two params were registered in the other order",
    ("verify", 1, [INDEX, NOT_DERIVED]),
    ("reshard", 4, ["not what the layout says"]),
)
def swapped_params(folder: Path) -> None:
    lines = (folder / "manifest.json").read_text().split("\n")
    one, two = (next(line for line in lines if f'"name":"{name}"' in line) for name in ("embed", "fc.weight"))
    reseal(folder, (f"{one}\n{two}", f"{two},\n{one.rstrip(',')}"))


NO_SHAPE = "its whole slots have no shape, or others have one"


@whole_flaw(
    "a whole slot has no shape",
    ("open", 4, ["manifest.json", "fc.w", NO_SHAPE]),
    base="factored_slots",
)
def whole_slot_without_shape(folder: Path) -> None:
    reseal(folder, (',"shapes":{"exp_avg_sq_col":[6],"exp_avg_sq_row":[9]}', ',"shapes":{"exp_avg_sq_row":[9]}'))


@whole_flaw(
    "a slot that has the param's shape states one",
    ("open", 4, ["manifest.json", "fc.b", NO_SHAPE]),
    base="factored_slots",
)
def shape_of_an_elementwise_slot(folder: Path) -> None:
    lines = (folder / "manifest.json").read_text().split("\n")
    row = next(line for line in lines if '"name":"fc.b"' in line)
    reseal(folder, (row, row[:-1] + ',"shapes":{"exp_avg_sq":[9]}}'))


@whole_flaw(
    "a whole slot has another shape of the same size",
    ("open", 0, []),
    ("verify", 1, ["embed/exp_avg_sq_row", "[11]", "[1, 11]"]),
    ("reshard", 4, ["embed/exp_avg_sq_row", "[11]", "[1, 11]"]),
    base="factored_slots",
)
def wrong_whole_shape(folder: Path) -> None:
    reseal(folder, ('"exp_avg_sq_row":[11]', '"exp_avg_sq_row":[1,11]'))


@slice_flaw(
    "the name of a slice states another range of the same size; its file's digest agrees",
    ("open", 0, []),
    ("verify", 1, [RANK1, "w/exp_avg/128:256"]),
    ("reshard", 4, [RANK1, "w/exp_avg/128:256"]),
)
def wrong_range(folder: Path) -> None:
    rewrite(folder, RANK1, lambda rows: rename(rows, "w/exp_avg/128:256", "w/exp_avg/127:255"))


@slice_flaw(
    "a slice overlaps that of the other rank; all digests of files agree",
    ("verify", 1, [RANK1, "w/exp_avg/128:256"]),
    ("reshard", 4, [RANK1, "w/exp_avg/128:256"]),
)
def overlapping_ranges(folder: Path) -> None:
    resize(folder, 120, 4 * b"\x01\x02\x03\x04\x05\x06\x07\x08")


@slice_flaw(
    "no file has some elements of a slice; all digests of files agree",
    ("verify", 1, [RANK1, "w/exp_avg/128:256"]),
    ("reshard", 4, [RANK1, "w/exp_avg/128:256"]),
)
def gap_between_ranges(folder: Path) -> None:
    resize(folder, 132, b"")


def resize(folder: Path, start: int, before: bytes) -> None:
    """Has rank 1's slice of ``exp_avg`` of ``w`` begin elsewhere than at 128, ``before`` in front of it."""

    def change(rows: list[tuple[TensorEntry, bytes]]) -> None:
        at = next(i for i, (t, _) in enumerate(rows) if t.name == "w/exp_avg/128:256")
        entry, data = rows[at]
        data = before + data[max(start - 128, 0) * 4 :]
        rows[at] = (replace(entry, name=f"w/exp_avg/{start}:256", shape=(256 - start,)), data)

    rewrite(folder, RANK1, change)


@slice_flaw("no layout is stated, and the format needs it", ("open", 4, ["manifest.json", "states no layout"]))
def layout_missing(folder: Path) -> None:
    reseal(folder, (LAYOUT, '"layout": null'))


@slice_flaw(
    "the manifest states an alignment that the files were not written with",
    ("open", 0, []),
    ("verify", 1, [RANK0, "w/fp32_param/0:160", "layout"]),
    ("reshard", 4, ["rank-0000", "layout"]),
)
def wrong_alignment(folder: Path) -> None:
    reseal(folder, ('"param_align":64', '"param_align":32'))


@slice_flaw(
    "the manifest states a dp size of which there are not the files",
    ("open", 4, ["manifest.json", "does not list", "rank-00000-of-00003"]),
)
def wrong_dp_size(folder: Path) -> None:
    reseal(folder, ('"dp_size":2', '"dp_size":3'))


FACTORED = "rank-{:05d}-of-00003.safetensors".format


@slice_flaw(
    "a whole tensor lies with another rank than the one that owns its param's first element; all digests agree",
    ("verify", 1, ["embed/exp_avg_sq_row/0:11", "layout"]),
    ("reshard", 4, ["embed/exp_avg_sq_row/0:11", "layout"]),
    base="factored_slots",
)
def whole_tensor_of_another_rank(folder: Path) -> None:
    name = "embed/exp_avg_sq_row/0:11"
    owner = next(rank for rank in range(3) if name.encode() in (folder / FACTORED(rank)).read_bytes())
    moved: list[tuple[TensorEntry, bytes]] = []

    def take(rows: list[tuple[TensorEntry, bytes]]) -> None:
        moved.append(rows.pop(next(i for i, (t, _) in enumerate(rows) if t.name == name)))

    rewrite(folder, FACTORED(owner), take)
    rewrite(folder, FACTORED((owner + 1) % 3), lambda rows: rows.extend(moved))


@slice_flaw(
    "a whole tensor was cut",
    ("verify", 1, ["embed/exp_avg_sq_col/0:14", "layout"]),
    ("reshard", 4, ["embed/exp_avg_sq_col/0:14", "layout"]),
    base="factored_slots",
)
def whole_tensor_cut(folder: Path) -> None:
    name = "embed/exp_avg_sq_col/0:14"

    def cut(rows: list[tuple[TensorEntry, bytes]]) -> None:
        at = next(i for i, (t, _) in enumerate(rows) if t.name == name)
        entry, data = rows[at]
        halves = ((0, 7, data[:28]), (7, 14, data[28:]))
        rows[at : at + 1] = [
            (replace(entry, name=f"embed/exp_avg_sq_col/{low}:{high}", shape=(7,)), half) for low, high, half in halves
        ]

    owner = next(rank for rank in range(3) if name.encode() in (folder / FACTORED(rank)).read_bytes())
    rewrite(folder, FACTORED(owner), cut)


# ------------------------------------------------------------------------------------------- whole, other containers

ZARR_DATA, ZARR_NODE = "fc.bias/exp_avg/c/0", "fc.bias/exp_avg/zarr.json"
ARCHIVES, SIDECAR = "__0_0.distcp", "__0_0.distcp.checksums.json"


def container_flaws(home: str, data: str, beside: str, at: int) -> None:
    """Flaws that both containers can have. ``at``: a byte of the file ``data`` that is a value of fc.bias: exp_avg."""

    def own(what: str, *expect: Expect) -> Callable[[Make], Make]:
        return flaw(what, *expect, home=home)

    @own(
        "the last 5 bytes of a file of values are gone",
        ("open", 4, [data, "truncated"]),
        ("verify", 1, [data, "found", "expected"]),
        ("reshard", 4, [data, "truncated"]),
    )
    def truncated_file(folder: Path) -> None:
        (folder / data).write_bytes((folder / data).read_bytes()[:-5])

    @own(
        "a file of values is not there",
        ("open", 3, [data, "missing"]),
        ("verify", 1, [data, "missing"]),
        ("reshard", 3, [data, "missing"]),
    )
    def missing_file(folder: Path) -> None:
        (folder / data).unlink()

    @own(
        "one bit of a value; only reading the data finds it",
        ("open", 0, []),
        ("verify", 0, []),
        ("verify --deep", 1, [data, "fc.bias", "exp_avg", "checksum"]),
        ("reshard", 4, [data, "fc.bias", "exp_avg"]),
    )
    def flipped_bit_in_data(folder: Path) -> None:
        flip(folder / data, at)

    @own(
        "a file beside the values is not there",
        ("open", 3, [beside, "missing"]),
        ("verify", 1, [beside, "missing"]),
    )
    def missing_file_beside(folder: Path) -> None:
        (folder / beside).unlink()

    @own("one bit of a file beside the values", ("open", 0, []), ("verify", 1, [beside]), ("reshard", 4, [beside]))
    def flipped_bit_beside(folder: Path) -> None:
        flip(folder / beside, 20)

    @own(
        "a param's shape is larger than its file; the manifest's digest agrees",
        ("open", 4, ["manifest.json"]),
        ("verify", 4, ["manifest.json"]),
    )
    def shape_too_large(folder: Path) -> None:
        reseal(folder, ('"name":"fc.bias","shape":[6]', '"name":"fc.bias","shape":[60]'))


container_flaws(ZARR, ZARR_DATA, ZARR_NODE, -3)
container_flaws(TORCH_DIST, ARCHIVES, SIDECAR, 5747)


def make_broken(own: Flaw, folder: Path, vectors: Path) -> None:
    shutil.copytree(vectors / own.base, folder, ignore=shutil.ignore_patterns("expected.json"))
    own.make(folder)
    rows = [{"command": c, "exit_code": code, "message_contains": parts} for c, code, parts in own.expect]
    write_json(folder / "expected.json", {"flaw": own.what, "expect": rows})


# ---------------------------------------------------------------------------------------------------------------- main


def write_json(path: Path, value: dict[str, Any]) -> None:
    """One top-level row a line, so that a change can be read in a diff."""
    lines = []
    for key, item in value.items():
        if isinstance(item, list) and item and isinstance(item[0], dict):
            rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in item)
            lines.append(f"{json.dumps(key)}: [\n{rows}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(item, ensure_ascii=False)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def generate(root: Path) -> None:
    """All vectors and broken ones below ``root``, whose folders must not exist."""
    with mock.patch("os.fsync"):  # nothing here needs to outlive a power failure
        for home, makers in VECTORS.items():
            vectors = root / home / "vectors"
            for make in makers:
                make(vectors / make.__name__, **INTO[home])
                write_json(vectors / make.__name__ / "expected.json", facts(vectors / make.__name__))
            for name, own in BROKEN[home].items():
                make_broken(own, root / home / "broken" / name, vectors)


def differences(a: Path, b: Path) -> list[str]:
    """Files that are not the same in both folders, by their path."""
    mine, theirs = ({p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()} for root in (a, b))
    changed = {p for p in mine & theirs if not filecmp.cmp(a / p, b / p, shallow=False)}
    return sorted((mine ^ theirs) | changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        generate(made)
        folders = [f"{home}/{kind}" for home in VECTORS for kind in ("vectors", "broken")]
        found = [f"{folder}/{p}" for folder in folders for p in differences(made / folder, HOME / folder)]
        for path in found:
            print(f"{HOME.relative_to(ROOT)}/{path}: {'differs' if check else 'written'}", file=sys.stderr)
        if check:
            return 1 if found else 0
        for folder in folders:
            shutil.rmtree(HOME / folder, ignore_errors=True)
            shutil.copytree(made / folder, HOME / folder)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
