"""``Zero1Optimizer`` with save and load: the engine joined to the checkpoints."""

from .async_save import SaveHandle
from .optimizer import Zero1Optimizer
from .saving import save

__all__ = ["SaveHandle", "Zero1Optimizer", "save"]
