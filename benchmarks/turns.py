"""Turns of two groups of processes, which measure one after the other and never at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from mtcheckpoint._clock import Deadline, wait_for

__all__ = ["Turns"]

_LIMIT_SECONDS = 600.0


class Turns:
    """The turns of one process, kept by files in a folder that all of both groups see.

    Args:
        folder: the folder, which exists.
        group: 0 or 1: group 0 begins.
        rank: of this process in its group.
        processes: how many processes each group has.
    """

    def __init__(self, folder: str, *, group: int, rank: int, processes: Sequence[int]) -> None:
        self._folder = Path(folder)
        self._group = group
        self._rank = rank
        self._processes = list(processes)
        self._number = group

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Comes when all processes of the other group have left their turn."""
        wait_for(
            lambda: None if self._missing() else True,
            Deadline.after(_LIMIT_SECONDS),
            "the turn of the other processes to end",
            missing=self._missing,
        )
        yield
        self._mark(self._number, self._rank).touch()
        self._number += 2

    def _missing(self) -> list[str]:
        before = self._number - 1
        if before < 0:
            return []
        ranks = range(self._processes[1 - self._group])
        marks = [self._mark(before, rank) for rank in ranks]
        return [mark.name for mark in marks if not mark.exists()]

    def _mark(self, number: int, rank: int) -> Path:
        return self._folder / f"turn-{number}-of-{rank}"
