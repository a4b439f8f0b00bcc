"""``state_dict()`` that torch's distributed checkpoints (DCP) save and load at any number of ranks.

A rank holds a run of a flattened param. DCP knows boxes of N dimensions only, so a run is cut into the few boxes that
hold it (``core.boxes``), each under its own offset: several ranks never write one key. What is loaded goes straight
into the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.boxes import Box, range_boxes
from ..core.errors import UnsupportedError, UsageError
from ..core.ranges import Range
from ..engine.inner_state import scalar_of
from ..engine.params import dtype_name, dtype_of
from ..engine.shards import OwnedFragment
from ..model.state import LossScale, ParamSpec, Scalar
from .together import together

if TYPE_CHECKING:
    from ..engine.zero1 import Zero1Optimizer as Engine

__all__ = ["ShardedSlot", "load_state", "make_sharded_state", "make_state"]


class ShardedSlot(torch.Tensor):
    """What this rank holds of a tensor of this shape: ``local``, 1-D, are the elements ``flattened_range`` of it.

    A tensor for DCP only, which writes and reads it by the methods with underscores: operations are refused.
    ``writes=False``: another rank writes it. ``before_read`` is called before DCP writes to ``local``.
    """

    key: str
    local: torch.Tensor
    flattened_range: Range
    _writes: bool
    _before_read: Callable[[], None] | None
    _reading: bool

    def __new__(
        cls,
        key: str,
        local: torch.Tensor,
        global_shape: Sequence[int],
        flattened_range: Range,
        *,
        writes: bool = True,
        before_read: Callable[[], None] | None = None,
    ) -> ShardedSlot:
        made: ShardedSlot = torch.Tensor._make_wrapper_subclass(
            cls, tuple(global_shape), dtype=local.dtype, device=local.device
        )
        made.key, made.local, made.flattened_range = key, local, flattened_range
        made._writes, made._before_read, made._reading = writes, before_read, False
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs have no function in it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedError(
            f"{func} on the part of a tensor that a rank holds", param=args[0].key, hint="use its attribute local"
        )

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Of the whole tensor, under Megatron's name."""
        return tuple(self.shape)

    @property
    def boxes(self) -> list[Box]:
        """The range in the dimensions of the tensor, in the order of its elements."""
        return list(range_boxes(self.global_shape, self.flattened_range))

    def part(self, start: Sequence[int]) -> torch.Tensor:
        """The box that starts there, as a view of ``local``. Raises ``KeyError`` for another place."""
        for box in self.boxes:
            if box.start == tuple(start):
                at = int(np.ravel_multi_index(box.start, self.global_shape)) if box.start else 0
                at -= self.flattened_range.start
                return self.local[at : at + box.size].view(box.shape)
        raise KeyError(f"{self.key} has no part at {tuple(start)}")

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._reading = False
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in (self._chunks() if self._writes else ())
        ]

    def __create_chunk_list__(self) -> list[Any]:
        self._reading = True
        return list(self._chunks())

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        if self._reading and self._before_read is not None:
            self._before_read()
        return self.part(index.offset)

    def _chunks(self) -> Iterator[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        for box in self.boxes:
            yield ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.key, self.local, self.global_shape, self.flattened_range, self._writes)

    def __deepcopy__(self, memo: Any) -> ShardedSlot:
        return _rebuilt(self.key, self.local.clone(), self.global_shape, self.flattened_range, self._writes)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes a keyword that print never gives
        low, high = self.flattened_range.start, self.flattened_range.end
        return f"ShardedSlot({self.key}, {dtype_name(self.dtype)}{list(self.global_shape)}, {low}:{high})"


def _rebuilt(key: str, local: torch.Tensor, shape: tuple[int, ...], flat: Range, writes: bool) -> ShardedSlot:
    """A copy, which no optimizer is bound to."""
    return ShardedSlot(key, local, shape, flat, writes=writes)


# ------------------------------------------------------------------------------------------------------------- the dict


def make_state(optimizer: Engine, before_read: Callable[[], None]) -> dict[str, Any]:
    """See ``Zero1Optimizer.state_dict``."""
    optimizer.wait_for_params()
    for slot in optimizer.expected_slots():
        optimizer._store.ensure(slot.name, dtype_of(slot.dtype))
    state: dict[str, dict[str, ShardedSlot]] = {}
    scalars: dict[str, dict[str, ShardedSlot]] = {}
    present: dict[str, ShardedSlot] = {}
    absent, known = optimizer.local_absent(), optimizer.local_scalars()
    for fragment in optimizer.fragments:
        name, own = _key(optimizer, fragment.spec), known[fragment.index]
        state[name] = {
            slot: ShardedSlot(
                f"optimizer.state.{slot}.{name}",
                optimizer._store.view(slot, fragment).detach(),
                fragment.spec.shape,
                fragment.param,
                before_read=before_read,
            )
            for slot in _slots(optimizer)
        }
        wanted = _scalar_starts(optimizer, fragment)
        scalars[name] = {
            slot: _small(f"optimizer.{slot}.{name}", [own.get(slot, start)], fragment) for slot, start in wanted.items()
        }
        flags = [(fragment.index, slot) not in absent for slot in _slots(optimizer)]
        flags += [slot in own for slot in wanted]
        present[name] = _small(f"optimizer.present.{name}", [Scalar("uint8", int(flag)) for flag in flags], fragment)
    scale = optimizer.scaler.state()
    return {
        "state": state,
        "scalars": scalars,
        "present": present,
        "param_groups": _groups(optimizer),
        "params": [spec.name for spec in optimizer.param_specs],
        "step": optimizer.applied_steps,
        "loss_scale": None if scale is None else asdict(scale),
    }


