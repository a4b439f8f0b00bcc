"""What today's Megatron-Core calls the tensors of a legacy checkpoint, and where each rank's piece lies in them.

A legacy file has a rank's own names, shapes and layer numbers; other containers have one key for the tensor of all
ranks. The way from one to the other is what ``sharded_state_dict`` of Megatron-Core's GPT model does, written down here
as a table: which names change, which axes are put in front (layers, experts), and which axis is cut by tensor
parallelism. What is not in the table is taken as not cut (``Spot.sure`` is False: it has to be proved), and a model
that the table does not know is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ...core.boxes import Box
from ...core.errors import UnsupportedError
from .common import Args

__all__ = [
    "EMBEDDING",
    "EXTRA",
    "OUTPUT",
    "Keys",
    "LayerOffsets",
    "Seat",
    "Spot",
    "global_name",
    "layer_offsets",
    "object_key",
]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
EXTRA = "_extra_state"
LayerOffsets = Mapping[tuple[int, int, str], int]
"""First layer's global number by (pipeline rank, virtual chunk, prefix of its name)."""

_LAYER = re.compile(r"^((?:.*?\.)?layers\.)(\d+)(\..*)$")
_BLOCK = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_CHILDREN = frozenset({"input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp"})
"""Modules of a GPT model's layer."""

_COLUMN = ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.shared_experts.linear_fc1", "mlp.experts.linear_fc1")
_ROW = ("self_attention.linear_proj", "mlp.linear_fc2", "mlp.shared_experts.linear_fc2", "mlp.experts.linear_fc2")
_WHOLE = (
    "input_layernorm",
    "pre_mlp_layernorm",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "decoder.final_layernorm",
)
_AXES: dict[str, int | None] = {EMBEDDING: 0, OUTPUT: 0, "output_layer.bias": 0}
"""The axis that tensor parallelism cuts, by name in a layer (or in the model); None for what all its ranks hold."""
_AXES |= {f"{module}.{field}": 0 for module in _COLUMN for field in ("weight", "bias")}
_AXES |= {f"{module}.weight": 1 for module in _ROW} | {f"{module}.bias": None for module in _ROW}
_AXES |= {f"{module}.{field}": None for module in _WHOLE for field in ("weight", "bias")}
_AXES |= {f"{module}.layer_norm_{field}": None for module in _COLUMN for field in ("weight", "bias")}
_AXES |= dict.fromkeys(
    (
        "embedding.position_embeddings.weight",
        "mlp.router.weight",
        "mlp.router.bias",
        "mlp.router.expert_bias",
        "mlp.shared_experts.gate_weight",
    )
)
_LOCAL_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""What a layer of Megatron's own modules calls its norms in a checkpoint: as Transformer Engine, which fuses them."""
_NOT_UNIFORM = (
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "hetereogenous_dist_checkpoint",
)


