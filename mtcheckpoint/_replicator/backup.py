"""Backups of all jobs under one URL: ``<root>/<job>/<YYYY-MM-DD_HH-MM>/``, flat.

A backup has no marker of its own. It is valid when every rank's ``.meta`` is there and every hash
these name, so a ``.meta`` must be the last thing to appear.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec.config
import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from mtcheckpoint._clock import Clock, Deadline, wait_for
from mtcheckpoint._handshake import files
from mtcheckpoint._replicator.choice import Holdings, MetaEntry
from mtcheckpoint._replicator.volume import MOST_DIGEST_BYTES

__all__ = ["BackupStore", "retried"]

_PARALLEL_FILES = 4
_ATTEMPTS = 5
_FIRST_BACKOFF_SECONDS = 0.25
# Of one request, which carries at most 50 MB.
_REQUEST_SECONDS = 120.0

_T = TypeVar("_T")


def retried(operation: Callable[[], _T], clock: Clock, check: Callable[[], None]) -> _T:
    """Calls `operation`, again after errors that may pass, with growing jittered pauses.

    `check` is called meanwhile; what it raises ends the retries. A missing file and a refused
    permission do not pass by themselves and are raised at once.

    Raises:
        OSError: the fifth attempt failed too.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        check()
        try:
            return operation()
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:
            # Clients raise their own kinds too, such as gcsfs for a 401.
            if attempt == _ATTEMPTS:
                raise OSError(f"{type(error).__name__}: {error}") from error
        seconds = _FIRST_BACKOFF_SECONDS * 2**attempt * random.uniform(0.5, 1.0)
        _pause(seconds, clock, check)
    raise AssertionError("unreachable")


def _pause(seconds: float, clock: Clock, check: Callable[[], None]) -> None:
    pause = Deadline.after(seconds, clock)

    def look() -> bool | None:
        check()
        return True if pause.passed() else None

    wait_for(look, Deadline.after(2 * seconds + 1, clock), "the next attempt")


