"""What this process sets in its environment for a fast start, and what its children get."""

from __future__ import annotations

import os

__all__ = ["child_environment", "start_fast"]

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_added: set[str] = set()


def start_fast() -> None:
    """Keeps numpy from starting a linear-algebra thread a core, for which nothing here has a use. Before its import."""
    if _BLAS_THREADS not in os.environ:
        os.environ[_BLAS_THREADS] = "1"
        _added.add(_BLAS_THREADS)


def child_environment() -> dict[str, str]:
    """The environment as it was given."""
    return {name: value for name, value in os.environ.items() if name not in _added}
