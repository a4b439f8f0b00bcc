"""formats/ is right, complete, and enough: a reader made from it alone agrees with every vector, value for value."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import struct
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from math import lcm, prod
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, unquote

import jsonschema
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import zarr

import zero1ckpt
from zero1ckpt.cli.main import run as command_line
from zero1ckpt.core import digest as package_digest
from zero1ckpt.core.dtypes import DTYPE_NAMES, itemsize, to_safetensors
from zero1ckpt.core.errors import Zero1CkptError
from zero1ckpt.core.layout import LayoutRules
from zero1ckpt.model.catalog import PIECE_BYTES
from zero1ckpt.model.manifest import SCHEMA, FormatOptions
from zero1ckpt.registry import FORMATS

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "formats"
SHARDS = HOME / "bucket_shards"
WHOLE = HOME / "fully_reshardable"
SLICES = HOME / "fully_sharded_model_space"
FORMAT_FOLDERS = (SHARDS, WHOLE, SLICES)
VECTORS = sorted(path.parent for path in HOME.glob("**/vectors/*/manifest.json"))
BROKEN = sorted(path.parent for path in HOME.glob("**/broken/*/expected.json"))
READ_HERE = [path for path in VECTORS + BROKEN if path.parent.parent in FORMAT_FOLDERS]
"""Those in safetensors, which the reader below reads; other containers have folders of their own."""


def table(page: Path, *head: str) -> list[list[str]]:
    """Rows of the table of a page that has these columns."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = lines.index(f"| {' | '.join(head)} |") + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows
    return rows


# ----------------------------------------------------------------- a reader of its own: stdlib only, after formats/*.md

MASK = 2**64 - 1


def _table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [(i >> 1) ^ (0x9A6C9329AC4BC9B5 if i & 1 else 0) for i in table]
    return table


TABLE = _table()
FORMAT_TABLE = ("format", "what it is for", "files depend on dp and bucket size")
PAIR_TABLE = ("format", "container", "page")
CODES = {name: (code, int(size)) for name, code, size in table(SHARDS / "SPEC.md", "dtype", "code", "bytes")}


def crc(data: bytes) -> int:
    register = MASK
    for byte in data:
        register = TABLE[(register ^ byte) & 0xFF] ^ (register >> 8)
    return register ^ MASK


def _apply(operator: list[int], register: int) -> int:
    result = 0
    for column in operator:
        if register & 1:
            result ^= column
        register >>= 1
    return result


POWERS = [[TABLE[(1 << i) & 0xFF] ^ ((1 << i) >> 8) for i in range(64)]]  # POWERS[k]: 2**k zero bytes


def shift(register: int, nbytes: int) -> int:
    for k in range(nbytes.bit_length()):
        if k == len(POWERS):
            POWERS.append([_apply(POWERS[-1], column) for column in POWERS[-1]])
        if nbytes >> k & 1:
            register = _apply(POWERS[k], register)
    return register


def text(value: int) -> str:
    return f"{value:016x}"


def quoted(name: str) -> str:
    short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}

    def one(char: str) -> str:
        units = struct.unpack(f"<{len(char.encode('utf-16-le')) // 2}H", char.encode("utf-16-le"))
        return short.get(char) or (char if " " <= char <= "~" else "".join(f"\\u{unit:04x}" for unit in units))

    return '"' + "".join(map(one, name)) + '"'


def merged(rows: Iterable[tuple[str, str, str]]) -> str:
    lines = sorted(("[" + ",".join(map(quoted, row)) + "]").encode() for row in rows)
    return text(crc(b"\n".join(lines)))


