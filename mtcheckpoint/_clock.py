"""Deadlines and waiting: the only module that sleeps.

Durations are seconds on the monotonic clock. Time is a parameter, so tests walk through a limit of
minutes in milliseconds with a clock of their own.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from mtcheckpoint.errors import WaitTimeoutError

__all__ = ["POLL_SECONDS", "Clock", "Deadline", "SystemClock", "begun", "run_within", "wait_for"]

# Files are looked at this often, so a reaction takes well under 50 ms. One look is a stat or a
# scandir of a few entries: about 20 µs.
POLL_SECONDS = 0.01

_T = TypeVar("_T")


class Clock(Protocol):
    """What a wait needs to know about time."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Lets `seconds` pass."""


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class Deadline:
    """A moment by which something must have happened."""

    seconds: float
    at: float
    clock: Clock = dataclasses.field(default_factory=SystemClock)

    @classmethod
    def after(cls, seconds: float, clock: Clock | None = None) -> Deadline:
        """A deadline `seconds` from now."""
        clock = clock or SystemClock()
        return cls(seconds=seconds, at=clock.monotonic() + seconds, clock=clock)

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at - self.clock.monotonic())

    def passed(self) -> bool:
        return self.clock.monotonic() >= self.at


def wait_for(
    look: Callable[[], _T | None],
    deadline: Deadline,
    what: str,
    *,
    missing: Callable[[], Iterable[str]] = tuple,
    hint: str = "",
    poll_seconds: float = POLL_SECONDS,
) -> _T:
    """Looks until `look` returns something other than None, and returns that.

    Args:
        look: called at once, then every `poll_seconds`. What it raises ends the wait.
        deadline: when to give up. `look` is called once more after it has passed.
        what: what is waited for, for the message.
        missing: names of what is missing, asked for when the wait is given up.
        hint: what to do about it, for the message.
        poll_seconds: seconds between two looks.

    Raises:
        WaitTimeoutError: `look` still returned None when the deadline had passed.
    """
    while True:
        last = deadline.passed()
        found = look()
        if found is not None:
            return found
        if last:
            raise WaitTimeoutError(what, seconds=deadline.seconds, missing=missing(), hint=hint)
        deadline.clock.sleep(min(poll_seconds, deadline.remaining()))


def run_within(operation: Callable[[], _T], deadline: Deadline, what: str, *, hint: str = "") -> _T:
    """Runs `operation`, which may know no limit of its own, and returns what it returns.

    It runs in a thread that is left behind when it hangs, and that does not keep the process from
    ending. What it does after the deadline goes nowhere.

    Args:
        operation: may raise anything, which is raised here.
        deadline: when to give up.
        what: what is waited for, for the message.
        hint: what to do about it, for the message.

    Raises:
        WaitTimeoutError: it was not done when the deadline had passed.
    """
    outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()
    if not deadline.passed():
        outcome = begun(operation)
    try:
        return outcome.result(timeout=deadline.remaining())
    except TimeoutError:
        if outcome.done():  # it is what `operation` has raised
            return outcome.result(timeout=0)
        raise WaitTimeoutError(what, seconds=deadline.seconds, hint=hint) from None


def begun(operation: Callable[[], _T]) -> concurrent.futures.Future[_T]:
    """Begins `operation` in a thread that does not keep the process from ending; what comes of it.

    Not in a pool: the threads of one are waited for when the process ends.
    """
    outcome: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(operation())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="mtcheckpoint-limited", daemon=True).start()
    return outcome
