"""The errors that users can cause, each with the exit code that the command line returns for it."""

from __future__ import annotations

__all__ = [
    "CorruptError",
    "InterruptedRunError",
    "LostRankError",
    "MissingError",
    "OutputError",
    "UnsupportedError",
    "UsageError",
    "VerificationError",
    "Zero1CkptError",
]


class Zero1CkptError(Exception):
    """Base of all errors of this package; ``exit_code`` is what the command line exits with.

    The message is one line: place (file, param), what is wrong, what was found and expected, what to do.
    """

    exit_code = 1

    def __init__(
        self,
        problem: str,
        *,
        file: object = None,
        param: str | None = None,
        found: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = None if file is None else str(file)
        self.param = param
        self.found = found
        self.expected = expected
        self.hint = hint
        super().__init__(self._line())

    def at(self, file: object) -> Zero1CkptError:
        """The same error, said of ``file``: for a callee that does not know which file it speaks of."""
        return type(self)(
            self.problem, file=file, param=self.param, found=self.found, expected=self.expected, hint=self.hint
        )

    def _line(self) -> str:
        place = ": ".join(part for part in (self.file, self.param) if part)
        line = f"{place}: {self.problem}" if place else self.problem
        facts = []
        if self.found is not None:
            facts.append(f"found {self.found}")
        if self.expected is not None:
            facts.append(f"expected {self.expected}")
        if facts:
            line += f" ({', '.join(facts)})"
        if self.hint:
            line += f"; {self.hint}"
        return " ".join(line.split())


class VerificationError(Zero1CkptError):
    """The answer is no: a check of a readable checkpoint found something."""

    exit_code = 1


class UsageError(Zero1CkptError, ValueError):
    """An argument is malformed, or source and destination are the same."""

    exit_code = 2


class MissingError(Zero1CkptError, FileNotFoundError):
    """A file of the input is missing, or there is no committed checkpoint."""

    exit_code = 3

    def __str__(self) -> str:  # FileNotFoundError would print its errno fields instead
        return str(self.args[0])


class CorruptError(Zero1CkptError, ValueError):
    """The input is truncated, altered, unparsable or unsafe."""

    exit_code = 4


class UnsupportedError(Zero1CkptError, ValueError):
    """The input is sound but not supported, or cannot be what was asked."""

    exit_code = 5


class OutputError(Zero1CkptError, OSError):
    """The output could not be written: it exists, there is no space, or no permission."""

    exit_code = 6

    def __str__(self) -> str:  # OSError would print its errno fields instead
        return str(self.args[0])


class InterruptedRunError(Zero1CkptError):
    """The run was interrupted; nothing was published."""

    exit_code = 130


class LostRankError(InterruptedRunError):
    """Another rank of the job failed or is gone; what this one has done is kept for a resume."""
