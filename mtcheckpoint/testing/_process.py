"""One process of a group, as the parent sees it: its files, its signals, its end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtcheckpoint.errors import MtCheckpointError
from mtcheckpoint.testing._starting import start

__all__ = ["Event", "Process", "ProcessFailedError"]

_SHOWN_LINES = 40
_SECONDS_TO_DIE = 60.0


class ProcessFailedError(MtCheckpointError, RuntimeError):
    """A process of a group raised, or ended without a result.

    Attributes:
        rank: its place in the group.
        output: the end of what it wrote to stdout and stderr.
    """

    def __init__(self, message: str, *, rank: int, output: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.output = output


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One call of `mtcheckpoint.testing.report`. ``event["step"]`` is the field of that name."""

    name: str
    rank: int
    fields: dict[str, Any]

    def __getitem__(self, field: str) -> Any:
        return self.fields[field]


class Process:
    """A child that runs ``_child.py``.

    Args:
        rank: its place in the group.
        orders: what the child reads; completed here by the place of the result.
        folder: where its files are; shared with the other processes of the group.
        events: the file that its reports go to.
        environment: its environment variables.
        python: the interpreter.
    """

    def __init__(
        self,
        rank: int,
        *,
        orders: Mapping[str, Any],
        folder: Path,
        events: Path,
        environment: Mapping[str, str],
        python: str = sys.executable,
    ) -> None:
        self.rank = rank
        self.killed = False
        self._events_path = events
        self._output_path = folder / f"output-{rank}"
        self._result_path = folder / f"result-{rank}"
        self._events: list[Event] = []
        self._read_bytes = 0
        orders_path = folder / f"orders-{rank}"
        orders_path.write_text(json.dumps({**orders, "result": str(self._result_path)}))
        with open(self._output_path, "wb") as output:
            self._running = start(rank, orders_path, output, environment, python)

    @property
    def pid(self) -> int:
        return self._running.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._running.poll()

    def outcome(self) -> dict[str, Any]:
        """The ``value`` or ``error`` that it ended its work with; empty while there is none."""
        try:
            found: dict[str, Any] = json.loads(self._result_path.read_text())
        except FileNotFoundError:
            return {}
        return found

    def finished(self) -> bool:
        """True when nothing more is to be expected of it."""
        return self.killed or bool(self.outcome())

    def events(self) -> list[Event]:
        """Everything that it has reported so far."""
        for line in self._new_lines():
            parsed = json.loads(line)
            self._events.append(Event(parsed["name"], self.rank, parsed["fields"]))
        return list(self._events)

    def output(self) -> str:
        """What it has written to stdout and stderr so far."""
        return self._output_path.read_text(encoding="utf-8", errors="replace")

    def output_tail(self) -> str:
        return "\n".join(self.output().splitlines()[-_SHOWN_LINES:])

    def fault(self) -> str | None:
        """What went wrong, as a sentence; None when nothing did, or when it was killed."""
        # In this order: a child writes its outcome before it ends.
        code, outcome = self.poll(), self.outcome()
        if self.killed:
            return None
        if "error" in outcome:
            return f"process {self.rank} raised {outcome['summary']}\n\n{outcome['error']}"
        if code is not None and not outcome:
            return f"process {self.rank} ended with {_ending(code)} and without a result"
        if code:
            return f"process {self.rank} returned a result, but then ended with {_ending(code)}"
        return None

    def signal(self, number: int) -> None:
        """Sends a signal to it and its children; does nothing when it has ended."""
        if self.poll() is None:
            os.killpg(self.pid, number)

    def dump_stacks(self) -> None:
        """Makes it write the stacks of its threads to its output."""
        if self.poll() is None:
            # To it alone: its children may not know this signal, and would end.
            os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kills it and its children; returns when it is gone."""
        self.signal(signal.SIGKILL)
        self._running.wait(_SECONDS_TO_DIE)
        self._close_stdin()

    def let_go(self) -> None:
        """Lets it leave the interpreter, once it has finished."""
        stdin = self._running.stdin
        if stdin is not None and not stdin.closed:
            try:
                stdin.write(b"leave\n")
                stdin.flush()
            except BrokenPipeError:
                pass  # It has ended already; its exit code says how.
        self._close_stdin()

    def _close_stdin(self) -> None:
        try:
            if self._running.stdin is not None:
                self._running.stdin.close()
        except BrokenPipeError:
            pass  # Closing flushes what a dead child did not read.

    def _new_lines(self) -> list[bytes]:
        """The whole lines of its events that were added since the last look."""
        try:
            with open(self._events_path, "rb") as events:
                events.seek(self._read_bytes)
                # The last line may still be under way.
                whole, newline, _ = events.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read_bytes += len(whole) + len(newline)
        return whole.splitlines()


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
