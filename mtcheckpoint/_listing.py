"""Looks at volumes and backups for `mtcheckpoint ls`; what it makes of them is in `_listed`."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mtcheckpoint._handshake import files
from mtcheckpoint._listed import (
    BackupLook,
    Row,
    ShareLook,
    VolumeLook,
    foreign_row,
    judge_backup,
    judge_volumes,
)
from mtcheckpoint._shares.backups import Backup, BackupRoot
from mtcheckpoint._shares.identity import IDENTITY_FILE, Identity, identity_from_json
from mtcheckpoint._shares.inventory import HeldShare, Volume, jobs_in, take_inventory
from mtcheckpoint._shares.volume import size_bytes
from mtcheckpoint.errors import ShareError

__all__ = ["BackupsAt", "backups_at", "list_places"]

# What the protocol and our own saves leave in a volume besides shares.
_KNOWN_FILES = {
    *(files.REPLICATOR_YAML, files.JAX_INIT_INFO_FILE, files.PRERESTORE_FILE),
    *(files.ERRORS_FILE, files.FAILED_FILE, "lost+found"),
}
_KNOWN_ENDINGS = (".meta", ".restore", ".save", ".tmp", ".again", ".deleted")
_OUR_PREFIX = "mtcheckpoint."


def list_places(places: Sequence[str], *, job: str | None, timeout_secs: float) -> list[Row]:
    """What lies in volumes and backups.

    Args:
        places: volumes, which are judged together; backup roots, jobs' folders in them and dated
            backups, as paths or URLs.
        job: only this job; None for all.
        timeout_secs: limit of a single request.

    Raises:
        TierUnreadableError: a backup could not be read.
        OSError: a volume could not be read.
    """
    rows: list[Row] = []
    volumes: list[Path] = []
    for place in places:
        looked = _backups_in(place, timeout_secs)
        if looked is None:
            volumes.append(Path(place))
        else:
            rows += looked
    return [row for row in [*_in_volumes(volumes), *rows] if job is None or row.job == job]


# Volumes.


def _in_volumes(volumes: Sequence[Path]) -> list[Row]:
    now = time.time()
    jobs = sorted({job for volume in volumes for job in jobs_in(volume)})
    rows: list[Row] = []
    for job in jobs:
        rows += judge_volumes([_look(volume, job) for volume in volumes], now=now)
    rows += judge_volumes([_look(volume, None) for volume in volumes], now=now)
    for volume in volumes:
        rows += _foreign_in(volume)
    return rows


def _look(volume: Path, job: str | None) -> VolumeLook:
    """What is known to be `job`'s in a volume; for None, what does not say whose it is."""
    found = take_inventory(volume, job or "")
    shares = [share for share in found.shares if _says_whose(share) == (job is not None)]
    # A damaged share's name tells the job only when a replicator took it.
    unsaid = take_inventory(volume, "").damaged if job is not None else ()
    return VolumeLook(
        place=str(volume),
        job=job,
        shares=tuple(look for share in shares if (look := _weigh(volume, job, share)) is not None),
        metas=found.metas,
        damaged=tuple(text for text in found.damaged if text not in unsaid),
    )


def _says_whose(share: HeldShare) -> bool:
    return not share.by_orbax or share.digest is not None or share.path.suffix == ".save"


def _weigh(volume: Path, job: str | None, share: HeldShare) -> ShareLook | None:
    """A share's size and time; None when a replicator moves it at this moment."""
    dated = share.path
    if share.digest is not None and job is not None:
        name = files.ShareName(job=job, step=share.step, node_rank=share.node_rank).meta
        dated = volume / name if (volume / name).exists() else share.path
    try:
        return ShareLook(
            step=share.step,
            save_id=share.save_id,
            node_rank=share.node_rank,
            nodes=share.nodes,
            digest=share.digest,
            by_orbax=share.by_orbax,
            size_bytes=size_bytes(share.path),
            saved_at=dated.stat().st_mtime,
        )
    except FileNotFoundError:
        return None


def _foreign_in(volume: Path) -> Iterator[Row]:
    """What is neither a share nor the protocol's."""
    everybody = [take_inventory(volume, job) for job in ["", *jobs_in(volume)]]
    for entry in sorted(os.scandir(volume), key=lambda entry: entry.name):
        reason = _foreign_reason(entry, everybody)
        if reason is not None:
            yield foreign_row(str(volume), "memory", None, f"{entry.name}: {reason}")


def _foreign_reason(entry: os.DirEntry[str], everybody: Sequence[Volume]) -> str | None:
    name = entry.name
    if name in _KNOWN_FILES or name.endswith(_KNOWN_ENDINGS) or name.startswith(_OUR_PREFIX):
        return None
    match = files.DATA_NAME.fullmatch(name)
    if match is not None:
        named = {digest for found in everybody for _, _, digest in found.metas}
        return None if match[1] in named else "no .meta names this data"
    known = {share.path.name for found in everybody for share in found.shares}
    damaged = any(text.startswith(entry.path) for found in everybody for text in found.damaged)
    return None if name in known or damaged else "not a share"


