"""Backups as the replicator lays them out: ``<root>/<job>/<date>/``, flat. Read-only.

A backup is complete when every rank has a ``.meta`` for a step and the data of every hash is there;
there is no other marker. Nothing is ever written or deleted here.
"""

from __future__ import annotations

import dataclasses
import tempfile
import urllib.parse
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec

from mtcheckpoint._handshake import files
from mtcheckpoint._shares.places import LocalPlace, Place
from mtcheckpoint.errors import TierUnreadableError

__all__ = ["Backup", "BackupRoot"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Backup:
    """One dated folder of one job.

    Attributes:
        name: the folder's name.
        metas: the hash of each rank's share, by step and rank.
        data: the hashes whose data is there.
    """

    name: str
    metas: Mapping[int, Mapping[int, str]]
    data: frozenset[str]

    def fault(self, step: int) -> str | None:
        """Why a step of this backup is not complete; None when it is, as far as names tell."""
        ranks = self.metas.get(step, {})
        gaps = sorted(set(range(max(ranks, default=0) + 1)) - ranks.keys())
        if gaps:
            return f"no .meta of rank {', '.join(map(str, gaps))}"
        lost = sorted(rank for rank, digest in ranks.items() if digest not in self.data)
        if lost:
            return f"no data of rank {', '.join(map(str, lost))}"
        return None


class BackupRoot:
    """The folder or bucket that holds the jobs' folders."""

    def __init__(self, url: str, *, timeout_secs: float) -> None:
        """
        Args:
            url: any URL that fsspec knows, or an absolute path.
            timeout_secs: limit of a single request.
        """
        self.url = url.rstrip("/")
        self._timeout_secs = timeout_secs
        self._filesystem, self._path = self._open()
        # Copies of shares on file systems that TensorStore cannot read; gone with this object.
        self._copies: dict[str, tempfile.TemporaryDirectory[str]] = {}

    def backups(self, job: str) -> list[Backup]:
        """The job's backups, newest first; [] when the job has none.

        Raises:
            TierUnreadableError: the root is not there, or it could not be listed or read.
        """
        folder = f"{self._path}/{job}"
        names = self._list(folder)
        if names is None:
            self._check_root()
            return []
        dated = sorted((n for n in names if files.BACKUP_FOLDER.fullmatch(n)), reverse=True)
        return [self._backup(job, name) for name in dated]

    def place(self, job: str, backup: Backup, digest: str) -> Place:
        """Where one share of a backup lies."""
        path = f"{self._path}/{job}/{backup.name}/{files.data_name(digest)}"
        protocols = _protocols(self._filesystem)
        if "file" in protocols or "local" in protocols:
            return LocalPlace(Path(path), tier="backup")
        if "gs" in protocols or "gcs" in protocols:
            return _BucketPlace(self, path)
        return LocalPlace(self._copy(path), tier="backup")

    def read(self, path: str) -> bytes | None:
        """A whole file below this root; None when it is not there."""
        try:
            return bytes(self._filesystem.cat_file(path))
        except FileNotFoundError:
            return None
        except Exception as error:  # each file system raises its own
            raise self._unreadable(path, error) from error

    def _open(self) -> tuple[Any, str]:
        # gcsfs hides what others wrote behind its cache, and waits for ever without a limit.
        options = (
            {"use_listings_cache": False, "requests_timeout": self._timeout_secs}
            if urllib.parse.urlsplit(self.url).scheme in ("gs", "gcs")
            else {}
        )
        try:
            filesystem, path = fsspec.core.url_to_fs(self.url, **options)
        except Exception as error:
            raise self._unreadable(self.url, error) from error
        return filesystem, str(path).rstrip("/")

    def _list(self, path: str) -> list[str] | None:
        try:
            entries = self._filesystem.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            raise self._unreadable(path, error) from error
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]

    def _check_root(self) -> None:
        if self._list(self._path) is None and not self._filesystem.exists(self._path):
            raise TierUnreadableError(
                f"the backup root {self.url} is not there: create it, or correct backup_root."
                " Whether there are backups cannot be told without it",
                place=self.url,
            )

    def _backup(self, job: str, name: str) -> Backup:
        folder = f"{self._path}/{job}/{name}"
        names = self._list(folder) or []
        metas: dict[int, dict[int, str]] = {}
        for entry in names:
            share = files.parse_share_name(entry, "meta")
            if share is None or share.job != job or share.worker != 0:
                continue
            content = self.read(f"{folder}/{entry}")
            if content is not None:
                digest = content.decode(errors="replace").strip()
                metas.setdefault(share.step, {})[share.node_rank] = digest
        data = {match[1] for entry in names if (match := files.DATA_NAME.fullmatch(entry))}
        return Backup(name=name, metas=metas, data=frozenset(data))

    def _copy(self, path: str) -> Path:
        if path not in self._copies:
            folder = tempfile.TemporaryDirectory(prefix="mtcheckpoint-backup-")
            try:
                self._filesystem.get(path + "/", folder.name + "/share/", recursive=True)
            except Exception as error:
                folder.cleanup()
                raise self._unreadable(path, error) from error
            self._copies[path] = folder
            weakref.finalize(self, folder.cleanup)
        return Path(self._copies[path].name) / "share"

    def _unreadable(self, path: str, error: Exception) -> TierUnreadableError:
        return TierUnreadableError(
            f"the backup at {self.url} cannot be read ({path}): {type(error).__name__}: {error}",
            place=self.url,
        )


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

    def kvstore(self, folder: str) -> dict[str, Any]:
        bucket, _, key = self.path.partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{key}/{folder}/"}


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
