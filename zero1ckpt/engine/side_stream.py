"""Where collectives are launched while computation goes on: a stream of their own on CUDA, nothing on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .collectives import Pending

__all__ = ["SideStream"]


class SideStream:
    """Launches collectives behind the work that made their input, and lets later work wait for them, on the device.

    The host waits for nothing here. On the CPU, ``begin`` only calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._writers: list[torch.cuda.Stream] = []

    def note_writer(self) -> None:
        """The current stream has written to what will be sent: autograd runs hooks on the stream of the forward op."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            if current not in self._writers:
                self._writers.append(current)

    def begin(self, start: Callable[[], list[Pending]], tensors: list[torch.Tensor]) -> list[Pending]:
        """``start()`` on the side stream, after all noted writers. ``tensors``: what it reads and writes."""
        if self._stream is None:
            return start()
        self.note_writer()
        for writer in self._writers:
            self._stream.wait_stream(writer)
        with torch.cuda.stream(self._stream):
            made: list[Pending] = []
            for pending in start():
                pending.wait()  # makes the side stream wait, and puts what follows the message (division, cast) on it
                made.append(_OnSide(pending, self._stream.record_event(), self._device))
        for tensor in tensors:
            tensor.record_stream(self._stream)
        return made

    def forget_writers(self) -> None:
        """All that they wrote has been waited for."""
        self._writers.clear()


class _OnSide:
    """A collective whose end is an event of the side stream; keeps the handle, and so its tensors, alive."""

    def __init__(self, pending: Pending, event: torch.cuda.Event, device: torch.device) -> None:
        self._pending, self._event, self._device = pending, event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
