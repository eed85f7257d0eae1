"""This node's volume: which steps were committed there, and what became of them.

A committed step is a directory of digits. With a replicator present it belongs to the replicator
from that moment on, and is gone soon after: the record of what was saved is kept here, not read from
a listing. Without one it stays, and only the newest are kept.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtcheckpoint import _events
from mtcheckpoint._handshake import files
from mtcheckpoint._shares.identity import IDENTITY_FILE, identity_from_json
from mtcheckpoint.errors import ShareError

__all__ = [
    "STAGING_FOLDER",
    "CommittedSteps",
    "KeptSteps",
    "ReplicatedSteps",
    "free_bytes",
    "own_steps",
    "size_bytes",
]

# Not digits: the replicator does not look at it.
STAGING_FOLDER = "mtcheckpoint.staging"

# A directory that is still there after this long, while nothing is being hashed, was missed.
_MISSED_SECONDS = 1.5


def free_bytes(volume: Path) -> int:
    """Bytes that can still be written to the volume."""
    found = os.statvfs(volume)
    return found.f_bavail * found.f_frsize


def size_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`, as they occupy memory, without following links."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += size_bytes(Path(entry.path))
            else:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def own_steps(volume: Path, job: str) -> dict[int, Path]:
    """Committed steps of `job` that lie in the volume as directories of digits."""
    return dict(sorted(_own_steps(volume, job)))


def _own_steps(volume: Path, job: str) -> Iterator[tuple[int, Path]]:
    with os.scandir(volume) as entries:
        folders = [Path(entry.path) for entry in entries if files.is_step_name(entry.name)]
    for folder in folders:
        try:
            text = (folder / IDENTITY_FILE).read_bytes()
            identity = identity_from_json(text, str(folder))
        except (OSError, ShareError):
            continue  # not one of ours
        if identity.job == job:
            yield int(folder.name), folder


class CommittedSteps:
    """Base of the two ways in which committed steps end: `ReplicatedSteps` and `KeptSteps`.

    Used by one thread, except for `report` and `newest`.
    """

    def __init__(self, volume: Path) -> None:
        self.volume = volume
        self.newest: int | None = None
        self._finished: int | None = None
        self._share_bytes = 0
        self._host = socket.gethostname()

    @property
    def pending(self) -> bool:
        """True while something is to be watched."""
        raise NotImplementedError

    @property
    def taken(self) -> int | None:
        """The newest step that was committed and needs no more watching."""
        raise NotImplementedError

    def commit(self, share: Path, step: int, share_bytes: int) -> None:
        """Renames a finished share into place. This rename is the commit: it comes last."""
        os.rename(share, self.volume / str(step))
        self.newest = step
        self._share_bytes = share_bytes

    def finished(self, step: int) -> None:
        """Notes that the save of `step` is over, whether it was committed or not."""
        self._finished = step

    def look(self) -> bool:
        """Looks at the volume; True when there is something new to report."""
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        """How far this node is (see `_policy.HostReport`)."""
        return {
            "host": self._host,
            "finished_step": self._finished,
            # A save that failed left nothing to be taken.
            "taken_step": self.taken if self.pending else self._finished,
            "free_bytes": free_bytes(self.volume),
            "share_bytes": self._share_bytes,
        }


class ReplicatedSteps(CommittedSteps):
    """Steps that a replicator takes: nothing here deletes or touches them, with one exception.

    The replicator begins to watch only after it has restored and tidied up. A step that was
    committed before is never taken, and when it was missed on one node only, all nodes wait for each
    other for ever. So such a step is announced again, by renaming it away and back. That is fatal
    for the replicator when it has the first announcement in its queue: it is done for the first step
    of a run only, for later ones are certainly seen, and only when nothing has happened for a while.
    """

    def __init__(self, volume: Path) -> None:
        super().__init__(volume)
        self._taken: int | None = None
        self._announced_at = 0.0
        self._patience = _MISSED_SECONDS

    @property
    def pending(self) -> bool:
        return self.newest is not None and self._taken != self.newest

    @property
    def taken(self) -> int | None:
        return self._taken

    def commit(self, share: Path, step: int, share_bytes: int) -> None:
        super().commit(share, step, share_bytes)
        self._announced_at = time.monotonic()

    def look(self) -> bool:
        if not self.pending:
            return False
        if not (self.volume / str(self.newest)).exists():
            self._taken = self.newest
            return True
        if self._missed():
            self._announce_again()
        return False

    def _missed(self) -> bool:
        return (
            self._taken is None
            and time.monotonic() - self._announced_at > self._patience
            and not any(self.volume.glob("*.save"))
        )

    def _announce_again(self) -> None:
        step = self.volume / str(self.newest)
        aside = self.volume / f"{self.newest}.again"
        os.rename(step, aside)
        os.rename(aside, step)
        self._announced_at = time.monotonic()
        self._patience *= 2
        _events.happened("save/announced_again", step=self.newest)


class KeptSteps(CommittedSteps):
    """Steps without a replicator: the newest `keep` stay, older ones of this job are deleted.

    After a roll-back, steps beyond the one just saved belong to a past that did not happen; they go
    when it is committed, so that a restart does not come back to them.
    """

    def __init__(self, volume: Path, *, job: str, keep: int) -> None:
        super().__init__(volume)
        self._job = job
        self._keep = keep

    @property
    def pending(self) -> bool:
        return False

    @property
    def taken(self) -> int | None:
        return self.newest

    def commit(self, share: Path, step: int, share_bytes: int) -> None:
        replaced = own_steps(self.volume, self._job).get(step)
        if replaced is not None:
            _delete(replaced)
        super().commit(share, step, share_bytes)
        for folder in self._superseded(step):
            _delete(folder)

    def look(self) -> bool:
        return False

    def _superseded(self, newest: int) -> list[Path]:
        steps = own_steps(self.volume, self._job)
        kept = [step for step in steps if step <= newest][-self._keep :]
        return [folder for step, folder in steps.items() if step not in kept]


def _delete(folder: Path) -> None:
    aside = folder.with_name(f"{folder.name}.deleted")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)  # half a directory must not look like a step
    shutil.rmtree(aside)
