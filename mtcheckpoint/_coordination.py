"""Agreement between the processes of a job, through a key-value store.

No device collective is used: one would wait behind the training steps that are queued.

A round of a topic is settled by one key, its verdict, which is inserted once and never
overwritten. Normally process 0 inserts it when it has heard everybody. A process that has waited
too long inserts a verdict that names the missing ones, if it is the first. So all processes read
the same verdict, late ones included, whatever the order in which they come and give up.
"""

from __future__ import annotations

import json
import socket
import threading
import urllib.parse
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import jax

from mtcheckpoint import errors
from mtcheckpoint._clock import Deadline
from mtcheckpoint._jax import KeyValueStore, job_store, note_missing, wait_slice
from mtcheckpoint.errors import CoordinationError, MtCheckpointError, WaitTimeoutError

__all__ = ["Coordinator", "job_coordinator"]

_T = TypeVar("_T")

# JSON of this size and above is compressed: 1 MiB takes the store 20 ms, zlib 10 ms for a fifth.
# What thousands of processes say is mostly the same, and each of them receives it.
_COMPRESS_BYTES = 4 * 1024

_LEADER = 0
_HOSTS = "hosts"


class Coordinator:
    """How the processes of a job agree. Make one on every process, with the same arguments.

    Every method must be called on all processes with the same topics, each topic equally often;
    different topics may be used from different threads at once, one topic from one thread at a
    time. Values are what JSON can carry; tuples come back as lists.

    Args:
        store: what the processes share.
        process: index of this process, from 0. Process 0 collects and decides.
        processes: number of processes.
        namespace: first part of all keys. Unique among the coordinators of a job: rounds are
            counted from the start, so a second one would read the verdicts of the first.
        timeout_secs: seconds that process 0 waits for the others, unless a call says otherwise.
        host: name of this machine, for messages; the machine's own by default.
        grace_secs: seconds that the others wait longer than process 0, so that they hear its
            verdict.

    Example:
        >>> from mtcheckpoint._jax import MemoryStore
        >>> alone = Coordinator(MemoryStore(), process=0, processes=1, namespace="example")
        >>> alone.gather("free-bytes", 1024)
        (1024,)
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        process: int,
        processes: int,
        namespace: str,
        timeout_secs: float = 300.0,
        host: str | None = None,
        grace_secs: float = 2.0,
    ) -> None:
        self.process = process
        self.processes = processes
        self.timeout_secs = timeout_secs
        self._grace_secs = grace_secs
        self._store = store
        self._namespace = namespace
        self._lock = threading.Lock()
        self._own: dict[str, Any] = {}
        self._rounds: dict[str, int] = defaultdict(int)
        self._kept_from: dict[str, int] = defaultdict(int)
        self.announce(_HOSTS, host or socket.gethostname())

    @property
    def is_leader(self) -> bool:
        """True on the process that collects and decides."""
        return self.process == _LEADER

    def gather(
        self, topic: str, value: Any, *, timeout_secs: float | None = None
    ) -> tuple[Any, ...]:
        """The values of all processes, in process order: the same tuple on all.

        Raises:
            WaitTimeoutError: a process did not come; the same error on all, naming it.
            CoordinationError: the store does not answer.
        """
        return tuple(self.decide(topic, value, list, timeout_secs=timeout_secs))

    def decide(
        self,
        topic: str,
        value: Any,
        choose: Callable[[tuple[Any, ...]], Any],
        *,
        timeout_secs: float | None = None,
    ) -> Any:
        """What `choose` makes of the values of all processes.

        `choose` runs on process 0 only; everybody gets its answer.

        Raises:
            WaitTimeoutError: a process did not come; the same error on all, naming it.
            CoordinationError: `choose` raised, on all processes but 0, where its own error comes
                out; an error of this library has the same type and text on all.
        """
        folder = self._next_round(topic)
        # Process 0 too: who gives up tells from these keys who is missing.
        self._store.set(f"{folder}/in/{self.process}", _encode(value))
        deadline = self._deadline(timeout_secs)
        if not self.is_leader:
            answer = self._await_verdict(folder, topic, deadline)
            note_missing(False)
            return answer
        values = self._collect(folder, value, deadline)
        if values is None:
            return self._give_up(folder, topic, deadline)
        note_missing(False)  # all are there
        answer = self._conclude(folder, topic, lambda: choose(values))
        # Not before the verdict, for which all are waiting.
        self._store.delete(f"{folder}/in")
        self._delete_earlier_rounds(topic)
        return answer

    def agree(
        self, topic: str, attempt: Callable[[], _T], *, timeout_secs: float | None = None
    ) -> _T:
        """Runs `attempt` here; returns its result when it succeeded on all processes.

        As `share`, with nothing told.
        """
        return self.share(topic, attempt, tell=lambda _: None, timeout_secs=timeout_secs)[0]

    def share(
        self,
        topic: str,
        attempt: Callable[[], _T],
        *,
        tell: Callable[[_T], Any],
        timeout_secs: float | None = None,
    ) -> tuple[_T, tuple[Any, ...]]:
        """Runs `attempt` here, and tells all processes of its result when all have succeeded.

        Args:
            topic: what is attempted, for the messages.
            attempt: runs on every process; its result stays on this one.
            tell: what the others are told of it; any JSON.
            timeout_secs: seconds to wait for the others after the own attempt.

        Returns:
            The own result, and what each process told, in process order.

        Raises:
            Exception: what `attempt` raised here, with a note about the others.
            CoordinationError: it failed on other processes only; names them and their messages.
            WaitTimeoutError: a process did not come; the same error on all, naming it.
        """
        try:
            result = attempt()
            told = tell(result)
        except Exception as error:
            self._report_failure(topic, error, timeout_secs)
            raise
        except BaseException as error:
            # An interrupt ends this process: tell the others, but do not wait for them.
            self._leave(topic, error)
            raise
        reports = self.gather(topic, {"told": told}, timeout_secs=timeout_secs)
        failed = _failed(reports)
        if failed:
            raise CoordinationError(
                f"{topic!r} failed: {self._fault_text(reports)}", processes=failed
            )
        return result, tuple(report["told"] for report in reports)

    def lead(
        self, topic: str, compute: Callable[[], Any], *, timeout_secs: float | None = None
    ) -> Any:
        """What `compute` returns on process 0, which does not wait for the others.

        Args:
            topic: used once in the life of the coordinator, say ``decision/<step>``. See `forget`.
            compute: runs on process 0 only.
            timeout_secs: seconds that the others wait for process 0.

        Raises:
            WaitTimeoutError: process 0 had not answered in time. It gets the same error itself
                when it comes later.
            CoordinationError: `compute` raised; as in `decide`.
        """
        folder = f"{self._namespace}/lead/{topic}"
        if self.is_leader:
            return self._conclude(folder, topic, compute)
        return self._await_verdict(folder, topic, self._deadline(timeout_secs))

    def led(self, topic: str) -> Any | None:
        """What process 0 has published under a topic of `lead`; None so far. Does not wait.

        Raises:
            CoordinationError: an error was published; as in `lead`.
        """
        verdict = self._store.get(f"{self._namespace}/lead/{topic}/verdict")
        return None if verdict is None else _answer(verdict)

    def forget(self, *topics: str) -> None:
        """Deletes what `lead` published under these topics and below them.

        Call it when all processes have read it. Does something on process 0 only.
        """
        if self.is_leader:
            for topic in topics:
                self._store.delete(f"{self._namespace}/lead/{topic}")

    def announce(self, topic: str, value: Any) -> None:
        """Sets this process' report on `topic`, over its last one. Does not wait."""
        self._own[topic] = value
        self._store.set(f"{self._namespace}/announced/{topic}/{self.process}", _encode(value))

    def own(self, topic: str) -> Any:
        """This process' last report on `topic`, None before the first; does not ask the store."""
        return self._own.get(topic)

    def announced(self, topic: str) -> dict[int, Any]:
        """The newest report of each process that has made one. Does not wait."""
        found = self._store.list(f"{self._namespace}/announced/{topic}")
        return {int(process): _decode(found[process]) for process in sorted(found, key=int)}

    def names(self, processes: Iterable[int]) -> tuple[str, ...]:
        """``process 3 (host-c)`` for each, as messages show it."""
        processes = tuple(processes)
        if not processes:
            return ()
        hosts = self.announced(_HOSTS)
        return tuple(
            f"process {process} ({hosts[process]})" if process in hosts else f"process {process}"
            for process in processes
        )

    # Rounds.

    def _next_round(self, topic: str) -> str:
        """The folder of this process' next round of `topic`."""
        with self._lock:
            self._rounds[topic] += 1
            return self._round(topic, self._rounds[topic])

    def _round(self, topic: str, number: int) -> str:
        return f"{self._namespace}/rounds/{urllib.parse.quote(topic, safe='')}/{number}"

    def _delete_earlier_rounds(self, topic: str) -> None:
        """Deletes the topic's rounds before the present one.

        Only when all have come to the present one: then each has read the verdicts before it.
        """
        with self._lock:
            present = self._rounds[topic]
            first = self._kept_from[topic]
            self._kept_from[topic] = present
        for number in range(max(first, 1), present):
            self._store.delete(self._round(topic, number))

    def _deadline(self, timeout_secs: float | None) -> Deadline:
        seconds = self.timeout_secs if timeout_secs is None else timeout_secs
        return Deadline.after(seconds if self.is_leader else seconds + self._grace_secs)

    def _collect(self, folder: str, own: Any, deadline: Deadline) -> tuple[Any, ...] | None:
        """The values of all processes; None when one is missing or the round has a verdict."""
        found = [_encode(own)]  # as the others would read it
        for process in range(1, self.processes):
            key = f"{folder}/in/{process}"
            while (value := wait_slice(self._store, key, deadline)) is None:
                if deadline.passed() or self._store.get(f"{folder}/verdict") is not None:
                    return None
            found.append(value)
        return tuple(_decode(value) for value in found)

    def _await_verdict(self, folder: str, topic: str, deadline: Deadline) -> Any:
        while (verdict := wait_slice(self._store, f"{folder}/verdict", deadline)) is None:
            if deadline.passed():
                return self._give_up(folder, topic, deadline)
        return _answer(verdict)

    def _give_up(self, folder: str, topic: str, deadline: Deadline) -> Any:
        present = {int(process) for process in self._store.list(f"{folder}/in")}
        missing = [process for process in range(self.processes) if process not in present]
        if not present or not missing:
            # Nobody reports to a `lead`; or all have reported, and no answer came.
            missing = [_LEADER]
        error = WaitTimeoutError(
            f"all processes at {topic!r}",
            seconds=deadline.seconds,
            missing=self.names(missing),
            hint="Look at their logs: a process that is gone must be restarted with the whole job",
        )
        return self._settle(folder, _encode({"error": _described(error, topic)}))

    def _conclude(self, folder: str, topic: str, compute: Callable[[], Any]) -> Any:
        """Process 0: computes the answer and publishes it."""
        try:
            verdict = _encode({"value": compute()})
        except BaseException as error:
            self._store.set_once(f"{folder}/verdict", _encode({"error": _described(error, topic)}))
            raise
        return self._settle(folder, verdict)

    def _settle(self, folder: str, verdict: bytes) -> Any:
        """Inserts `verdict` unless the round has one, and answers with the one that counts."""
        key = f"{folder}/verdict"
        while not self._store.set_once(key, verdict):
            settled = self._store.get(key)
            if settled is not None:
                return _answer(settled)
        return _answer(verdict)

    # Failures of an attempt.

    def _report_failure(self, topic: str, error: Exception, timeout_secs: float | None) -> None:
        try:
            faults = self.gather(topic, _one_line(error), timeout_secs=timeout_secs)
        except MtCheckpointError as unheard:
            error.add_note(f"{topic!r} failed here; the other processes could not agree: {unheard}")
        else:
            error.add_note(f"{topic!r} failed: {self._fault_text(faults)}")

    def _leave(self, topic: str, error: BaseException) -> None:
        folder = self._next_round(topic)
        self._store.set(f"{folder}/in/{self.process}", _encode(_one_line(error)))
        if self.is_leader:
            self._store.set_once(f"{folder}/verdict", _encode({"error": _described(error, topic)}))

    def _fault_text(self, faults: Sequence[Any]) -> str:
        failed = _failed(faults)
        names = self.names(failed)
        return "; ".join(
            f"{name}: {faults[process]}" for name, process in zip(names, failed, strict=True)
        )


