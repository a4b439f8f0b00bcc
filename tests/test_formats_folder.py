"""formats/ is right, complete, and enough: a reader made from it alone agrees with every vector, value for value."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import struct
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import pairwise
from math import lcm, prod
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
import safetensors.torch
import torch

import zero1ckpt
from zero1ckpt.cli.main import run as command_line
from zero1ckpt.core import digest as package_digest
from zero1ckpt.core.dtypes import DTYPE_NAMES, itemsize, to_safetensors
from zero1ckpt.core.errors import Zero1CkptError
from zero1ckpt.core.layout import LayoutRules
from zero1ckpt.model.catalog import PIECE_BYTES
from zero1ckpt.model.manifest import SCHEMA
from zero1ckpt.registry import FORMATS

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "formats"
SHARDS = HOME / "bucket_shards"
VECTORS = sorted(p for p in (SHARDS / "vectors").iterdir())
BROKEN = sorted(p for p in (SHARDS / "broken").iterdir())


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


class IndependentReader:
    """Reads one part of a checkpoint, and proves all but other parts. ``values``: (param, slot) -> bytes."""

    def __init__(self, folder: Path, part: str = "") -> None:
        data = (folder / "manifest.json").read_bytes()
        body, _, last = data.rpartition(b'"manifest_digest": "')
        assert last == f'{text(crc(body))}"\n}}\n'.encode()
        self.manifest = json.loads(data)
        self.files = {entry["path"]: entry for entry in self.manifest["files"]}
        self.part = next(p for p in self.manifest["parts"] if p["name"] == part)
        self.params, self.rules = self.part["params"], self.part["layout"]
        self.dp_size = self.rules["dp_size"]
        self.sizes = {slot["name"]: CODES[slot["dtype"]][1] for slot in self.part["slots"]}
        assert len({p["name"] for p in self.params}) == len(self.params)
        assert all(p.get("group", 0) < len(self.part["groups"]) for p in self.params)
        self.buffers = lay_out(self.params, self.rules)
        self.values = {
            (p["name"], slot): bytearray(prod(p["shape"]) * self.sizes[slot])
            for p in self.params
            for slot in p["digests"]
        }
        for rank in range(self.dp_size):
            prefix = f"part-{quote(part, safe='')}/" if part else ""
            self._rank(folder, f"{prefix}rank-{rank:05d}-of-{self.dp_size:05d}.safetensors", rank)
        names = [
            name for name in self.files if re.fullmatch(r"(extra|model|rank_extra-\d{5}-of-\d{5})\.safetensors", name)
        ]
        self.others = {name: self._file(folder, name) for name in names}
        self._digests()

    def _file(
        self, folder: Path, name: str, tensors: dict[str, Any] | None = None, bounds: Iterable[int] = ()
    ) -> dict[str, bytes]:
        """Tensors of a file, each piece and the file's digest proved; ``tensors``: what the header must hold."""
        data, entry = (folder / name).read_bytes(), self.files[name]
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
        assert text(whole) == entry["digest"] == text(crc(data))
        return {name: payload[slice(*row["data_offsets"])] for name, row in header.items()}

    def _rank(self, folder: Path, file: str, rank: int) -> None:
        tensors, start, at = {}, {}, 0
        for b, buffer in enumerate(self.buffers):
            for k, (_, numel, _) in enumerate(buffer["buckets"]):
                for slot in self.part["slots"]:
                    n = numel // self.dp_size
                    end = at + n * self.sizes[slot["name"]]
                    row = {"dtype": CODES[slot["dtype"]][0], "shape": [n], "data_offsets": [at, end]}
                    tensors[f"buffer.{b}.bucket.{k}.{slot['name']}"] = row
                    start[b, k, slot["name"]], at = at, end
        places = {}
        for f in fragments(self.buffers, self.dp_size, rank):
            for slot, size in self.sizes.items():
                name = self.params[f["index"]]["name"]
                if (name, slot) in self.values:
                    base = start[f["buffer"], f["bucket"], slot]
                    local = [base + size * e for e in f["gbuf_local"]]
                    places[name, slot] = (local, [size * e for e in f["param"]])
        found = self._file(folder, file, tensors, [at for local, _ in places.values() for at in local])
        payload = bytearray(b"".join(found.values()))
        for key, (local, inside) in places.items():
            self.values[key][slice(*inside)] = payload[slice(*local)]
            payload[slice(*local)] = bytes(local[1] - local[0])
        assert not any(payload), "padding is zero"

    def _digests(self) -> None:
        dtypes = {slot["name"]: slot["dtype"] for slot in self.part["slots"]}
        rows = []
        for param in self.params:
            for slot, stated in param["digests"].items():
                values = bytes(self.values[param["name"], slot])
                assert self._tensor(param["name"], slot, dtypes[slot], param["shape"], values) == stated
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


