"""Asks for the small files of a share that is far away all at once, before they are looked at.

One after the other each would take its way there and back: a tenth of a second from a bucket.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from mtcheckpoint._clock import Deadline, begun
from mtcheckpoint._shares.places import Place, Tier
from mtcheckpoint.errors import TierUnreadableError

__all__ = ["ReadAhead"]

_T = TypeVar("_T")


class ReadAhead:
    """A place, some of whose files are on their way."""

    def __init__(self, place: Place, deadline: Deadline) -> None:
        """
        Args:
            place: the share.
            deadline: for all that is asked for.
        """
        self._place = place
        self._deadline = deadline
        self._coming: dict[str, concurrent.futures.Future[bytes | None]] = {}

    def ask_for(self, files: Iterable[str]) -> None:
        """Asks for small files that will be wanted."""
        self._coming |= {file: begun(functools.partial(self._place.read, file)) for file in files}

    @property
    def tier(self) -> Tier:
        return self._place.tier

    @property
    def name(self) -> str:
        return self._place.name

    def read(self, file: str) -> bytes | None:
        coming = self._coming.get(file)
        return self._place.read(file) if coming is None else self._await(coming)

    def size(self, file: str) -> int | None:
        return self._place.size(file)

    def kvstore(self, folder: str) -> dict[str, Any]:
        return self._place.kvstore(folder)

    def begin(self, operation: Callable[[], _T]) -> Callable[[], _T]:
        """Begins something else that takes a way there and back; returns what waits for it."""
        coming = begun(operation)
        return lambda: self._await(coming)

    def _await(self, coming: concurrent.futures.Future[_T]) -> _T:
        try:
            return coming.result(timeout=self._deadline.remaining())
        except TimeoutError as error:
            raise TierUnreadableError(
                f"{self.name} cannot be read: no answer in {self._deadline.seconds:.0f} s",
                place=self.name,
            ) from error