class BackupStore:
    """The bucket, or a local folder that stands for it.

    Args:
        url: any fsspec URL or a local path.
        clock: for the pauses between attempts.
    """

    def __init__(self, url: str, clock: Clock) -> None:
        self._fs, root = fsspec.core.url_to_fs(url, **_options(url))
        self._root = root.rstrip("/")
        self._renames = isinstance(self._fs, LocalFileSystem)
        self._clock = clock
        self.url = url

    def folders(self, job: str) -> list[str]:
        """Names of the job's backups, newest first; none when the job has no folder.

        Raises:
            OSError: the place cannot be read, so nobody knows.
        """
        names = (name for name, size_bytes in self._list(job) if size_bytes is None)
        return sorted(filter(files.BACKUP_FOLDER.fullmatch, names), reverse=True)

    def holdings(self, job: str, folder: str) -> Holdings:
        """What backup `folder` of `job` holds, complete or not."""
        metas, digests = [], set()
        for name, size_bytes in self._list(job, folder):
            if match := files.DATA_NAME.fullmatch(name):
                digests.add(match[1])
            share = files.parse_share_name(name, "meta")
            if share is not None and share.job == job and share.worker == 0:
                # What is too large for a hash is none, and is not read.
                fits = size_bytes is not None and size_bytes <= MOST_DIGEST_BYTES
                digest = self._read(job, folder, name).strip() if fits else ""
                metas.append(MetaEntry(step=share.step, node_rank=share.node_rank, digest=digest))
        return Holdings(metas=tuple(metas), digests=frozenset(digests))

    def forced_folder(self, job: str) -> str | None:
        """The backup that ``restore.version`` names, None without that file."""
        sizes = dict(self._list(job))
        size_bytes = sizes.get(files.FORCED_RESTORE_FILE)
        if size_bytes is None:
            return None
        if size_bytes > MOST_DIGEST_BYTES:
            raise OSError(f"{size_bytes:,} bytes are no name of a backup")
        return self._read(job, files.FORCED_RESTORE_FILE).strip()

    def remove_forced(self, job: str) -> bool:
        """Deletes ``restore.version``; True if there was one."""
        path = self._path(job, files.FORCED_RESTORE_FILE)
        if not self._fs.exists(path):
            return False
        self._fs.rm_file(path)
        return True

    def upload_data(
        self, job: str, folder: str, data: Path, rank: int, check: Callable[[], None]
    ) -> None:
        """Brings a ``<hash>.data`` into the backup; on a local disk by rename at the end.

        Args:
            rank: the uploading node: two may hold equal data.
            check: called before each file; what it raises ends the upload.
        """
        target = self._path(job, folder, data.name)
        if not self._renames:
            self._upload_tree(data, target, check)
        elif not os.path.exists(target):
            staging = f"{target}.n{rank}.tmp"
            self._upload_tree(data, staging, check)
            self._move_into_place(staging, target)

    def upload_meta(
        self, job: str, folder: str, share: files.ShareName, digest: str, check: Callable[[], None]
    ) -> None:
        """Writes the ``.meta`` that makes the share's backup valid."""
        target = self._path(job, folder, share.meta)
        content = digest.encode()
        if not self._renames:
            retried(lambda: self._fs.pipe_file(target, content), self._clock, check)
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(f"{target}.tmp").write_bytes(content)
        os.replace(f"{target}.tmp", target)

    def download_data(
        self, job: str, folder: str, digest: str, target: Path, check: Callable[[], None]
    ) -> None:
        """Copies ``<hash>.data`` of a backup to the local path `target`.

        Raises:
            FileNotFoundError: the backup does not hold it.
        """
        source = self._path(job, folder, files.data_name(digest))
        paths = self._fs.find(source)
        if not paths:
            raise FileNotFoundError(f"{source} is not there")

        def download(path: str) -> None:
            local = target / os.path.relpath(path, source) if path != source else target
            local.parent.mkdir(parents=True, exist_ok=True)
            retried(lambda: self._fs.get_file(path, str(local)), self._clock, check)

        _in_parallel(download, paths)

    def _upload_tree(self, source: Path, target: str, check: Callable[[], None]) -> None:
        def upload(path: Path) -> None:
            relative = path.relative_to(source).as_posix()
            remote = target if relative == "." else f"{target}/{relative}"
            if self._renames:
                os.makedirs(os.path.dirname(remote), exist_ok=True)
            retried(lambda: self._fs.put_file(str(path), remote), self._clock, check)

        _in_parallel(upload, list(_files_below(source)))

    def _move_into_place(self, staging: str, target: str) -> None:
        try:
            os.rename(staging, target)
        except OSError:
            # Another node brought equal data in this moment.
            if not os.path.exists(target):
                raise
            self._fs.rm(staging, recursive=True)

    def _list(self, *parts: str) -> list[tuple[str, int | None]]:
        """Names in a folder with their sizes in bytes; None for a folder's."""
        path = self._path(*parts)
        try:
            entries = self._retried(lambda: self._fs.ls(path, detail=True, refresh=True))
        except FileNotFoundError:
            return []
        return [
            (
                os.path.basename(str(entry["name"]).rstrip("/")),
                None if entry["type"] == "directory" else int(entry["size"] or 0),
            )
            for entry in entries
        ]

    def _read(self, *parts: str) -> str:
        data: bytes = self._retried(lambda: self._fs.cat_file(self._path(*parts)))
        return data.decode("utf-8", errors="replace")

    def _retried(self, operation: Callable[[], Any]) -> Any:
        return retried(operation, self._clock, lambda: None)

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))


def _options(url: str) -> dict[str, Any]:
    # Listings of others' writes must not come from a cache.
    options: dict[str, Any] = {"use_listings_cache": False}
    if url.startswith(("gs://", "gcs://")):
        # gcsfs compares no checksums and sets no limit by itself.
        ours = {"consistency": "md5", "requests_timeout": _REQUEST_SECONDS}
        options |= {**ours, **fsspec.config.conf.get("gcs", {})}
    return options


def _files_below(source: Path) -> Iterator[Path]:
    if source.is_file():
        yield source
    for folder, _, names in os.walk(source):
        yield from (Path(folder, name) for name in names)


def _in_parallel(action: Callable[[Any], None], items: list[Any]) -> None:
    with ThreadPoolExecutor(max_workers=_PARALLEL_FILES) as pool:
        for _ in pool.map(action, items):
            pass
