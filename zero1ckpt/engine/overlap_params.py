"""All-gather of updated params: all of it in ``step()``, or bucket by bucket while the next forward runs.

Every gather is launched inside ``step()``, in the order in which the buckets are first needed: what remains is this
rank's own waiting. So ranks need not run the same modules afterwards, and rank 0 may evaluate alone. With
``align_param_gather=False`` only the first buckets are, and each wait launches further ones: the link is left to
others for longer, but a rank that stops calling modules then holds up those that go on. Ranks then stand at different
places, so all that is left is launched before any other message of the engine, of whichever optimizer: messages of one
group are told apart by their order only.

Until a bucket has been waited for its memory is being written to, and its params must not be read. ``ParamGuard`` sees
to that for all that goes through modules.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch

from ..core.errors import UsageError, Zero1CkptError
from .bucket_order import BucketRef
from .buffers import ParamGradBuffer
from .collectives import Communicator, Pending
from .param_watch import ParamWatch
from .side_stream import SideStream

__all__ = ["ParamGatherer", "launch_all"]

AHEAD = 2
"""Buckets that travel before the first is waited for, with ``align_param_gather=False``."""


class ParamGatherer:
    """Gathers of all param buckets. A position is a bucket's place in ``refs``, whatever order they are launched in.

    ``on_gathered``: called with a position when its params may be read.
    """

    def __init__(
        self,
        refs: Sequence[BucketRef],
        buffers: Sequence[ParamGradBuffer],
        names: Sequence[str],
        comm: Communicator,
        watch: ParamWatch,
        *,
        align: bool,
    ) -> None:
        self._refs, self._buffers, self._names = tuple(refs), tuple(buffers), tuple(names)
        self._comm, self._watch, self._align = comm, watch, align
        self._side = SideStream(buffers[0].params.device)
        self.position = [0] * len(self._names)
        """Of each param."""
        for at, ref in enumerate(self._refs):
            for index in ref.params:
                self.position[index] = at
        # A forward pass goes the other way through the buckets than a backward pass, until it was seen to do otherwise.
        self.order: tuple[int, ...] = tuple(reversed(range(len(self._refs))))
        self.needed: list[int] = []
        """Positions in the order in which they were first asked for since the last launch."""
        self._queue: list[int] = []
        self._pending: dict[int, Pending | None] = {}
        self.on_gathered: Callable[[int], None] = lambda position: None
        _LIVE[next(_NUMBERS)] = self

    @property
    def in_flight(self) -> bool:
        return bool(self._pending)

    def is_pending(self, position: int) -> bool:
        return position in self._pending

    # ---------------------------------------------------------------------------------------------------------- launch

    def put(self, position: int) -> None:
        """This rank's slice of the bucket holds its new values: gather it when its turn comes."""
        self._pending[position] = None
        self._queue.append(position)
        self._watch.count(self._refs[position].params)

    def launch(self) -> None:
        """After ``put`` of every bucket, in ``order``."""
        self.needed = []
        self._side.note_writer()
        self._launch(len(self._queue) if self._align else AHEAD)

    def _launch(self, count: int) -> None:
        for position in self._queue[:count]:
            ref = self._refs[position]
            bucket = self._buffers[ref.buffer].bucket_of_params(ref.bucket)
            self._pending[position] = self._begin(self._comm.of(ref.buffer), bucket)
        del self._queue[:count]

    def _begin(self, comm: Communicator, bucket: torch.Tensor) -> Pending:
        return self._side.begin(lambda: [comm.begin_all_gather(bucket)], [bucket])[0]

    def launch_rest(self) -> None:
        """Launch all that waits for its turn."""
        self._launch(len(self._queue))

    # ------------------------------------------------------------------------------------------------------------ wait

    def need(self, positions: Sequence[int]) -> None:
        """Return when the params of these buckets may be read."""
        for position in positions:
            if position in self._pending:
                self.needed.append(position)
                self._wait(position)

    def wait_all(self) -> None:
        """Return when all params may be read."""
        self.launch_rest()
        for position in list(self._pending):
            self._wait(position)
        self._side.forget_writers()

    def _wait(self, position: int) -> None:
        if position in self._queue:
            self._launch(self._queue.index(position) + 1)
        pending = self._pending[position]
        assert pending is not None
        pending.wait()
        del self._pending[position]
        self._launch(max(0, AHEAD - (len(self._pending) - len(self._queue))))
        self._watch.count(self._refs[position].params)
        self.on_gathered(position)

    def check_arrival(self, index: int) -> None:
        """A gradient of param ``index`` has come: raise ``UsageError`` if it was read before it was gathered."""
        if self._pending and self.position[index] in self._pending:
            raise UsageError(
                "param was used before it was gathered",
                param=self._names[index],
                hint="call optimizer.wait_for_params() before params are read other than through their modules",
            )

    def start_from(self, needed: Sequence[int]) -> None:
        """Launch in this order from now on, the rest after it. The same on all ranks."""
        self.order = tuple(dict.fromkeys([*needed, *self.order]))


_NUMBERS = count()
_LIVE: WeakValueDictionary[int, ParamGatherer] = WeakValueDictionary()
"""All there are, in the order in which they were made, which is the same on all ranks of a group."""


def launch_all() -> None:
    """Of every optimizer in this process: before any other message."""
    for gatherer in list(_LIVE.values()):
        gatherer.launch_rest()


@atexit.register
def _finish_all() -> None:
    """A process that ends with its last slices unsent would leave the others without them."""
    for gatherer in list(_LIVE.values()):
        try:
            gatherer.wait_all()
        except (RuntimeError, Zero1CkptError):  # the group is gone, and with it whoever could wait
            continue
