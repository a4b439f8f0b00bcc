"""The model's params between two steps: gathered from all ranks, guarded until they are, and watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

import torch
from torch import nn

from ..core.errors import UsageError
from .bucket_order import BucketRef
from .buffers import ParamGradBuffer
from .collectives import Communicator
from .control import ControlPlane
from .overlap_params import ParamGatherer, launch_all
from .param_guard import ParamGuard
from .param_places import ParamPlaces
from .param_watch import ParamWatch

__all__ = ["ParamSync"]

ORDER_TRIES = 3
"""Launches after which the order of first need is no longer looked for."""


class ParamSync:
    """Owns what happens to params outside the update. ``overlap``: gathers go on after ``publish`` has returned."""

    def __init__(
        self,
        refs: Sequence[BucketRef],
        buffers: Sequence[ParamGradBuffer],
        tensors: Sequence[torch.Tensor],
        names: Sequence[str],
        model: nn.Module | None,
        comm: Communicator,
        control: ControlPlane,
        *,
        overlap: bool,
        align: bool,
    ) -> None:
        self._refs, self._control = tuple(refs), control
        self._places = ParamPlaces(model, tensors)
        self._watch = ParamWatch(tensors, names, self._places)
        self.gatherer = ParamGatherer(refs, buffers, names, comm, self._watch, align=align)
        self._guard = ParamGuard(self._places, self.gatherer) if overlap else None
        self._tries = ORDER_TRIES if overlap and comm.size > 1 else 0

    def publish(self, cast: Callable[[BucketRef], None]) -> None:
        """``cast`` brings this rank's new values of a bucket into the param buffer; then gather all buckets."""
        self._agree_on_order()
        launch_all()
        for position in self.gatherer.order:
            cast(self._refs[position])
            self.gatherer.put(position)
        self.gatherer.launch()
        if self._guard is None:
            self.gatherer.wait_all()
        else:
            self._guard.arm()

    def _agree_on_order(self) -> None:
        """Rank 0's order of first need becomes everybody's, once, after the first forward pass that shows one."""
        if self._tries:
            needed = self._control.broadcast(self.gatherer.needed, "the order of param gathers")
            self.gatherer.start_from(needed)
            self._tries = 0 if needed else self._tries - 1

    def wait(self) -> None:
        """Return when all params may be read, however they are reached."""
        if self.gatherer.in_flight:
            self.gatherer.wait_all()

    def problem(self) -> UsageError | None:
        """A param that has been moved, replaced or written to since ``publish`` or ``accept``."""
        return self._watch.problem()

    def displaced(self) -> UsageError | None:
        return self._watch.displaced()

    def accept(self) -> None:
        """What was written to params until now is wanted."""
        self._watch.accept()

    def releaser(self) -> Callable[[], None]:
        """A function that brings gathers to their end and takes hooks off the modules; it keeps nothing alive."""
        gatherer, guard = ref(self.gatherer), None if self._guard is None else ref(self._guard)

        def release() -> None:
            alive = gatherer()
            if alive is not None:
                alive.wait_all()
            guarding = None if guard is None else guard()
            if guarding is not None:
                guarding.close()

        return release
