"""Open, write, reshard and verify checkpoints: no process group, no GPU, no model code, no torch until needed.

Names are imported when they are used: what only describes a checkpoint does not load what writes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint, open
    from .comparison import Comparison, diff
    from .exporting import Export, export
    from .history import History, history
    from .resharding import ReshardPlan, plan_reshard, reshard
    from .verification import Finding, Verification, verify
    from .writing import write

__all__ = [
    "Checkpoint",
    "Comparison",
    "Export",
    "Finding",
    "History",
    "ReshardPlan",
    "Verification",
    "diff",
    "export",
    "history",
    "open",
    "plan_reshard",
    "reshard",
    "verify",
    "write",
]

_HOMES = {
    "Checkpoint": "checkpoint",
    "Comparison": "comparison",
    "Export": "exporting",
    "Finding": "verification",
    "History": "history",
    "ReshardPlan": "resharding",
    "Verification": "verification",
    "diff": "comparison",
    "export": "exporting",
    "history": "history",
    "open": "checkpoint",
    "plan_reshard": "resharding",
    "reshard": "resharding",
    "verify": "verification",
    "write": "writing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
