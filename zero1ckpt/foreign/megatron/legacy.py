"""Megatron-LM's own ``.pt`` checkpoints: a folder for each model-parallel rank, ``mp_rank_<tp>[_<pp>][_<ep>]``.

``model_optim_rng.pt`` holds the rank's model as an ordered state dict (by its local names, layers numbered from 0 in
each pipeline stage), groups, args and the rest; ``distrib_optim.pt`` the optimizer's state as data-parallel rank 0
gathered it: one tensor a buffer and slot (``zero_gather``), or, before February 2024, one a bucket.

The order of params in a buffer is known: that of the state dict, reversed; and where the weights are still views of
the buffer that they lay in, as torch saves them, their places in it show order and members outright.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...core.boxes import Box
from ...core.errors import CorruptError, MissingError, UnsupportedError
from ...core.layout import BufferKey, default_bucket_size
from ...model.catalog import Catalog, Extents, TablePlacement
from ...model.state import MAIN_PARAM, LossScale, ParamSpec, PartState, SlotSpec
from ...storage.local import LocalStore
from .common import chained_values, common_of
from .entries import Entries
from .gathered_layout import FoundLayout, PlacedParam, buckets_by_rule
from .groups import GroupSet, archive_numbers, assign_groups, read_groups, read_loss_scale
from .legacy_keys import LayerOffsets, global_name, layer_offsets
from .legacy_places import Placed, distinct, place_all
from .legacy_ranks import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    RankReader,
    RankTensors,
    Table,
    Weight,
    legacy_entries,
    open_ranks,
    world_runs,
)
from .model import Buffer, Doubt, Evidence, KeyBox, LocalParam, MegatronCheckpoint, MegatronPart, PartLayout, said_of

__all__ = ["open_legacy"]

FORMAT = "megatron:legacy"
_FLOATS = ("float32", "bfloat16", "float16")
_SLOT_ORDER = (MAIN_PARAM, "exp_avg", "exp_avg_sq")


def open_legacy(path: Path) -> MegatronCheckpoint:
    """Reads the ranks' pickles, and of tensors the ends of each param.

    Keys of ``entries.tensors`` are the rank's folder and the name in its state dict. Raises ``MissingError``,
    ``CorruptError``, and ``UnsupportedError`` where places or names cannot be known.
    """
    store = LocalStore(path)
    ranks = open_ranks(store)
    table = Table()
    read = [RankReader(store, table, rank).read() for rank in ranks]
    entries = legacy_entries(path, store, ranks, table)
    names = ((one.rank.pp, weight.virtual, weight.name) for one in read for weight in one.weights)
    parts, notices = _Parts(entries, read, layer_offsets(names, ranks[0].args.num_layers, path)).all()
    steps = {part.catalog.state.step for part in parts}
    if len(steps) > 1:
        notices.append(Doubt(f"parts are at different steps: {', '.join(map(str, sorted(steps)))}"))
    return MegatronCheckpoint(
        entries,
        FORMAT,
        "torch",
        max(steps),
        common_of(entries.common).iteration,
        {part.name: part for part in parts},
        tuple(weight.key for rank in read for weight in rank.weights),
        tuple(dict.fromkeys(notices)),
    )


# --------------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class _Parts:
    entries: Entries
    read: Sequence[RankTensors]
    offsets: LayerOffsets

    def all(self) -> tuple[list[MegatronPart], list[str]]:
        count = max((len(one.optimizers) for one in self.read), default=0)
        if not count:
            raise MissingError(
                f"no rank's folder has a {OPTIMIZER_FILE}",
                file=self.entries.path,
                hint="the checkpoint holds no state of a distributed optimizer",
            )
        groups = [
            (optimizer, group, one)
            for optimizer in range(count)
            for group, one in enumerate(self.holders(optimizer, count))
        ]
        made = [self.made(o, g, one, count, len(groups) == 1) for o, g, one in groups]
        return [part for part, _ in made], [line for _, lines in made for line in lines]

    def holders(self, optimizer: int, count: int) -> list[RankTensors]:
        """Ranks that hold an optimizer's state, by (pp, ep, tp): their order is the data-parallel groups'."""
        for one in self.read:
            if one.optimizers and len(one.optimizers) != count:
                raise CorruptError(
                    "ranks have different numbers of optimizers",
                    file=self.entries.store.label(one.rank.file(OPTIMIZER_FILE)),
                    found=len(one.optimizers),
                    expected=count,
                )
        holding = [
            one for one in self.read if len(one.optimizers) > optimizer and one.optimizers[optimizer] is not None
        ]
        self.check_holders(optimizer, count, holding)
        return holding

    def check_holders(self, optimizer: int, count: int, holding: Sequence[RankTensors]) -> None:
        """State of dense params is held once by each (tp, pp); each of experts by each rank, where it has any."""
        held = [(one.rank.tp, one.rank.pp) for one in holding]
        for one in self.read:
            if self.is_expert(optimizer, one, count):
                tensor = one.rank.args.integer("expert_tensor_parallel_size")
                each = tensor in (None, one.rank.args.tensor_parallel)
                missing = each and one not in holding and any(weight.expert for weight in one.weights)
            else:
                missing = (one.rank.tp, one.rank.pp) not in held
                if held.count((one.rank.tp, one.rank.pp)) > 1 and one in holding and one.rank.ep == 0:
                    raise CorruptError("two ranks hold the state of the same params", file=self.entries.path)
            if missing:
                raise MissingError(
                    "the optimizer's state of a rank is missing",
                    file=self.entries.store.label(one.rank.file(OPTIMIZER_FILE)),
                    hint="restore it from a copy",
                )

    def is_expert(self, optimizer: int, one: RankTensors, count: int) -> bool | None:
        """Whether an optimizer is that of the experts, as its groups say; None where one has all params."""
        if count == 1:
            return None if any(weight.expert for weight in one.weights) else False
        try:
            groups = self.groups(optimizer, one).groups
        except (CorruptError, IndexError):
            groups = ()
        said = {bool(group.get("is_expert_parallel", False)) for group in groups}
        if len(said) == 1:
            return said.pop()
        if count == 2 and any(weight.expert for weight in one.weights):
            return optimizer == 1
        raise UnsupportedError(
            "the file does not say which params each of its optimizers holds",
            file=self.entries.store.label(one.rank.file(MODEL_FILE)),
            found=f"{count} optimizers",
        )

    def groups(self, optimizer: int, one: RankTensors) -> GroupSet:
        value = chained_values(one.rank.state.get("optimizer"))[optimizer]
        return read_groups(value, archive_numbers(self.entries.store, one.rank.model))

    def loss_scale(self, optimizer: int, one: RankTensors) -> LossScale | None:
        value = chained_values(one.rank.state.get("optimizer"))[optimizer]
        scaler = value.get("grad_scaler") if isinstance(value, dict) else None
        return read_loss_scale(scaler, archive_numbers(self.entries.store, one.rank.model))

    def made(
        self, optimizer: int, group: int, one: RankTensors, count: int, only: bool
    ) -> tuple[MegatronPart, list[str]]:
        chained = optimizer if count > 1 else None
        name = "" if only else f"{'' if chained is None else f'chained_{chained}.'}dp_group_idx_{group}"
        members = self.members(optimizer, one, count)
        placed = place_all(self.entries, one, members, one.optimizers[optimizer] or ())
        experts = self.is_expert(optimizer, one, count)
        builder = _Builder(self.entries, one, members, placed, experts is True, self.offsets)
        return builder.build(name, chained, group, self.groups(optimizer, one), self.loss_scale(optimizer, one))

    def members(self, optimizer: int, one: RankTensors, count: int) -> list[Weight]:
        experts = self.is_expert(optimizer, one, count)
        weights = distinct(one.weights)
        return [w for w in weights if w.dtype in _FLOATS and (experts is None or w.expert == experts)]


# ------------------------------------------------------------------------------------------------------ building a part


def _whole(weight: Weight) -> KeyBox:
    """A rank's weight as a box of itself: the files do not say where it lies in the tensor of all ranks."""
    return KeyBox(weight.key, Box(tuple(0 for _ in weight.shape), weight.shape))