@dataclass(frozen=True, slots=True)
class Seat:
    """A model-parallel rank, and the virtual chunk of its model."""

    tp: int
    pp: int
    ep: int
    virtual: int = 0


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a rank's tensor lies in the tensor ``key`` of all ranks, of ``shape``: ``boxes`` make it up in order.

    ``sure``: False where the table does not know the name, so that it may be cut though it is taken as whole.
    """

    key: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    sure: bool = True


@dataclass(frozen=True, slots=True)
class _Name:
    """``front``: (index, length) of each axis that is put in front; ``kind``: the name in the table."""

    key: str
    kind: str
    front: tuple[tuple[int, int], ...] = ()


# ----------------------------------------------------------------------------------------------------- names of layers


def layer_offsets(names: Iterable[tuple[int, int, str]], num_layers: int | None, path: object) -> LayerOffsets:
    """Where the layers of each stage begin. ``names``: of all tensors, with pipeline rank and virtual chunk.

    Stages follow each other in order of virtual chunk, then of pipeline rank; each numbers its layers from 0.
    """
    counts: dict[str, dict[tuple[int, int], set[int]]] = {}
    stages: set[tuple[int, int]] = set()
    for pp, virtual, name in names:
        stages.add((virtual, pp))
        found = _LAYER.fullmatch(name)
        if found is not None:
            counts.setdefault(found[1], {}).setdefault((virtual, pp), set()).add(int(found[2]))
    offsets: dict[tuple[int, int, str], int] = {}
    for prefix, stage in counts.items():
        total = 0
        for virtual, pp in sorted(stages):
            offsets[pp, virtual, prefix] = total
            total += len(stage.get((virtual, pp), ()))
        whole = all(own == set(range(len(own))) for own in stage.values())
        stated = num_layers if prefix.endswith("decoder.layers.") else None
        if len(stage) > 1 and (not whole or stated not in (None, total)):
            raise UnsupportedError(
                f"the stages' layers under {prefix.rstrip('.')} cannot be numbered",
                file=path,
                found=f"{total} layers in all stages" if whole else "stages that do not number theirs from 0",
                expected=None if stated is None else f"{stated}, as the args state",
            )
    return offsets


def global_name(name: str, pp: int, virtual: int, offsets: LayerOffsets) -> str:
    """A tensor's name with the number that its layer has in the whole model. Pure."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    return f"{found[1]}{int(found[2]) + offsets[pp, virtual, found[1]]}{found[3]}"


# ------------------------------------------------------------------------------------------------------- keys of models


