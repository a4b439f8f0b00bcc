"""Small checkpoints as Megatron writes them (torch_dist, fully_reshardable), made without Megatron."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zero1ckpt.encodings.dcp_metadata import BytesEntry, DcpMetadata, TensorEntry, dump_metadata

SHAPES = {
    "embedding.weight": (24, 8),
    "decoder.layers.mlp.weight": (2, 12, 8),  # stacked: two layers
    "decoder.layers.norm.bias": (2, 8),
    "output.weight": (24, 8),
}
NAMES = {
    "embedding.weight": (24, 8),
    "decoder.layers.0.mlp.weight": (12, 8),
    "decoder.layers.1.mlp.weight": (12, 8),
    "decoder.layers.0.norm.bias": (8,),
    "decoder.layers.1.norm.bias": (8,),
    "output.weight": (24, 8),
}
FIELDS = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
RNG = {"random": [1, 2, 3]}


def make_values(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Key -> field -> value, float32."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for key, shape in SHAPES.items():
        values[key] = {field: torch.randn(shape, generator=generator) for field in FIELDS}
        values[key]["exp_avg_sq"].abs_()
    return values


def by_name(values: dict[str, dict[str, torch.Tensor]], name: str, slot: str) -> torch.Tensor:
    """One param's slot by the names that we give."""
    field = next(field for field, own in FIELDS.items() if own == slot)
    if ".layers." not in name:
        return values[name][field]
    head, _, tail = name.partition(".layers.")
    layer, _, rest = tail.partition(".")
    return values[f"{head}.layers.{rest}"][field][int(layer)]


class _File:
    """Archives end to end."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, value: Any) -> tuple[int, int]:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        at = len(self.data)
        self.data += buffer.getvalue()
        return at, len(self.data) - at


def write_iteration(
    folder: Path,
    *,
    seed: int = 0,
    iteration: int = 3,
    weights: dict[str, torch.Tensor] | None = None,
    crc32: bool = True,
) -> dict[str, dict[str, torch.Tensor]]:
    """Writes an iteration folder and returns its values. ``weights``: model tensors that are not the main params.
    ``crc32``: whether torch computes the archives' checksums.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(crc32)
    try:
        return _write_iteration(folder, seed, iteration, weights or {})
    finally:
        torch.serialization.set_crc32_options(before)


def _write_iteration(
    folder: Path, seed: int, iteration: int, weights: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    folder.mkdir(parents=True)
    values = make_values(seed)
    file = _File()
    tensors = {}
    for key, own in values.items():
        model = weights[key] if key in weights else own["param"].bfloat16()
        tensors[key] = _entry(file, key, model)
        for field, value in own.items():
            full = f"optimizer.state.{field}.{key}"
            tensors[full] = _entry(file, full, value)
    objects = {}
    for key, value in {"rng_state/shard_0_1": [RNG]}.items():
        at, nbytes = file.add(value)
        objects[key] = BytesEntry(key, 0, at, nbytes)
    (folder / "__0_0.distcp").write_bytes(file.data)
    (folder / ".metadata").write_bytes(dump_metadata(DcpMetadata(tensors, objects, ("__0_0.distcp",))))
    groups = [
        {"lr": 0.001, "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "step": 3},
        {"lr": 0.001, "wd_mult": 0.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "step": 3},
    ]
    common = {
        "iteration": iteration,
        "checkpoint_version": 3.0,
        "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"},
        "opt_param_scheduler": {"max_lr": 0.001, "num_steps": 12},
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    }
    torch.save(common, folder / "common.pt")
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(config))
    return values


def write_run(run: Path, iterations: tuple[int, ...] = (3,)) -> dict[str, dict[str, torch.Tensor]]:
    """Writes a run folder with its tracker, and returns the values of the last iteration."""
    values = {}
    for iteration in iterations:
        values = write_iteration(run / f"iter_{iteration:07d}", seed=iteration, iteration=iteration)
    (run / "latest_checkpointed_iteration.txt").write_text(str(iterations[-1]))
    return values


def _entry(file: _File, key: str, value: torch.Tensor) -> TensorEntry:
    """A tensor in two chunks along its last but one axis (stacked ones in one a layer)."""
    rows = [(i,) for i in range(value.shape[0])] if value.ndim == 3 else [()]
    boxes = []
    for row in rows:
        part = value[row] if row else value
        cut = part.shape[0] // 2 if part.ndim == 2 and not row else part.shape[0]
        for low in range(0, part.shape[0], cut):
            boxes.append(((*row, low, *(0 for _ in part.shape[1:])), part[low : low + cut]))
    if key.endswith("norm.bias"):
        boxes = [((i, 0), value[i]) for i in range(value.shape[0])]
    offsets, sizes, places = [], [], []
    for start, piece in boxes:
        shape = (*(1 for _ in range(value.ndim - piece.ndim)), *piece.shape)
        offsets.append(start)
        sizes.append(shape)
        places.append(file.add(piece.reshape(shape).clone()))
    at, nbytes = np.array(places, np.int64).T
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorEntry(
        key,
        dtype,
        tuple(value.shape),
        np.array(offsets, np.int64),
        np.array(sizes, np.int64),
        np.zeros(len(at), np.int64),
        at,
        nbytes,
    )
