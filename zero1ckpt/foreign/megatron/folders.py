"""What a folder is, from the names in it: an iteration that Megatron saved, a run of them, or something else.

Nothing but ``metadata.json`` is read, so that a folder of many checkpoints is listed at once.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

__all__ = ["TRACKER", "container_of", "is_iteration", "iteration_folders", "iteration_of", "whole"]

TRACKER = "latest_checkpointed_iteration.txt"
"""Names the latest iteration of a run; the last file that Megatron-LM writes."""
_CONFIG = "metadata.json"
_RANK = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")
_ITERATION = re.compile(r"iter_(\d{7,})")
_RELEASE = "release"
"""Folder of a checkpoint that stands for no iteration (converted weights)."""


def container_of(folder: Path) -> str | None:
    """``torch_dist``, ``zarr`` or ``torch`` (legacy), or None where a folder is no iteration of Megatron's."""
    backend = _backend(folder)
    if backend in ("torch_dist", "zarr"):
        return backend
    if (folder / ".metadata").is_file() and (folder / "common.pt").is_file():
        return "torch_dist"  # half-made: what says the container is written last
    if any(_RANK.fullmatch(child.name) for child in _folders(folder)):
        return "torch"
    return None


def is_iteration(folder: Path) -> bool:
    return container_of(folder) is not None


def iteration_of(folder: Path) -> int | None:
    """The iteration in a folder's name."""
    found = _ITERATION.fullmatch(folder.name)
    return int(found[1]) if found else None


def iteration_folders(name: str) -> tuple[str, ...]:
    """Folders that the text of the tracker may mean."""
    text = name.strip()
    if text == _RELEASE or not text.isdigit():
        return (text,)
    return (f"iter_{int(text):07d}", text)


def whole(folder: Path) -> bool:
    """Whether what Megatron writes last is there: ``metadata.json`` (and the index), or of the legacy container the
    run's tracker.
    """
    container = container_of(folder)
    if container != "torch":
        return (folder / _CONFIG).is_file() and (container != "torch_dist" or (folder / ".metadata").is_file())
    tracker = folder.parent / TRACKER
    try:
        text = tracker.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return False
    iteration = iteration_of(folder)
    return folder.name == text or (iteration is not None and text.isdigit() and int(text) >= iteration)


def _backend(folder: Path) -> str | None:
    path = folder / _CONFIG
    try:
        if not path.is_file() or path.stat().st_size > 2**20:
            return None
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    backend = value.get("sharded_backend") if isinstance(value, dict) else None
    return backend if isinstance(backend, str) else None


def _folders(folder: Path) -> list[Path]:
    try:
        return [child for child in folder.iterdir() if child.is_dir()]
    except OSError:
        return []
