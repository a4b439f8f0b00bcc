"""What an optimizer is on disk: one part, or with expert params one for the dense params and one an expert group.

Ranks of different expert groups hold different params under the same names, so each group has a part of its own: part
``""`` holds the dense params and ``experts<i>`` those of expert group ``i`` (``gen`` and ``gen.experts<i>`` for a part
``gen``). Of several optimizer instances the first one saves: the others hold the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Union

import torch

from ..core.errors import LostRankError, UsageError
from ..core.layout import Layout, layout_params
from ..engine.control import ControlPlane
from ..engine.grad_scaler import Scaler
from ..engine.snapshot import Snapshot
from ..model.state import LossScale, ParamSpec, Scalar, SlotSpec

if TYPE_CHECKING:
    from ..engine.zero1 import OwnedFragment
    from ..engine.zero1 import Zero1Optimizer as Engine

__all__ = [
    "LoadView",
    "PartView",
    "Peers",
    "Saved",
    "check_expert_parts",
    "load_views",
    "peers_of",
    "stored_parts",
]


class PartView:
    """Some params of ``whole``, those of the buffers that are ``expert`` or are not, as an optimizer of their own."""

    def __init__(self, whole: Engine | Snapshot, *, expert: bool) -> None:
        self._whole = whole
        chosen = [at for at, buffer in enumerate(whole.layout.buffers) if buffer.key.expert == expert]
        self._buffers = chosen
        self._members = [i for i, spec in enumerate(whole.param_specs) if spec.expert == expert]
        self._place = {index: at for at, index in enumerate(self._members)}
        self.param_specs: tuple[ParamSpec, ...] = tuple(whole.param_specs[i] for i in self._members)
        self.layout: Layout = layout_params(self.param_specs, whole.layout.buffers[chosen[0]].rules)
        self.dp_size = self.layout.rules.dp_size
        experts = whole.experts
        assert experts is not None
        self.peers: Sequence[int] = experts.ranks if expert else range(self.dp_size)
        self.rank = self.peers.index(whole.rank)

    @property
    def control(self) -> ControlPlane:
        return self._whole.control

    @property
    def applied_steps(self) -> int:
        return self._whole.applied_steps

    @property
    def scaler(self) -> Scaler:
        return self._whole.scaler

    def shard(self, slot: str, buffer: int, bucket: int) -> torch.Tensor:
        return self._whole.shard(slot, self._buffers[buffer], bucket)

    def slot_specs(self) -> tuple[SlotSpec, ...]:
        return self._whole.slot_specs()

    def group_values(self) -> tuple[dict[str, Any], ...]:
        return self._whole.group_values()

    def local_scalars(self) -> dict[int, dict[str, Scalar]]:
        return {self._place[i]: own for i, own in self._whole.local_scalars().items() if i in self._place}

    def local_absent(self) -> set[tuple[int, str]]:
        return {(self._place[i], slot) for i, slot in self._whole.local_absent() if i in self._place}


Saved = Union["Engine", Snapshot, PartView]
"""What is saved: a live optimizer, its state at an earlier moment, or some of its params."""


def stored_parts(optimizers: Mapping[str, Saved]) -> dict[str, Saved]:
    """What this rank saves, by part."""
    made: dict[str, Saved] = {}
    for part, optimizer in optimizers.items():
        if isinstance(optimizer, PartView) or optimizer.experts is None:
            if isinstance(optimizer, PartView) or optimizer.instance == 0:
                made[part] = optimizer
            continue
        for name, expert in _kinds(optimizer, part):
            made[name] = PartView(optimizer, expert=expert)
    return made


def _kinds(optimizer: Engine | Snapshot, part: str) -> Iterator[tuple[str, bool]]:
    kinds = {buffer.key.expert for buffer in optimizer.layout.buffers}
    if False in kinds:
        yield part, False
    if True in kinds:
        assert optimizer.experts is not None
        yield f"{_expert_prefix(part)}{optimizer.experts.index}", True


def _expert_prefix(part: str) -> str:
    return f"{part}.experts" if part else "experts"


def peers_of(optimizer: Saved) -> Sequence[int]:
    """The ranks that save the part, as ranks of its control plane."""
    return optimizer.peers if isinstance(optimizer, PartView) else range(optimizer.dp_size)


_DATA, _SENDER, _TAKER = 0, 1, 2
"""Tags: bytes, what who sends them has said before, and what who takes them has."""
_WHAT = "the exchange of a save"


class Peers:
    """The ranks of one part, which send each other pieces of blobs over the control plane's group.

    ``ranks``: their ranks in that group. A rank that does not come within the group's timeout is named.
    """

    def __init__(self, control: ControlPlane, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.size, self._ranks = rank, len(ranks), ranks
        self.sent = 0
        self._control = control

    def swap(self, to: int, out: memoryview, origin: int, into: memoryview) -> None:
        sends = [(self._ranks[to], torch.frombuffer(out, dtype=torch.uint8), _DATA)] if out.nbytes else []
        takes = [(self._ranks[origin], torch.frombuffer(into, dtype=torch.uint8), _DATA)] if into.nbytes else []
        self._control.exchange(sends, takes, _WHAT)
        self.sent += out.nbytes

    def greet(self, to: int, origin: int, culprit: int) -> tuple[int, int]:
        own = torch.tensor([culprit])
        heard = [torch.tensor([-1]), torch.tensor([-1])]
        sends, takes = [], []
        for other, told, say, hear in ((to, heard[0], _SENDER, _TAKER), (origin, heard[1], _TAKER, _SENDER)):
            if other >= 0:
                sends.append((self._ranks[other], own, say))
                takes.append((self._ranks[other], told, hear))
        self._control.exchange(sends, takes, _WHAT)
        return int(heard[0]), int(heard[1])

    def lost(self, rank: int) -> LostRankError:
        return LostRankError(f"{_WHAT}: rank {self._ranks[rank]} has failed", hint="see the error of that rank")


# ------------------------------------------------------------------------------------------------------------- loading


class _Joined:
    """Parts that are loaded into one optimizer, one after the other."""

    def __init__(self, optimizer: Engine, count: int) -> None:
        self.left = count
        self.scalars: list[Mapping[str, Scalar]] = [{} for _ in optimizer.param_specs]
        self.groups: dict[int, Mapping[str, Any]] = {}


class LoadView(PartView):
    """As ``PartView``, of a live optimizer, to be loaded. The optimizer is whole once its last part is."""

    def __init__(self, optimizer: Engine, joined: _Joined, *, expert: bool) -> None:
        super().__init__(optimizer, expert=expert)
        self._engine, self._joined = optimizer, joined

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._engine.param_groups
        return groups

    @property
    def fragments(self) -> Sequence[OwnedFragment]:
        return [fragment for fragment in self._engine.fragments if fragment.index in self._place]

    def expected_slots(self) -> tuple[SlotSpec, ...]:
        return self._engine.expected_slots()

    def check_load(self, slots: Sequence[SlotSpec], scalars: Sequence[Mapping[str, Scalar]]) -> None:
        self._engine.check_load(slots, self._widened(scalars, [{} for _ in self._engine.param_specs]))

    def begin_load(
        self,
        slots: Sequence[SlotSpec],
        absent: AbstractSet[tuple[int, str]],
        scalars: Sequence[Mapping[str, Scalar]],
    ) -> None:
        everywhere = {(self._members[i], slot) for i, slot in absent}
        self._engine.begin_load(slots, everywhere, self._widened(scalars, self._joined.scalars), self._place.keys())

    def _widened(
        self, scalars: Sequence[Mapping[str, Scalar]], into: list[Mapping[str, Scalar]]
    ) -> list[Mapping[str, Scalar]]:
        for at, own in zip(self._members, scalars, strict=False):
            into[at] = own
        return into

    def finish_load(
        self, step: int, groups: Sequence[Mapping[str, Any]] | None, loss_scale: LossScale | None = None
    ) -> None:
        own = {spec.group for spec in self.param_specs}
        for at, values in enumerate(groups or ()):
            if at in own or at not in self._joined.groups:
                self._joined.groups[at] = values
        self._joined.left -= 1
        if not self._joined.left:
            rows = [self._joined.groups[at] for at in range(len(self.param_groups))] if self._joined.groups else None
            self._engine.finish_load(step, rows, loss_scale)


def load_views(optimizer: Engine, part: str) -> list[tuple[str, Engine | LoadView]]:
    """The parts to load into ``optimizer``, and what each is loaded into."""
    if optimizer.experts is None:
        return [(part, optimizer)]
    kinds = list(_kinds(optimizer, part))
    joined = _Joined(optimizer, len(kinds))
    return [(name, LoadView(optimizer, joined, expert=expert)) for name, expert in kinds]


def check_expert_parts(
    optimizer: Engine,
    part: str,
    names: Sequence[str],
    steps: Sequence[int],
    *,
    drop: bool,
    file: str | os.PathLike[str],
) -> None:
    """``names``: all parts of the checkpoint; ``steps``: of those that are loaded.

    Raises ``UsageError`` for another number of expert groups than the run's, and for parts of different steps.
    """
    prefix = _expert_prefix(part)
    there = sum(name.startswith(prefix) and name[len(prefix) :].isdigit() for name in names)
    here = optimizer.experts.count if optimizer.experts is not None else 0
    wanted = any(spec.expert for spec in optimizer.param_specs) or not drop
    if wanted and there != here:
        raise UsageError(
            "the checkpoint has another number of expert groups",
            file=file,
            found=there,
            expected=here,
            hint="load with as many expert-parallel ranks as it was saved with",
        )
    if len(set(steps)) > 1:
        raise UsageError("dense and expert params are of different steps", file=file, found=list(steps))
