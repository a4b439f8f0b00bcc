"""ZeRO-1 training and checkpoints whose optimizer state moves between any data-parallel and bucket sizes.

Names are imported when they are used, so that reading a checkpoint's manifest does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .core.errors import Zero1CkptError

if TYPE_CHECKING:
    from .api import Checkpoint, diff, open, reshard, verify, write
    from .core.ranges import Range
    from .engine.adamw import AdamW
    from .engine.grad_scaler import DynamicScale
    from .model.manifest import FormatOptions
    from .training import SaveHandle, Zero1Optimizer, save

__version__ = "0.1.0"
__all__ = [
    "AdamW",
    "Checkpoint",
    "DynamicScale",
    "FormatOptions",
    "Range",
    "SaveHandle",
    "Zero1CkptError",
    "Zero1Optimizer",
    "diff",
    "open",
    "reshard",
    "save",
    "verify",
    "write",
]

_HOMES = {
    "AdamW": "engine.adamw",
    "DynamicScale": "engine.grad_scaler",
    "FormatOptions": "model.manifest",
    "Range": "core.ranges",
    "Zero1Optimizer": "training",
    "save": "training",
    "SaveHandle": "training",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
