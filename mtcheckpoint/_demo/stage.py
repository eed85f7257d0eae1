"""A running job in front of an audience."""

from __future__ import annotations

import time
from collections.abc import Callable

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint._demo.job import Job
from mtcheckpoint._demo.screen import Screen
from mtcheckpoint._demo.view import View

__all__ = ["Stage"]

_LOOK_SECONDS = 0.02


class Stage:
    """Shows a job while something is waited for.

    Attributes:
        job: the job.
        part: which part of the show it is, for people.
        act: what is going on, for people.
    """

    def __init__(self, job: Job, screen: Screen) -> None:
        self.job = job
        self.part = ""
        self.act = ""
        self._screen = screen
        self._begun = time.monotonic()

    def say(self, text: str, *, style: str = "") -> None:
        """Tells that something has happened."""
        self._screen.say(text, self._seconds(), style=style)

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Waits until `condition` is true, and shows the job meanwhile.

        Raises:
            WaitTimeoutError: it was not true in time.
            ProcessFailedError: a process failed.
        """

        def look() -> bool | None:
            self.job.check()
            self._screen.update(self._view)
            return condition() or None

        wait_for(look, Deadline.after(seconds), what, poll_seconds=_LOOK_SECONDS)

    def _view(self) -> View:
        return View(
            act=f"{self.part} {self.act}".strip(),
            seconds=self._seconds(),
            nodes=self.job.node_views(),
            losses=self.job.losses,
            backup_step=self.job.backup_step,
        )

    def _seconds(self) -> float:
        return time.monotonic() - self._begun