# Backups.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackupsAt:
    """What a place that is no volume leads to.

    Attributes:
        root: the backup root that it is, or lies in.
        jobs: the jobs with backups.
        name: the one dated backup that the place is; None when it is a job's folder or a root.
        foreign: what else lies in the root, when the place is one.
    """

    root: BackupRoot
    jobs: tuple[str, ...]
    name: str | None = None
    foreign: tuple[str, ...] = ()

    def dated(self) -> Iterator[tuple[str, str]]:
        """Job and name of each backup, newest first within a job."""
        for job in self.jobs:
            for name in [self.name] if self.name is not None else self.root.names(job):
                yield job, name


def backups_at(place: str, *, timeout_secs: float) -> BackupsAt | None:
    """The backups that a backup root, a job's folder or a dated backup holds; None for a volume.

    Raises:
        TierUnreadableError: it could not be listed.
        OSError: a path that could not be listed.
    """
    url = place if "://" in place else str(Path(place).absolute())
    if "://" not in place:
        os.listdir(url)  # says more plainly what is wrong than a file system of fsspec
    here = BackupRoot(url, timeout_secs=timeout_secs)
    names = here.entries()
    parent, _, name = here.url.rpartition("/")
    if files.BACKUP_FOLDER.fullmatch(name):
        above, _, job = parent.rpartition("/")
        root = BackupRoot(above or "/", timeout_secs=timeout_secs)
        return BackupsAt(root=root, jobs=(job,), name=name)
    if any(files.BACKUP_FOLDER.fullmatch(entry) for entry in names):
        root = BackupRoot(parent or "/", timeout_secs=timeout_secs)
        return BackupsAt(root=root, jobs=(name,))
    jobs = tuple(entry for entry in names if here.names(entry))
    if not jobs and "://" not in place:
        return None
    foreign = tuple(sorted(set(names) - set(jobs)))
    return BackupsAt(root=here, jobs=jobs, foreign=foreign)


def _backups_in(place: str, timeout_secs: float) -> list[Row] | None:
    """What a backup root, a job's folder or a dated backup holds; None for a volume."""
    found = backups_at(place, timeout_secs=timeout_secs)
    if found is None:
        return None
    if found.name is not None:
        return list(_in_backup(found.root, found.jobs[0], found.name))
    rows = [row for job in found.jobs for row in _in_job(found.root, job)]
    return rows + [
        foreign_row(found.root.url, "backup", None, f"{entry}: not a job with backups")
        for entry in found.foreign
    ]


def _in_job(root: BackupRoot, job: str) -> Iterator[Row]:
    for name in root.names(job):
        yield from _in_backup(root, job, name)
    for entry in root.entries(job):
        if not files.BACKUP_FOLDER.fullmatch(entry) and entry != files.FORCED_RESTORE_FILE:
            yield foreign_row(f"{root.url}/{job}", "backup", job, f"{entry}: not a backup")


def _in_backup(root: BackupRoot, job: str, name: str) -> Iterator[Row]:
    backup = root.backup(job, name)
    place = f"{root.url}/{job}/{name}"
    sizes = root.sizes(job, backup)
    named: set[str] = set()
    for step in sorted(backup.ranks, reverse=True):
        claims = root.claims(job, backup, step)
        named |= set(claims.values())
        yield judge_backup(_look_into(root, job, backup, step, claims, sizes), now=time.time())
    for entry in root.entries(f"{job}/{name}"):
        reason = _foreign_to_backup(entry, job, named)
        if reason is not None:
            yield foreign_row(place, "backup", job, f"{entry}: {reason}")


def _look_into(
    root: BackupRoot,
    job: str,
    backup: Backup,
    step: int,
    claims: dict[int, str],
    sizes: dict[str, int],
) -> BackupLook:
    identity, by_orbax, fault = None, None, None
    # Any one share tells of how many ranks the save is.
    digest = next((claim for claim in claims.values() if claim in backup.data), None)
    if digest is not None:
        try:
            identity = _identity(root, job, backup, digest)
        except ShareError as error:
            fault = str(error)
        else:
            by_orbax = identity is None
            if identity is not None and identity.job != job:
                fault = f"its shares are of the job {identity.job}"
    return BackupLook(
        place=f"{root.url}/{job}/{backup.name}",
        job=job,
        step=step,
        claims=claims,
        sizes=sizes,
        nodes=identity.nodes if identity is not None else None,
        save_id=identity.save_id if identity is not None and identity.step == step else None,
        by_orbax=by_orbax,
        saved_at=_moment(backup.name),
        fault=fault,
    )


def _identity(root: BackupRoot, job: str, backup: Backup, digest: str) -> Identity | None:
    place = root.place(job, backup, digest)
    text = place.read(IDENTITY_FILE)
    return None if text is None else identity_from_json(text, place.name)


def _moment(name: str) -> float:
    moment = datetime.datetime.strptime(name, "%Y-%m-%d_%H-%M")
    return moment.replace(tzinfo=datetime.UTC).timestamp()


def _foreign_to_backup(entry: str, job: str, named: set[str]) -> str | None:
    match = files.DATA_NAME.fullmatch(entry)
    if match is not None:
        return None if match[1] in named else "no .meta names this data"
    share = files.parse_share_name(entry, "meta")
    if share is None:
        return "not a share"
    return None if share.job == job else f"of the job {share.job}"
