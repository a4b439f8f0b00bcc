"""``export``: read back with the readers that others use, and rounded as torch rounds."""

import json
import os
import tracemalloc

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

import zero1ckpt
from tests.strategies import finite, same_bits, small_state, tree
from zero1ckpt.api.commit import encode_manifest_of
from zero1ckpt.api.exporting import export, plan_export
from zero1ckpt.api.stored import MODEL_FILE, describe
from zero1ckpt.api.tensors import dtype_name, tensor_bytes
from zero1ckpt.core.casting import cast_bits
from zero1ckpt.core.digest import crc64, format_digest, tensor_digest
from zero1ckpt.core.errors import OutputError, UnsupportedError, UsageError
from zero1ckpt.encodings.tensor_file import write_tensor_file
from zero1ckpt.model.manifest import ModelTensor
from zero1ckpt.storage.staging import find_leftovers

FLOATS = ("float32", "float16", "bfloat16", "float64")
FORMATS = ("bucket_shards", "fully_sharded_model_space", "fully_reshardable")


def read(folder):
    """All weights as anybody reads them: by the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert {name for tensors in files.values() for name in tensors} == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())
    return {name: files[file][name] for name, file in index["weight_map"].items()}


@pytest.fixture
def state():
    return small_state()


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_casts_are_those_of_torch(source, target):
    values = finite(source, (5000,), 3)
    special = [0.0, -0.0, float("inf"), float("-inf"), 65504.0, 65519.9, 65520.0, 1e-8, 2.0**-24, 3.0**-25, 1e39]
    ties = [1 + k * 2.0**-e for e in (8, 9, 11, 12) for k in range(9)]
    values = torch.cat([values, torch.tensor(special + ties, dtype=torch.float64).to(values.dtype)])
    wanted = values.to(getattr(torch, target))
    out = torch.empty_like(wanted)
    overflows = cast_bits(tensor_bytes(values), source, target, tensor_bytes(out))
    assert same_bits(out, wanted)
    assert overflows == int((values.isfinite() & wanted.isinf()).sum())


def test_a_nan_stays_one():
    values = torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    for target in FLOATS:
        out = torch.empty(3, dtype=getattr(torch, target))
        assert cast_bits(tensor_bytes(values), "float32", target, tensor_bytes(out)) == 0
        assert out.isnan().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_each_param_is_the_main_param_rounded_once(work, state, format, dtype):
    dtypes = ["bfloat16", "float32", "float16"]
    params = {name: {"dtype": dtypes[i % 3]} for i, name in enumerate(state)}
    zero1ckpt.write(work / "a", state, dp_size=3, bucket_size=100, params=params, format=format)
    made = export(work / "a", work / "out", dtype=dtype, shard_size=3000)
    found = read(work / "out")
    assert list(found) == sorted(state) and len(made.shards) > 1
    for name, slots in state.items():
        assert same_bits(found[name], slots["fp32_param"].to(getattr(torch, dtype or params[name]["dtype"]))), name
    assert [shard.name for shard in made.shards] == sorted(
        n for n in os.listdir(work / "out") if n.startswith("model-")
    )


def test_the_same_bytes_from_any_layout_with_any_number_of_workers(work, state):
    zero1ckpt.write(work / "a", state, dp_size=5, bucket_size=64)
    zero1ckpt.write(work / "b", state, dp_size=2, format="fully_reshardable")
    export(work / "a", work / "x", dtype="bfloat16", shard_size=2000, workers=1)
    export(work / "b", work / "y", dtype="bfloat16", shard_size=2000, workers=4, memory_limit=2**18)
    assert tree(work / "x") == tree(work / "y")


def test_one_file_is_aligned_and_marked(work, state):
    zero1ckpt.write(work / "a", state, dp_size=2, params={"layers.0.weight": {"dtype": "bfloat16"}})
    export(work / "a", work / "out")
    assert sorted(os.listdir(work / "out")) == ["model.safetensors", "model.safetensors.index.json"]
    with safe_open(work / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(state)
    data = (work / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    sizes = {"F32": 4, "BF16": 2}
    assert length % 8 == 0
    assert all(row["data_offsets"][0] % sizes[row["dtype"]] == 0 for n, row in header.items() if n != "__metadata__")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(11, 4)
        self.lin = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("count", torch.tensor([3], dtype=torch.int64))
        self.register_buffer("scale", torch.tensor([0.1, 1e-3]))


def write_with_model(path, net, trained):
    """A checkpoint of some params, with the others and the buffers stored beside, as ``save(model=)`` does."""
    state = {name: {"fp32_param": p.detach().clone()} for name, p in net.named_parameters() if name in trained}
    zero1ckpt.write(path, state, dp_size=2)
    stored = describe(path)
    tensors = [("frozen", n, p.detach()) for n, p in net.named_parameters() if n not in trained]
    tensors += [("buffer", n, b) for n, b in net.named_buffers()]
    rows = [(name, dtype_name(t.dtype), tuple(t.shape), tensor_bytes(t)) for _, name, t in tensors]
    model = [
        ModelTensor(n, kind, d, list(s), format_digest(tensor_digest(n, kind, d, s, crc64(v), v.nbytes)))
        for (kind, *_), (n, d, s, v) in zip(tensors, rows, strict=True)
    ]
    files = [*stored.manifest.files, write_tensor_file(path / MODEL_FILE, MODEL_FILE, rows)]
    parts, options = stored.manifest.parts, stored.manifest.options
    (path / "manifest.json").write_bytes(encode_manifest_of(stored.format, parts, files, model=model, options=options))


def test_a_whole_model_is_loaded_from_it(work):
    torch.manual_seed(0)
    net = Net()
    write_with_model(work / "a", net, {"emb.weight", "lin.bias"})
    assert zero1ckpt.verify(work / "a", deep=True)
    made = export(work / "a", work / "out", tied={"head.weight": "emb.weight"})
    assert made.notices == [] and {w.kind for w in made.weights} == {"param", "frozen", "buffer"}
    with safe_open(work / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "emb.weight"}
    other = Net()
    assert load_model(other, work / "out" / "model.safetensors") == (set(), [])
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))


def test_frozen_params_and_buffers_keep_their_dtype_unless_told(work):
    net = Net()
    write_with_model(work / "a", net, {"emb.weight"})
    export(work / "a", work / "kept")
    assert {t.dtype for t in read(work / "kept").values()} == {torch.float32, torch.int64}
    export(work / "a", work / "half", dtype="bfloat16")
    found = read(work / "half")
    assert found["count"].dtype == torch.int64 and found["scale"].dtype == torch.bfloat16
    assert torch.equal(found["lin.weight"], net.lin.weight.detach().bfloat16())


def test_a_param_without_a_main_param_is_named(work, state):
    del state["layers.1.weight"]["fp32_param"]
    zero1ckpt.write(work / "a", state, dp_size=2)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.weight.*fp32_param"):
        export(work / "a", work / "out")
    assert not (work / "out").exists()


def test_what_is_missing_or_changed_is_said(work):
    state = {"emb": {"fp32_param": torch.tensor([1.0, 70000.0, -1e9])}}
    zero1ckpt.write(work / "a", state, dp_size=1, params={"emb": {"shared_embedding": True}})
    made = export(work / "a", work / "out", dtype="float16")
    assert len(made.notices) == 3
    assert "no frozen params or buffers" in made.notices[0] and "shared embedding" in made.notices[1]
    assert made.notices[2] == "emb: 2 finite values are too large for float16 and became infinite"


def test_refusals(work, state):
    zero1ckpt.write(work / "a", state, dp_size=2)
    (work / "full").mkdir()
    (work / "full" / "mine").write_text("x")
    with pytest.raises(OutputError, match="full"):
        export(work / "a", work / "full")
    with pytest.raises(UsageError, match="lies in"):
        export(work / "a", work / "a" / "out")
    for keywords in ({"dtype": "int8"}, {"shard_size": 0}, {"part": "gen"}, {"tied": {"x": "y"}}):
        with pytest.raises(UsageError):
            plan_export(work / "a", **keywords)
    with pytest.raises(UsageError, match=r"layers\.1\.weight"):
        plan_export(work / "a", tied={"layers.1.weight": "layers.0.weight"})
    (work / "empty").mkdir()
    export(work / "a", work / "empty")
    assert len(read(work / "empty")) == len(state)


def test_an_error_leaves_nothing(work, state):
    zero1ckpt.write(work / "a", state, dp_size=1)
    (rank,) = [path for path in (work / "a").iterdir() if path.name.startswith("rank")]
    data = bytearray(rank.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 1000] ^= 1
    rank.write_bytes(data)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="fp32_param"):
        export(work / "a", work / "out")
    assert sorted(os.listdir(work)) == ["a"] and not find_leftovers(work)


def test_memory_is_bounded(work):
    numel = 4_000_000
    zero1ckpt.write(work / "a", {"w": {"fp32_param": torch.arange(numel).float()}}, dp_size=4)
    tracemalloc.start()
    export(work / "a", work / "out", dtype="bfloat16", memory_limit=2**20, workers=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20
    assert torch.equal(read(work / "out")["w"], torch.arange(numel).float().bfloat16())
