"""What kind of file system a folder lies on: pages of a file are coherent between hosts only on a local one."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

__all__ = ["is_local"]

_LOCAL = frozenset(
    (
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "jfs",
        "bcachefs",
        "tmpfs",
        "ramfs",
        "overlay",
        "apfs",
        "hfs",
    )
)


def is_local(path: Path) -> bool:
    """Whether ``path`` is known to lie on a local file system; what is not known is taken for a shared one."""
    return _type_of(os.path.realpath(path)) in _LOCAL


@lru_cache(maxsize=256)
def _type_of(path: str) -> str:
    """File system type of the mount that holds ``path``, from /proc/self/mountinfo (proc(5)); "" where unknown."""
    try:
        rows = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for row in rows:
        before, _, after = row.partition(" - ")
        fields = before.split()
        point = fields[4].replace("\\040", " ") if len(fields) > 4 else ""
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # of mounts on one point the last one is seen
            best, kind = len(point), after.split()[0]
    return kind
