"""What a checkpoint says of itself beside its tensors: iteration, layout of the optimizer, args, scheduler, the rest.

Every getter is None where the file does not say: toy files have a few args, real ones 657, of other names in other
versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ...core.errors import CorruptError
from ...encodings.inert_pickle import Dtype, EnumValue, Record, Value
from .entries import Entries

__all__ = ["Args", "CarriedEntry", "Common", "chained_values", "common_of", "read_common"]

MODEL_SPACE = "fully_sharded_model_space"
BUCKET_SPACE = "fully_sharded_bucket_space"
DP_ZERO = "dp_zero_gather_scatter"
DP_RESHARDABLE = "dp_reshardable"
FULLY_RESHARDABLE = "fully_reshardable"


@dataclass(frozen=True)
class Args:
    """The arguments of the training run (``argparse.Namespace``), by name; None for what is absent or of another type.

    ``values`` are inert: dtypes, enums and unknown objects as ``inert_pickle`` shows them.
    """

    values: Mapping[str, Value] = field(default_factory=dict)

    def integer(self, name: str) -> int | None:
        value = self.values.get(name)
        return value if type(value) is int else None

    def flag(self, name: str) -> bool | None:
        value = self.values.get(name)
        return value if type(value) is bool else None

    def text(self, name: str) -> str | None:
        """A string, or the name of a dtype or of an enum's member."""
        value = self.values.get(name)
        if isinstance(value, EnumValue):
            value = value.value
        if isinstance(value, Dtype):
            return value.name
        return value if type(value) is str else None

    @property
    def tensor_parallel(self) -> int | None:
        return self.integer("tensor_model_parallel_size")

    @property
    def pipeline_parallel(self) -> int | None:
        return self.integer("pipeline_model_parallel_size")

    @property
    def virtual_pipeline(self) -> int | None:
        """Model chunks a pipeline rank; None without interleaving."""
        return self.integer("virtual_pipeline_model_parallel_size")

    @property
    def expert_parallel(self) -> int | None:
        return self.integer("expert_model_parallel_size")

    @property
    def data_parallel(self) -> int | None:
        """Of the whole job: with several optimizer instances, more than shards a bucket."""
        return self.integer("data_parallel_size")

    @property
    def context_parallel(self) -> int | None:
        return self.integer("context_parallel_size")

    @property
    def instances(self) -> int | None:
        return self.integer("num_distributed_optimizer_instances")

    @property
    def world_size(self) -> int | None:
        return self.integer("world_size")

    @property
    def num_layers(self) -> int | None:
        return self.integer("num_layers")

    @property
    def expert_tensor_parallel(self) -> int | None:
        return self.integer("expert_tensor_parallel_size")

    @property
    def num_experts(self) -> int | None:
        return self.integer("num_experts") or self.integer("num_moe_experts")

    @property
    def padded_vocab_size(self) -> int | None:
        return self.integer("padded_vocab_size")

    @property
    def transformer_impl(self) -> str | None:
        """ "local" or "transformer_engine": which modules hold the LayerNorms."""
        return self.text("transformer_impl")

    @property
    def overlap_grad_reduce(self) -> bool | None:
        return self.flag("overlap_grad_reduce")

    @property
    def ddp_bucket_size(self) -> int | None:
        return self.integer("ddp_bucket_size")

    @property
    def pad_for_high_nccl_busbw(self) -> bool | None:
        return self.flag("ddp_pad_buckets_for_high_nccl_busbw")

    @property
    def grads_in_fp32(self) -> bool | None:
        return self.flag("accumulate_allreduce_grads_in_fp32")

    @property
    def untied_embeddings(self) -> bool | None:
        return self.flag("untie_embeddings_and_output_weights")


@dataclass(frozen=True, slots=True)
class CarriedEntry:
    """Something that the checkpoint holds besides its optimizer state. ``nbytes``: of a common value, 0 (it lies in
    one pickle with the others). ``kind``: "common", "object", "tensor" or "file".
    """

    key: str
    kind: str
    nbytes: int


@dataclass(frozen=True)
class Common:
    """The common state.

    ``sharding_type``: layout of the optimizer state, as the keys of the entries show it and else as the file says;
    None where there is no distributed optimizer's state. ``scheduler``: inert state of the LR scheduler.
    ``optimizer``: inert, as stored. ``carried``: each other thing that the checkpoint holds.
    """

    args: Args
    iteration: int | None = None
    checkpoint_version: float | None = None
    sharding_type: str | None = None
    scheduler: Mapping[str, Value] | None = None
    optimizer: Value = None
    content_metadata: Mapping[str, Value] = field(default_factory=dict)
    carried: tuple[CarriedEntry, ...] = ()
    notices: tuple[str, ...] = ()


