"""Makes formats/bucket_shards/{vectors,broken}: tiny checkpoints, sound ones and ones with one flaw each.

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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, whichever is installed

import torch  # noqa: E402

import zero1ckpt  # noqa: E402
from zero1ckpt.api.stored import Stored, describe  # noqa: E402
from zero1ckpt.core.digest import crc64, format_digest  # noqa: E402
from zero1ckpt.encodings.safetensors_file import build_header, file_crc, read_header  # noqa: E402
from zero1ckpt.model.catalog import PIECE_BYTES  # noqa: E402

HOME = ROOT / "formats" / "bucket_shards"
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


def no_params(path: Path) -> None:
    zero1ckpt.write(path, {}, dp_size=2)


def plain(path: Path) -> None:
    state = {
        "embed.weight": adam(10, 11, 4, step=3.0),
        "fc.weight": adam(20, 6, 4, step=3.0),
        "fc.bias": adam(30, 6, step=3.0),
    }
    group = {"lr": 0.001, "betas": (0.9, 0.95), "eps": 1e-08, "weight_decay": 0.1}
    zero1ckpt.write(path, state, dp_size=2, groups=[group], step=3)


def several_buckets(path: Path) -> None:
    state = {f"layers.{i}.weight": adam(40 + 10 * i, 5 + 8 * i, 7) for i in range(5)}
    zero1ckpt.write(path, state, dp_size=2, bucket_size=200, step=7)


def dp_that_does_not_divide(path: Path) -> None:
    state = {"a": adam(100, 13, 11), "b": adam(110, 101), "c": adam(120, 37)}
    zero1ckpt.write(path, state, dp_size=3, bucket_size=100, step=1)


def several_buffers(path: Path) -> None:
    shapes = {"embed": (9, 8), "router": (3, 8), "norm": (8,), "experts.w": (2, 8, 5), "head": (9, 8)}
    state = {name: adam(130 + 10 * i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    half = {"dtype": "bfloat16", "grad_dtype": "float32"}
    params: Params = {"embed": half, "head": half, "router": {"dtype": "float32"}, "norm": half}
    params["experts.w"] = {**half, "expert": True}
    zero1ckpt.write(path, state, dp_size=2, params=params, step=12)


def tiny_params(path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"scale": (), "empty": (0, 3), "one": (1,), "tail": (2, 1), "last.empty": (0,)}
    state = {name: adam(200 + 10 * i, *shape, step=2.0) for i, (name, shape) in enumerate(shapes.items())}
    zero1ckpt.write(path, state, dp_size=4, step=2)


def absent_slots(path: Path) -> None:
    state = {"trained": adam(300, 4, 5, step=9.0), "late": adam(310, 9, step=2.0), "never": adam(320, 6, 3)}
    del state["never"]["exp_avg"], state["never"]["exp_avg_sq"]
    state["trained"]["max_exp_avg_sq"] = state["trained"]["exp_avg_sq"] * 2
    zero1ckpt.write(path, state, dp_size=2, step=9)


def two_groups(path: Path) -> None:
    state = {
        "w1": {"fp32_param": values(400, 8, 3), "momentum_buffer": values(401, 8, 3)},
        "b1": {"fp32_param": values(402, 3), "momentum_buffer": values(403, 3)},
        "w2": {"fp32_param": values(404, 5, 3), "momentum_buffer": values(405, 5, 3)},
    }
    groups = [
        {"params": ["w1", "w2"], "lr": torch.tensor(0.25), "momentum": 0.9, "weight_decay": 0.01},
        {"params": ["b1"], "lr": 0.5, "momentum": 0.9, "weight_decay": 0.0, "nesterov": True},
    ]
    zero1ckpt.write(path, state, dp_size=2, groups=groups, step=5)


def extra_with_tensors(path: Path) -> None:
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
    zero1ckpt.write(path, {"w": adam(510, 4, 4)}, dp_size=2, step=4, extra=extra)


def own_buckets(path: Path) -> None:
    state = {f"layers.{i}": adam(600 + 10 * i, 10 + 23 * i) for i in range(3)}
    state = {"word_embeddings": adam(590, 7, 10), **state, "tail": adam(640, 100)}
    params: Params = {"word_embeddings": {"shared_embedding": True}, "layers.1": {"shared_embedding": True}}
    zero1ckpt.write(path, state, dp_size=2, params=params, step=1)


def other_dtypes(path: Path) -> None:
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

    zero1ckpt.write(path, {"a": slots(700, 33), "b": slots(710, 130)}, dp_size=3, step=6)


def unusual_names(path: Path) -> None:
    names = ["blocks.0.été", 'quo"te\\back', "tab\tdel\x7f", "emoji \U0001f9ca/slash"]
    zero1ckpt.write(path, {name: adam(800 + 10 * i, 3) for i, name in enumerate(names)}, dp_size=2, step=1)


def padded_for_high_busbw(path: Path) -> None:
    state = {
        name: {"exp_avg": values(900, n, dtype=torch.bfloat16).to(torch.int8)} for name, n in (("a", 70), ("b", 5))
    }
    zero1ckpt.write(path, state, dp_size=2, pad_for_high_nccl_busbw=True, step=1)


VECTORS = (
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
)

# ------------------------------------------------------------------------------------------- what a vector is expected


def facts(path: Path) -> dict[str, Any]:
    """What `inspect --json` says of a vector, and all values."""
    stored = describe(path)
    ckpt = zero1ckpt.open(path)
    layout = ckpt.layout
    assert layout is not None
    state = ckpt.state
    return {
        "format": ckpt.format,
        "container": ckpt.container,
        "step": ckpt.step,
        "dp_size": layout.rules.dp_size,
        "bucket_size": layout.rules.bucket_size,
        "digest": stored.manifest.digest,
        "slots": list(ckpt.slots),
        "slot_dtypes": {slot.name: slot.dtype for slot in state.slots},
        "params": [
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "numel": spec.numel,
                "group": spec.group,
                "digests": {s.name: d for s in state.slots if (d := ckpt.digest_of(spec.name, s.name))},
                "scalars": {name: scalar.value for name, scalar in state.scalars_of(i).items()},
            }
            for i, spec in enumerate(state.params)
        ],
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
            for buffer in layout.buffers
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
            for rank in range(layout.rules.dp_size)
        ],
        "files": [{"path": f.path, "bytes": f.bytes} for f in stored.manifest.files],
        "values": [value(ckpt, name, slot) for name, slot in ckpt.tensors()],
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
BROKEN: dict[str, tuple[Callable[[Path], None], str, list[Expect]]] = {}


def flaw(what: str, *expect: Expect) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Registers a function that puts one flaw into a copy of ``vectors/plain``; its name names the flaw."""

    def register(make: Callable[[Path], None]) -> Callable[[Path], None]:
        BROKEN[make.__name__] = (make, what, list(expect))
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


