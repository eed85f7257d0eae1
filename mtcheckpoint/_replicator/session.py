"""What the phases of a run share: one node's volume, its run, its voice and its patience."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import logging
import math
from collections.abc import Callable
from typing import TypeVar

from mtcheckpoint._clock import Clock, Deadline, wait_for
from mtcheckpoint._handshake import files
from mtcheckpoint._replicator.backup import BackupStore
from mtcheckpoint._replicator.rendezvous import Member, Run, RunEndedError, StoppedError
from mtcheckpoint._replicator.settings import RunSettings
from mtcheckpoint._replicator.volume import Volume

__all__ = ["POLL_SECONDS", "Voice", "NodeState", "Options", "Session", "wait_without_limit"]

logger = logging.getLogger("mtcheckpoint.replicator")

POLL_SECONDS = 0.02

_T = TypeVar("_T")


class NodeState(enum.Enum):
    """What one node's replicator is doing."""

    STOPPED = "stopped"
    WAITING = "waiting"  # for a replicator.yaml
    REFUSED = "refused"  # wrote replicator.failed; waits for another replicator.yaml
    JOINING = "joining"  # waits for the other nodes of the run
    RESTORING = "restoring"
    WATCHING = "watching"  # for the next step
    REPLICATING = "replicating"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What is the same for all nodes of a replicator.

    Attributes:
        clock: time.
        store: where backups go, None for nowhere.
        strict: step directories are taken as soon as they are seen, finished or not.
        timeout_secs: seconds that nodes wait for each other before ``replicator.errors`` says so.
        is_stopping: whether the replicator is being stopped.
    """

    clock: Clock
    store: BackupStore | None
    strict: bool
    timeout_secs: float
    is_stopping: Callable[[], bool]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Voice:
    """Tells training and the log, in one node's name."""

    volume: Volume
    who: str

    def info(self, text: str) -> None:
        logger.info("%s: %s", self.who, text)

    def error(self, text: str) -> None:
        """Something went wrong that training survives."""
        logger.error("%s: %s", self.who, text)
        self._append(files.ERRORS_FILE, text)

    def failed(self, text: str) -> None:
        """The run is lost; training stops when it sees this."""
        logger.critical("%s: %s", self.who, text)
        self._append(files.ERRORS_FILE, text)
        self._append(files.FAILED_FILE, text)

    def _append(self, name: str, text: str) -> None:
        moment = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        try:
            self.volume.append(name, f"{moment} {self.who}: {text}")
        except OSError as error:
            # A full or removed volume: the log has the line.
            logger.warning("%s: cannot write %s: %s", self.who, name, error)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One node in one run.

    Attributes:
        enter_state: called with what the node is doing now.
    """

    member: Member
    run: Run
    voice: Voice
    options: Options
    enter_state: Callable[[NodeState], None]

    @property
    def settings(self) -> RunSettings:
        return self.member.settings

    @property
    def volume(self) -> Volume:
        return self.member.volume

    @property
    def rank(self) -> int:
        return self.member.rank

    def share(self, step: int) -> files.ShareName:
        """The name of this node's share of `step`."""
        return files.ShareName(job=self.settings.job_name, step=step, node_rank=self.rank)

    def check(self) -> None:
        """Raises when this node has to leave the run: it is over, or a new YAML is there."""
        if self.options.is_stopping():
            raise StoppedError
        if self.volume.yaml_stamp() is not None:
            raise RunEndedError(f"{self.member} got a new {files.REPLICATOR_YAML}")
        self.run.check()

    def wait(
        self, look: Callable[[], _T | None], what: str, on_limit: Callable[[], None] | None = None
    ) -> _T:
        """Looks until there is something; the protocol sets no limit.

        Args:
            look: returns None as long as there is nothing.
            what: what is waited for.
            on_limit: called once, after `timeout_secs` in vain.

        Raises:
            RunEndedError, RunFailedError, StoppedError: the wait is pointless.
        """
        limit = Deadline.after(self.options.timeout_secs, self.options.clock)
        pending = [on_limit] if on_limit else []

        def look_or_leave() -> _T | None:
            self.check()
            found = look()
            if found is None and pending and limit.passed():
                pending.pop()()
            return found

        return wait_without_limit(look_or_leave, what, self.options.clock)


def wait_without_limit(look: Callable[[], _T | None], what: str, clock: Clock) -> _T:
    """Looks every 20 ms until there is something, or `look` raises."""
    forever = Deadline.after(math.inf, clock)
    return wait_for(look, forever, what, poll_seconds=POLL_SECONDS)
