"""Real English text that every Python brings, and batches of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

__all__ = ["VOCABULARY_SIZE", "Batches", "read_text"]

VOCABULARY_SIZE = 128


def read_text() -> np.ndarray:
    """The language reference that comes with `help`, as ASCII codes; shape (characters,)."""
    try:
        from pydoc_data import topics
    except ImportError:  # some distributions ship it apart
        text = "".join(path.read_text(errors="replace") for path in _standard_library())
    else:
        text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(text.encode("ascii", errors="ignore"), np.uint8)


def _standard_library() -> list[Path]:
    import argparse

    return sorted(Path(argparse.__file__).parent.glob("[a-f]*.py"))


@dataclasses.dataclass(frozen=True, slots=True)
class Batches:
    """Random pieces of a text; the batch of a step depends on the step alone.

    Attributes:
        text: ASCII codes.
        size: rows of a batch.
        length: characters of a row, of which each is to be predicted from those before it.
    """

    text: np.ndarray
    size: int
    length: int

    def batch(self, step: int) -> np.ndarray:
        """Shape (size, length + 1), int32; the same on every process."""
        random = np.random.default_rng(step)
        starts = random.integers(0, len(self.text) - self.length - 1, self.size)
        rows: np.ndarray = self.text[starts[:, None] + np.arange(self.length + 1)]
        return rows.astype(np.int32)