def swap_header_text(folder: Path, old: str, new: str) -> None:
    """Changes the header of rank 1's file, and states the digest of the changed file."""
    path = folder / RANK1
    before, data = stated(folder, RANK1), path.read_bytes()
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


def make_broken(name: str, folder: Path, source: Path) -> None:
    make, what, expect = BROKEN[name]
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("expected.json"))
    make(folder)
    rows = [{"command": c, "exit_code": code, "message_contains": parts} for c, code, parts in expect]
    write_json(folder / "expected.json", {"flaw": what, "expect": rows})


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


def generate(home: Path) -> None:
    """All vectors and broken ones below ``home``, whose folders must not exist."""
    for make in VECTORS:
        folder = home / "vectors" / make.__name__
        make(folder)
        write_json(folder / "expected.json", facts(folder))
    for name in BROKEN:
        make_broken(name, home / "broken" / name, home / "vectors" / "plain")


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
        found = [f"{kind}/{p}" for kind in ("vectors", "broken") for p in differences(made / kind, HOME / kind)]
        for path in found:
            print(f"{HOME.relative_to(ROOT)}/{path}: {'differs' if check else 'written'}", file=sys.stderr)
        if check:
            return 1 if found else 0
        for kind in ("vectors", "broken"):
            shutil.rmtree(HOME / kind, ignore_errors=True)
            shutil.copytree(made / kind, HOME / kind)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
