"""Real checkpoints of other systems, where they lie beside the checkout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve()
_BESIDE = _HERE.parents[2].parent / "shared" / "corpus"
DATA = _HERE.parent / "data"
"""A few of the real checkpoints, which are in the project."""
CORPUS = Path(os.environ.get("ZERO1CKPT_CORPUS", _BESIDE if _BESIDE.is_dir() else DATA))
"""Real checkpoints: what ZERO1CKPT_CORPUS names, ``../shared/corpus`` beside the checkout, or those in the project."""


@pytest.fixture
def corpus() -> Callable[..., Path]:
    """``corpus(case)`` is the folder of a Megatron case, ``corpus(case, save)`` the iteration folder of one save."""

    def find(case: str, save: str | None = None) -> Path:
        folder = CORPUS / "megatron" / case
        if not folder.is_dir():
            pytest.skip(f"real checkpoints are not at {CORPUS}: {case} was not tried")
        return folder if save is None else folder / save / "iter_0000003"

    return find
