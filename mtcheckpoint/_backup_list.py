"""The backups of a job as a restore goes through them: listed by process 0, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from mtcheckpoint import _events
from mtcheckpoint._coordination import Coordinator
from mtcheckpoint._shares.backups import Backup, BackupRoot
from mtcheckpoint._shares.places import Place
from mtcheckpoint.config import CheckpointConfig
from mtcheckpoint.errors import TierUnreadableError

__all__ = ["BackupList"]


class BackupList:
    """The job's backups, newest first, listed one by one and only as far as needed."""

    def __init__(self, config: CheckpointConfig, coordinator: Coordinator) -> None:
        self._job = config.run_name
        self._coordinator = coordinator
        self._root: BackupRoot | None = None
        self._names: list[str] | None = None if config.backup_root else []
        self._url = config.backup_root or ""
        self._timeout_secs = config.timeout_secs
        self._waiting: list[tuple[Backup, int]] = []
        self._unreadable: TierUnreadableError | None = None

    def newer_than(self, step: int) -> tuple[Backup, int] | None:
        """Takes the next backup and step, if that is newer than `step`.

        What cannot be read ends the list: see `raise_if_unreadable`.
        """
        try:
            while not self._waiting and self._next_name() is not None:
                self._fill()
        except TierUnreadableError as error:
            self._end(error)
        if self._waiting and self._waiting[0][1] > step:
            return self._waiting.pop(0)
        return None

    def names(self) -> dict[str, Any]:
        """Process 0: what `take_names` takes, for a round that is made anyway."""
        try:
            return {"names": self._the_root().names(self._job) if self._url else []}
        except TierUnreadableError as error:
            return {"unreadable": str(error), "place": error.place}

    def take_names(self, told: Mapping[str, Any]) -> None:
        """Takes what process 0 has found, so that it need not be asked again."""
        if "names" in told:
            self._names = list(told["names"])
        else:
            self._end(TierUnreadableError(told["unreadable"], place=told["place"]))

    def _end(self, error: TierUnreadableError) -> None:
        _events.happened("restore/unreadable", level=logging.WARNING, reason=str(error))
        self._unreadable, self._names = error, []

    def raise_if_unreadable(self) -> None:
        """Raises what ended the list early."""
        if self._unreadable is not None:
            raise self._unreadable

    def places(self, backup: Backup, step: int) -> Mapping[int, Place]:
        """Where the shares of a backup lie, by rank."""
        root = self._the_root()
        digests = root.digests(self._job, backup, step)
        return {rank: root.place(self._job, backup, digest) for rank, digest in digests.items()}

    def _the_root(self) -> BackupRoot:
        if self._root is None:
            self._root = BackupRoot(self._url, timeout_secs=self._timeout_secs)
        return self._root

    def _next_name(self) -> str | None:
        if self._names is None:
            self._names = self.decide(
                "restore/backups", lambda _: self._the_root().names(self._job)
            )
        return self._names[0] if self._names else None

    def _fill(self) -> None:
        assert self._names
        name = self._names.pop(0)
        listed = self.decide(
            "restore/backup", lambda _: self._the_root().backup(self._job, name).to_json()
        )
        backup = Backup.from_json(listed)
        self._waiting = [(backup, step) for step in sorted(backup.ranks, reverse=True)]

    def decide(self, topic: str, listing: Callable[[Any], Any]) -> Any:
        """What process 0 finds; the others wait long enough to hear that it had no answer."""
        limit = 2 * self._timeout_secs
        return self._coordinator.decide(topic, None, listing, timeout_secs=limit)
