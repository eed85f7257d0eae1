"""Reads a part of a file from a peer, straight into the buffers that it is for."""

from __future__ import annotations

import http.client
import socket
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mtcheckpoint._clock import Deadline
from mtcheckpoint._shares.places import PeerPlace

__all__ = ["PeerStream"]

_ATTEMPTS = 5
_FIRST_PAUSE_SECONDS = 0.05


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
        if self._connection is not None:
            self._connection.close()
        self._connection = self._answer = self._socket = None

    def _receive(self, view: memoryview) -> int:
        """Some of the next bytes."""
        try:
            answer = self._answer or self._ask()
            # Wait by wait: a peer that sends a byte now and then must not outlast the deadline,
            # and `readinto` would go on until all is there.
            assert self._socket is not None
            self._socket.settimeout(self._limit_seconds())
            count = answer.readinto1(view)
        except (http.client.HTTPException, ConnectionError) as error:
            self._pause(error)
            return 0
        if count == 0:
            self._pause(EOFError("the peer sent less than it has to"))
        return count

    def _ask(self) -> http.client.HTTPResponse:
        self._connection = http.client.HTTPConnection(self._address, timeout=self._limit_seconds())
        wanted = f"bytes={self._offset}-{self._end - 1}"
        headers = {"Authorization": f"Bearer {self._place.token}", "Range": wanted}
        self._connection.request("GET", self._path, headers=headers)
        self._socket = self._connection.sock
        answer = self._connection.getresponse()
        if answer.status >= 500 or answer.status == 429:
            raise http.client.HTTPException(f"the peer answered {answer.status}")
        if answer.status != 206 or answer.length != self._end - self._offset:
            raise OSError(f"the peer answered {answer.status} with {answer.length} bytes")
        self._answer = answer
        return answer

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
