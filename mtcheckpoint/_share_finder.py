"""Finds what is a share in volumes and backups, or should be one, by names alone."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from mtcheckpoint._handshake import files
from mtcheckpoint._listing import backups_at
from mtcheckpoint._shares.backups import BackupRoot
from mtcheckpoint._shares.places import LocalPlace, Place
from mtcheckpoint.errors import TierUnreadableError

__all__ = ["FoundShare", "shares_at"]

# A directory that is being announced again to a replicator.
_AGAIN = ".again"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FoundShare:
    """Something that is or should be a share.

    Attributes:
        where: its folder, for people.
        open: makes the place that it is read from. What that keeps is let go with it.
        job: as names tell.
        step: as names tell.
        rank: as names tell.
        size_bytes: about.
        fault: why it cannot be read.
        may_move: a replicator may rename or clear it at any time.
    """

    where: str
    open: Callable[[], Place]
    job: str | None = None
    step: int | None = None
    rank: int | None = None
    size_bytes: int = 0
    fault: str | None = None
    may_move: bool = False


def shares_at(place: str, timeout_secs: float) -> list[FoundShare]:
    """Everything in a volume, or in the backups at a place, that is or should be a share.

    Raises:
        TierUnreadableError: a backup could not be listed or read.
        OSError: a volume could not be listed.
    """
    backups = backups_at(place, timeout_secs=timeout_secs)
    if backups is None:
        return list(_shares_in_volume(Path(place).absolute()))
    return [
        share
        for job, name in backups.dated()
        for share in _shares_in_backup(backups.root, job, name, timeout_secs)
    ]


def _shares_in_volume(volume: Path) -> Iterator[FoundShare]:
    names = sorted(os.listdir(volume))
    named: dict[str, files.ShareName] = {}
    for name in names:
        share = files.parse_share_name(name, "meta")
        if share is not None and share.worker == 0:
            # With data-parallel replicas several may name the same data.
            named.setdefault(files.data_name(_digest_in(volume / name)), share)
    for name in names:
        path = volume / name
        if path.is_dir() and not path.is_symlink():
            yield from _share_in_volume(path, named.get(name))
    for name, share in named.items():
        if name not in names and (volume / share.meta).exists():
            fault = f"{share.meta} names {name[:80]!r}, which is not there"
            yield _found_locally(volume / share.meta, share, fault=fault)


def _digest_in(meta: Path) -> str:
    try:
        text = LocalPlace(meta.parent).read(meta.name) or b""
    except TierUnreadableError:
        return ""
    return text[:80].decode(errors="replace").strip()


def _share_in_volume(path: Path, share: files.ShareName | None) -> Iterator[FoundShare]:
    saving = files.parse_share_name(path.name, "save")
    step = path.name.removesuffix(_AGAIN)
    if files.DATA_NAME.fullmatch(path.name):
        yield _found_locally(path, share)
    elif saving is not None:
        yield _found_locally(path, saving)
    elif files.is_step_name(step):
        yield dataclasses.replace(_found_locally(path, None), step=int(step))


def _found_locally(path: Path, share: files.ShareName | None, *, fault: str = "") -> FoundShare:
    return FoundShare(
        where=str(path),
        open=lambda: LocalPlace(path),
        job=share.job if share is not None else None,
        step=share.step if share is not None else None,
        rank=share.node_rank if share is not None else None,
        size_bytes=_size_of(path),
        fault=fault or None,
        may_move=True,
    )


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # moved or cleared by a replicator
    return total


def _shares_in_backup(
    root: BackupRoot, job: str, name: str, timeout_secs: float
) -> Iterator[FoundShare]:
    backup = root.backup(job, name)
    folder = f"{root.url}/{job}/{name}"
    sizes = root.sizes(job, backup)

    def found(digest: str, step: int | None = None, rank: int | None = None) -> FoundShare:
        return FoundShare(
            where=f"{folder}/{files.data_name(digest)}",
            open=_opener(root.url, job, name, digest, timeout_secs),
            job=job,
            step=step,
            rank=rank,
            size_bytes=sizes.get(digest, 0),
        )

    unnamed = set(backup.data)
    for step in sorted(backup.ranks, reverse=True):
        for rank, digest in root.claims(job, backup, step).items():
            if digest in unnamed:  # of replicas several name the same data
                unnamed.discard(digest)
                yield found(digest, step, rank)
            elif digest not in backup.data:
                meta = files.ShareName(job=job, step=step, node_rank=rank).meta
                fault = f"it names {digest[:80]!r}, and there is no such data"
                absent = found(digest, step, rank)
                yield dataclasses.replace(absent, where=f"{folder}/{meta}", fault=fault)
    yield from (found(digest) for digest in sorted(unnamed))


def _opener(url: str, job: str, name: str, digest: str, timeout_secs: float) -> Callable[[], Place]:
    """A root of its own for each share: it may keep a local copy of what it reads."""

    def opened() -> Place:
        root = BackupRoot(url, timeout_secs=timeout_secs)
        return root.place(job, root.backup(job, name), digest)

    return opened
