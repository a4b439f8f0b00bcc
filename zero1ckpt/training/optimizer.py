"""The public ``Zero1Optimizer``: the engine's, with save and load."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from ..engine.memory import MemoryReport, measure_memory
from ..engine.zero1 import Zero1Optimizer as Engine
from ..model.manifest import FormatOptions
from ..registry import DEFAULT_FORMAT
from .async_save import SaveHandle
from .dcp_state import load_state, make_sharded_state, make_state
from .loading import LoadOptions, execute_load, prepare_parts
from .saving import check_whole, save

__all__ = ["Zero1Optimizer"]


class Zero1Optimizer(Engine):
    """A complete ZeRO-1 optimizer for PyTorch that saves and loads at any data-parallel and bucket size.

    See ``zero1ckpt.engine.zero1.Zero1Optimizer`` for the arguments.
    """

    def __init__(self, params: Any, *args: Any, model: Any = None, **options: Any) -> None:
        known = params if isinstance(params, nn.Module) else model
        self._model = known if isinstance(known, nn.Module) else None
        self.half_loaded = False
        super().__init__(params, *args, model=model, **options)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = DEFAULT_FORMAT,
        container: str | None = None,
        extra: Any = None,
        rank_extra: Any = None,
        model: nn.Module | None = None,
        options: FormatOptions | None = None,
        overwrite: bool = False,
        asynchronous: bool = False,
        keep: int | None = None,
        latest: bool = False,
    ) -> SaveHandle:
        """Saves this optimizer; to be called by all ranks of its group. Sends no tensor byte.

        ``path``: a folder that does not exist or is empty; missing parents are made; nothing is there until all of it
        is. ``extra``: state that is the same on all ranks (JSON-able values and tensors), taken from rank 0.
        ``rank_extra``: state of this rank, such as its RNG's; given by all ranks or none. ``model``: stores its
        persistent buffers and frozen params too, as they are on rank 0. ``options``: of the format, such as
        the size of its files. ``overwrite``: replaces a checkpoint. ``asynchronous``: training goes on meanwhile, and
        ``wait()`` of the handle returns when the checkpoint is committed. ``latest``: then the file ``latest`` beside
        it names it. ``keep``: then, of the checkpoints beside it, all but so many of the newest are removed. For these
        see ``zero1ckpt.save``.

        Raises, on every rank alike, ``UsageError`` for arguments, ``OutputError`` where nothing can be written.
        """
        return save(
            path,
            {"": self},
            format=format,
            container=container,
            extra=extra,
            rank_extra=rank_extra,
            model=model,
            options=options,
            overwrite=overwrite,
            asynchronous=asynchronous,
            keep=keep,
            latest=latest,
        )

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        part: str = "",
        groups: str = "file",
        missing: str = "error",
        unexpected: str = "error",
        rank_state: str = "error",
        verify: bool = False,
    ) -> dict[str, Any]:
        """Loads a checkpoint of any dp size and bucket size; to be called by all ranks. Returns its extra state.

        Writes back main params and slots, the model's params, and buffers and frozen params where the file has them.
        ``groups``: hyper-parameters from the "file", matched by membership, or those of the "run".
        ``missing="init"``: params and slots that the file has not start fresh. ``unexpected="drop"``: what only the
        file has is left out. ``rank_state``: what becomes of rank-bound state when the number of ranks has changed:
        "keep" returns all of it by saving rank, "reseed" a seed for this rank, "drop" nothing; at the same number of
        ranks this rank gets its own. It comes back under ``rank_extra``. ``verify``: checks all data first; without
        it every piece that is read whole is checked.

        Raises, on every rank alike, before anything is changed: ``MissingError``, ``CorruptError`` or
        ``UnsupportedError`` for the file, ``UsageError`` that names every param or group that differs. Where data turns
        out to be damaged on the way, ``CorruptError``, and the optimizer refuses to step until a load succeeds.
        """
        options = LoadOptions(part, groups, missing, unexpected, rank_state, verify)
        plans = prepare_parts(self, path, options, self._model)
        self.half_loaded = True
        for view, plan in plans:
            execute_load(view, plan, self._model)
        self.half_loaded = False
        return plans[0][1].extra

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, by reference, for ``torch.distributed.checkpoint``.

        ``state[name][slot]`` are ``ShardedSlot``s: this rank's elements with their range, which DCP writes and reads in
        boxes: ``torch.distributed.checkpoint.save({"optimizer": optimizer}, ...)``, and ``load`` at any number of
        ranks (of experts, at the same number of expert groups). To be called by all ranks; for optimizers of several
        process groups, under different keys.
        """
        return make_state(self, self._begin_read)

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes over what ``torch.distributed.checkpoint.load`` has read into ``state_dict()``, or an earlier
        ``state_dict()`` of this rank at the same number of ranks. To be called by all ranks.

        Raises, on every rank alike, ``UsageError`` or ``UnsupportedError`` that names the param that differs.
        """
        load_state(self, state_dict)
        self.half_loaded = False

    def sharded_state_dict(self) -> dict[str, Any]:
        """``state_dict()`` in the shape of Megatron's: ``param_state`` maps ``optimizer.state.<slot>.<param>`` to this
        rank's shard (``local``, ``global_shape``, ``flattened_range``); ``optimizer`` holds what all ranks share.
        """
        return make_sharded_state(self.state_dict())

    def _begin_read(self) -> None:
        self.before_change()
        self.half_loaded = True

    def memory(self) -> MemoryReport:
        """Bytes that this rank's params, gradients, main params and states take, padding and temporaries told apart."""
        return measure_memory(self)

    def check_steppable(self) -> None:
        check_whole(self)
        super().check_steppable()
