"""``Zero1Optimizer`` with save and load: the engine joined to the checkpoints."""

from .optimizer import Zero1Optimizer
from .saving import SaveHandle, save

__all__ = ["SaveHandle", "Zero1Optimizer", "save"]
