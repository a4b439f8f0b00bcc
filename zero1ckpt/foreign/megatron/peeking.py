"""Iteration and layout of a checkpoint from its common state alone, so that a run of many is listed quickly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...encodings.torch_archive import read_archive
from ...storage.local import LocalStore
from .common import common_of
from .folders import iteration_of
from .torch_dist import open_torch_dist

__all__ = ["Peek", "peek"]

_COMMON = "common.pt"


@dataclass(frozen=True, slots=True)
class Peek:
    """``format``: as ``MegatronCheckpoint.format``; what the file does not say outright is None."""

    iteration: int | None
    format: str | None


def peek(folder: Path, container: str) -> Peek:
    """Reads no tensor, and no index but where the common state lies in an entry. Raises ``Zero1CkptError``."""
    if container == "torch":
        return Peek(iteration_of(folder), "megatron:legacy")
    store = LocalStore(folder)
    try:
        if (folder / _COMMON).is_file():
            state = read_archive(store, _COMMON).value
        else:
            state = open_torch_dist(folder).common
    finally:
        store.close()
    common = common_of(state if isinstance(state, dict) else {})
    kind = common.sharding_type
    return Peek(common.iteration, None if kind is None else f"megatron:{kind}")
