"""Runs ``clean``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import MissingError
from ..storage.staging import Leftover, find_leftovers, remove_leftover
from .exit_codes import DONE
from .render import write_json, write_stdout
from .text import safe, short_bytes

__all__ = ["run"]


def run(path: str, *, dry_run: bool, as_json: bool, quiet: bool) -> int:
    """Names what dead writers left, and removes it; what a live one holds stays."""
    leftovers = _find(path)
    live = [leftover for leftover in leftovers if leftover.owner is not None]
    dead = [leftover for leftover in leftovers if leftover.owner is None]
    if not (as_json or quiet):
        _name(path, dead, live, dry_run)
    if not dry_run:
        for leftover in dead:
            remove_leftover(leftover)
    if as_json:
        write_json(
            {
                "schema": "zero1ckpt.clean/1",
                "path": path,
                "removed": _paths(dead),
                "kept": _paths(live),
                "dry_run": dry_run,
            }
        )
    return DONE


def _find(path: str) -> list[Leftover]:
    """Leftovers at a path. A leftover itself stands for all of its writer's."""
    target = Path(os.path.abspath(path))
    if not target.parent.is_dir():
        raise MissingError("there is no such folder", file=target.parent, hint="check the path")
    for leftover in find_leftovers(target.parent):
        if target in leftover.paths:
            return [leftover]
    return find_leftovers(target)


def _name(path: str, dead: Sequence[Leftover], live: Sequence[Leftover], dry_run: bool) -> None:
    lines = []
    for leftover in live:
        lines += [f"kept     {safe(str(p))}: {leftover.owner} is at work on it" for p in leftover.paths]
    word = "found  " if dry_run else "removing"
    for leftover in dead:
        lines += [f"{word} {safe(str(p))} ({short_bytes(_size(p))})" for p in leftover.paths]
    if not dead:
        lines.append(f"nothing to remove at {safe(path)}")
    elif dry_run:
        lines.append("a dry run: nothing was removed")
    write_stdout("\n".join(lines), "\n")


def _paths(leftovers: Sequence[Leftover]) -> list[str]:
    return [str(path) for leftover in leftovers for path in leftover.paths]


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_size
    return sum(Path(folder, name).lstat().st_size for folder, _, names in os.walk(path) for name in names)
