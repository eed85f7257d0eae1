"""How many steps can pass before a save can have ended: from how long the last ones took. Pure."""

from __future__ import annotations

from collections import deque

__all__ = ["Pace"]

# Saves that are remembered; the shortest of them counts.
_REMEMBERED = 8
# Until this part of the shortest save has passed, nobody asks.
_QUIET_PART = 7 / 8
# From then on the next save starts later than it could by at most this part of the time.
_LATE_PART = 1 / 16


class Pace:
    """Says at which step it is worth while to ask again, as long as a save keeps the hosts busy.

    Times are seconds on one clock.
    """

    def __init__(self) -> None:
        self._lengths: deque[float] = deque(maxlen=_REMEMBERED)
        self._since: tuple[int, float] | None = None  # from here steps are counted
        self._started: tuple[int, float] | None = None
        self._busy_until: float | None = None

    def started(self, step: int, now: float) -> None:
        """Notes that a save of `step` was started."""
        if self._started is not None and self._busy_until is not None:
            # The last moment at which somebody was seen busy: never more than it took.
            self._lengths.append(max(0.0, self._busy_until - self._started[1]))
        self._since, self._started = self._started or (step, now), (step, now)
        self._busy_until = None

    def busy(self, step: int, now: float) -> int:
        """Notes that some hosts are busy with the save at `step`; the step to ask again at."""
        self._busy_until = now
        if self._started is None:
            return step + 1
        shortest, passed = min(self._lengths, default=0.0), now - self._started[1]
        return self.after(max(_QUIET_PART * shortest - passed, _LATE_PART * passed), step, now)

    def after(self, seconds: float, step: int, now: float) -> int:
        """The last step that begins before `seconds` have passed, but not the present one."""
        if self._since is None or now <= self._since[1] or step <= self._since[0]:
            return step + 1
        steps_per_second = (step - self._since[0]) / (now - self._since[1])
        return step + max(1, int(seconds * steps_per_second))