@dataclass(frozen=True)
class Keys:
    """The keys of a model. ``grid``: tensor, pipeline and expert parallel sizes; ``shapes``: of all ranks' tensors;
    ``tied``: whether the last stage's output layer is a copy of the embedding, None where there is no such choice.
    """

    path: str
    grid: tuple[int, int, int]
    args: Args
    offsets: LayerOffsets
    shapes: Mapping[tuple[Seat, str], tuple[int, ...]]
    tied: bool | None = None

    def spot(self, seat: Seat, name: str) -> Spot:
        """Where a rank's tensor lies in that of all ranks. Raises ``UnsupportedError``."""
        named = self._named(seat, name)
        shape = self.shapes[seat, name]
        sure = named.kind in _AXES or self.grid[0] == 1
        axis = _AXES.get(named.kind) if self.is_gpt else None
        if axis is None:
            return _framed(named, shape, (Box(tuple(0 for _ in shape), shape),), sure)
        halves = 2 if self._is_gated(seat, name, named.kind) else 1
        whole, boxes = _cut(shape, axis, halves, seat.tp, self.grid[0])
        return _framed(named, whole, boxes, sure)

    def extra(self, seat: Seat, name: str) -> str | None:
        """The key of a module's extra state; None where a GPT model leaves it out. Raises ``UnsupportedError``."""
        if self.is_gpt and name == f"output_layer.{EXTRA}":
            return None
        named = self._named(seat, name)
        return object_key(named.key, named.front)

    @cached_property
    def is_gpt(self) -> bool:
        """Whether it is Megatron-Core's GPT model; else it is a model in one piece, whose names are its keys.

        Raises ``UnsupportedError`` for a model that is neither, so far as it shows.
        """
        if any(_BLOCK.fullmatch(name) for _, name in self.shapes):
            self._check_gpt()
            return True
        if self.grid != (1, 1, 1):
            raise self._refused("only the keys of GPT models are known where several ranks hold a model")
        return False

    # ----------------------------------------------------------------------------------------------------------- names

    def _named(self, seat: Seat, name: str) -> _Name:
        found = _BLOCK.fullmatch(name)
        if found is not None and self.is_gpt:
            return self._in_layer(seat, name, int(found[1]), found[2])
        if _LAYER.fullmatch(name) or name.startswith("mtp."):
            raise self._refused("whether the layers of this module have one key together is not known", name)
        if name == OUTPUT and self.tied:
            return _Name(EMBEDDING, EMBEDDING)
        return _Name(name, name)

    def _in_layer(self, seat: Seat, name: str, number: int, rest: str) -> _Name:
        if rest.partition(".")[0] not in _CHILDREN:
            raise self._refused("a layer has a module that GPT models have not", name)
        layer = number + self.offsets[seat.pp, seat.virtual, "decoder.layers."]
        front = [] if self._numbered else [(layer, self._layers)]
        prefix = f"decoder.layers.{layer}." if self._numbered else "decoder.layers."
        expert = _EXPERT.fullmatch(rest)
        if expert is not None:
            count = self._local_experts
            front.append((seat.ep * count + int(expert[1]), self.grid[2] * count))
            return _Name(f"{prefix}mlp.experts.experts.{expert[2]}", f"mlp.experts.{expert[2]}", tuple(front))
        if rest.startswith("mlp.experts."):
            raise self._refused("how the experts of a grouped GEMM lie in their tensor is not known", name)
        return _Name(prefix + self._norms_renamed(seat, number, rest), rest, tuple(front))

    def _norms_renamed(self, seat: Seat, number: int, rest: str) -> str:
        """Megatron's own modules have norms apart from the linear layers, and a checkpoint names them by these."""
        if (seat, f"decoder.layers.{number}.input_layernorm.weight") not in self.shapes:
            return rest
        for old, new in _LOCAL_NORMS.items():
            if rest.startswith(old):
                return new + rest[len(old) :]
        return rest

    # ---------------------------------------------------------------------------------------------------- what is known

    @cached_property
    def _numbered(self) -> bool:
        """Whether layers differ from each other as the args say, so that each has keys of its own.

        Args without ``moe_layer_freq`` say nothing; then dense layers and such of experts in one model say it.
        """
        values = [self.args.values.get(name) for name in ("moe_layer_freq", "linear_attention_freq")]
        if any(isinstance(v, (list, tuple)) or (type(v) is int and v > 1) for v in values):
            return True
        experts = {any(rest == "mlp.router.weight" for _, _, rest in shapes) for shapes in self._by_layer.values()}
        return "moe_layer_freq" not in self.args.values and len(experts) == 2

    @cached_property
    def _by_layer(self) -> Mapping[int, Mapping[tuple[int, int, str], tuple[int, ...]]]:
        """Shapes by global layer, then by (tp, ep, name in the layer)."""
        found: dict[int, dict[tuple[int, int, str], tuple[int, ...]]] = {}
        for (seat, name), shape in self.shapes.items():
            match = _BLOCK.fullmatch(name)
            if match is not None:
                layer = int(match[1]) + self.offsets[seat.pp, seat.virtual, "decoder.layers."]
                found.setdefault(layer, {})[seat.tp, seat.ep, match[2]] = shape
        return found

    @property
    def _layers(self) -> int:
        return len(self._by_layer)

    @cached_property
    def _local_experts(self) -> int:
        """Experts of a rank. Raises ``UnsupportedError`` where ranks differ, or the args say otherwise."""
        if self.grid[0] > 1 and (
            self.args.integer("expert_tensor_parallel_size") not in (None, self.grid[0])
            or self.args.flag("moe_extended_tp")
        ):
            raise self._refused("experts are cut by tensor parallelism in another way than the rest")
        held: dict[tuple[int, int, int], set[int]] = {}
        for layer, shapes in self._by_layer.items():
            for tp, ep, rest in shapes:
                expert = _EXPERT.fullmatch(rest)
                if expert is not None:
                    held.setdefault((layer, tp, ep), set()).add(int(expert[1]))
        counts = {len(own) for own in held.values() if own == set(range(len(own)))}
        every = {len(own) for own in held.values()}
        if len(counts) != 1 or counts != every or self.args.num_experts not in (None, self.grid[2] * min(counts)):
            raise self._refused("ranks do not hold the experts that the args state", found=f"{sorted(every)} a rank")
        return min(counts)

    def _is_gated(self, seat: Seat, name: str, kind: str) -> bool:
        """Whether a linear_fc1 is a gate and its value in one, as the shape of the linear_fc2 behind it shows."""
        module, _, field = name.rpartition(".")
        if not kind.rpartition(".")[0].endswith("linear_fc1") or field not in ("weight", "bias"):
            return False
        after = self.shapes.get((seat, f"{module.removesuffix('linear_fc1')}linear_fc2.weight"), ())
        out = self.shapes[seat, name][0]
        if len(after) != 2 or out not in (after[1], 2 * after[1]) or not after[1]:
            raise self._refused("whether this is a gate and its value in one cannot be seen", name)
        gated = out == 2 * after[1]
        if self.args.flag("swiglu") and not gated:
            raise self._refused("the args state swiglu, and the shapes show no gate", name)
        return gated

    def _check_gpt(self) -> None:
        """Raises ``UnsupportedError`` where layers are not those that the table is of."""
        self._check_args()
        layers = [{rest for _, _, rest in shapes} for shapes in self._by_layer.values()]
        mlps = ("mlp.linear_fc1.weight", "mlp.router.weight")
        if not all("self_attention.linear_qkv.weight" in own and any(m in own for m in mlps) for own in layers):
            raise self._refused("its layers are of a kind whose keys are not known", found="no GPT layers")
        if sorted(self._by_layer) != list(range(self._layers)):
            raise self._refused("the layers of the model are not numbered through")
        first, *others = self._by_layer.values()
        if not self._numbered and any(own != first for own in others):
            raise self._refused("its layers differ from each other, and the args do not say that they do")

    def _check_args(self) -> None:
        stated = (self.args.tensor_parallel, self.args.pipeline_parallel)
        for known, found in zip(stated, self.grid, strict=False):
            if known != found and (known is not None or found > 1):
                raise self._refused("the args do not state the parallel sizes of its ranks", found=known)
        if self.args.num_layers not in (None, self._layers):
            raise self._refused("the args state another number of layers", found=f"{self._layers} layers")
        if any(self.args.values.get(name) for name in _NOT_UNIFORM):
            raise self._refused("its layers are made by a configuration of their own")
        groups = self.args.integer("num_query_groups")
        if self.args.flag("group_query_attention") and groups is not None and groups < self.grid[0]:
            raise self._refused("tensor-parallel ranks share query groups")

    def _refused(self, why: str, name: str | None = None, found: object = None) -> UnsupportedError:
        return UnsupportedError(
            f"where the model's tensors lie in those of all ranks is not known: {why}",
            file=self.path,
            param=name,
            found=found,
            hint="write it from the training script and pass it with --layout, or choose megatron:legacy",
        )


