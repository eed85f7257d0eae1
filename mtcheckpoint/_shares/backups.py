"""Backups as the replicator lays them out: ``<root>/<job>/<date>/``, flat. Read-only.

A backup is complete when every rank has a ``.meta`` for a step and the data of every hash is there;
there is no other marker. Nothing is ever written or deleted here.
"""

from __future__ import annotations

import dataclasses
import tempfile
import urllib.parse
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from mtcheckpoint._clock import Deadline, run_within
from mtcheckpoint._handshake import files
from mtcheckpoint._shares.places import SMALL_FILE_BYTES, LocalPlace, Place, check_small
from mtcheckpoint.errors import (
    MtCheckpointError,
    ShareError,
    TierUnreadableError,
    WaitTimeoutError,
)

__all__ = ["Backup", "BackupRoot", "open_filesystem"]

_T = TypeVar("_T")

# Thousands of small files, each a round trip.
_PARALLEL_READS = 16
# A whole share, from a file system that TensorStore does not know. A restore's own limit is less.
_COPY_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Backup:
    """One dated folder of one job.

    Attributes:
        name: the folder's name.
        ranks: the ranks that have a ``.meta``, by step.
        data: the hashes whose data is there.
    """

    name: str
    ranks: Mapping[int, tuple[int, ...]]
    data: frozenset[str]

    def fault(self, step: int) -> str | None:
        """Why a step of this backup cannot be complete; None when it may be, as names tell."""
        ranks = self.ranks.get(step, ())
        gaps = sorted(set(range(max(ranks, default=0) + 1)) - set(ranks))
        if gaps:
            return f"no .meta of rank {', '.join(map(str, gaps))}"
        return None if self.data else "no data of any rank"

    def to_json(self) -> dict[str, Any]:
        ranks = {str(step): list(found) for step, found in self.ranks.items()}
        return {"name": self.name, "ranks": ranks, "data": sorted(self.data)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Backup:
        return cls(
            name=value["name"],
            ranks={int(step): tuple(found) for step, found in value["ranks"].items()},
            data=frozenset(value["data"]),
        )


class BackupRoot:
    """The folder or bucket that holds the jobs' folders.

    Every method has an answer within the limit, or raises `TierUnreadableError`.
    """

    def __init__(self, url: str, *, timeout_secs: float) -> None:
        """
        Args:
            url: any URL that fsspec knows, or an absolute path.
            timeout_secs: limit of each call, however many requests that takes.
        """
        self.url = url.rstrip("/")
        self._timeout_secs = timeout_secs
        self._filesystem, self._path = self._open()
        # Copies of shares on file systems that TensorStore cannot read. The places keep this object
        # alive, and the copies go with it.
        self._copies: dict[str, tempfile.TemporaryDirectory[str]] = {}

    def entries(self, folder: str = "") -> list[str]:
        """All names directly in a folder below this root, or in the root itself.

        Raises:
            TierUnreadableError: the root is not there, or the folder could not be listed.
        """
        deadline = self._deadline()
        names = self._list(f"{self._path}/{folder}" if folder else self._path, deadline)
        if names is None:
            self._check_root(deadline)
        return sorted(names or ())

    def names(self, job: str) -> list[str]:
        """The names of the job's backups, newest first; [] when the job has none.

        Raises:
            TierUnreadableError: the root is not there, or it could not be listed or read.
        """
        deadline = self._deadline()
        names = self._list(f"{self._path}/{job}", deadline)
        if names is None:
            self._check_root(deadline)
            return []
        return sorted((n for n in names if files.BACKUP_FOLDER.fullmatch(n)), reverse=True)

    def backup(self, job: str, name: str) -> Backup:
        """One of the job's backups, from a listing alone.

        Raises:
            TierUnreadableError: it could not be listed.
        """
        names = self._list(f"{self._path}/{job}/{name}", self._deadline()) or []
        ranks: dict[int, list[int]] = {}
        for entry in names:
            share = files.parse_share_name(entry, "meta")
            if share is not None and share.job == job and share.worker == 0:
                ranks.setdefault(share.step, []).append(share.node_rank)
        return Backup(
            name=name,
            ranks={step: tuple(sorted(found)) for step, found in ranks.items()},
            data=frozenset(m[1] for entry in names if (m := files.DATA_NAME.fullmatch(entry))),
        )

    def digests(self, job: str, backup: Backup, step: int) -> dict[int, str]:
        """The hash of each rank's share of a step.

        Raises:
            ShareError: a ``.meta`` is gone or says nothing sensible, or its data is not there.
            TierUnreadableError: one could not be read.
        """
        folder = f"{self._path}/{job}/{backup.name}"
        found = self.claims(job, backup, step)
        for rank, digest in found.items():
            if digest not in backup.data:
                name = files.ShareName(job=job, step=step, node_rank=rank).meta
                said = digest[:80] or "nothing"
                raise ShareError(
                    f"{folder}/{name} says {said!r}, and there is no such data", place=folder
                )
        return found

    def claims(self, job: str, backup: Backup, step: int) -> dict[int, str]:
        """What each rank's ``.meta`` of a step says, sensible or not.

        Raises:
            TierUnreadableError: one could not be read.
        """
        deadline = self._deadline()

        def claim(rank: int) -> str:
            name = files.ShareName(job=job, step=step, node_rank=rank).meta
            try:
                text = self._read(f"{self._path}/{job}/{backup.name}/{name}", deadline) or b""
            except ShareError:  # too large for any hash
                text = b""
            return text.decode(errors="replace").strip()

        ranks = backup.ranks[step]
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            return dict(zip(ranks, pool.map(claim, ranks), strict=True))

    def sizes(self, job: str, backup: Backup) -> dict[str, int]:
        """Bytes of each hash's data in a backup, from one listing of all its files.

        Raises:
            TierUnreadableError: it could not be listed.
        """
        folder = f"{self._path}/{job}/{backup.name}"
        found = self._ask(folder, self._deadline(), lambda: self._find(folder))
        sizes = dict.fromkeys(backup.data, 0)
        for path, entry in (found or {}).items():
            match = files.DATA_NAME.fullmatch(path.removeprefix(f"{folder}/").partition("/")[0])
            if match is not None and match[1] in sizes:
                sizes[match[1]] += int(entry["size"] or 0)
        return sizes

    def place(self, job: str, backup: Backup, digest: str) -> Place:
        """Where one share of a backup lies."""
        path = f"{self._path}/{job}/{backup.name}/{files.data_name(digest)}"
        if self._is_local:
            return LocalPlace(Path(path), tier="backup")
        if self._is_bucket:
            return _BucketPlace(self, path)
        return _CopiedPlace(self, path)

    @property
    def _is_local(self) -> bool:
        return bool({"file", "local"} & set(_protocols(self._filesystem)))

    @property
    def _is_bucket(self) -> bool:
        return bool({"gs", "gcs"} & set(_protocols(self._filesystem)))

    def read(self, path: str) -> bytes | None:
        """A whole small file below this root; None when it is not there.

        Raises:
            ShareError: it has more than `places.SMALL_FILE_BYTES`.
            TierUnreadableError: it could not be read.
        """
        return self._read(path, self._deadline())

    def _read(self, path: str, deadline: Deadline) -> bytes | None:
        if self._is_local:
            place = LocalPlace(Path(path).parent)
            return self._ask(path, deadline, lambda: place.read(Path(path).name))
        content = self._ask(path, deadline, lambda: self._start_of(path))
        if content is not None:
            folder, _, file = path.rpartition("/")
            check_small(len(content), file, folder)
        return content

    def _start_of(self, path: str) -> bytes:
        try:
            return bytes(self._filesystem.cat_file(path, start=0, end=SMALL_FILE_BYTES + 1))
        except Exception as error:  # each file system raises its own
            if str(getattr(error, "code", "")) == "416" and self._filesystem.size(path) == 0:
                return b""  # an empty object has no range
            raise

    def size(self, path: str) -> int | None:
        """Bytes of a file below this root; None when it is not there."""
        return self._ask(path, self._deadline(), lambda: int(self._filesystem.size(path)))

    def _find(self, folder: str) -> Mapping[str, Mapping[str, Any]]:
        found: Mapping[str, Mapping[str, Any]] = self._filesystem.find(folder, detail=True)
        return found

    def _open(self) -> tuple[Any, str]:
        found = self._ask(
            self.url, self._deadline(), lambda: open_filesystem(self.url, self._timeout_secs)
        )
        if found is None:  # a file with credentials, say
            raise TierUnreadableError(f"the backup at {self.url} cannot be reached", place=self.url)
        return found

    def _list(self, path: str, deadline: Deadline) -> list[str] | None:
        entries = self._ask(path, deadline, lambda: self._filesystem.ls(path, detail=False))
        if entries is None:
            return None
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]

    def _check_root(self, deadline: Deadline) -> None:
        """Refuses a root that is not there, which is not the same as one without backups."""
        # A bucket has no folders: there is nothing to see of a prefix before the first backup.
        root = self._path.partition("/")[0] if self._is_bucket else self._path
        if not self._ask(root, deadline, lambda: self._filesystem.isdir(root)):
            raise TierUnreadableError(
                f"the backup root {self.url} is not there or is no folder: create it, or correct"
                " backup_root. Whether there are backups cannot be told without it",
                place=self.url,
            )

    def copy_folder(self, path: str) -> Path:
        """A local copy of a folder below this root; made once."""
        if path not in self._copies:
            folder = tempfile.TemporaryDirectory(prefix="mtcheckpoint-backup-")
            copy = folder.name + "/copy/"
            try:
                self._ask(
                    path,
                    Deadline.after(_COPY_SECONDS),
                    lambda: self._filesystem.get(path + "/", copy, recursive=True),
                )
            except TierUnreadableError:
                folder.cleanup()
                raise
            self._copies[path] = folder
            weakref.finalize(self, folder.cleanup)
        return Path(self._copies[path].name) / "copy"

    def _deadline(self) -> Deadline:
        return Deadline.after(self._timeout_secs)

    def _ask(self, path: str, deadline: Deadline, request: Callable[[], _T]) -> _T | None:
        """What the file system answers; None when `path` is not there.

        Raises:
            TierUnreadableError: it cannot be read, or there was no answer in time. File systems
                know limits of single requests at most, and try those again.
        """
        try:
            return run_within(request, deadline, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except WaitTimeoutError as error:
            raise TierUnreadableError(
                f"the backup at {self.url} cannot be read ({path}): no answer in"
                f" {deadline.seconds:g} s",
                place=self.url,
            ) from error
        except MtCheckpointError:
            raise
        except Exception as error:  # each file system raises its own
            raise TierUnreadableError(
                f"the backup at {self.url} cannot be read ({path}): {type(error).__name__}:"
                f" {error}",
                place=self.url,
            ) from error


def open_filesystem(url: str, timeout_secs: float) -> tuple[Any, str]:
    """fsspec's file system for a URL or a path, and the path in it.

    Args:
        url: any URL that fsspec knows, or an absolute path.
        timeout_secs: limit of a single request.
    """
    # gcsfs hides what others wrote behind its cache, and waits for ever without a limit.
    options = (
        {"use_listings_cache": False, "requests_timeout": timeout_secs}
        if urllib.parse.urlsplit(url).scheme in ("gs", "gcs")
        else {}
    )
    filesystem, path = fsspec.core.url_to_fs(url, **options)
    return filesystem, str(path).rstrip("/")


@dataclasses.dataclass(frozen=True, slots=True)
class _BucketPlace:
    """A share in a bucket of Cloud Storage."""

    root: BackupRoot
    path: str  # bucket/key
    tier: Any = "backup"

    @property
    def name(self) -> str:
        return f"gs://{self.path}"

    def read(self, file: str) -> bytes | None:
        return self.root.read(f"{self.path}/{file}")

    def size(self, file: str) -> int | None:
        return self.root.size(f"{self.path}/{file}")

    def kvstore(self, folder: str) -> dict[str, Any]:
        bucket, _, key = self.path.partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{key}/{folder}/"}


@dataclasses.dataclass(frozen=True, slots=True)
class _CopiedPlace:
    """A share on a file system that TensorStore does not know: arrays are read from a copy."""

    root: BackupRoot
    path: str
    tier: Any = "backup"

    @property
    def name(self) -> str:
        return f"{self.root.url}: {self.path}"

    def read(self, file: str) -> bytes | None:
        return self.root.read(f"{self.path}/{file}")

    def size(self, file: str) -> int | None:
        return self.root.size(f"{self.path}/{file}")

    def kvstore(self, folder: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self.root.copy_folder(f'{self.path}/{folder}')}/"}


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
