"""Text to train on that ships with Python, and batches that depend on the step alone, not on the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["CONTEXT", "Corpus", "load_corpus"]

CONTEXT = 64
"""Tokens that the model sees at once."""
_SEED = 20_000


@dataclass(frozen=True)
class Corpus:
    """The text as token numbers; token ``i`` is ``alphabet[i]``."""

    tokens: torch.Tensor
    alphabet: str

    def batch(self, step: int, size: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of ``rank``'s share of the ``size`` sequences of a step.

        All ranks together see the same sequences in the same order, whatever their number; it must divide ``size``.
        """
        generator = torch.Generator().manual_seed(_SEED + step)
        starts = torch.randint(0, len(self.tokens) - CONTEXT - 1, (size,), generator=generator)
        own = starts.chunk(ranks)[rank]
        rows = self.tokens[own.unsqueeze(1) + torch.arange(CONTEXT + 1)]
        return rows[:, :-1], rows[:, 1:]


def load_corpus() -> Corpus:
    """The language reference behind ``help()``: some 700,000 characters of English and code."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    number = {letter: i for i, letter in enumerate(alphabet)}
    return Corpus(torch.tensor([number[letter] for letter in text]), alphabet)
