"""Several processes of one job find each other through a folder on a file system that they share.

Used by ``reshard`` under torchrun or srun: no process group, no port, no torch. Rank 0 leads. Every rank writes a sign
of life once a second; who is not heard from for a time is named. Files appear whole (written aside and renamed), and a
session begins only when rank 0 has answered the very token that a rank has posted, so that what an earlier, dead run
left is never taken for an answer. From then on all is posted in a folder that is named after the session: ranks of a
dead run that are still at work post into nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from ..core.errors import LostRankError, UsageError, Zero1CkptError
from .local import writing
from .staging import RANKS_SUFFIX, refuse_live_writer

__all__ = ["Ranks", "Rendezvous", "rendezvous_path"]

_GO = "go"

_POLL_SECONDS = 0.05
_BEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among those of a job."""

    rank: int
    size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Ranks:
        """Rank and size as torchrun (RANK, WORLD_SIZE) or srun (SLURM_PROCID, tasks of the step) tell; else one rank.

        Raises ``UsageError`` for values that make no sense.
        """
        env = os.environ if environment is None else environment
        slurm = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", slurm)):
            if rank in env and size in env:
                found = f"{rank}={env[rank]} {size}={env[size]}"
                try:
                    made = cls(int(env[rank]), int(env[size]))
                except ValueError:
                    raise UsageError("the environment's rank is no number", found=found) from None
                if not 0 <= made.rank < made.size:
                    raise UsageError("the environment's rank is out of range", found=found)
                return made
        return cls(0, 1)


class _Go(msgspec.Struct):
    """Rank 0's answer: the session's folder, and the tokens that it has seen, by rank."""

    session: str
    tokens: dict[int, str]


def rendezvous_path(dst: Path) -> Path:
    return dst.parent / f".{dst.name}{RANKS_SUFFIX}"


