"""What happens to the entries of a folder, as the kernel tells it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import select
import struct
from pathlib import Path

MODIFY, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x40, 0x80, 0x100, 0x200

_HEADER = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    name: str
    mask: int


class Watch:
    """Reports changes of the entries directly in `folder`, in the order in which they happened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = MOVED_FROM | MOVED_TO | CREATE | DELETE
        if self._fd < 0 or _libc.inotify_add_watch(self._fd, os.fsencode(folder), mask) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def changes(self, timeout_secs: float = 0.0) -> list[Change]:
        """What has happened since the last call; waits for the first change."""
        if not select.select([self._fd], [], [], timeout_secs)[0]:
            return []
        data = os.read(self._fd, 1 << 20)
        found, position = [], 0
        while position < len(data):
            _, mask, _, length = _HEADER.unpack_from(data, position)
            position += _HEADER.size
            name = data[position : position + length].rstrip(b"\0").decode()
            position += length
            found.append(Change(name=name, mask=mask))
        return found
