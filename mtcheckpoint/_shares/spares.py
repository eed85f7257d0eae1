"""Data files of steps that are gone, so that the next share is written into their memory.

A page of a RAM disk that is there already is written to four times faster than the kernel finds and
clears a new one. So a share keeps a second name for each of its data files, in a folder of its own.
When the step is gone, whoever deleted it, that name is the last one, and the next share takes the
file. Between two saves this keeps the memory of one share that would be free otherwise: the next
save needs it anyway.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from mtcheckpoint._shares.writing import new_file

__all__ = ["Spares"]

_LOG = logging.getLogger("mtcheckpoint.saver")

# Smaller ones are not worth a name.
_LEAST_BYTES = 1 << 20


class Spares:
    """Second names of data files, in one folder. What is known of them lies on the disk."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: for nothing else, on the volume of the shares. Made when it is needed.
        """
        self._folder = folder
        self._lock = threading.Lock()
        self._refused = not hasattr(fcntl, "F_SETLEASE")  # not on Linux

    def remember(self, data_folder: Path) -> None:
        """Gives second names to the data files of a share that is written."""
        if self._refused:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with os.scandir(data_folder) as entries:
                for entry in entries:
                    if entry.stat(follow_symlinks=False).st_size >= _LEAST_BYTES:
                        os.link(entry.path, self._folder / uuid.uuid4().hex, follow_symlinks=False)
        except OSError as error:
            self._refuse(error)

    def open(self, path: Path) -> int:
        """A file at `path`, which is not there yet, opened for writing: a spare one, or a new one.

        A spare one still holds what it held.
        """
        with self._lock:
            for spare, _ in self._free():
                if (file := self._take(spare, path)) is not None:
                    return file
        return new_file(path)

    def trim(self, keep_bytes: int) -> None:
        """Lets go of free ones beyond so many bytes."""
        for spare, size in self._free():
            if size > keep_bytes:
                spare.unlink(missing_ok=True)
            else:
                keep_bytes -= size

    def free_bytes(self) -> int:
        """Memory that the next share can be written into."""
        with self._lock:
            return sum(size for spare, size in self._free() if self._can_be_taken(spare))

    def _free(self) -> Iterator[tuple[Path, int]]:
        """Files that have no other name, and how much memory they hold in bytes."""
        try:
            with os.scandir(self._folder) as entries:
                found = [Path(entry.path) for entry in entries]
        except FileNotFoundError:
            return
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                told = path.stat(follow_symlinks=False)
                if told.st_nlink == 1:
                    yield path, told.st_blocks * 512

    def _can_be_taken(self, spare: Path) -> bool:
        file = _opened(spare)
        if file is None:
            return False
        try:
            return self._is_ours_alone(file)
        finally:
            os.close(file)

    def _take(self, spare: Path, path: Path) -> int | None:
        file = _opened(spare)
        if file is None:
            return None
        try:
            if self._is_ours_alone(file):
                os.rename(spare, path)
                return file
        except OSError:  # its folder is gone, or that of the path: then a new file says so
            pass
        os.close(file)
        return None

    def _is_ours_alone(self, file: int) -> bool:
        """Whether nobody reads a file, or has mapped it: the kernel tells who wants a lease on it.

        A replicator may still send a step that it has deleted; a name is not needed for that.
        """
        try:
            # Whoever opens it meanwhile breaks the lease: the signal for that must not end us.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                self._refuse(error)
            return False
        return os.fstat(file).st_nlink == 1

    def _refuse(self, error: OSError) -> None:
        """From here on without: a volume of another kind, or too many names."""
        _LOG.info("data files are not used again on this volume: %s", error)
        self._refused = True
        shutil.rmtree(self._folder, ignore_errors=True)


def _opened(spare: Path) -> int | None:
    try:
        return os.open(spare, os.O_WRONLY | os.O_NOFOLLOW)
    except OSError:
        return None
