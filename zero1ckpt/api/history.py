"""``zero1ckpt log``: the checkpoints of a run folder, the half-made ones too. Reads manifests only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..core.errors import MissingError, Zero1CkptError
from ..foreign.megatron.folders import TRACKER, container_of, is_iteration, iteration_folders, iteration_of, whole
from ..foreign.megatron.peeking import peek
from ..model.manifest import MANIFEST_NAME, Manifest, decode_manifest
from ..storage.local import LocalStore
from ..storage.staging import find_leftovers

__all__ = ["History", "LoggedCheckpoint", "history"]

_POINTERS = ("latest", TRACKER)
_OURS = re.compile(
    r"(rank-\d{5}-of-\d{5}|optimizer-\d{5}-of-\d{5})\.safetensors(\.part)?|optimizer\.safetensors\.index\.json"
)
"""Names of files that only a checkpoint of ours has."""


@dataclass(frozen=True, slots=True)
class LoggedCheckpoint:
    """One entry of a run folder. What is not known, as of a half-made checkpoint, is None.

    ``committed``: whether there is a manifest that is whole. ``latest``: whether the run's pointer names it. ``note``:
    what is wrong with it or worth knowing.
    """

    name: str
    path: Path
    bytes: int
    committed: bool
    step: int | None = None
    format: str | None = None
    container: str | None = None
    dp_size: int | None = None
    digest: str | None = None
    latest: bool = False
    note: str = ""


@dataclass(frozen=True)
class History:
    """A run folder: its checkpoints by step, those of no known step last, and what is worth a warning."""

    path: Path
    checkpoints: tuple[LoggedCheckpoint, ...]
    pointer: str | None = None
    """Name of the file that points to the latest checkpoint."""
    warnings: list[str] = field(default_factory=list)


Reader = Callable[[Path], LoggedCheckpoint | None]
"""What a folder is to one kind of checkpoint; None where it is none of that kind."""


def history(path: str | os.PathLike[str]) -> History:
    """The checkpoints directly in a folder; a folder that is one itself is the only one.

    Raises ``MissingError`` where there is no folder, or nothing in it.
    """
    run = Path(path)
    if not run.is_dir():
        what = "this is a file, and a run is a folder" if run.exists() else "there is nothing here"
        raise MissingError(what, file=run, hint="check the path")
    alone = (run / MANIFEST_NAME).is_file() or is_iteration(run)
    found = [_entry(run)] if alone else [_entry(child) for child in _folders(run)]
    known = [entry for entry in found if entry is not None]
    if not alone:
        known += _leftovers(run)
    pointer, target = _pointer(run)
    if not known and pointer is None:
        raise MissingError(
            "there is no checkpoint in this folder", file=run, hint="give the folder that a run saves into"
        )
    marked = [replace(entry, latest=target is not None and entry.path == target) for entry in known]
    ordered = tuple(sorted(marked, key=_order))
    return History(
        run, ordered, pointer, [*_same_digests(ordered), *_pointed(run, pointer, ordered), *_damaged(ordered)]
    )


def _folders(run: Path) -> list[Path]:
    return sorted(child for child in run.iterdir() if child.is_dir() and not child.name.startswith("."))


def _order(entry: LoggedCheckpoint) -> tuple[bool, int, list[int | str], str]:
    numbers = [int(text) for text in re.findall(r"\d+", entry.name)]
    return entry.step is None, entry.step or 0, list(numbers), entry.name


def _entry(folder: Path) -> LoggedCheckpoint | None:
    for read in READERS:
        found = read(folder)
        if found is not None:
            return found
    return None


# -------------------------------------------------------------------------------------------------------------- readers


def _native(folder: Path) -> LoggedCheckpoint | None:
    store = LocalStore(folder)
    if not (folder / MANIFEST_NAME).is_file():
        files = store.keys()
        if any(_OURS.fullmatch(key.rpartition("/")[2]) for key in files):
            note = f"not committed: it has no {MANIFEST_NAME}"
            return LoggedCheckpoint(folder.name, folder, _size(folder), False, note=note)
        return None
    try:
        manifest = decode_manifest(store.read(MANIFEST_NAME), folder / MANIFEST_NAME).manifest
    except Zero1CkptError as error:
        return LoggedCheckpoint(folder.name, folder, _size(folder), False, note=error.problem)
    finally:
        store.close()
    steps = sorted({part.step for part in manifest.parts})
    note = f"parts at steps {', '.join(map(str, steps))}" if len(steps) > 1 else ""
    return LoggedCheckpoint(
        folder.resolve().name,
        folder,
        _size(folder),
        True,
        steps[-1],
        manifest.format,
        manifest.container,
        max((part.layout.dp_size for part in manifest.parts if part.layout is not None), default=None),
        manifest.digest,
        note=_incomplete(folder, manifest) or note,
    )


def _megatron(folder: Path) -> LoggedCheckpoint | None:
    """An iteration of Megatron's. Of its content only what says the step and layout is read."""
    container = container_of(folder)
    if container is None:
        return None
    step, format, note = iteration_of(folder), None, ""
    try:
        found = peek(folder, container)
        step, format = found.iteration if found.iteration is not None else step, found.format
    except Zero1CkptError as error:
        note = f"damaged: {error.problem}"
    committed = whole(folder)
    if not committed:
        note = note or "not committed: what Megatron writes last is not there"
    name = folder.resolve().name
    return LoggedCheckpoint(name, folder, _size(folder), committed, step, format, container, note=note)