@dataclass(frozen=True)
class _Builder:
    entries: Entries
    one: RankTensors
    members: Sequence[Weight]
    placed: tuple[Placed, ...]
    expert: bool
    offsets: LayerOffsets

    def build(
        self, name: str, chained: int | None, group: int, groups: GroupSet, loss_scale: LossScale | None
    ) -> tuple[MegatronPart, list[str]]:
        order = self.registration_order()
        index = {weight.key: i for i, weight in enumerate(order)}
        names = self.names(order)
        params = [self.spec(weight, names[i]) for i, weight in enumerate(order)]
        chosen, notice = assign_groups(params, groups.groups)
        params = [replace(param, group=g) for param, g in zip(params, chosen, strict=True)]
        slots = self.slots()
        if not self.placed:
            file = self.entries.store.label(self.one.rank.file(OPTIMIZER_FILE))
            raise CorruptError("there is no optimizer state in the file", file=file)
        step = common_of(self.one.rank.state).iteration or 0 if groups.step is None else groups.step
        state = PartState(
            tuple(params), tuple(SlotSpec(s, "float32") for s in slots), step, groups.groups, loss_scale=loss_scale
        )
        catalog = Catalog(FORMAT, "torch", name, state, None, self.placement(index, slots))
        locals_ = tuple(
            LocalParam(p.name, i, 0, p.numel, p.dtype, p.grad_dtype, p.expert, p.shared_embedding, (_whole(weight),))
            for i, (p, weight) in enumerate(zip(params, order, strict=True))
        )
        known = {weight.name: names[i] for i, weight in enumerate(order)}
        ambiguous = tuple(known[n] for placed in self.placed for n in placed.ambiguous)
        evidence = Evidence("order", sum(p.numel for p in params), ambiguous=ambiguous)
        layout = self.layout(index)
        part = MegatronPart(name, catalog, locals_, layout, evidence, chained, group, self.one.rank.pp)
        lines = (*groups.notices, notice, self.left_out())
        return part, [said_of(name, line) for line in lines if line]

    def left_out(self) -> str | None:
        """Says which weights no buffer has: buffers of the model, and frozen params."""
        placed = {weight.key for one in self.placed for weight in one.weights}
        left = [weight.name for weight in self.members if weight.key not in placed]
        if not left:
            return None
        return f"{len(left)} tensors of the model have no optimizer state, the first is {left[0]}"

    def registration_order(self) -> list[Weight]:
        """The state dict's, where all buffers agree with it; else that of the buffers, reversed."""
        by_buffer = [list(reversed(placed.weights)) for placed in self.placed]
        place = {weight.key: i for i, weight in enumerate(self.one.weights)}
        if all(place[a.key] < place[b.key] for weights in by_buffer for a, b in pairwise(weights)):
            return sorted((w for weights in by_buffer for w in weights), key=lambda weight: place[weight.key])
        return [weight for weights in by_buffer for weight in weights]

    def names(self, order: Sequence[Weight]) -> list[str]:
        named = [global_name(w.name, self.one.rank.pp, w.virtual, self.offsets) for w in order]
        if len(set(named)) == len(named):
            return named
        return [f"model{w.virtual}.{name}" for w, name in zip(order, named, strict=True)]

    def spec(self, weight: Weight, name: str) -> ParamSpec:
        grad = next(p.world.grad_dtype for p in self.placed if weight in p.weights)
        return ParamSpec(
            name, weight.shape, weight.dtype, grad, expert=self.expert, shared_embedding=self.shared(weight)
        )

    def shared(self, weight: Weight) -> bool:
        """Whether pipeline stages share the param: as the args state, or as its bucket shows, in which it is alone."""
        args = self.one.rank.args
        if not weight.embedding:
            return False
        if args.untied_embeddings is not None:
            return not args.untied_embeddings and (args.pipeline_parallel or 1) > 1
        for placed in self.placed:
            at = next((i for i, w in enumerate(placed.weights) if w is weight), None)
            if at is not None:
                return self.closed_early(placed, at)
        return False

    def closed_early(self, placed: Placed, at: int) -> bool:
        """Whether a param stands alone in a bucket though neither it nor the bucket before is as large as they get."""
        k = next((k for k, b in enumerate(placed.buckets) if b.first == at and b.last == at + 1), None)
        if k is None or len(placed.buckets) == 1:
            return False
        args = self.one.rank.args
        if args.overlap_grad_reduce is not True or self.one.rank.pp:
            return True
        most = args.ddp_bucket_size or default_bucket_size(args.data_parallel or 1)
        return placed.buckets[k - 1 if k else 0].numel_unpadded < most

    def slots(self) -> list[str]:
        names = {slot for placed in self.placed for slot in placed.world.slots}
        if any(set(placed.world.slots) != names for placed in self.placed):
            raise CorruptError(
                "buffers have different slots", file=self.entries.store.label(self.one.rank.file(OPTIMIZER_FILE))
            )
        return [s for s in _SLOT_ORDER if s in names] + sorted(names - set(_SLOT_ORDER))

    def placement(self, index: Mapping[str, int], slots: Sequence[str]) -> TablePlacement:
        rows: list[tuple[int, int, int, int, int, int, int]] = []
        for placed in self.placed:
            for weight, start in zip(placed.weights, placed.starts, strict=True):
                for slot, name in enumerate(slots):
                    for chunk, at, begin, count in world_runs(placed.world, name, start, weight.numel):
                        rows.append((index[weight.key], slot, begin, count, chunk, at * 4, count * 4))
        columns = np.array(rows, np.int64).reshape(-1, 7).T
        table = Extents(*(np.ascontiguousarray(column) for column in columns))
        chunks = self.entries.chunks
        keys = tuple(chunks.place(i)[0] for i in range(len(chunks)))
        return TablePlacement(keys, tuple(chunks.nbytes.tolist()), table, len(slots))

    def layout(self, index: Mapping[str, int]) -> PartLayout:
        found = [self.by_rule(placed) for placed in self.placed]
        buffers = []
        for placed, rule in zip(self.placed, found, strict=True):
            buckets = placed.buckets if rule is None else rule.buckets
            begins = [placed.starts[bucket.first] for bucket in buckets for _ in range(bucket.first, bucket.last)]
            inside = tuple(start - begin for start, begin in zip(placed.starts, begins, strict=True))
            members = tuple(index[weight.key] for weight in placed.weights)
            dtype = placed.world.param_dtype or placed.weights[0].dtype
            buffers.append(Buffer(placed.world.index, dtype, placed.world.grad_dtype, members, inside, buckets))
        rules = [rule for rule in found if rule is not None]
        dp_sizes = {rule.dp_size for rule in rules}
        dp_size = dp_sizes.pop() if len(rules) == len(found) and len(dp_sizes) == 1 else None
        acting = rules[0] if rules and rules[0] is found[0] else None
        return PartLayout(
            tuple(buffers),
            dp_size,
            acting.bucket_size if acting else self.threshold(self.placed[0]),
            acting is not None and acting.stated,
        )

    def by_rule(self, placed: Placed) -> FoundLayout | None:
        key = BufferKey(placed.weights[0].dtype, placed.world.grad_dtype, self.expert)
        params = [
            PlacedParam(weight.key, weight.numel, key, self.shared(weight), start, world)
            for weight, start, world in zip(placed.weights, placed.starts, placed.worlds, strict=True)
        ]
        smallest = self.threshold(placed)
        overlaps = self.one.rank.pp == 0 and placed.weights[0].virtual == 0
        return buckets_by_rule(
            params,
            placed.world.total,
            self.one.rank.args,
            [] if smallest is None else [smallest],
            overlaps=overlaps,
        )

    def threshold(self, placed: Placed) -> int | None:
        """A bucket size that closes each bucket which the places show: None where they show one only."""
        closed = [b.numel_unpadded for b in placed.buckets[:-1] if not self.shared(placed.weights[b.first])]
        return min(closed, default=None)
