"""Open, write, reshard and verify checkpoints: no process group, no GPU, no model code, no torch until needed."""

from .checkpoint import Checkpoint, open
from .resharding import ReshardPlan, plan_reshard, reshard
from .verification import Finding, Verification, verify
from .writing import write

__all__ = [
    "Checkpoint",
    "Finding",
    "ReshardPlan",
    "Verification",
    "open",
    "plan_reshard",
    "reshard",
    "verify",
    "write",
]
