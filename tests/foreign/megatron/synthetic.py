"""The index of a large run, without its tensors: what a 70 B model leaves at TP 8 x PP 8 x DP 64."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from zero1ckpt.core.layout import BufferKey, BufferLayout, LayoutRules, layout_buffer
from zero1ckpt.encodings.dcp_metadata import BytesEntry, DcpMetadata, TensorEntry, dump_metadata
from zero1ckpt.encodings.inert_pickle import Dtype
from zero1ckpt.encodings.torch_archive import object_archive

FIELDS = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Run:
    """Sizes of the model and of the job. ``bucket_size`` acts on the first stage."""

    layers: int = 80
    hidden: int = 8192
    ffn: int = 28672
    vocab: int = 32000
    tp: int = 8
    pp: int = 8
    dp: int = 64
    bucket_size: int = 64_000_000

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def layer(self) -> list[tuple[str, tuple[int, ...], int | None]]:
        """Suffix, global shape of one layer, and the axis that tensor parallelism cuts, in registration order."""
        qkv = self.hidden + 2 * self.hidden // 8
        return [
            ("self_attention.linear_proj.weight", (self.hidden, self.hidden), 1),
            ("self_attention.linear_qkv.layer_norm_weight", (self.hidden,), None),
            ("self_attention.linear_qkv.weight", (qkv, self.hidden), 0),
            ("mlp.linear_fc1.layer_norm_weight", (self.hidden,), None),
            ("mlp.linear_fc1.weight", (2 * self.ffn, self.hidden), 0),
            ("mlp.linear_fc2.weight", (self.hidden, self.ffn), 1),
        ]

    def local(self, stage: int) -> list[tuple[str, int]]:
        """Names and local sizes of a stage's params in registration order."""
        cut = self.vocab // self.tp * self.hidden
        per = self.layers // self.pp
        found = [("embedding.word_embeddings.weight", cut)] if stage == 0 else []
        for layer in range(stage * per, (stage + 1) * per):
            for suffix, shape, axis in self.layer():
                found.append((f"decoder.layers.{layer}.{suffix}", prod(shape) // (1 if axis is None else self.tp)))
        if stage == self.pp - 1:
            found += [("decoder.final_layernorm.weight", self.hidden), ("output_layer.weight", cut)]
        return found


_KEY = BufferKey("bfloat16", "float32")


@dataclass(frozen=True)
class _Param:
    name: str
    numel: int
    buffer_key: BufferKey = _KEY
    shared_embedding: bool = False


def layout_of(run: Run, stage: int) -> BufferLayout:
    params = [_Param(*row) for row in run.local(stage)]
    rules = LayoutRules(run.dp, run.bucket_size if stage == 0 else None)
    return layout_buffer(params[0].buffer_key, params, range(len(params)), rules)


def bucket_edges(layout: BufferLayout, bucket: int, dp: int) -> np.ndarray:
    """Where the chunks of a bucket end: params, gaps and shards."""
    held = layout.bucket(bucket)
    inside = slice(held.first, held.last)
    edges = [layout.start[inside] - held.offset, layout.end[inside] - held.offset]
    shards = np.arange(1, dp) * (held.numel // dp)
    return np.unique(np.concatenate([*edges, shards[shards < held.numel_unpadded], [0, held.numel_unpadded]]))


def write_run(path: Path, run: Run | None = None) -> Run:
    """An iteration folder whose ``.distcp`` files are empty."""
    run = run or Run()
    path.mkdir(parents=True)
    tensors: dict[str, TensorEntry] = {}
    for key, dtype, shape, offsets, sizes, writers in [*_model(run), *_state(run)]:
        at = np.zeros(len(offsets), np.int64)
        tensors[key] = TensorEntry(key, dtype, shape, offsets, sizes, writers, at, at + 1)
    objects, first = {}, b""
    for stage in range(run.pp):
        layout = layout_of(run, stage)
        kinds = (Dtype("bfloat16"), Dtype("float32"))
        for name, sizes in (("", layout.bucket_numel), ("_unpadded", layout.bucket_numel_unpadded)):
            data = object_archive([[{kinds: sizes.tolist()}]])
            for tp in range(run.tp):
                prefix = f"optimizer.distributed.dp_group_idx_{stage * run.tp + tp}"
                key = f"{prefix}.per_bucket_numel{name}/shard_0_1"
                objects[key] = BytesEntry(key, 0, len(first), len(data))
            first += data
    groups = object_archive([{"param_groups": [{"wd_mult": 1.0, "step": 7}, {"wd_mult": 0.0, "step": 7}]}])
    for group in range(run.tp * run.pp):
        key = f"optimizer.distributed.dp_group_idx_{group}.optimizer/shard_0_1"
        objects[key] = BytesEntry(key, 0, len(first), len(groups))
    first += groups
    rng = f"rng_state/shard_0.0_{run.pp}.{run.tp}"
    objects[rng] = BytesEntry(rng, 0, len(first), len(groups))
    first += groups
    files = tuple(f"__{rank}_0.distcp" for rank in range(run.world))
    for name in files:
        (path / name).write_bytes(first if name == files[0] else b"\0")
    (path / ".metadata").write_bytes(dump_metadata(DcpMetadata(tensors, objects, files)))
    common = {"iteration": 7, "checkpoint_version": 3.0, "optimizer": {"param_state_sharding_type": "dp_reshardable"}}
    (path / "common.pt").write_bytes(object_archive(common))
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(config))
    return run


Row = tuple[str, str, tuple[int, ...], np.ndarray, np.ndarray, np.ndarray]


def _model(run: Run) -> Iterator[Row]:
    whole: list[tuple[str, tuple[int, ...], int | None]] = [
        ("embedding.word_embeddings.weight", (run.vocab, run.hidden), 0),
        ("decoder.final_layernorm.weight", (run.hidden,), None),
        ("output_layer.weight", (run.vocab, run.hidden), 0),
    ]
    for key, shape, axis in whole:
        yield _boxes(key, shape, axis, run.tp, gated=False, layers=None)
    for suffix, shape, axis in run.layer():
        gated = suffix == "mlp.linear_fc1.weight"
        yield _boxes(f"decoder.layers.{suffix}", shape, axis, run.tp, gated=gated, layers=run.layers)


def _boxes(key: str, shape: tuple[int, ...], axis: int | None, tp: int, *, gated: bool, layers: int | None) -> Row:
    lead = [()] if layers is None else [(i,) for i in range(layers)]
    cuts = 1 if axis is None else tp * (2 if gated else 1)
    offsets, sizes = [], []
    for front in lead:
        for cut in range(cuts):
            low, size = [0] * len(shape), list(shape)
            if axis is not None:
                size[axis] //= cuts
                low[axis] = cut * size[axis]
            offsets.append([*front, *low])
            sizes.append([*(1 for _ in front), *size])
    full = shape if layers is None else (layers, *shape)
    return key, "bfloat16", full, *_columns(offsets, sizes, [0] * len(offsets))


def _state(run: Run) -> Iterator[Row]:
    for stage in range(run.pp):
        layout = layout_of(run, stage)
        for bucket in range(layout.bucket_count):
            edges = bucket_edges(layout, bucket, run.dp)
            shard = int(layout.bucket_numel[bucket]) // run.dp
            starts, sizes = edges[:-1, None], np.diff(edges)[:, None]
            for tp in range(run.tp):
                writers = (stage * run.tp * run.dp + edges[:-1] // shard * run.tp + tp).astype(np.int64)
                head = f"optimizer.distributed.dp_group_idx_{stage * run.tp + tp}.gbuf_idx_0"
                for field in FIELDS:
                    key = f"{head}.dtype_(torch.bfloat16, torch.float32).bucket_idx_{bucket}.{field}"
                    yield key, "float32", (int(edges[-1]),), starts, sizes, writers


def _columns(
    offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], files: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array(offsets, np.int64), np.array(sizes, np.int64), np.array(files, np.int64)