def read_common(entries: Entries) -> Common:
    """The common state of an opened checkpoint. Raises ``CorruptError`` for one that contradicts itself."""
    common = common_of(entries.common)
    shown = _shown_by_keys(entries)
    stated = common.sharding_type
    notices: tuple[str, ...] = ()
    if shown == DP_RESHARDABLE and stated == BUCKET_SPACE:
        shown = BUCKET_SPACE
    if shown is not None and stated is not None and shown != stated:
        notices = (f"the common state says that the optimizer lies in {stated}, its entries show {shown}",)
    return Common(
        common.args,
        common.iteration,
        common.checkpoint_version,
        shown or (stated if stated_outright(entries.common) else None),
        common.scheduler,
        common.optimizer,
        common.content_metadata,
        _carried(entries),
        notices,
    )


def common_of(state: Mapping[str, Any]) -> Common:
    """The same from the common state alone. Pure. Raises ``CorruptError``."""
    args = Args(_namespace(state.get("args")))
    iteration = state.get("iteration")
    version = state.get("checkpoint_version")
    scheduler = state.get("opt_param_scheduler", state.get("lr_scheduler"))
    content = state.get("content_metadata")
    return Common(
        args,
        iteration if type(iteration) is int else args.integer("iteration"),
        version if type(version) is float else None,
        _stated(state, args),
        scheduler if isinstance(scheduler, dict) else None,
        state.get("optimizer"),
        content if isinstance(content, dict) else {},
    )


def chained_values(value: Value) -> tuple[Value, ...]:
    """The states of several optimizers (a list, or a dict by number); of one optimizer, it alone. Pure."""
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if isinstance(value, dict) and value and all(type(key) is int for key in value):
        return tuple(value[key] for key in sorted(value))
    return (value,)


def stated_outright(state: Mapping[str, Any]) -> bool:
    """Whether the common state names the layout, so that no rule of a version is needed."""
    return _from_optimizer(state.get("optimizer")) is not None or _from_content(state) is not None


def _namespace(args: Value) -> Mapping[str, Value]:
    if isinstance(args, Record):
        return args.fields
    return {k: v for k, v in args.items() if type(k) is str} if isinstance(args, dict) else {}


def _stated(state: Mapping[str, Any], args: Args) -> str | None:
    """What the file says; before 0.13, what Megatron itself then assumes on load."""
    found = _from_optimizer(state.get("optimizer")) or _from_content(state)
    if found is not None:
        return found
    parallel = args.flag("ckpt_fully_parallel_save")
    return None if parallel is None else MODEL_SPACE if parallel else DP_ZERO


def _from_optimizer(optimizer: Value) -> str | None:
    found = {
        kind
        for part in chained_values(optimizer)
        if isinstance(part, dict) and type(kind := part.get("param_state_sharding_type")) is str
    }
    if len(found) > 1:
        raise CorruptError("the optimizers of the checkpoint lie in different layouts", found=", ".join(sorted(found)))
    return next(iter(found), None)


def _from_content(state: Mapping[str, Any]) -> str | None:
    content = state.get("content_metadata")
    kind = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    return kind if type(kind) is str else None


def _shown_by_keys(entries: Entries) -> str | None:
    """The layout that the keys show; None without state of a distributed optimizer."""
    for key in entries.tensors:
        if ".gbuf_idx_" in key:
            return DP_RESHARDABLE
        if "optimizer.state." in key:
            break
    for key in entries.objects:
        if "optimizer.distributed." in key and ".param_state" in key:
            return DP_ZERO
    if any("optimizer.state.fp32_param." in key for key in entries.tensors):
        return MODEL_SPACE
    return FULLY_RESHARDABLE if any("optimizer.state.param." in key for key in entries.tensors) else None


def _is_optimizer_state(key: str) -> bool:
    return "optimizer.state." in key or "optimizer.distributed." in key


def _carried(entries: Entries) -> tuple[CarriedEntry, ...]:
    """All but the optimizer's own tensors, in the order of the file."""
    found = [CarriedEntry(str(key), "common", 0) for key in entries.common]
    found += [CarriedEntry(key, "object", size) for key, size in entries.objects.items() if ".param_state" not in key]
    found += [
        CarriedEntry(key, "tensor", prod(tensor.shape) * tensor.itemsize)
        for key, tensor in entries.tensors.items()
        if not _is_optimizer_state(key)
    ]
    return tuple(found)