def make_sharded_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """See ``Zero1Optimizer.sharded_state_dict``."""
    shards = [s for kind in ("state", "scalars") for slots in state[kind].values() for s in slots.values()]
    shards += state["present"].values()
    common = {key: value for key, value in state.items() if key not in ("state", "scalars", "present")}
    return {"optimizer": common, "param_state": {shard.key: shard for shard in shards}}


def _key(optimizer: Engine, spec: ParamSpec) -> str:
    """A param's name; experts of several groups have one name and different values."""
    experts = optimizer.experts if spec.expert else None
    return spec.name if experts is None or experts.count == 1 else f"expert-{experts.index}/{spec.name}"


def _slots(optimizer: Engine) -> list[str]:
    """``fp32_param`` first; the same on all ranks and in every run of the same optimizer."""
    return [slot.name for slot in optimizer.slot_specs()]


def _scalar_starts(optimizer: Engine, fragment: OwnedFragment) -> dict[str, Scalar]:
    """The scalars that the param has or will have after a step, with values to stand for those that it has not yet."""
    samples = optimizer._slots.scalar_samples(fragment)
    return {slot: Scalar(scalar_of(slot, sample).dtype, 0) for slot, sample in samples.items()}


def _small(key: str, values: Sequence[Scalar], fragment: OwnedFragment) -> ShardedSlot:
    """A few numbers of one param, which all that own a part of it hold alike and the first of them writes."""
    dtype = dtype_of(values[0].dtype) if values else torch.uint8
    data = torch.tensor([value.value for value in values], dtype=dtype)
    return ShardedSlot(key, data, (len(values),), Range(0, len(values)), writes=fragment.param.start == 0)


def _groups(optimizer: Engine) -> list[dict[str, Any]]:
    return [
        {**values, "params": [spec.name for spec in optimizer.param_specs if spec.group == at]}
        for at, values in enumerate(optimizer.group_values())
    ]


# -------------------------------------------------------------------------------------------------------------- loading


def load_state(optimizer: Engine, state: Mapping[str, Any]) -> None:
    """See ``Zero1Optimizer.load_state_dict``."""

    def take() -> None:
        _check(optimizer, state)
        scalars = [_scalars(state, _key(optimizer, spec)) for spec in optimizer.param_specs]
        absent = {
            (fragment.index, slot)
            for fragment in optimizer.fragments
            for slot, there in zip(
                _slots(optimizer), state["present"][_key(optimizer, fragment.spec)].local.tolist(), strict=False
            )
            if not there
        }
        optimizer.begin_load(optimizer.slot_specs(), absent, scalars)
        with torch.no_grad():
            for fragment in optimizer.fragments:
                for slot, shard in state["state"][_key(optimizer, fragment.spec)].items():
                    _fill(optimizer._store.view(slot, fragment), shard, (fragment.index, slot) in absent)

    together(optimizer.control, "load_state_dict", take)
    scale = state["loss_scale"]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    optimizer.finish_load(state["step"], groups, None if scale is None else LossScale(**scale))


def _fill(live: torch.Tensor, shard: ShardedSlot, absent: bool) -> None:
    """Nothing to do where DCP has read into the shard itself."""
    if not absent and live.data_ptr() != shard.local.data_ptr():
        live.copy_(shard.local)


def _scalars(state: Mapping[str, Any], name: str) -> dict[str, Scalar]:
    held = state["scalars"].get(name)
    if not held:
        return {}
    flags = state["present"][name].local.tolist()[-len(held) :]
    return {
        slot: Scalar(dtype_name(value.dtype), value.local[0].item())
        for (slot, value), there in zip(held.items(), flags, strict=True)
        if there
    }


def _check(optimizer: Engine, state: Mapping[str, Any]) -> None:
    """Raises ``UsageError`` or ``UnsupportedError`` for a dict of another optimizer, or of another rank's part."""
    needed = {"state", "scalars", "present", "param_groups", "params", "step", "loss_scale"}
    if not needed <= set(state):
        raise UsageError("this is no state_dict of a Zero1Optimizer", hint="use load(path) for a checkpoint of ours")
    names = [spec.name for spec in optimizer.param_specs]
    if state["params"] != names:
        other = sorted(set(names) ^ set(state["params"])) or ["their order"]
        raise UnsupportedError("the state_dict has other params than the optimizer", param=other[0])
    if [group["params"] for group in state["param_groups"]] != [group["params"] for group in _groups(optimizer)]:
        raise UnsupportedError("the state_dict has other param groups than the optimizer", hint="group them alike")
    for fragment in optimizer.fragments:
        _check_fragment(optimizer, fragment, state["state"].get(_key(optimizer, fragment.spec), {}))


def _check_fragment(optimizer: Engine, fragment: OwnedFragment, shards: Mapping[str, ShardedSlot]) -> None:
    for slot in _slots(optimizer):
        shard = shards.get(slot)
        found = None if shard is None else (shard.global_shape, shard.flattened_range, shard.dtype)
        dtype = optimizer._store.dtype(slot)
        if found != (fragment.spec.shape, fragment.param, dtype):
            raise UnsupportedError(
                f"the state_dict has another {slot} than this rank",
                param=fragment.spec.name,
                found="nothing" if shard is None else shard,
                expected=f"{dtype_name(dtype)}{list(fragment.spec.shape)}, "
                f"{fragment.param.start}:{fragment.param.end} of {prod(fragment.spec.shape)}",
                hint="for another number of ranks use torch.distributed.checkpoint, or save and load",
            )