def object_key(key: str, front: Iterable[tuple[int, int]]) -> str:
    """The key of an object: its place along the axes in front, and their lengths. Pure."""
    axes = tuple(front) or ((0, 1),)
    return f"{key}/shard_{'.'.join(str(i) for i, _ in axes)}_{'.'.join(str(n) for _, n in axes)}"


def _cut(
    shape: tuple[int, ...], axis: int, halves: int, rank: int, size: int
) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """The whole shape, and the boxes of one rank's part: of a gate and its value all gates come first. Pure."""
    each = shape[axis] // halves
    boxes = []
    for half in range(halves):
        start = tuple((half * size + rank) * each if i == axis else 0 for i in range(len(shape)))
        boxes.append(Box(start, tuple(each if i == axis else n for i, n in enumerate(shape))))
    return tuple(n * size if i == axis else n for i, n in enumerate(shape)), tuple(boxes)


def _framed(named: _Name, shape: tuple[int, ...], boxes: tuple[Box, ...], sure: bool) -> Spot:
    """Boxes with the axes in front. Pure."""
    start, ones = tuple(i for i, _ in named.front), tuple(1 for _ in named.front)
    moved = tuple(Box((*start, *box.start), (*ones, *box.shape)) for box in boxes)
    return Spot(named.key, (*(n for _, n in named.front), *shape), moved, sure)