def lay_out(params: list[dict[str, Any]], rules: dict[str, Any]) -> list[dict[str, Any]]:
    """Buffers: each its key, ``placed`` (param index, start, end, bucket) and ``buckets`` (offset, numel, unpadded)."""
    end_align = lcm(rules["dp_size"], rules["bucket_align"], 65536 if rules.get("pad_for_high_nccl_busbw") else 1)
    keys = [(bool(p.get("expert")), p["dtype"], p["grad_dtype"]) for p in params]
    buffers = []
    for key in sorted(dict.fromkeys(keys), key=lambda key: key[0]):
        placed: list[tuple[int, int, int, int]] = []
        buckets: list[tuple[int, int, int]] = []
        at = begin = 0
        for i in (i for i in reversed(range(len(params))) if keys[i] == key):
            at = -(-at // rules["param_align"]) * rules["param_align"]
            own, members = bool(params[i].get("shared_embedding")), [p for p in placed if p[3] == len(buckets)]
            if own and members:
                end = -(-at // end_align) * end_align
                buckets.append((begin, end - begin, at - begin))
                at = begin = end
            placed.append((i, at, at + prod(params[i]["shape"]), len(buckets)))
            at += prod(params[i]["shape"])
            if own or (rules["bucket_size"] is not None and at - begin >= rules["bucket_size"]):
                end = -(-at // end_align) * end_align
                buckets.append((begin, end - begin, at - begin))
                at = begin = end
        if any(p[3] == len(buckets) for p in placed):
            buckets.append((begin, -(-at // end_align) * end_align - begin, at - begin))
        buffers.append({"key": key, "placed": placed, "buckets": buckets})
    return buffers


def fragments(buffers: list[dict[str, Any]], dp_size: int, rank: int) -> Iterator[dict[str, Any]]:
    for b, buffer in enumerate(buffers):
        for i, p, end, k in sorted(buffer["placed"], key=lambda row: row[1:3]):
            offset, numel, _ = buffer["buckets"][k]
            s = offset + rank * (numel // dp_size)
            low, high = max(p, s), min(end, s + numel // dp_size)
            if low < high:
                views = {"gbuf_world": 0, "gbuf_world_in_bucket": offset, "gbuf_local": s, "param": p}
                yield {"index": i, "buffer": b, "bucket": k, **{v: [low - o, high - o] for v, o in views.items()}}


def encoded(name: str) -> str:
    kept = set(range(0x21, 0x7F)) - set(b"%/")
    return "".join(chr(b) if b in kept else f"%{b:02X}" for b in name.encode())


Place = tuple[tuple[str, str], int, int]
"""(param, slot) of a fragment; its first byte in the payload, and in the tensor's values."""


class Payload:
    """What a header must say, and where fragments lie, gathered in payload order."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.places: list[tuple[Place, int]] = []
        self.size = 0

    def add(self, name: str, dtype: str, shape: list[int]) -> int:
        """Puts a tensor at the end; its first byte."""
        code, size = CODES[dtype]
        begin, self.size = self.size, self.size + prod(shape) * size
        self.tensors[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, self.size]}
        return begin


class IndependentReader:
    """Reads one part of a checkpoint, and proves all but other parts. ``values``: (param, slot) -> bytes."""

    def __init__(self, folder: Path, part: str = "") -> None:
        data = (folder / "manifest.json").read_bytes()
        body, _, last = data.rpartition(b'"manifest_digest": "')
        assert last == f'{text(crc(body))}"\n}}\n'.encode()
        self.folder, self.manifest = folder, json.loads(data)
        self.files = {entry["path"]: entry for entry in self.manifest["files"]}
        self.part = next(p for p in self.manifest["parts"] if p["name"] == part)
        self.prefix = f"part-{quote(part, safe='')}/" if part else ""
        self.params, self.rules, self.slots = self.part["params"], self.part["layout"], self.part["slots"]
        self.whole = {slot["name"] for slot in self.slots if slot.get("whole")}
        self.sizes = {slot["name"]: CODES[slot["dtype"]][1] for slot in self.slots}
        self._check_manifest()
        self.buffers = lay_out(self.params, self.rules) if self.rules else []
        self.dp_size = self.rules["dp_size"] if self.rules else 0
        self.values = {
            (p["name"], slot): bytearray(prod(self._shape(p, slot)) * self.sizes[slot])
            for p in self.params
            for slot in p["digests"]
        }
        formats = {SHARDS: self._bucket_shards, WHOLE: self._fully_reshardable, SLICES: self._model_space}
        owned = dict.fromkeys(self.values, 0)
        for name, payload in formats[HOME / self.manifest["format"]]():
            self._read(self.prefix + name, payload, owned)
        assert owned == {key: len(value) for key, value in self.values.items()}, "each element is there once"
        names = [
            name for name in self.files if re.fullmatch(r"(extra|model|rank_extra-\d{5}-of-\d{5})\.safetensors", name)
        ]
        self.others = {name: self._file(name) for name in names}
        self._digests()

    def _check_manifest(self) -> None:
        kept = {row[0].strip("`"): row[2] for row in table(HOME / "README.md", *FORMAT_TABLE)}
        rows = [[cell.strip("`") for cell in row] for row in table(HOME / "README.md", *PAIR_TABLE)]
        assert [self.manifest["format"], self.manifest["container"], f"{self.manifest['format']}/SPEC.md"] in rows
        assert (self.rules is None) == (kept[self.manifest["format"]] == "no")
        assert len({p["name"] for p in self.params}) == len(self.params)
        assert all(p.get("group", 0) < len(self.part["groups"]) for p in self.params)
        assert all(p.get("shapes", {}).keys() == self.whole & p["digests"].keys() for p in self.params)
        options = {name for name, value in self.manifest.get("options", {}).items() if value is not None}
        assert options <= ({"shard_bytes"} if self.rules is None else set()), "no option of another format"

    def _shape(self, param: dict[str, Any], slot: str) -> list[int]:
        shape: list[int] = param["shapes"][slot] if slot in self.whole else param["shape"]
        return shape

    def _present(self, param: dict[str, Any], *, whole: bool | None = None) -> list[dict[str, Any]]:
        """Slots of a param that are present, in order; only whole ones, or only the others."""
        present = [slot for slot in self.slots if slot["name"] in param["digests"]]
        return [slot for slot in present if whole is None or (slot["name"] in self.whole) is whole]

    def _file(self, name: str, tensors: dict[str, Any] | None = None, bounds: Iterable[int] = ()) -> dict[str, bytes]:
        """Tensors of a file, each piece and the file's digest proved; ``tensors``: what the header must hold."""
        data, entry = (self.folder / name).read_bytes(), self.files[name]
        length = int.from_bytes(data[:8], "little")
        header, payload = json.loads(data[8 : 8 + length]), data[8 + length :]
        meta = header.pop("__metadata__")
        assert len(data) == entry["bytes"] and (8 + length) % 4096 == 0
        assert tensors is None or header == tensors
        if tensors is None:
            bounds = [at for row in header.values() for at in row["data_offsets"]]
        cuts = sorted({0, len(payload), *range(0, len(payload), 4194304), *bounds})
        pieces = re.findall("." * 16, meta["zero1ckpt.pieces"])
        assert pieces == [text(crc(payload[low:high])) for low, high in pairwise(cuts)]
        whole = shift(crc(data[: 8 + length]), len(payload))
        for piece, end in zip(pieces, cuts[1:], strict=True):
            whole ^= shift(int(piece, 16), len(payload) - end)
        assert text(whole) == entry["digest"] and (len(data) > 2**20 or text(whole) == text(crc(data)))
        return {name: payload[slice(*row["data_offsets"])] for name, row in header.items()}

    def _read(self, name: str, wanted: Payload, owned: dict[tuple[str, str], int]) -> None:
        """Takes the fragments of a file; what is left must be zero."""
        bounds = [at for (_, begin, _), nbytes in wanted.places for at in (begin, begin + nbytes)]
        found = self._file(name, wanted.tensors, bounds)
        payload = bytearray(b"".join(found[name] for name in wanted.tensors))
        assert len(payload) == wanted.size
        for (key, begin, inside), nbytes in wanted.places:
            self.values[key][inside : inside + nbytes] = payload[begin : begin + nbytes]
            payload[begin : begin + nbytes] = bytes(nbytes)
            owned[key] += nbytes
        assert not any(payload), "padding is zero"

    def _bucket_shards(self) -> Iterator[tuple[str, Payload]]:
        for rank in range(self.dp_size):
            payload, start = Payload(), {}
            for b, buffer in enumerate(self.buffers):
                for k, (_, numel, _) in enumerate(buffer["buckets"]):
                    for slot in (slot for slot in self.slots if slot["name"] not in self.whole):
                        name = f"buffer.{b}.bucket.{k}.{slot['name']}"
                        start[b, k, slot["name"]] = payload.add(name, slot["dtype"], [numel // self.dp_size])
            for f in fragments(self.buffers, self.dp_size, rank):
                param = self.params[f["index"]]
                for slot in self._present(param, whole=False):
                    size = self.sizes[slot["name"]]
                    begin = start[f["buffer"], f["bucket"], slot["name"]] + size * f["gbuf_local"][0]
                    place = ((param["name"], slot["name"]), begin, size * f["param"][0])
                    payload.places.append((place, size * (f["param"][1] - f["param"][0])))
            self._carry(rank, payload, "whole.{}/{}")
            yield f"rank-{rank:05d}-of-{self.dp_size:05d}.safetensors", payload

    def _model_space(self) -> Iterator[tuple[str, Payload]]:
        for rank in range(self.dp_size):
            payload = Payload()
            for f in sorted(fragments(self.buffers, self.dp_size, rank), key=lambda f: f["index"]):
                param, (low, high) = self.params[f["index"]], f["param"]
                for slot in self._present(param, whole=False):
                    size = self.sizes[slot["name"]]
                    name = f"{encoded(param['name'])}/{encoded(slot['name'])}/{low}:{high}"
                    begin = payload.add(name, slot["dtype"], [high - low])
                    payload.places.append((((param["name"], slot["name"]), begin, size * low), size * (high - low)))
            self._carry(rank, payload, "{}/{}/0:{}")
            yield f"rank-{rank:05d}-of-{self.dp_size:05d}.safetensors", payload

    def _carry(self, rank: int, payload: Payload, name: str) -> None:
        """The whole tensors that a rank carries."""
        for i, param in enumerate(self.params):
            if rank == self._owner(i):
                for slot in self._present(param, whole=True):
                    numel = prod(self._shape(param, slot["name"]))
                    if numel:
                        own = name.format(encoded(param["name"]), encoded(slot["name"]), numel)
                        self._put(payload, own, param, slot)

    def _put(self, payload: Payload, name: str, param: dict[str, Any], slot: dict[str, Any]) -> None:
        begin = payload.add(name, slot["dtype"], self._shape(param, slot["name"]))
        payload.places.append((((param["name"], slot["name"]), begin, 0), payload.size - begin))

    def _owner(self, index: int) -> int:
        """Rank that owns a param's first element; 0 for a param without any."""
        for buffer in self.buffers:
            for i, start, end, k in buffer["placed"]:
                if i == index and end > start:
                    offset, numel, _ = buffer["buckets"][k]
                    return int((start - offset) // (numel // self.dp_size))
        return 0

    def _fully_reshardable(self) -> Iterator[tuple[str, Payload]]:
        limit = self.manifest.get("options", {}).get("shard_bytes", 5000000000)
        assert limit >= 1
        payloads = [Payload()]
        for param in self.params:
            for slot in self._present(param):
                nbytes = prod(self._shape(param, slot["name"])) * self.sizes[slot["name"]]
                if payloads[-1].size > 0 and payloads[-1].size + nbytes > limit:
                    payloads.append(Payload())
                self._put(payloads[-1], f"{encoded(param['name'])}/{encoded(slot['name'])}", param, slot)
        names = [f"optimizer-{k:05d}-of-{len(payloads):05d}.safetensors" for k in range(1, len(payloads) + 1)]
        index = {
            "metadata": {"total_size": sum(payload.size for payload in payloads)},
            "weight_map": {t: name for name, p in zip(names, payloads, strict=True) for t in p.tensors},
        }
        entry = self.files[f"{self.prefix}optimizer.safetensors.index.json"]
        data = (self.folder / entry["path"]).read_bytes()
        assert data == (json.dumps(index, indent=2) + "\n").encode()
        assert (len(data), text(crc(data))) == (entry["bytes"], entry["digest"])
        return zip(names, payloads, strict=True)

    def _digests(self) -> None:
        dtypes = {slot["name"]: slot["dtype"] for slot in self.slots}
        rows = []
        for param in self.params:
            for slot, stated in param["digests"].items():
                values = bytes(self.values[param["name"], slot])
                assert self._tensor(param["name"], slot, dtypes[slot], self._shape(param, slot), values) == stated
                rows.append((param["name"], slot, stated))
        assert merged(rows) == self.part["digest"]
        parts = {part["name"]: part["digest"] for part in self.manifest["parts"]}
        whole = parts[""] if list(parts) == [""] else merged((name, "", digest) for name, digest in parts.items())
        assert whole == self.manifest["digest"]
        for row in self.manifest["model"]:
            values = self.others["model.safetensors"][row["name"]]
            assert self._tensor(row["name"], row["kind"], row["dtype"], row["shape"], values) == row["digest"]

    @staticmethod
    def _tensor(name: str, slot: str, dtype: str, shape: list[int], values: bytes) -> str:
        line = f"[{','.join(map(quoted, (name, slot, dtype)))},[{','.join(map(str, shape))}]]"
        return text(crc(line.encode() + values))

    def facts(self) -> dict[str, Any]:
        return {
            "buffers": [
                {
                    "param_dtype": buffer["key"][1],
                    "grad_dtype": buffer["key"][2],
                    "numel": sum(row[1] for row in buffer["buckets"]),
                    "numel_unpadded": sum(row[2] for row in buffer["buckets"]),
                    "buckets": [
                        dict(zip(("index", "offset", "numel", "numel_unpadded"), (k, *row), strict=True))
                        for k, row in enumerate(buffer["buckets"])
                    ],
                }
                for buffer in self.buffers
            ],
            "ranks": [
                {
                    "rank": rank,
                    "shards": [
                        {"name": self.params[f.pop("index")]["name"], **f}
                        for f in fragments(self.buffers, self.dp_size, rank)
                    ],
                }
                for rank in range(self.dp_size)
            ],
        }


# --------------------------------------------------------------------------------------------------------------- tools


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def validator(path: Path) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(load(path))


def enums(schema: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """(place, values) of every enum and const."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("enum", "const") and not isinstance(value, dict):
                yield place, value
            else:
                yield from enums(value, f"{place}.{key}" if place else key)
    elif isinstance(schema, list):
        for value in schema:
            yield from enums(value, place)


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_vectors", ROOT / "tools" / "generate_vectors.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def span(cell: str) -> list[int]:
    low, high = re.fullmatch(r"\[(\d+), (\d+)[)\]]", cell).groups()  # type: ignore[union-attr]
    return [int(low), int(high)]


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


@pytest.fixture
def vector(request: pytest.FixtureRequest, work: Path) -> Path:
    """A copy of a vector without its expected.json, which is no part of the checkpoint."""
    folder = work / request.param.relative_to(HOME)
    shutil.copytree(request.param, folder, ignore=shutil.ignore_patterns("expected.json"))
    return folder


@pytest.fixture(autouse=True)
def no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing written here needs to outlive a power failure."""
    monkeypatch.setattr("os.fsync", lambda fd: None)


def place_of(folder: Path) -> str:
    """Of a vector, a broken one, or a copy of one: where it lies below ``formats/``."""
    parts = folder.parts
    at = next(i for i in reversed(range(len(parts))) if parts[i] in ("vectors", "broken"))
    formats = {own.name for own in FORMAT_FOLDERS}
    return "/".join(parts[next(i for i in reversed(range(at)) if parts[i] in formats) :])


def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = load(HOME / place_of(folder) / "expected.json")
    return found


def expected_parts(folder: Path) -> dict[str, dict[str, Any]]:
    """What is expected of each part."""
    wanted = expected(folder)
    parts: dict[str, dict[str, Any]] = wanted.get("parts", {"": wanted})
    return parts


def with_vectors(vectors: Iterable[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", sorted(vectors), indirect=True, ids=place_of)


each_vector = with_vectors(VECTORS)
each_vector_read_here = with_vectors(set(VECTORS) & set(READ_HERE))
each_broken = pytest.mark.parametrize("broken", BROKEN, ids=place_of)

# ------------------------------------------------------------------------------------------------ the folder as a whole


def test_nothing_in_the_folder_is_unknown() -> None:
    files = {p for p in HOME.rglob("*") if p.is_file() and p.name != ".gitattributes"}
    assert sum(path.stat().st_size for path in files) < 3 * 2**20
    for folder in FORMAT_FOLDERS:
        assert len([p for p in VECTORS if p.parent.parent == folder]) >= 10, folder
        assert len([p for p in BROKEN if p.parent.parent == folder]) >= 19, folder
    for folder in VECTORS:
        listed = {folder / entry["path"] for entry in load(folder / "manifest.json")["files"]}
        own = {folder / "manifest.json", folder / "expected.json"} | listed
        assert own == {path for path in files if folder in path.parents}, folder
    names = {p.name for p in files if p.parent.name not in ("cases",) and not {"vectors", "broken"} & set(p.parts)}
    assert {name for name in names if not re.fullmatch(r"[A-Z_]+\.md|(\w+\.)?schema\.json", name)} == set()
    for path in files:
        if {"vectors", "broken"} & set(path.relative_to(HOME).parts):
            assert [p for p in path.parents if p in VECTORS or p in BROKEN], path
        elif path.suffix == ".json":
            load(path)


def test_every_pair_of_format_and_container_has_a_page() -> None:
    rows = {(f.strip("`"), c.strip("`")): page.strip("`") for f, c, page in table(HOME / "README.md", *PAIR_TABLE)}
    first = dict(reversed(FORMATS))
    for name, container in FORMATS:
        page = f"{name}/{'SPEC' if container == first[name] else container.upper()}.md"
        assert rows[name, container] == page
        assert (HOME / page).is_file(), f"{name} in {container} is registered: write formats/{page}"
    assert {name for name, _ in FORMATS} == {folder.name for folder in FORMAT_FOLDERS}
    assert all((folder / "schema.json").is_file() for folder in FORMAT_FOLDERS)
    said = {row[0].strip("`"): row[2] for row in table(HOME / "README.md", *FORMAT_TABLE)}
    assert said == {plugin.name: "yes" if plugin.keeps_layout else "no" for plugin in FORMATS.values()}


@pytest.mark.parametrize("page", sorted(HOME.rglob("*.md")), ids=lambda p: str(p.relative_to(HOME)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("path", sorted(HOME.glob("**/*schema.json")), ids=lambda p: str(p.relative_to(HOME)))
def test_schemas_are_schemas_and_their_enums_are_the_codes(path: Path) -> None:
    schema = load(path)
    jsonschema.Draft202012Validator.check_schema(schema)
    rows = table(HOME / "README.md", *PAIR_TABLE)
    containers = list(dict.fromkeys(row[1].strip("`") for row in rows))
    assert {(f.strip("`"), c.strip("`")) for f, c, _ in rows} >= FORMATS.keys()
    own = {
        "properties.schema": SCHEMA,
        "properties.format": list(dict.fromkeys(name for name, _ in FORMATS)),
        "properties.container": containers,
        "properties.checksum": package_digest.CHECKSUM,
        "properties.piece_bytes": PIECE_BYTES,
        "$defs.dtype": list(DTYPE_NAMES),
        "$defs.code": [to_safetensors(name) for name in DTYPE_NAMES],
        "zero1ckpt.checksum": package_digest.CHECKSUM,
        "zero1ckpt.piece_bytes": str(PIECE_BYTES),
        "kind": ["buffer", "frozen"],
        "$float": ["inf", "-inf", "nan"],
        "scalar_value.anyOf": ["inf", "-inf", "nan"],
    }
    for place, found in enums(schema):
        keys = [key for key in own if place == key or place.endswith("." + key)]
        assert keys, f"{place}: compare it with the code here"
        assert found == own[max(keys, key=len)], place


def test_options_of_the_schema_are_the_codes() -> None:
    stated = load(HOME / "manifest.schema.json")["$defs"]["options"]["properties"]
    assert list(stated) == list(FormatOptions.__struct_fields__)
    page = (WHOLE / "SPEC.md").read_text()
    default = FORMATS[WHOLE.name, "safetensors"].normalize(FormatOptions())
    assert f"left out it is {default.shard_bytes}." in page


def test_pages_say_what_the_code_does() -> None:
    readme = HOME / "README.md"
    dtypes = table(SHARDS / "SPEC.md", "dtype", "code", "bytes")
    assert dtypes == [[name, to_safetensors(name), str(itemsize(name))] for name in DTYPE_NAMES]
    assert f"it is `{text(crc(b'123456789'))}`" in readme.read_text()
    assert crc(b"") == 0


def test_the_checksum_is_the_packages_and_combines() -> None:
    data = bytes(range(256)) * 3 + b"tail"
    for cut in (0, 1, 255, 600, len(data)):
        assert crc(data) == shift(crc(data[:cut]), len(data) - cut) ^ crc(data[cut:])
    assert crc(data) == package_digest.crc64(data)
    assert shift(crc(data), 5 * 2**20 + 3) == package_digest.shift(crc(data), 5 * 2**20 + 3)


def test_the_generator_still_makes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["generate_vectors.py", "--check"])
    assert generator().main() == 0


# ------------------------------------------------------------------------------------------------------------- vectors


def holds(whole: Any, part: Any) -> bool:
    """Whether ``whole`` has all that ``part`` says; objects may have more keys."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and holds(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(holds, whole, part))
    return bool(whole == part)


@each_vector
def test_vector_has_the_form_of_the_schemas(vector: Path) -> None:
    manifest = load(vector / "manifest.json")
    validator(HOME / "manifest.schema.json").validate(manifest)
    for path in [*vector.glob("**/rank-*.safetensors"), *vector.glob("**/optimizer-*.safetensors")]:
        validator(HOME / manifest["format"] / "schema.json").validate(header_of(path))
    for path in vector.glob("**/*.index.json"):
        validator(HOME / manifest["format"] / "index.schema.json").validate(load(path))


@each_vector
def test_vector_opens_verifies_and_holds_the_values(vector: Path) -> None:
    answer = zero1ckpt.verify(vector, deep=True)
    assert answer.ok and not answer.notices
    assert json.loads(json.dumps(generator().facts(vector))) == expected(vector)
    parts = zero1ckpt.open(vector).parts
    for name, wanted in expected_parts(vector).items():
        for row in wanted["values"]:
            tensor = parts[name].read(row["param"], row["slot"])
            assert tensor.reshape(-1)[:3].tolist() == row["first"]
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            assert raw.hex() == row["hex"]


@each_vector
def test_inspect_says_what_is_expected(vector: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["inspect", "--json", str(vector)]) == 0
    found = json.loads(capsys.readouterr().out)
    found["files"] = [row for row in found["files"] if row["path"] != "manifest.json"]
    wanted = expected(vector)
    for part in [wanted, *wanted.get("parts", {}).values()]:
        part.pop("values", None)
        for param in part.get("params", ()):
            del param["scalars"]
            param.pop("shapes", None)
    assert [key for key, value in wanted.items() if not holds(found.get(key), value)] == []


@each_vector_read_here
def test_independent_reader_agrees(vector: Path) -> None:
    for name, wanted in expected_parts(vector).items():
        reader = IndependentReader(vector, name)
        assert reader.facts() == {key: wanted[key] for key in ("buffers", "ranks")}
        assert [p["digests"] for p in reader.params] == [p["digests"] for p in wanted["params"]]
        assert [p.get("shapes") for p in reader.params] == [p.get("shapes") for p in wanted["params"]]
        assert reader.part["digest"] == wanted["digest"]
        assert reader.manifest["digest"] == expected(vector)["digest"]
        assert {(row["param"], row["slot"]): row["hex"] for row in wanted["values"]} == {
            key: value.hex() for key, value in reader.values.items()
        }


def test_vectors_have_all_that_the_schema_knows() -> None:
    """Each kind of slot, each key of the manifest, in every format."""
    for folder in FORMAT_FOLDERS:
        manifests = [load(path / "manifest.json") for path in VECTORS if path.parent.parent == folder]
        parts = [part for manifest in manifests for part in manifest["parts"]]
        params = [param for part in parts for param in part["params"]]
        assert any(slot.get("whole") for part in parts for slot in part["slots"])
        assert any("loss_scale" in part for part in parts) and any(part["scalars"] for part in parts)
        assert any(len(manifest["parts"]) > 1 and manifest["model"] for manifest in manifests)
        assert any(manifest["rank_extra"] and manifest["extra"] for manifest in manifests)
        assert any(param["shape"] == [] for param in params) and any(0 in param["shape"] for param in params)
        assert any(0 in shape for param in params for shape in param.get("shapes", {}).values())
        assert any(len(param["digests"]) < len(part["slots"]) for part in parts for param in part["params"])


def test_independent_reader_agrees_where_pieces_end_on_the_grid(work: Path) -> None:
    state = {"a": {"fp32_param": torch.arange(700_001.0)}, "b": {"fp32_param": torch.arange(384_000.0)}}
    zero1ckpt.write(work / "c", state, dp_size=1)
    cuts = header_of(work / "c" / "rank-00000-of-00001.safetensors")["__metadata__"]["zero1ckpt.pieces"]
    assert len(cuts) == 16 * 4  # b, a up to the grid, a beyond it, the tail
    IndependentReader(work / "c")


@with_vectors(path for path in READ_HERE if path.name == "several_parts")
def test_independent_reader_agrees_on_files_beside_the_state(vector: Path) -> None:
    reader = IndependentReader(vector, "gen")
    model = zero1ckpt.open(vector).model_tensors()
    assert len(model) == 5  # three buffers, and the frozen layer
    for name, tensor in model.items():
        assert reader.others["model.safetensors"][name] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    file = "rank_extra-00000-of-00001.safetensors"
    assert reader.others[file]["rank_extra.rng"] == bytes(range(5))
    value = json.loads(header_of(vector / file)["__metadata__"]["zero1ckpt.value"])
    assert value == {"rng": {"$tensor": "rank_extra.rng"}, "at": {"$tuple": [1, 2.5]}}
    assert reader.part["loss_scale"]["scale"] == 65536


@each_vector_read_here
def test_safetensors_reads_the_same_values(vector: Path) -> None:
    """With the library, and what the format's page says of names."""
    for name, wanted in expected_parts(vector).items():
        folder = vector / f"part-{quote(name, safe='')}" if name else vector
        files = {path.name: safetensors.torch.load_file(path) for path in folder.glob("*[0-9].safetensors")}
        assert files
        made = {(row["param"], row["slot"]): bytearray(len(row["hex"]) // 2) for row in wanted["values"]}
        put = {SHARDS.name: from_shards, WHOLE.name: from_whole, SLICES.name: from_slices}[expected(vector)["format"]]
        for key, first, tensor in put(files, wanted):
            assert str(tensor.dtype) == f"torch.{wanted['slot_dtypes'][key[1]]}"
            raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            at = first * tensor.element_size()
            made[key][at : at + len(raw)] = raw
        values = {(row["param"], row["slot"]): row["hex"] for row in wanted["values"]}
        assert {key: value.hex() for key, value in made.items()} == values
    for file in vector.glob("*extra*.safetensors"):
        assert safetensors.torch.load_file(file)


Files = dict[str, dict[str, torch.Tensor]]
Slice = tuple[tuple[str, str], int, torch.Tensor]
"""(param, slot), first element, values."""


def from_shards(files: Files, wanted: dict[str, Any]) -> Iterator[Slice]:
    present = {(row["param"], row["slot"]) for row in wanted["values"]}
    for rank in wanted["ranks"]:
        tensors = next(found for name, found in files.items() if name.startswith(f"rank-{rank['rank']:05d}-"))
        for shard in rank["shards"]:
            for slot in wanted["slot_dtypes"]:
                flat = tensors.get(f"buffer.{shard['buffer']}.bucket.{shard['bucket']}.{slot}")
                if flat is not None and (shard["name"], slot) in present:
                    yield (shard["name"], slot), shard["param"][0], flat[slice(*shard["gbuf_local"])]
        for name, tensor in tensors.items():
            if name.startswith("whole."):
                yield split(name.removeprefix("whole.")), 0, tensor


def from_slices(files: Files, wanted: dict[str, Any]) -> Iterator[Slice]:
    shapes = {p["name"]: p.get("shapes", {}) for p in wanted["params"]}
    for tensors in files.values():
        for name, tensor in tensors.items():
            tensor_name, _, span = name.rpartition("/")
            low, high = map(int, span.split(":"))
            param, slot = split(tensor_name)
            assert list(tensor.shape) == shapes[param].get(slot, [high - low])
            yield (param, slot), low, tensor


def from_whole(files: Files, wanted: dict[str, Any]) -> Iterator[Slice]:
    params = {p["name"]: p for p in wanted["params"]}
    found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    assert len(found) == len(wanted["values"]) == sum(map(len, files.values()))
    for name, tensor in found.items():
        param, slot = split(name)
        assert list(tensor.shape) == params[param].get("shapes", {}).get(slot, params[param]["shape"])
        yield (param, slot), 0, tensor


def split(name: str) -> tuple[str, str]:
    param, slot = map(unquote, name.split("/"))
    return param, slot


@each_vector
def test_vector_reshards_and_comes_back_byte_for_byte(vector: Path, work: Path) -> None:
    """By way of another dp and bucket size, of each other format, and both."""
    wanted, parts = expected(vector), expected_parts(vector)
    sizes = {part["dp_size"] for part in parts.values()}
    assert len(sizes) == 1
    (dp,) = sizes
    bucket = max(part["bucket_size"] or 0 for part in parts.values()) or "none"
    back: dict[str, Any] = {} if dp is None else {"to_dp": dp, "bucket_size": bucket}
    back |= {"format": wanted["format"], "container": wanted["container"]}
    manifest = load(vector / "manifest.json")
    options = FormatOptions(**manifest.get("options", {}))
    padded = any((part["layout"] or {}).get("pad_for_high_nccl_busbw") for part in manifest["parts"])
    for i, folder in enumerate(FORMAT_FOLDERS):
        if padded and folder == WHOLE:
            continue  # where no layout is kept, nothing tells of it
        to_dp = (dp or 1) * (i + 2) if wanted.get("parts") else (dp or 1) + 3
        there = work / f"there-{folder.name}"
        zero1ckpt.reshard(vector, there, to_dp=to_dp, bucket_size=64, format=folder.name, container="safetensors")
        assert zero1ckpt.verify(there, deep=True, against=vector).ok
        IndependentReader(there, next(iter(parts)))
        zero1ckpt.reshard(there, work / "back", options=options, overwrite=True, **back)
        assert tree(work / "back") == tree(vector)


def other_tools_read(vector: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of the vector ``plain``, as zarr-python or torch.distributed.checkpoint reads it."""
    params = {row["name"]: row["shape"] for row in expected(vector)["params"]}
    slots = expected(vector)["slot_dtypes"]
    if expected(vector)["container"] == "zarr":
        root = zarr.open_group(vector, mode="r")
        return {(p, s): torch.from_numpy(np.asarray(root[f"{p}/{s}"])) for p in params for s in slots}
    loaded = {p: {s: torch.full(shape, 7.0) for s in slots} for p, shape in params.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"state": loaded}, checkpoint_id=str(vector), no_dist=True)
    return {(p, s): loaded[p][s] for p in params for s in slots}


@pytest.mark.parametrize("container", ["zarr", "torch_dist"])
def test_vectors_of_other_containers_hold_what_their_own_tools_read(container: str) -> None:
    vector = WHOLE / container / "vectors" / "plain"
    assert len(list(vector.parent.iterdir())) >= 6 and len(list((vector.parent.parent / "broken").iterdir())) >= 6
    whole = zero1ckpt.open(SHARDS / "vectors" / "plain")  # the same state
    found = other_tools_read(vector)
    assert {name for name, _ in found} == set(whole.names())
    for (param, slot), tensor in found.items():
        assert tensor.shape == whole.read(param, slot).shape and torch.equal(tensor, whole.read(param, slot))


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# -------------------------------------------------------------------------------------------------------------- broken


def run(command: str, folder: Path, out: Path) -> tuple[int, list[str]]:
    """Exit code and messages of a command."""
    try:
        if command == "open":
            zero1ckpt.open(folder)
        elif command == "reshard":
            zero1ckpt.reshard(folder, out, to_dp=3)
        else:
            answer = zero1ckpt.verify(folder, deep=command == "verify --deep")
            return (0 if answer.ok else 1), [finding.message for finding in answer.findings]
    except Zero1CkptError as error:
        return error.exit_code, [str(error)]
    return 0, []


@each_broken
def test_broken_one_is_refused_as_expected(broken: Path, work: Path) -> None:
    record = load(broken / "expected.json")
    folder = work / broken.name
    shutil.copytree(broken, folder, ignore=shutil.ignore_patterns("expected.json"))
    before = tree(folder)
    assert any(row["exit_code"] for row in record["expect"])
    for row in record["expect"]:
        code, messages = run(row["command"], folder, work / "out")
        assert code == row["exit_code"], (row, messages)
        assert not code or any(all(part in line for part in row["message_contains"]) for line in messages), messages
        assert all("\n" not in line for line in messages)
        assert code == 0 or sorted(p.name for p in work.iterdir()) == [broken.name], "nothing is left behind"
        shutil.rmtree(work / "out", ignore_errors=True)
    assert tree(folder) == before


@each_broken
def test_command_line_refuses_it_with_one_line(broken: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = work / broken.name
    shutil.copytree(broken, folder, ignore=shutil.ignore_patterns("expected.json"))
    arguments = {
        "open": ["inspect", str(folder)],
        "verify": ["verify", str(folder)],
        "verify --deep": ["verify", "--deep", str(folder)],
        "reshard": ["reshard", str(folder), str(work / "out"), "--to-dp", "3"],
    }
    for row in load(broken / "expected.json")["expect"]:
        code = command_line(arguments[row["command"]])
        output = capsys.readouterr()
        assert code == row["exit_code"], (row, output)
        if code:
            assert output.err.count("\n") == 1
            assert all(part in output.err for part in row["message_contains"]), (row, output.err)
        shutil.rmtree(work / "out", ignore_errors=True)


@each_broken
def test_schema_or_independent_reader_refuses_it(broken: Path) -> None:
    """The pages say enough to find every flaw without this package."""
    with pytest.raises((jsonschema.ValidationError, AssertionError, OSError, ValueError, KeyError, MemoryError)):
        validator(HOME / "manifest.schema.json").validate(load(broken / "manifest.json"))
        IndependentReader(broken)


# ------------------------------------------------------------------------------------------------ examples in the pages


def example() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = table(HOME / "layout" / "SPEC.md", "param", "shape", "numel", "dtype", "grad_dtype", "shared_embedding")
    params = [
        {
            "name": name,
            "shape": json.loads(shape),
            "dtype": dtype,
            "grad_dtype": grad,
            "shared_embedding": json.loads(own),
        }
        for name, shape, _, dtype, grad, own in rows
    ]
    assert [prod(p["shape"]) for p in params] == [int(row[2]) for row in rows]
    rules = {name: json.loads(value) for name, value, _ in layout_defaults() if value}
    return params, {**rules, "dp_size": 2, "bucket_size": 100}


def layout_defaults() -> list[list[str]]:
    rows = table(HOME / "layout" / "SPEC.md", "rule", "default", "meaning")
    return [[row[0].strip("`"), *row[1:]] for row in rows]


def write_example(path: Path, format: Path, **keywords: Any) -> zero1ckpt.Checkpoint:
    params, _ = example()
    state = {
        p["name"]: {
            slot: torch.arange(1.0, prod(p["shape"]) + 1).reshape(p["shape"]) for slot in ("fp32_param", "exp_avg")
        }
        for p in params
    }
    facts = {p["name"]: {key: p[key] for key in ("dtype", "grad_dtype", "shared_embedding")} for p in params}
    return zero1ckpt.write(path, state, dp_size=2, bucket_size=100, params=facts, format=format.name, **keywords)


def test_the_layouts_example_is_right(work: Path) -> None:
    page = HOME / "layout" / "SPEC.md"
    params, rules = example()
    buffers = lay_out(params, rules)
    rows = table(page, "buffer", "bucket", "offset", "numel", "numel_unpadded", "params")
    computed = []
    for b, buffer in enumerate(buffers):
        for k, bucket in enumerate(buffer["buckets"]):
            inside = [f"{params[i]['name']} [{s}, {e})" for i, s, e, which in buffer["placed"] if which == k]
            computed.append([str(b), str(k), *map(str, bucket), ", ".join(inside)])
    assert rows == computed
    views = ("gbuf_world", "gbuf_world_in_bucket", "gbuf_local", "param")
    stated = [
        [int(rank), int(b), int(k), name, *map(span, cells)]
        for rank, b, k, name, *cells in table(page, "rank", "buffer", "bucket", "param name", *views)
    ]
    own = [
        [rank, f["buffer"], f["bucket"], params[f["index"]]["name"], *(f[view] for view in views)]
        for rank in range(2)
        for f in fragments(buffers, 2, rank)
    ]
    assert stated == own
    layout = write_example(work / "c", SHARDS).layout
    assert layout is not None
    packages = [
        [rank, b, f.bucket, f.name, *([getattr(f, v).start, getattr(f, v).end] for v in views)]
        for rank in range(2)
        for b, buffer in enumerate(layout.buffers)
        for f in buffer.fragments(rank)
    ]
    assert stated == packages


def test_the_example_of_model_space_is_right(work: Path) -> None:
    write_example(work / "c", SLICES)
    found = [
        [str(rank), name, json.dumps(row["shape"]), json.dumps(row["data_offsets"])]
        for rank in range(2)
        for name, row in header_of(work / "c" / f"rank-{rank:05d}-of-00002.safetensors").items()
        if name != "__metadata__"
    ]
    assert found == table(SLICES / "SPEC.md", "rank", "tensor", "shape", "data_offsets")


def test_the_example_of_fully_reshardable_is_right(work: Path) -> None:
    write_example(work / "c", WHOLE, options=FormatOptions(shard_bytes=500))
    found = [
        [name, json.dumps(row["shape"]), str(k), json.dumps(row["data_offsets"])]
        for k in range(1, 6)
        for name, row in header_of(work / "c" / f"optimizer-{k:05d}-of-00005.safetensors").items()
        if name != "__metadata__"
    ]
    assert found == table(WHOLE / "SPEC.md", "tensor", "shape", "file", "data_offsets")


def test_the_example_of_bucket_shards_is_right(work: Path) -> None:
    write_example(work / "c", SHARDS)
    header = header_of(work / "c" / "rank-00001-of-00002.safetensors")
    meta = header.pop("__metadata__")
    rows = table(SHARDS / "SPEC.md", "tensor", "shape", "data_offsets")
    assert rows == [[name, json.dumps(row["shape"]), json.dumps(row["data_offsets"])] for name, row in header.items()]
    (sentence,) = (line for line in (SHARDS / "SPEC.md").read_text().splitlines() if line.startswith("Rank 1's pieces"))
    ends = [int(n) for n in re.findall(r"(\d+) \(", sentence)]
    assert len(ends) == len(meta["zero1ckpt.pieces"]) / 16
    reader = IndependentReader(work / "c")  # proves the cuts; here, that the sentence has them
    places = [0]
    for f in fragments(reader.buffers, 2, 1):
        base = [
            row["data_offsets"][0]
            for n, row in header.items()
            if n.startswith(f"buffer.{f['buffer']}.bucket.{f['bucket']}.")
        ]
        places += [b + 4 * e for b in base for e in f["gbuf_local"]]
    assert sorted({*places, ends[-1]})[1:] == ends


def test_the_layouts_defaults_are_the_codes() -> None:
    stated = {name: json.loads(value) for name, value, _ in layout_defaults() if value}
    own = {f.name: f.default for f in fields(LayoutRules) if f.name in stated}
    assert stated == own and [row[0] for row in layout_defaults()] == [f.name for f in fields(LayoutRules)]