class Rendezvous:
    """One rank's view of a session. As a context: enters when all ranks have come, and tells the others on an error.

    ``timeout``: seconds without a sign of life after which a rank counts as missing. Raises ``LostRankError`` that
    names the missing ranks, and on the others what one rank's error was.
    """

    def __init__(self, dst: Path, ranks: Ranks, *, timeout: float) -> None:
        self.dst = dst
        self.folder = rendezvous_path(dst)
        self.ranks = ranks
        self.timeout = timeout
        self._token = secrets.token_hex(8)
        self._room = self.folder  # then the session's own
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._stop = threading.Event()
        self._beat: threading.Thread | None = None

    def __enter__(self) -> Rendezvous:
        if self.ranks.rank == 0:  # a live job's ranks may be meeting here, and would take this one's files for theirs
            refuse_live_writer(self.dst)
        try:
            with writing(self.folder):
                self._meet()
        except BaseException:  # no one calls __exit__ then
            self._end_beating()
            if self.ranks.rank == 0:
                self._clear()
            raise
        return self

    def _meet(self) -> None:
        if self.ranks.rank:
            self._start_beating()
            self._join()
            return
        self._clear()
        session = self.folder / self._token
        session.mkdir(parents=True)
        self._start_beating()
        tokens = {rank: self._await(f"hello-{rank}", rank).decode() for rank in range(1, self.ranks.size)}
        self.post(_GO, msgspec.json.encode(_Go(session.name, tokens)))
        self._room = session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            line = str(error) if isinstance(error, Zero1CkptError) else f"{kind.__name__ if kind else ''}: {error}"
            with contextlib.suppress(OSError):
                self._post("failed", f"rank {self.ranks.rank} on {socket.gethostname()}: {line}".encode())
        self._end_beating()
        if self.ranks.rank == 0 and error is None:
            self._clear()

    def post(self, name: str, data: bytes) -> None:
        """Makes ``data`` visible to all ranks of the session under ``name``. Raises ``LostRankError`` without one."""
        try:
            self._post(name, data)
        except FileNotFoundError:
            raise self.ended() from None

    def _post(self, name: str, data: bytes) -> None:
        room = self._room
        aside = room / f".{name}.{self._token}"
        aside.write_bytes(data)
        aside.rename(room / name)

    def collect(self, name: str) -> Iterator[bytes]:
        """What ranks 1 and up post under ``name-<rank>``, in rank order; for rank 0."""
        for rank in range(1, self.ranks.size):
            yield self._await(f"{name}-{rank}", rank)

    def receive(self, name: str) -> bytes:
        """What rank 0 posts under ``name``."""
        return self._await(name, 0)

    def await_end(self) -> None:
        """Waits until rank 0 has ended the session."""
        while self.alive:
            self._check(0)
            time.sleep(_POLL_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether the session's folder is there: rank 0 takes it away at the end, and so does a later job."""
        return self._room.exists()

    def _clear(self) -> None:
        """Takes the folder away in one step: others may be writing into it."""
        aside = rendezvous_path(self.dst.with_name(f"{self.dst.name}.{self._token}"))  # a kill leaves what clean finds
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def _join(self) -> None:
        """Posts this rank's token, again where rank 0 has cleared the folder meanwhile, until it is answered."""
        hello = self.folder / f"hello-{self.ranks.rank}"
        begin = time.monotonic()
        while True:
            with contextlib.suppress(OSError):
                if self.folder.exists() and not hello.exists():
                    self._post(hello.name, self._token.encode())
                go = msgspec.json.decode((self.folder / _GO).read_bytes(), type=_Go)
                if go.tokens.get(self.ranks.rank) == self._token:
                    self._room = self.folder / go.session
                    return
            if time.monotonic() - begin > self.timeout:
                raise LostRankError(
                    f"rank 0 did not come within {self.timeout:g} s",
                    file=self.folder,
                    hint="all ranks must run the same command on a file system that they share",
                )
            time.sleep(_POLL_SECONDS)

    def _await(self, name: str, rank: int) -> bytes:
        path = self._room / name
        while True:
            with contextlib.suppress(FileNotFoundError):
                return path.read_bytes()
            self._check(rank)
            if not self.alive:
                raise self.ended()
            time.sleep(_POLL_SECONDS)

    def ended(self) -> LostRankError:
        """The error of a rank whose session is no more."""
        return LostRankError(
            "the session was ended without this rank, by another job at the same place",
            file=self.folder,
            hint="nothing of this rank's was committed; see what the other job made",
        )

    def _check(self, rank: int) -> None:
        """Raises where a rank has failed, or where ``rank`` shows no sign of life."""
        with contextlib.suppress(FileNotFoundError):
            raise LostRankError((self._room / "failed").read_text(), hint="mend the cause and go on with --resume")
        now = time.monotonic()
        others = [other for other in range(self.ranks.size) if other != self.ranks.rank]
        silent = [other for other in others if self._silence(other, now) > self.timeout]
        if rank in silent:
            names = ", ".join(str(other) for other in silent)
            raise LostRankError(
                f"no sign of life for {self.timeout:g} s from rank {names} of {self.ranks.size}",
                file=self.folder,
                hint="nothing was committed; go on with --resume (for a single process unset RANK or SLURM_PROCID)",
            )

    def _silence(self, rank: int, now: float) -> float:
        """Seconds for which a rank's sign of life has not changed."""
        sign = b""
        with contextlib.suppress(FileNotFoundError):
            sign = (self._room / f"alive-{rank}").read_bytes()
        known, since = self._seen.get(rank, (None, now))
        if known != sign:
            since = now
        self._seen[rank] = (sign, since)
        return now - since

    def _start_beating(self) -> None:
        def beat() -> None:
            count = 0
            while not self._stop.is_set():
                count += 1
                with contextlib.suppress(OSError):
                    self._post(f"alive-{self.ranks.rank}", f"{self._token} {count}".encode())
                self._stop.wait(_BEAT_SECONDS)

        self._beat = threading.Thread(target=beat, name="zero1ckpt-alive", daemon=True)
        self._beat.start()

    def _end_beating(self) -> None:
        self._stop.set()
        if self._beat is not None:
            self._beat.join()
