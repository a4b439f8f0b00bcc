"""Format name -> plug-in. The one place where format and container names are compared."""

from __future__ import annotations

import difflib

from .core.errors import UnsupportedError
from .formats.bucket_shards import BucketShards
from .model.protocols import Format

__all__ = ["DEFAULT_FORMAT", "FORMATS", "find_container", "find_format"]

FORMATS: dict[str, Format] = {plugin.name: plugin for plugin in (BucketShards(),)}
DEFAULT_FORMAT = "bucket_shards"


def find_format(name: str) -> Format:
    """The plug-in of a format. Raises ``UnsupportedError`` with the nearest name."""
    plugin = FORMATS.get(name)
    if plugin is None:
        near = difflib.get_close_matches(name, FORMATS, 1)
        hint = f"did you mean {near[0]}?" if near else "see `zero1ckpt reshard --help`"
        raise UnsupportedError("unknown format", found=name, expected=f"one of {', '.join(FORMATS)}", hint=hint)
    return plugin


def find_container(plugin: Format, container: str | None) -> str:
    """The container to write a format in: the given one, or its first. Raises ``UnsupportedError`` for a wrong pair."""
    if container is None:
        return plugin.containers[0]
    if container not in plugin.containers:
        raise UnsupportedError(
            f"format {plugin.name} does not come in container {container}",
            found=container,
            expected=f"one of {', '.join(plugin.containers)}",
        )
    return container
