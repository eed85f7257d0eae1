"""Ctrl-C at any moment, and nothing left behind."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Lets Ctrl-C, SIGTERM and a closed terminal end a ``with`` block once, as an exception.

    Whatever comes after the first one is ignored, so that the clean-up is not interrupted. To be
    used on the main thread.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._is_held_back = False
        self._pending: int | None = None

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """What is made in here is made whole: an interrupt is raised at the end of the block."""
        self._is_held_back = True
        try:
            yield
        finally:
            self._is_held_back = False
        if self._pending is not None:
            self._raise(self._pending)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        if self._is_held_back:
            self._pending = number
        else:
            self._raise(number)

    def _raise(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)
