"""What each process last said of itself: all tell, process 0 listens.

Listening asks the job's store, and the answer grows with the job. So a background thread does, and
the training thread decides by what was heard. That may be a moment old: then a save is held up for
that long, but none is started too early, as nobody's report is taken back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mtcheckpoint._clock import POLL_SECONDS
from mtcheckpoint._coordination import Coordinator

__all__ = ["Reports"]

_TOPIC = "report"
# How often process 0 listens when nobody is expected to say anything that matters.
_QUIET_SECONDS = 0.2
# At most this part of a thread's time goes into listening.
_MOST = 1 / 4


class Reports:
    """The reports of a job. One thread of a process tells and listens, any may look."""

    def __init__(self, coordinator: Coordinator) -> None:
        """
        Args:
            coordinator: agreement with the other processes; process 0 of it listens.
        """
        self._coordinator = coordinator
        self._heard: Mapping[int, Any] = {}
        self._listened_at = 0.0
        self._took_seconds = 0.0

    @property
    def known(self) -> dict[int, Any]:
        """By process, what is known of it: the own newest report, and what was heard of others."""
        own = self._coordinator.own(_TOPIC)
        known = {**self._heard} if own is None else {**self._heard, self._coordinator.process: own}
        return dict(sorted(known.items()))

    @property
    def awaited(self) -> bool:
        """True on process 0 when it is ready for the next save and others are not, as it heard."""
        own = self._coordinator.own(_TOPIC)
        if not self._coordinator.is_leader or own is None or not _is_ready(own):
            return False
        known = self.known.values()
        return len(known) < self._coordinator.processes or any(
            not _is_ready(report) or report["finished_step"] != own["finished_step"]
            for report in known
        )

    def tell(self, report: Mapping[str, Any]) -> None:
        """Replaces what this process has said (see `_policy.HostReport`, and ``fault``)."""
        self._coordinator.announce(_TOPIC, dict(report))

    def listen(self) -> None:
        """Asks for the reports of all; on process 0 only."""
        if not self._coordinator.is_leader:
            return
        begun = self._listened_at = time.monotonic()  # also when this fails
        self._heard = self._coordinator.announced(_TOPIC)
        self._listened_at = time.monotonic()
        self._took_seconds = self._listened_at - begun

    def listen_when_due(self) -> None:
        """The same, when it is time to."""
        pause = POLL_SECONDS if self.awaited else _QUIET_SECONDS
        pause = max(pause, self._took_seconds / _MOST)
        if time.monotonic() - self._listened_at >= pause:
            self.listen()


def _is_ready(report: Mapping[str, Any]) -> bool:
    """Whether nothing of its last save is left to be done or to be taken."""
    return bool(report.get("finished_step") == report.get("taken_step"))
