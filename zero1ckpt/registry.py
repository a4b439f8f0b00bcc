"""(format, container) -> plug-in. The one place where format and container names are compared."""

from __future__ import annotations

import difflib

from .core.errors import UnsupportedError
from .formats.bucket_shards import BucketShards
from .formats.fully_reshardable import FullyReshardable
from .formats.fully_reshardable_torch_dist import FullyReshardableTorchDist
from .formats.fully_reshardable_zarr import FullyReshardableZarr
from .formats.fully_sharded_model_space import FullyShardedModelSpace
from .model.protocols import NativeFormat

__all__ = ["DEFAULT_FORMAT", "FORMATS", "find_format"]

_PLUGINS: tuple[NativeFormat, ...] = (
    BucketShards(),
    FullyReshardable(),
    FullyReshardableTorchDist(),
    FullyReshardableZarr(),
    FullyShardedModelSpace(),
)

FORMATS: dict[tuple[str, str], NativeFormat] = {(plugin.name, plugin.container): plugin for plugin in _PLUGINS}
"""Plug-ins by format and container; a format's first container is its default."""
DEFAULT_FORMAT = "bucket_shards"


def find_format(name: str, container: str | None = None) -> NativeFormat:
    """The plug-in of a format in a container, by default the format's first.

    Raises ``UnsupportedError`` with the nearest name for an unknown one, or for a pair that does not exist.
    """
    names = list(dict.fromkeys(known for known, _ in FORMATS))
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}?" if near else "see `zero1ckpt reshard --help`"
        raise UnsupportedError("unknown format", found=name, expected=f"one of {', '.join(names)}", hint=hint)
    containers = [kind for known, kind in FORMATS if known == name]
    plugin = FORMATS.get((name, containers[0] if container is None else container))
    if plugin is None:
        raise UnsupportedError(
            f"format {name} does not come in this container",
            found=container,
            expected=f"one of {', '.join(containers)}",
        )
    return plugin
