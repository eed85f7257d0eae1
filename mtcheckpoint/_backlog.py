"""Says when the newest step has waited for the replicator for long. Process 0 asks and tells."""

from __future__ import annotations

import logging

from mtcheckpoint import _policy
from mtcheckpoint._policy import ClusterState

__all__ = ["Backlog"]

_LOG = logging.getLogger("mtcheckpoint.decider")


class Backlog:
    """Warns when nothing new is replicated for long, once and then at each doubling of the time.

    Training is not held up meanwhile: steps are not saved, and the log says what a restart would
    come back to.

    Args:
        patience_secs: seconds that a step may wait before the first warning.
    """

    def __init__(self, patience_secs: float = 60.0) -> None:
        self._first_patience = patience_secs
        self._patience = patience_secs
        self._since: float | None = None

    def look(self, state: ClusterState) -> None:
        """Looks at what is known at a step; warns, or says that all is well again."""
        reason = _policy.held_up(state)
        if reason is None:
            self._settle(state)
            return
        if self._since is None:
            self._since = state.now_seconds
        seconds = state.now_seconds - self._since
        if seconds >= self._patience:
            self._patience = 2 * seconds
            _LOG.warning(
                "step %d: for %.0f s no step was saved, because of %s. Training goes on; a restart"
                " would come back to %s. See the replicator's log on that node",
                state.step,
                seconds,
                reason,
                _newest_everywhere(state),
            )

    def _settle(self, state: ClusterState) -> None:
        if self._since is not None and self._patience > self._first_patience:
            seconds = state.now_seconds - self._since
            _LOG.info("step %d: saving goes on after %.0f s", state.step, seconds)
        self._since, self._patience = None, self._first_patience


def _newest_everywhere(state: ClusterState) -> str:
    taken = [report.taken_step for report in state.reports]
    known = [step for step in taken if step is not None]
    if len(known) < state.processes:
        return "what was there before this run"
    return f"step {min(known)}"
