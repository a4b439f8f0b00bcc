"""What follows a commit: the pointer to the newest checkpoint of a run, and the removal of old ones.

A run folder is the folder that checkpoints lie in. Both happen on rank 0, once the new checkpoint is durable, so that
at every moment the pointer names a whole one.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.stored import POINTERS, Stored, describe
from ..core.errors import UsageError, Zero1CkptError
from ..model.manifest import MANIFEST_NAME
from ..storage.local import fsync_folder, writing
from ..storage.staging import partial_path, remove_whole

if TYPE_CHECKING:
    from .saving import SaveRequest

__all__ = ["after_commit", "check_retention"]

_LATEST = POINTERS[0]


def check_retention(path: Path, keep: object, latest: bool) -> None:
    """Raises ``UsageError`` for a number that keeps nothing, and for a checkpoint in the pointer's place."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise UsageError("keep", found=repr(keep), expected="a number of checkpoints from 1 on, or None")
    if latest and path.name in POINTERS:
        raise UsageError("the pointer to the newest checkpoint has this name", file=path, hint="choose another name")


def after_commit(request: SaveRequest) -> None:
    """Moves the pointer, then removes old checkpoints; a folder that cannot be removed is a warning.

    Raises ``OutputError`` where the pointer cannot be written; the checkpoint is there nevertheless.
    """
    if request.latest:
        _point_to(request.path)
    if request.keep is not None:
        for old in _superfluous(request.path, request.keep):
            try:
                remove_whole(old)
            except Zero1CkptError as error:
                warnings.warn(f"an old checkpoint was not removed: {error}", RuntimeWarning, stacklevel=2)


def _point_to(path: Path) -> None:
    pointer = path.parent / _LATEST
    aside = partial_path(pointer)
    with writing(pointer):
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(f"{path.name}\n")
                file.flush()
                os.fsync(file.fileno())
            os.rename(aside, pointer)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


def _superfluous(path: Path, keep: int) -> list[Path]:
    """Checkpoints beside ``path`` that hold the same params, all but the ``keep`` that were committed last.

    ``path`` itself and what a pointer names stay. Whatever holds other files, or cannot be read, is nobody's to remove.
    """
    mine = _params(describe(path, check_files=False))
    kept = {path.name, *_pointed_at(path.parent)}
    found: list[tuple[int, int, Path]] = []
    for folder in path.parent.iterdir():
        if folder.is_symlink() or not (folder / MANIFEST_NAME).is_file():
            continue
        with contextlib.suppress(Zero1CkptError, OSError):
            stored = describe(folder, check_files=False)
            if _params(stored) == mine and set(stored.store.keys()) <= {MANIFEST_NAME, *stored.files}:
                when = (folder / MANIFEST_NAME).stat().st_mtime_ns
                found.append((when, max(catalog.state.step for catalog in stored.catalogs.values()), folder))
    oldest_first = [folder for _, _, folder in sorted(found) if folder.name != path.name]
    return [folder for folder in oldest_first[: max(len(oldest_first) - keep + 1, 0)] if folder.name not in kept]


def _params(stored: Stored) -> object:
    return {part: [(p.name, p.shape) for p in catalog.state.params] for part, catalog in stored.catalogs.items()}


def _pointed_at(run: Path) -> set[str]:
    names: set[str] = set()
    for pointer in POINTERS:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            name = (run / pointer).read_text(encoding="utf-8").strip()
            names |= {name, f"iter_{name:0>7}"}
    return names
