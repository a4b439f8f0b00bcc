"""Small legacy checkpoints as Megatron-LM writes them, of what no real one at hand shows."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero1ckpt.core.layout import BufferKey, LayoutRules, layout_buffer

SLOTS = ("param", "exp_avg", "exp_avg_sq")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
State = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Param:
    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    shared_embedding: bool = False
    buffer: bool = False  # a tensor of the model that no optimizer has

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def buffer_key(self) -> BufferKey:
        return BufferKey(self.dtype, "float32")


@dataclass(frozen=True)
class Style:
    """How the files are written. ``views``: weights stay views of the buffer; ``coalesced``: one tensor a buffer, else
    a list with one a bucket, ``padded`` or not; ``dtype_pair``: keys name both dtypes.
    """

    rules: LayoutRules = field(default_factory=lambda: LayoutRules(2))
    views: bool = True
    coalesced: bool = True
    padded: bool = False
    dtype_pair: bool = True
    step: Any = 3


def random_state(params: Sequence[Param], seed: int = 0, young: bool = False) -> dict[str, dict[str, torch.Tensor]]:
    """Main params and moments. ``young``: one-dimensional weights are still 1 and biases 0; moments differ."""
    torch.manual_seed(seed)
    state = {}
    for param in params:
        main = torch.randn(param.shape)
        if young and len(param.shape) == 1:
            main = torch.zeros(param.shape) if param.name.endswith("bias") else torch.ones(param.shape)
        state[param.name] = {"param": main, "exp_avg": torch.randn(param.shape), "exp_avg_sq": torch.rand(param.shape)}
    return state


def write_rank(
    folder: Path, chunks: Sequence[Sequence[Param]], state: State, args: Mapping[str, Any], style: Style
) -> None:
    """One model-parallel rank. ``chunks``: params of each virtual pipeline chunk, in registration order."""
    folder.mkdir(parents=True)
    gathered: dict[Any, Any] = {"buckets_coalesced": True} if style.coalesced else {}
    models = []
    for params in chunks:
        weights: dict[str, torch.Tensor] = {}
        for dtype in dict.fromkeys(p.dtype for p in params if not p.buffer):
            mine = [p for p in params if p.dtype == dtype and not p.buffer]
            world = gather(mine, state, style, weights)
            key = (DTYPES[dtype], torch.float32) if style.dtype_pair else torch.float32
            gathered[sum(type(k) is int for k in gathered)] = {key: world}
        for param in params:
            if param.buffer:
                weights[param.name] = state[param.name]["param"].to(DTYPES[param.dtype])
        models.append(OrderedDict((p.name, weights[p.name]) for p in params))
    groups = [{"wd_mult": wd, "lr_mult": 1.0, "is_expert_parallel": False, "step": style.step} for wd in (1.0, 0.0)]
    saved: dict[str, Any] = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 3}
    saved |= {"model": models[0]} if len(models) == 1 else {f"model{i}": model for i, model in enumerate(models)}
    saved["optimizer"] = {"optimizer": {"param_groups": groups}}
    torch.save(saved, folder / "model_optim_rng.pt")
    torch.save(gathered, folder / "distrib_optim.pt")


def gather(params: Sequence[Param], state: State, style: Style, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    layout = layout_buffer(params[0].buffer_key, params, list(range(len(params))), style.rules)
    padded = {slot: torch.zeros(layout.numel) for slot in SLOTS}
    model = torch.zeros(layout.numel, dtype=DTYPES[params[0].dtype])
    by_name = {p.name: p for p in params}
    for place in layout.placements:
        part = slice(place.world.start, place.world.end)
        for slot in SLOTS:
            padded[slot][part] = state[place.name][slot].reshape(-1)
        model[part] = state[place.name]["param"].reshape(-1).to(model.dtype)
        view = model[part].view(by_name[place.name].shape)
        weights[place.name] = view if style.views else view.clone()
    world: dict[str, Any] = {}
    for slot in SLOTS:
        pieces = [
            padded[slot][b.offset : b.offset + (b.numel if style.padded else b.numel_unpadded)].clone()
            for b in layout.buckets
        ]
        world[slot] = torch.cat(pieces) if style.coalesced else pieces
    if style.coalesced:
        world["numel_unpadded"] = layout.numel_unpadded
    return world


def gpt_layer(prefix: str, hidden: int = 6, ffn: int = 10) -> list[Param]:
    return [
        Param(f"{prefix}.input_layernorm.weight", (hidden,)),
        Param(f"{prefix}.input_layernorm.bias", (hidden,)),
        Param(f"{prefix}.linear_qkv.weight", (3 * hidden, hidden)),
        Param(f"{prefix}.linear_qkv.bias", (3 * hidden,)),
        Param(f"{prefix}.mlp.linear_fc1.weight", (ffn, hidden)),
        Param(f"{prefix}.mlp.linear_fc2.weight", (hidden, ffn)),
        Param(f"{prefix}.mlp.linear_fc2.bias", (hidden,)),
    ]


def write_zarr_gathered(
    folder: Path, params: Sequence[Param], state: State, args: Mapping[str, Any], style: Style
) -> None:
    """The same state as ``dp_zero_gather_scatter`` in the zarr container: one group, one buffer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, torch.Tensor] = {}
    world = gather(params, state, style, weights)
    for name, weight in weights.items():
        (folder / name).mkdir()
        chunk = list(weight.shape)
        told = {"zarr_format": 2, "shape": chunk, "chunks": chunk, "dtype": "bfloat16", "order": "C"}
        told |= {"compressor": None, "filters": None, "fill_value": None}
        (folder / name / ".zarray").write_text(json.dumps(told))
        file = folder / name / ".".join("0" for _ in chunk)
        file.write_bytes(weight.contiguous().view(torch.uint16).numpy().tobytes())
    kind = {"param_state_sharding_type": "dp_zero_gather_scatter"}
    torch.save({"args": Namespace(**args), "iteration": 3, "optimizer": kind}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    groups = [{"wd_mult": wd, "lr_mult": 1.0, "is_expert_parallel": False, "step": style.step} for wd in (1.0, 0.0)]
    gathered = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): world}}
    for key, value in (("param_state", gathered), ("optimizer", {"param_groups": groups})):
        file = folder / f"optimizer.distributed.dp_group_idx_0.{key}" / "shard_0_1.pt"
        file.parent.mkdir()
        torch.save(value, file)
