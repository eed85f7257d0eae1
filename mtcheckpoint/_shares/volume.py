"""This node's volume: which steps were committed there, and what became of them.

A committed step is a directory of digits. With a replicator present it belongs to the replicator
from that moment on, and is gone soon after: the record of what was saved is kept here, not read
from a listing. Without one it stays, and only the newest are kept.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtcheckpoint import _events
from mtcheckpoint._handshake import files
from mtcheckpoint._policy import SPACE_MARGIN
from mtcheckpoint._shares.identity import IDENTITY_FILE, STATE_ITEM, identity_from_json
from mtcheckpoint._shares.places import read_small_file
from mtcheckpoint._shares.spares import Spares
from mtcheckpoint._shares.write_plan import DATA_FOLDER
from mtcheckpoint.errors import ShareError

__all__ = [
    "SET_ASIDE_SUFFIX",
    "STAGING_FOLDER",
    "CommittedSteps",
    "KeptSteps",
    "ReplicatedSteps",
    "free_bytes",
    "own_steps",
    "set_aside_text",
    "size_bytes",
]

# Of a share that was found bad: nobody takes it for one.
SET_ASIDE_SUFFIX = ".condemned"
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


def set_aside_text(volume: Path) -> str:
    """What shares that were found bad, and set aside, take of a volume; "" when there are none."""
    found = sorted(volume.glob(f"*{SET_ASIDE_SUFFIX}"))
    if not found:
        return ""
    try:
        amount = sum(size_bytes(path) for path in found if path.is_dir() and not path.is_symlink())
    except OSError:  # somebody deletes them just now
        return ""
    return (
        f"; {len(found)} that a restore found bad and set aside hold {amount:,} bytes: when nobody"
        f" wants to look at them, rm -r {volume}/*{SET_ASIDE_SUFFIX}"
    )


def own_steps(volume: Path, job: str) -> dict[int, Path]:
    """Committed steps of `job` that lie in the volume as directories of digits."""
    return dict(sorted(_own_steps(volume, job)))


def _own_steps(volume: Path, job: str) -> Iterator[tuple[int, Path]]:
    with os.scandir(volume) as entries:
        folders = [Path(entry.path) for entry in entries if files.is_step_name(entry.name)]
    for folder in folders:
        try:
            text = read_small_file(folder / IDENTITY_FILE)
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
        self.spares = Spares(volume / STAGING_FOLDER / "spare")
        self.newest: int | None = None
        self._finished: int | None = None
        self._share_bytes = 0
        self._told_room = True
        self._host = socket.gethostname()

    @property
    def pending(self) -> bool:
        """True while something is to be watched."""
        raise NotImplementedError

    @property
    def unseen(self) -> bool:
        """True while nobody can tell whether the run's first step is going to be taken."""
        return False

    @property
    def taken(self) -> int | None:
        """The newest step that was committed and needs no more watching."""
        raise NotImplementedError

    def prepare(self, step: int, array_bytes: int) -> None:
        """Before a share is written: can it be committed, and how large will it be?

        Raises:
            FileExistsError: something of that name is in the volume that is not to be replaced.
        """
        self._share_bytes = max(self._share_bytes, array_bytes)
        self._check_free(step)
        self.spares.trim(self._share_bytes)

    def _check_free(self, step: int) -> None:
        place = self.volume / str(step)
        if place.exists():
            raise FileExistsError(
                f"{place} is there already and is not a step of this job that may be replaced; the"
                " share cannot be renamed to it. Move it away, or save other steps"
            )

    def commit(self, share: Path, step: int, share_bytes: int) -> None:
        """Renames a finished share into place. This rename is the commit: it comes last."""
        self.spares.remember(share / STATE_ITEM / DATA_FOLDER)
        os.rename(share, self.volume / str(step))
        self.newest = step
        self._share_bytes = share_bytes

    def tidy(self) -> None:
        """After a step was committed on all processes: what it replaces is no step any more."""

    def sweep(self) -> None:
        """Deletes what `tidy` took away: freeing memory takes a third of the time of filling it."""

    def withdraw(self, step: int) -> None:
        """After the save of `step` failed somewhere: undoes its commit here, where that is safe."""

    def finished(self, step: int) -> None:
        """Notes that the save of `step` is over, whether it was committed or not."""
        self._finished = step

    def look(self) -> bool:
        """Looks at the volume; True when there is something new to report."""
        self.spares.trim(self._share_bytes)
        return self._has_room() != self._told_room

    def report(self) -> dict[str, Any]:
        """How far this node is (see `_policy.HostReport`)."""
        self._told_room = self._has_room()
        return {
            "host": self._host,
            "finished_step": self._finished,
            # A save that failed left nothing to be taken.
            "taken_step": self.taken if self.pending else self._finished,
            "free_bytes": self._room_bytes(),
            "share_bytes": self._share_bytes,
        }

    def full(self) -> OSError:
        """The error of a volume without space for a share, in bytes."""
        return OSError(
            errno.ENOSPC,
            f"{self.volume} is full: a share needs at least {self._share_bytes} bytes,"
            f" {self._room_bytes()} are free. Give the RAM disk more memory"
            f"{set_aside_text(self.volume)}",
        )

    def _has_room(self) -> bool:
        return self._room_bytes() >= self._share_bytes * SPACE_MARGIN

    def _room_bytes(self) -> int:
        """Bytes that a share can have."""
        return free_bytes(self.volume) + self.spares.free_bytes()


