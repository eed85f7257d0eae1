"""Reads a part of a file from a peer, straight into the buffers that it is for."""

from __future__ import annotations

import contextlib
import http.client
import io
import math
import socket
import struct
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mtcheckpoint._clock import Deadline
from mtcheckpoint._shares.places import PeerPlace

__all__ = ["PeerStream"]

_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 0.05
# So much can have come before it is read: fewer waits, which cost more than the copy.
_ROOM_BYTES = 4 << 20


class PeerStream:
    """Bytes of a peer's file, one behind the other. Where a connection ends, another goes on."""

    def __init__(
        self, place: PeerPlace, file: str, *, offset: int, length: int, deadline: Deadline
    ) -> None:
        """Asks for nothing yet.

        Args:
            place: the share.
            file: relative to it.
            offset: of the first byte.
            length: in bytes.
            deadline: for all of it; the place has a limit for each wait.
        """
        url = urllib.parse.urlsplit(place.url)
        self._address = url.netloc
        self._path = f"{url.path}/{urllib.parse.quote(file)}"
        self._place = place
        self._offset, self._end = offset, offset + length
        self._deadline = deadline
        self._connection: http.client.HTTPConnection | None = None
        self._answer: http.client.HTTPResponse | None = None
        self._socket: socket.socket | None = None
        self._begun = b""  # what has come together with the headers
        self._pauses = self._new_pauses()

    def fill(self, blocks: Sequence[np.ndarray[Any, Any]]) -> None:
        """Fills flat buffers of bytes, one after the other, with the next ones.

        Raises:
            OSError, TimeoutError: the peer does not send them.
        """
        for block in blocks:
            view = block.data
            while view.nbytes:
                count = self._receive(view)
                view = view[count:]
                self._offset += count

    def close(self) -> None:
        """Closes the connection."""
        for opened in (self._answer, self._connection):
            if opened is not None:
                opened.close()
        self._connection = self._answer = self._socket = None
        self._begun = b""

    def _receive(self, view: memoryview) -> int:
        """Some of the next bytes."""
        try:
            if self._answer is None:
                self._ask()
            return self._take_begun(view) or self._take(view)
        except (http.client.HTTPException, ConnectionError) as error:
            self._pause(error)
            return 0

    def _take_begun(self, view: memoryview) -> int:
        part = self._begun[: view.nbytes]
        view[: len(part)] = part
        self._begun = self._begun[len(part) :]
        return len(part)

    def _take(self, view: memoryview) -> int:
        """All of it in one call of the kernel, or what comes within the limit."""
        assert self._socket is not None
        _limit_waits(self._socket, self._limit_seconds())
        try:
            count = self._socket.recv_into(view, flags=socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("timed out: nothing has come from the peer") from None
        return _some(count)

    def _ask(self) -> None:
        limit_seconds = self._limit_seconds()
        self._connection = http.client.HTTPConnection(self._address, timeout=limit_seconds)
        self._connection.connect()
        self._socket = self._connection.sock
        _make_room(self._socket)
        wanted = f"bytes={self._offset}-{self._end - 1}"
        headers = {"Authorization": f"Bearer {self._place.token}", "Range": wanted}
        self._connection.request("GET", self._path, headers=headers)
        answer = self._connection.getresponse()
        if answer.status >= 500 or answer.status == 429:
            raise http.client.HTTPException(f"the peer answered {answer.status}")
        if answer.status != 206 or answer.length != self._end - self._offset:
            raise OSError(f"the peer answered {answer.status} with {answer.length} bytes")
        # As much as the buffer can hold empties it: the rest is read past it.
        self._begun = answer.read1(io.DEFAULT_BUFFER_SIZE)
        _some(len(self._begun))
        self._answer = answer

    def _limit_seconds(self) -> float:
        """For the next wait."""
        if self._deadline.passed():
            raise TimeoutError("the deadline passed before the peer had sent everything")
        return min(self._place.timeout_secs, self._deadline.remaining())

    def _pause(self, error: Exception) -> None:
        """Waits before the next attempt; raises the error when there is none left."""
        self.close()
        seconds = next(self._pauses, None)
        if seconds is None or self._deadline.passed():
            raise OSError(f"{type(error).__name__}: {error}") from error
        self._deadline.clock.sleep(min(seconds, max(self._deadline.remaining(), 0.0)))

    @staticmethod
    def _new_pauses() -> Iterator[float]:
        return (_FIRST_PAUSE_SECONDS * 2**attempt for attempt in range(_ATTEMPTS - 1))


def _some(count: int) -> int:
    if count == 0:
        raise ConnectionError("the peer sent less than it has to")
    return count


def _make_room(connected: socket.socket) -> None:
    """Lets the kernel take in more from the start.

    Linux grows the buffer to what a reader says it waits for. `SO_RCVBUF` would end the kernel's
    own growing of it, and be cut to a fraction of that where nobody has raised its limit.
    """
    with contextlib.suppress(OSError):  # it is only faster
        for count in (_ROOM_BYTES, 1):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


def _limit_waits(connected: socket.socket, seconds: float) -> None:
    """Lets the kernel wait in one call, for all of it at most so long.

    A limit of Python's own would be one for each piece that comes, and wake a thread for each.
    """
    connected.settimeout(None)
    fraction, whole = math.modf(max(seconds, 0.001))
    limit = struct.pack("@ll", int(whole), int(fraction * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
