"""Real checkpoints, and the truth beside them."""

from __future__ import annotations

from tests.foreign.conftest import corpus

__all__ = ["corpus"]