READERS: tuple[Reader, ...] = (_native, _megatron)
"""Kinds of checkpoints, tried in turn. A foreign kind is one more function here."""


def _incomplete(folder: Path, manifest: Manifest) -> str:
    """Names the first file that is missing or of another size; empty where all are there."""
    for entry in manifest.files:
        try:
            nbytes = (folder / entry.path).stat().st_size
        except OSError:
            return f"damaged: {entry.path} is missing"
        if nbytes != entry.bytes:
            return f"damaged: {entry.path} has {nbytes} bytes, expected {entry.bytes}"
    return ""


def _leftovers(run: Path) -> Iterator[LoggedCheckpoint]:
    """What writers that are dead or at work have left beside the checkpoints."""
    for leftover in find_leftovers(run):
        folders = [path for path in leftover.paths if path.is_dir()]
        if leftover.dst.parent != run or not folders:
            continue
        if leftover.owner is not None:
            note = f"half-made: {leftover.owner} is writing it"
        else:
            note = f"half-made and left: go on with --resume, or `zero1ckpt clean {leftover.dst}`"
        yield LoggedCheckpoint(leftover.dst.name, folders[0], sum(map(_size, folders)), False, note=note)


def _size(folder: Path) -> int:
    return sum(Path(at, name).lstat().st_size for at, _, names in os.walk(folder) for name in names)


# ------------------------------------------------------------------------------------------------------------- warnings


def _pointer(run: Path) -> tuple[str | None, Path | None]:
    """The file that points to the latest checkpoint, and the folder that it names, whether it is there or not."""
    for name in _POINTERS:
        try:
            text = (run / name).read_text().strip()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError):
            return name, None
        for candidate in (text, *iteration_folders(text)):
            if candidate and "/" not in candidate and (run / candidate).is_dir():
                return name, run / candidate
        return name, None
    return None, None


def _pointed(run: Path, pointer: str | None, found: Sequence[LoggedCheckpoint]) -> Iterator[str]:
    if pointer is None:
        return
    entry = next((entry for entry in found if entry.latest), None)
    newest = max((entry for entry in found if entry.committed), key=_order, default=None)
    if entry is None or not entry.committed:
        what = f"{entry.name}, which is not committed" if entry else "no checkpoint of this folder"
        better = f"; the newest committed one is {newest.name}" if newest else ""
        yield f"{run / pointer} names {what}{better}"
    elif newest is not None and (entry.step or 0) < (newest.step or 0):
        yield f"{run / pointer} names {entry.name}, and {newest.name} is newer"


def _same_digests(found: Sequence[LoggedCheckpoint]) -> Iterator[str]:
    """State that did not change between two steps: training stood still, or a save wrote old values again."""
    by_digest: dict[str, list[LoggedCheckpoint]] = {}
    for entry in found:
        if entry.digest is not None:
            by_digest.setdefault(entry.digest, []).append(entry)
    for digest, entries in by_digest.items():
        steps = sorted({entry.step for entry in entries if entry.step is not None})
        if len(steps) > 1:
            names = ", ".join(entry.name for entry in entries)
            yield f"steps {', '.join(map(str, steps))} hold identical state (digest {digest}): {names}"


def _damaged(found: Sequence[LoggedCheckpoint]) -> Iterator[str]:
    for entry in found:
        if entry.committed and entry.note.startswith("damaged"):
            yield f"{entry.name} is {entry.note}"
