"""What the corpus says is true, by the names that we give params."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

FIELDS = {"fp32_param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@cache
def layout_of(case: Path) -> dict[str, Any]:
    return json.loads((case / "layout.json").read_text())["model_parallel"]


def ranks_by_part(case: Path) -> dict[str, tuple[str, int]]:
    """Part name as we give it -> (model-parallel rank of the truth, which optimizer)."""
    optimizers = max(len(own) for own in layout_of(case).values())
    found: dict[str, tuple[str, int]] = {}
    for rank, own in layout_of(case).items():
        for index, optimizer in enumerate(own):
            chained = f"chained_{index}." if optimizers > 1 else ""
            found.setdefault(f"{chained}dp_group_idx_{optimizer['dp_group_idx']}", (rank, index))
    return {"": next(iter(found.values()))} if len(found) == 1 else found


def param_names(case: Path, rank: str, optimizer: int) -> list[str]:
    """Local names of one optimizer, in registration order within each buffer."""
    buffers = layout_of(case)[rank][optimizer]["buffers"]
    return [name for buffer in buffers for bucket in reversed(buffer["buckets"]) for name in reversed(bucket["params"])]


def stored_name(case: Path, rank: str, local: str) -> tuple[str, int | None]:
    """The name of the stored key with the global layer number, and the local expert."""
    stages = 1 + max(int(re.search(r"pp(\d+)", r)[1]) for r in layout_of(case))
    stage = int(re.search(r"pp(\d+)", rank)[1])
    first = sum(_layers(case, s) for s in range(stage))
    name = re.sub(r"layers\.(\d+)\.", lambda m: f"layers.{first + int(m[1])}.", local, count=1)
    name = re.sub(r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_", name)
    name = re.sub(r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_", name)
    expert = re.search(r"local_experts\.(\d+)\.", name)
    name = re.sub(r"local_experts\.\d+\.", "experts.", name)
    if stages > 1 and stage == stages - 1 and name == "output_layer.weight" and _tied(case):
        name = "embedding.word_embeddings.weight"
    return name, int(expert[1]) if expert else None


def _layers(case: Path, stage: int) -> int:
    ranks = [own for rank, own in layout_of(case).items() if f"pp{stage}_" in rank]
    names = [n for o in ranks[0] for b in o["buffers"] for k in b["buckets"] for n in k["params"]]
    return len({m[1] for n in names if (m := re.search(r"layers\.(\d+)\.", n))})


def _tied(case: Path) -> bool:
    return bool(json.loads((case / "truth.json").read_text())["job"].get("model_args", {}).get("tied"))


def part_truth(case: Path, rank: str, optimizer: int) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(our name, slot, flattened values) of each param of a bucket format's part; local experts follow each other."""
    with safe_open(case / "truth.safetensors", "pt") as file:
        for slot, field in FIELDS.items():
            experts: dict[str, dict[int, torch.Tensor]] = {}
            for local in param_names(case, rank, optimizer):
                values = file.get_tensor(f"local/{rank}/{local}/{field}").reshape(-1)
                name, expert = stored_name(case, rank, local)
                experts.setdefault(name, {})[expert or 0] = values
            for name, own in experts.items():
                yield name, slot, torch.cat([own[k] for k in sorted(own)])


def model_space_truth(case: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(our name, slot, flattened values) of each param of a model-space format."""
    with safe_open(case / "truth.safetensors", "pt") as file:
        keys = [key for key in file.keys() if key.startswith("global/")]  # noqa: SIM118
        if not keys:
            yield from part_truth(case, *next(iter(ranks_by_part(case).values())))
            return
        for key in keys:
            name, field = key.removeprefix("global/").rsplit("/", 1)
            slot = next(s for s, f in FIELDS.items() if f == field)
            values = file.get_tensor(key)
            if re.search(r"layers\.(?!\d)", name):
                for layer in range(len(values)):
                    yield name.replace("layers.", f"layers.{layer}.", 1), slot, values[layer].reshape(-1)
            else:
                yield name, slot, values.reshape(-1)