def pairs() -> dict[str, tuple[str, ...]]:
    """Containers of each format that the package has, the default first."""
    found: dict[str, tuple[str, ...]] = {}
    for plugin in FORMATS.values():
        own = plugin.containers if hasattr(plugin, "containers") else (plugin.container,)
        found[plugin.name] = found.get(plugin.name, ()) + own
    return found


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
def vector(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a vector without its expected.json, which is no part of the checkpoint."""
    folder = tmp_path / "vector" / request.param.name
    shutil.copytree(request.param, folder, ignore=shutil.ignore_patterns("expected.json"))
    return folder


def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = load(SHARDS / "vectors" / folder.name / "expected.json")
    return found


each_vector = pytest.mark.parametrize("vector", VECTORS, indirect=True, ids=lambda p: p.name)

# ------------------------------------------------------------------------------------------------ the folder as a whole


def test_nothing_in_the_folder_is_unknown() -> None:
    assert len(VECTORS) >= 13 and len(BROKEN) >= 27
    for path in VECTORS + BROKEN:
        assert (path / "expected.json").is_file(), path
    assert all((path / "manifest.json").is_file() for path in VECTORS)
    assert sum(path.stat().st_size for path in HOME.rglob("*")) < 1_500_000
    for path in (p for p in HOME.rglob("*") if p.is_file() and p.name != ".gitattributes"):
        kind = path.suffix if not path.name.startswith("schema") else "schema"
        assert kind in (".md", ".json", ".safetensors", "schema"), path
        if path.suffix == ".json" and "broken" not in path.parts:
            load(path)
        if path.suffix == ".safetensors":
            assert {"vectors", "broken"} & set(path.parts), path
    for name in pairs():
        assert (HOME / name / "SPEC.md").is_file() and (HOME / name / "schema.json").is_file()


@pytest.mark.parametrize("page", sorted(HOME.rglob("*.md")), ids=lambda p: str(p.relative_to(HOME)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("path", [HOME / "manifest.schema.json", *sorted(HOME.glob("*/schema.json"))], ids=str)
def test_schemas_are_schemas_and_their_enums_are_the_codes(path: Path) -> None:
    schema = load(path)
    jsonschema.Draft202012Validator.check_schema(schema)
    containers = [c for own in pairs().values() for c in own]
    own = {
        "properties.schema": SCHEMA,
        "properties.format": list(pairs()),
        "properties.container": list(dict.fromkeys(containers)),
        "properties.checksum": package_digest.CHECKSUM,
        "properties.piece_bytes": PIECE_BYTES,
        "$defs.dtype": list(DTYPE_NAMES),
        "dtype": [to_safetensors(name) for name in DTYPE_NAMES],
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


def test_pages_say_what_the_code_does() -> None:
    readme = HOME / "README.md"
    rows = table(readme, "format", "containers", "what it is for")
    assert {r[0].strip("`"): tuple(re.findall(r"`(\w+)`", r[1])) for r in rows} == pairs()
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
    for path in vector.glob("rank-*.safetensors"):
        validator(SHARDS / "schema.json").validate(header_of(path))


@each_vector
def test_vector_opens_verifies_and_holds_the_values(vector: Path) -> None:
    wanted = expected(vector)
    ckpt = zero1ckpt.open(vector)
    answer = zero1ckpt.verify(vector, deep=True)
    assert answer.ok and not answer.notices
    assert json.loads(json.dumps(generator().facts(vector))) == wanted
    for row in wanted["values"]:
        tensor = ckpt.read(row["param"], row["slot"])
        assert tensor.reshape(-1)[:3].tolist() == row["first"]
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert raw.hex() == row["hex"]


@each_vector
def test_inspect_says_what_is_expected(vector: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["inspect", "--json", str(vector)]) == 0
    found = json.loads(capsys.readouterr().out)
    found["files"] = [row for row in found["files"] if row["path"] != "manifest.json"]
    wanted = {key: value for key, value in expected(vector).items() if key != "values"}
    for param in wanted["params"]:
        del param["scalars"]
    assert [key for key, value in wanted.items() if not holds(found.get(key), value)] == []


@each_vector
def test_independent_reader_agrees(vector: Path) -> None:
    wanted = expected(vector)
    reader = IndependentReader(vector)
    assert reader.facts() == {key: wanted[key] for key in ("buffers", "ranks")}
    assert [p["digests"] for p in reader.params] == [p["digests"] for p in wanted["params"]]
    assert reader.manifest["digest"] == wanted["digest"]
    assert {(row["param"], row["slot"]): row["hex"] for row in wanted["values"]} == {
        key: value.hex() for key, value in reader.values.items()
    }


def test_independent_reader_agrees_where_pieces_end_on_the_grid(tmp_path: Path) -> None:
    state = {"a": {"fp32_param": torch.arange(700_001.0)}, "b": {"fp32_param": torch.arange(600_000.0)}}
    zero1ckpt.write(tmp_path / "c", state, dp_size=1)
    cuts = header_of(tmp_path / "c" / "rank-00000-of-00001.safetensors")["__metadata__"]["zero1ckpt.pieces"]
    assert len(cuts) == 16 * 4  # b, a up to the grid, a beyond it, the tail
    IndependentReader(tmp_path / "c")


def test_independent_reader_agrees_on_parts_model_tensors_and_rank_bound_state(tmp_path: Path) -> None:
    models = {name: torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)) for name in ("gen", "dis/é")}
    both = torch.nn.ModuleDict({"one": models["gen"], "two": models["dis/é"], "frozen": torch.nn.Linear(2, 2)})
    optimizers = {name: zero1ckpt.Zero1Optimizer(m, torch.optim.AdamW, lr=0.1) for name, m in models.items()}
    rank_extra = {"rng": torch.get_rng_state(), "at": (1, 2)}
    zero1ckpt.save(tmp_path / "c", optimizers, rank_extra=rank_extra, extra={"t": torch.ones(2)}, model=both)
    validator(HOME / "manifest.schema.json").validate(load(tmp_path / "c" / "manifest.json"))
    for name, ckpt in zero1ckpt.open(tmp_path / "c").parts.items():
        reader = IndependentReader(tmp_path / "c", name)
        assert reader.values.keys() == set(ckpt.tensors())
        for (param, slot), value in reader.values.items():
            assert ckpt.read(param, slot).reshape(-1).view(torch.uint8).numpy().tobytes() == value
    assert len(reader.manifest["model"]) == 8  # 3 buffers of each batch norm, and the frozen layer
    file = "rank_extra-00000-of-00001.safetensors"
    assert reader.others[file]["rank_extra.rng"] == rank_extra["rng"].numpy().tobytes()
    value = json.loads(header_of(tmp_path / "c" / file)["__metadata__"]["zero1ckpt.value"])
    assert value == {"rng": {"$tensor": "rank_extra.rng"}, "at": {"$tuple": [1, 2]}}


@each_vector
def test_safetensors_reads_the_same_values(vector: Path) -> None:
    wanted = {(row["param"], row["slot"]): row["hex"] for row in expected(vector)["values"]}
    dtypes = expected(vector)["slot_dtypes"]
    made = {key: bytearray(len(value) // 2) for key, value in wanted.items()}
    for rank in expected(vector)["ranks"]:
        (path,) = vector.glob(f"rank-{rank['rank']:05d}-of-*.safetensors")
        tensors = safetensors.torch.load_file(path)
        for shard in rank["shards"]:
            for slot, dtype in dtypes.items():
                if (shard["name"], slot) not in made:
                    continue
                whole = tensors[f"buffer.{shard['buffer']}.bucket.{shard['bucket']}.{slot}"]
                assert str(whole.dtype) == f"torch.{dtype}"
                part = whole[slice(*shard["gbuf_local"])].contiguous().view(torch.uint8).numpy().tobytes()
                low, high = (itemsize(dtype) * e for e in shard["param"])
                made[shard["name"], slot][low:high] = part
    assert {key: value.hex() for key, value in made.items()} == wanted
    if (vector / "extra.safetensors").exists():
        assert safetensors.torch.load_file(vector / "extra.safetensors")


@each_vector
def test_vector_reshards_and_comes_back_byte_for_byte(vector: Path, tmp_path: Path) -> None:
    wanted = expected(vector)
    there, back = tmp_path / "there", tmp_path / "back"
    zero1ckpt.reshard(vector, there, to_dp=wanted["dp_size"] + 3, bucket_size=64)
    assert zero1ckpt.verify(there, deep=True, against=vector).ok
    zero1ckpt.reshard(there, back, to_dp=wanted["dp_size"], bucket_size=wanted["bucket_size"] or "none")
    assert {p.name: p.read_bytes() for p in back.iterdir()} == {p.name: p.read_bytes() for p in vector.iterdir()}


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


@pytest.mark.parametrize("broken", BROKEN, ids=lambda p: p.name)
def test_broken_one_is_refused_as_expected(broken: Path, tmp_path: Path) -> None:
    record = load(broken / "expected.json")
    folder = tmp_path / broken.name
    shutil.copytree(broken, folder, ignore=shutil.ignore_patterns("expected.json"))
    before = {p: p.read_bytes() for p in folder.iterdir()}
    assert any(row["exit_code"] for row in record["expect"])
    for row in record["expect"]:
        code, messages = run(row["command"], folder, tmp_path / "out")
        assert code == row["exit_code"], (row, messages)
        assert not code or any(all(part in line for part in row["message_contains"]) for line in messages), messages
        assert all("\n" not in line for line in messages)
        assert code == 0 or sorted(p.name for p in tmp_path.iterdir()) == [broken.name], "nothing is left behind"
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert {p: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize("broken", BROKEN, ids=lambda p: p.name)
def test_command_line_refuses_it_with_one_line(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / broken.name
    shutil.copytree(broken, folder, ignore=shutil.ignore_patterns("expected.json"))
    arguments = {
        "open": ["inspect", str(folder)],
        "verify": ["verify", str(folder)],
        "verify --deep": ["verify", "--deep", str(folder)],
        "reshard": ["reshard", str(folder), str(tmp_path / "out"), "--to-dp", "3"],
    }
    for row in load(broken / "expected.json")["expect"]:
        code = command_line(arguments[row["command"]])
        output = capsys.readouterr()
        assert code == row["exit_code"], (row, output)
        if code:
            assert output.err.count("\n") == 1
            assert all(part in output.err for part in row["message_contains"]), (row, output.err)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda p: p.name)
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


def write_example(path: Path) -> zero1ckpt.Checkpoint:
    params, _ = example()
    state = {
        p["name"]: {
            slot: torch.arange(1.0, prod(p["shape"]) + 1).reshape(p["shape"]) for slot in ("fp32_param", "exp_avg")
        }
        for p in params
    }
    facts = {p["name"]: {key: p[key] for key in ("dtype", "grad_dtype", "shared_embedding")} for p in params}
    return zero1ckpt.write(path, state, dp_size=2, bucket_size=100, params=facts)


def test_the_layouts_example_is_right(tmp_path: Path) -> None:
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
    layout = write_example(tmp_path / "c").layout
    assert layout is not None
    packages = [
        [rank, b, f.bucket, f.name, *([getattr(f, v).start, getattr(f, v).end] for v in views)]
        for rank in range(2)
        for b, buffer in enumerate(layout.buffers)
        for f in buffer.fragments(rank)
    ]
    assert stated == packages


def test_the_formats_example_is_right(tmp_path: Path) -> None:
    write_example(tmp_path / "c")
    header = header_of(tmp_path / "c" / "rank-00001-of-00002.safetensors")
    meta = header.pop("__metadata__")
    rows = table(SHARDS / "SPEC.md", "tensor", "shape", "data_offsets")
    assert rows == [[name, json.dumps(row["shape"]), json.dumps(row["data_offsets"])] for name, row in header.items()]
    (sentence,) = (line for line in (SHARDS / "SPEC.md").read_text().splitlines() if line.startswith("Rank 1's pieces"))
    ends = [int(n) for n in re.findall(r"(\d+) \(", sentence)]
    assert len(ends) == len(meta["zero1ckpt.pieces"]) / 16
    reader = IndependentReader(tmp_path / "c")  # proves the cuts; here, that the sentence has them
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
