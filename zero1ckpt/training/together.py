"""Steps that all ranks of a group take, and that end the same way on each: on one rank's error all raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from ..core.errors import InterruptedRunError, UsageError, Zero1CkptError
from ..engine.control import ControlPlane

__all__ = ["as_report", "on_first_rank", "together"]

_T = TypeVar("_T")
Facts = tuple[str, ...]
_BEAT_SECONDS = 5.0
"""How often ranks that wait for rank 0's work hear of it; far below the control plane's timeout."""


def as_report(error: BaseException) -> Zero1CkptError:
    """The error as it is told to other ranks, where only this package's own can be built again from a line."""
    if isinstance(error, Zero1CkptError):
        return error
    kind = Zero1CkptError if isinstance(error, Exception) else InterruptedRunError
    return kind(f"{type(error).__name__}: {error}")


def together(control: ControlPlane, what: str, work: Callable[[], _T], same: Mapping[str, Facts] | None = None) -> _T:
    """The result of ``work`` on this rank, once all ranks have theirs.

    ``same``: arguments that must be the same on all ranks; each as one or more texts, of which one must agree.
    Raises this rank's own error as it is, or, on ranks without one, the first other rank's with its rank named;
    ``UsageError`` that names the first argument that differs.
    """
    try:
        made = work()
    except Exception as error:
        try:
            control.raise_together(as_report(error), what)
        except Zero1CkptError:
            pass
        raise
    _check_same(what, control.raise_together(None, what, same))
    return made


def _check_same(what: str, told: list[Mapping[str, Facts] | None]) -> None:
    for rank, own in enumerate(told):
        for name, facts in (told[0] or {}).items():
            found = (own or {}).get(name, ())
            if not set(facts) & set(found):
                raise UsageError(
                    f"{what}: {name} differs between rank 0 and rank {rank}",
                    found=found[0] if found else None,
                    expected=facts[0],
                    hint="all ranks must make the same call",
                )


def on_first_rank(control: ControlPlane, what: str, work: Callable[[], None]) -> None:
    """``work`` on rank 0 while the others wait, however long it takes; the error of rank 0 is raised by all."""
    if control.rank:
        while not control.broadcast(None, what):
            pass
        control.raise_together(None, what)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="zero1ckpt") as pool:
        future = pool.submit(work)
        while not control.broadcast(bool(wait([future], _BEAT_SECONDS).done), what):
            pass
    together(control, what, future.result)