class ReplicatedSteps(CommittedSteps):
    """Steps that a replicator takes: nothing here deletes or touches them, with one exception.

    The replicator begins to watch only after it has restored and tidied up. A step that was
    committed before is never taken, and when it was missed on one node only, all nodes wait for
    each other for ever. So such a step is announced again, by renaming it away and back. That is
    fatal for the replicator when it has the first announcement in its queue: it is done for the
    first step of a run only, for later ones are certainly seen, and only when nothing has happened
    for a while.
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
    def unseen(self) -> bool:
        return self.pending and self._taken is None

    @property
    def taken(self) -> int | None:
        return self._taken

    def commit(self, share: Path, step: int, share_bytes: int) -> None:
        super().commit(share, step, share_bytes)
        self._announced_at = time.monotonic()

    def look(self) -> bool:
        if not self.pending:
            return super().look()
        if not self._is_there():
            self._taken = self.newest
            return True
        if self._missed():
            self._announce_again()
        return super().look()

    def _is_there(self) -> bool:
        return (self.volume / str(self.newest)).exists()

    def _missed(self) -> bool:
        return (
            self.unseen
            and time.monotonic() - self._announced_at > self._patience
            and not any(self.volume.glob("*.save"))
        )

    def _announce_again(self) -> None:
        step = self.volume / str(self.newest)
        aside = self.volume / f"{self.newest}.again"
        try:
            os.rename(step, aside)
        except FileNotFoundError:
            return  # taken at this very moment
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
        self._trash = volume / STAGING_FOLDER / "deleted"

    @property
    def pending(self) -> bool:
        return False

    @property
    def taken(self) -> int | None:
        return self.newest

    def _check_free(self, step: int) -> None:
        if step not in own_steps(self.volume, self._job):
            super()._check_free(step)

    def commit(self, share: Path, step: int, share_bytes: int) -> None:
        if step in own_steps(self.volume, self._job):
            _set_aside(self.volume / str(step))
        super().commit(share, step, share_bytes)

    def tidy(self) -> None:
        # Not before: a share that the others have not committed is worth nothing by itself.
        for folder in [*self._superseded(), *_aside(self.volume)]:
            self._trash.mkdir(parents=True, exist_ok=True)
            os.rename(folder, self._trash / uuid.uuid4().hex)

    def sweep(self) -> None:
        shutil.rmtree(self._trash, ignore_errors=True)

    def withdraw(self, step: int) -> None:
        folder = self.volume / str(step)
        if self.newest == step:
            self.newest = None
            shutil.rmtree(_set_aside(folder, "withdrawn.deleted"), ignore_errors=True)
        replaced = self.volume / f"{step}.deleted"
        if replaced.exists():
            os.rename(replaced, folder)

    def _superseded(self) -> list[Path]:
        steps = own_steps(self.volume, self._job)
        kept = [step for step in steps if step <= (self.newest or 0)][-self._keep :]
        return [folder for step, folder in steps.items() if step not in kept]


# Half a directory must not look like a step, so what is deleted gets another name first.


def _set_aside(folder: Path, suffix: str = "deleted") -> Path:
    aside = folder.with_name(f"{folder.name}.{suffix}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    return aside


def _aside(volume: Path) -> list[Path]:
    found = volume.glob("*.deleted")
    return [path for path in found if files.is_step_name(path.name.partition(".")[0])]