def job_coordinator(namespace: str, *, timeout_secs: float = 300.0) -> Coordinator:
    """A coordinator for the processes of this job, numbered as ``jax.process_index()`` does.

    Call on every process, equally often and in the same order for one namespace.

    Args:
        namespace: whose agreement it is, say ``manager``.
        timeout_secs: seconds that process 0 waits for the others, unless a call says otherwise.

    Raises:
        CoordinationError: several processes, but no ``jax.distributed``.
    """
    with _made_lock:
        _made[namespace] += 1
        number = _made[namespace]
    return Coordinator(
        job_store(),
        process=jax.process_index(),
        processes=jax.process_count(),
        namespace=f"mtcheckpoint/{namespace}/{number}",
        timeout_secs=timeout_secs,
    )


_made: Counter[str] = Counter()
_made_lock = threading.Lock()


def _failed(reports: Sequence[str | dict[str, Any]]) -> list[int]:
    """A process that failed reports a text."""
    return [process for process, report in enumerate(reports) if isinstance(report, str)]


# What goes over the wire.


def _encode(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    if len(text) < _COMPRESS_BYTES:
        return b"j" + text
    return b"z" + zlib.compress(text, level=1)


def _decode(value: bytes) -> Any:
    text = zlib.decompress(value[1:]) if value[:1] == b"z" else value[1:]
    return json.loads(text)


def _answer(verdict: bytes) -> Any:
    """The value of a verdict; raises the error that it carries."""
    found = _decode(verdict)
    if "error" in found:
        error = _rebuilt(**found["error"])
        if isinstance(error, WaitTimeoutError):
            note_missing(True)
        raise error
    return found["value"]


def _described(error: BaseException, topic: str) -> dict[str, Any]:
    """An error as JSON: one of ours with its type and attributes, any other as text."""
    if isinstance(error, MtCheckpointError) and type(error).__name__ in errors.__all__:
        plain = {name: value for name, value in vars(error).items() if name[:2] != "__"}
        attributes = json.loads(json.dumps(plain, default=str))
        return {"kind": type(error).__name__, "message": str(error), "attributes": attributes}
    message = f"process {_LEADER} failed at {topic!r}: {_one_line(error)}"
    return {
        "kind": CoordinationError.__name__,
        "message": message,
        "attributes": {"processes": [_LEADER]},
    }


def _rebuilt(kind: str, message: str, attributes: dict[str, Any]) -> MtCheckpointError:
    cls = cast(type[MtCheckpointError], getattr(errors, kind))
    # Not through __init__, which makes the message from parts that are gone. Python wants to see
    # the builtin whose memory layout the class has.
    builtin: type[Exception] = OSError if issubclass(cls, OSError) else Exception
    error = builtin.__new__(cls, message)
    error.args = (message,)
    for name, value in attributes.items():
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    return error


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
