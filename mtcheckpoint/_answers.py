"""Numbered answers of process 0 that the other processes read, ahead of the question if possible.

Process 0 gives an answer when it is asked, or before, when it is known already; the others fetch
one before they ask, when it is there. Then nobody waits for the job's store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mtcheckpoint._clock import POLL_SECONDS
from mtcheckpoint._coordination import Coordinator

__all__ = ["Answers"]

# Answers are deleted in blocks of this many, when all processes have read them.
_BLOCK = 256
# How often an answer is looked for that is not there; the pauses double. With thousands of
# processes the store has better things to do.
_TRIES = 6


class Answers:
    """Answers to the questions that all processes ask in the same order. For one thread at a time.

    Each process is given answer number n to its question number n, by whatever way.
    """

    def __init__(self, coordinator: Coordinator, topic: str) -> None:
        """
        Args:
            coordinator: agreement with the other processes.
            topic: what is asked; only one such object of a job has it.
        """
        self._coordinator = coordinator
        self._topic = topic
        self._number = 0  # of the next question
        self._ahead: Any = None
        self._tries = 0
        self._try_at = 0.0
        self._kept = 0  # the first block of answers that was not deleted

    @property
    def asked(self) -> int:
        """How many questions were asked so far."""
        return self._number

    @property
    def is_ahead(self) -> bool:
        """Whether this process has the answer to the next question."""
        return self._ahead is not None

    def take(self, compute: Callable[[], Any]) -> Any:
        """The answer to the next question: what `compute` returns on process 0, if it is needed."""
        if self._opens_block:
            self._turn_page()
        topic, ahead = self._next_topic, self._ahead
        self._number += 1
        self._ahead, self._tries = None, 0
        return self._coordinator.lead(topic, compute) if ahead is None else ahead

    def give_ahead(self, answer: Any) -> None:
        """Process 0: answers the next question, which has not been answered ahead yet."""
        if not self._opens_block:
            self._ahead = self._coordinator.lead(self._next_topic, lambda: answer)

    def fetch_ahead(self) -> bool:
        """The others: looks for the answer to the next question; True to look again in a moment."""
        if self.is_ahead or self._opens_block or self._tries == _TRIES:
            return False
        if time.monotonic() >= self._try_at:
            # Before the call: one that fails is a try, too.
            self._try_at = time.monotonic() + POLL_SECONDS * 2**self._tries
            self._tries += 1
            self._ahead = self._coordinator.led(self._next_topic)
        return not self.is_ahead and self._tries < _TRIES

    @property
    def _opens_block(self) -> bool:
        return self._number % _BLOCK == 0

    @property
    def _next_topic(self) -> str:
        block, number = divmod(self._number, _BLOCK)
        return f"{self._topic}/{block}/{number}"

    def _turn_page(self) -> None:
        """Says that this process has read the answers before this block, and deletes read ones."""
        coordinator, topic = self._coordinator, f"{self._topic}/block"
        coordinator.announce(topic, self._number // _BLOCK)
        read = coordinator.announced(topic) if coordinator.is_leader else {}
        if len(read) == coordinator.processes:
            read_by_all = min(read.values())
            coordinator.forget(*(f"{self._topic}/{b}" for b in range(self._kept, read_by_all)))
            self._kept = read_by_all
