"""The one door to what JAX keeps private: the distributed client and its key-value store.

JAX's errors end here: a wait that ran out is None, everything else a `CoordinationError`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import jax
from jax._src import distributed

from mtcheckpoint._clock import Deadline, run_within, wait_for
from mtcheckpoint.errors import CoordinationError, WaitTimeoutError

__all__ = [
    "DistributedStore",
    "KeyValueStore",
    "MemoryStore",
    "coordinator_address",
    "distributed_client",
    "job_store",
    "key_implementation",
    "node_ranks_by_process",
    "note_missing",
    "process_id",
    "wait_for_key",
    "wait_slice",
]

# A blocking get holds the thread inside C++, where no signal is handled. So long waits are cut into
# pieces of this length, and Ctrl-C is answered in between.
_WAIT_SLICE_SECONDS = 1.0

# A call that does not wait takes a millisecond. When the process with the store is frozen it would
# take until JAX gives up its heartbeats and aborts this process, after 100 s.
_ANSWER_SECONDS = 15.0
# The same once something is missing.
_SECOND_ANSWER_SECONDS = 3.0

# How long a process waits at its end for those that were missing: they may only have been late.
_LEAVE_SECONDS = 5.0

_T = TypeVar("_T")


class KeyValueStore(Protocol):
    """What all processes of a job can write and read. Keys are paths: ``a/b/c``.

    Every call raises `CoordinationError` when the store does not answer. Thread-safe.
    """

    def set(self, key: str, value: bytes) -> None:
        """Writes `key`, over whatever it held."""

    def set_once(self, key: str, value: bytes) -> bool:
        """Writes `key` unless it is there already; True when this call wrote it. Atomic."""

    def get(self, key: str) -> bytes | None:
        """The value of `key`, or None. Does not wait."""

    def wait(self, key: str, timeout_secs: float) -> bytes | None:
        """The value of `key` as soon as it is there; None after `timeout_secs` seconds without."""

    def list(self, directory: str) -> dict[str, bytes]:
        """The keys below `directory`, named from there, with their values. Does not wait."""

    def delete(self, key: str) -> None:
        """Removes `key` and all keys below it; no error when there are none."""


def distributed_client() -> Any | None:
    """JAX's distributed client; None when ``jax.distributed`` is not initialised."""
    return distributed.global_state.client


def process_id() -> int:
    """The id that ``jax.distributed`` was initialised with; 0 without it.

    It need not be ``jax.process_index()``: some backends number the processes by the devices.
    """
    if distributed_client() is None:
        return 0
    return cast(int, distributed.global_state.process_id)


def coordinator_address() -> str:
    """``host:port`` of the job's coordinator; a port of this machine without one."""
    return distributed.global_state.coordinator_address or "127.0.0.1:1"


def key_implementation(dtype: Any) -> str:
    """The name of the generator that typed PRNG keys of this dtype belong to."""
    return str(dtype._impl.name)


def note_missing(missing: bool) -> None:
    """Notes whether a process did not come to the last agreement.

    Then this one does not wait long for it when it ends. JAX would: its shutdown is a barrier of
    all processes, which holds the end up for 100 s, until the heartbeats of the missing one are
    given up, and then aborts the process.
    """
    global _missing
    _missing = missing


_missing = False


@atexit.register  # after JAX's own, so that it runs before
def _leave_without_the_missing() -> None:
    state = distributed.global_state
    if not _missing or state.client is None:
        return
    orderly = threading.Thread(target=state.shutdown, daemon=True)
    orderly.start()
    orderly.join(_LEAVE_SECONDS)
    if orderly.is_alive():
        for part in ("preemption_sync_manager", "client", "service"):
            # Kept for ever: the end of these objects is the same barrier.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(state, part)))
            setattr(state, part, None)
        _keep_late_threads_from_aborting()


def _keep_late_threads_from_aborting() -> None:
    """Lets the thread that is left behind sleep for ever when it comes back while Python ends.

    Before Python 3.14 such a thread is unwound, through frames of C++ that do not allow it: then
    the process aborts, instead of ending with its own exit code.
    """
    try:
        sleep = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        return  # another C++ library
    set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
    set_terminate(sleep)


def job_store() -> KeyValueStore:
    """The store that the processes of this job share.

    Raises:
        CoordinationError: there are several processes, but no ``jax.distributed``.
    """
    client = distributed_client()
    if client is not None:
        return DistributedStore(client)
    if jax.process_count() > 1:
        raise CoordinationError(
            f"this job has {jax.process_count()} processes, but jax.distributed is not initialised,"
            " so they cannot agree on anything. Call mtcheckpoint.initialize(config) or"
            " jax.distributed.initialize() first, on every process"
        )
    return _local_store()


def node_ranks_by_process(timeout_secs: float) -> tuple[int, ...]:
    """The distributed ids of all processes, in the order of ``jax.process_index()``.

    Call on every process. The ids are the node ranks that the replicator knows.

    Args:
        timeout_secs: seconds to wait for the other processes.

    Raises:
        WaitTimeoutError: a process did not report its id in time.
        CoordinationError: the store does not answer.
    """
    store = job_store()
    folder = "mtcheckpoint/node_ranks"
    store.set(f"{folder}/{jax.process_index()}", str(process_id()).encode())
    deadline = Deadline.after(timeout_secs)
    found = [
        wait_for_key(
            store,
            f"{folder}/{index}",
            deadline,
            "the distributed ids of all processes",
            missing=f"process {index}",
        )
        for index in range(jax.process_count())
    ]
    return tuple(int(value) for value in found)


def wait_for_key(
    store: KeyValueStore, key: str, deadline: Deadline, what: str, *, missing: str
) -> bytes:
    """Waits for `key`.

    Raises:
        WaitTimeoutError: it was not there when the deadline had passed; names `missing`.
    """
    try:
        return wait_for(
            lambda: wait_slice(store, key, deadline),
            deadline,
            what,
            missing=lambda: (missing,),
            poll_seconds=0.0,
        )
    except WaitTimeoutError:
        note_missing(True)
        raise


def wait_slice(store: KeyValueStore, key: str, deadline: Deadline) -> bytes | None:
    """Waits a moment for `key`, at most until the deadline; None when it is not there yet."""
    seconds = min(_WAIT_SLICE_SECONDS, deadline.remaining())
    return store.wait(key, seconds) if seconds > 0 else store.get(key)


class DistributedStore:
    """The key-value store of ``jax.distributed``, which lives in the process with id 0.

    One call takes about 0.2 ms, a value of 1 MiB about 20 ms; 100 MiB were seen to pass. When that
    process ends, JAX aborts the others, often before a call here has failed.

    Args:
        client: JAX's distributed client.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: bytes) -> None:
        _call(lambda: self._client.key_value_set_bytes(key, value, True))

    def set_once(self, key: str, value: bytes) -> bool:
        def insert() -> bool:
            self._client.key_value_set_bytes(key, value, False)
            return True

        return _call(insert, "ALREADY_EXISTS") is not None

    def get(self, key: str) -> bytes | None:
        return _call(
            lambda: cast(bytes, self._client.key_value_try_get_bytes(key)),
            "NOT_FOUND",
        )

    def wait(self, key: str, timeout_secs: float) -> bytes | None:
        milliseconds = max(1, round(timeout_secs * 1000))
        return _call(
            lambda: cast(bytes, self._client.blocking_key_value_get_bytes(key, milliseconds)),
            "DEADLINE_EXCEEDED",
            knows_its_limit=True,
        )

    def list(self, directory: str) -> dict[str, bytes]:
        pairs = _call(lambda: self._client.key_value_dir_get_bytes(directory)) or []
        return {key.split(f"{directory}/", 1)[-1]: value for key, value in pairs}

    def delete(self, key: str) -> None:
        _call(lambda: self._client.key_value_delete(key))


def _call(
    operation: Callable[[], _T], none_on: str | None = None, *, knows_its_limit: bool = False
) -> _T | None:
    """Runs `operation`; None when it fails with the status `none_on`."""
    try:
        # A thread more would have to get the interpreter's lock from a busy background thread.
        direct = knows_its_limit or process_id() == 0
        return operation() if direct else _within(operation)
    except jax.errors.JaxRuntimeError as error:
        # JAX gives the status as the first word of the text, and nowhere else.
        if none_on is not None and str(error).startswith(none_on):
            return None
        raise _unanswered(_first_line(error)) from error


def _within(operation: Callable[[], _T]) -> _T:
    """Runs `operation`, which knows no limit."""
    seconds = _SECOND_ANSWER_SECONDS if _missing else _ANSWER_SECONDS
    try:
        return run_within(operation, Deadline.after(seconds), "the key-value store")
    except WaitTimeoutError:
        raise _unanswered(f"nothing for {seconds:g} s") from None


def _unanswered(reason: str) -> CoordinationError:
    note_missing(True)
    return CoordinationError(
        "the key-value store of jax.distributed, which lives in process 0, does not answer:"
        f" {reason} from {coordinator_address()}. Is process 0 still alive?",
        processes=(0,),
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class MemoryStore:
    """A store for processes that are threads of this one, or for a job of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def set_once(self, key: str, value: bytes) -> bool:
        with self._changed:
            if key in self._values:
                return False
            self._values[key] = value
            self._changed.notify_all()
            return True

    def get(self, key: str) -> bytes | None:
        with self._changed:
            return self._values.get(key)

    def wait(self, key: str, timeout_secs: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_secs)
            return self._values.get(key)

    def list(self, directory: str) -> dict[str, bytes]:
        prefix = f"{directory}/"
        with self._changed:
            return {
                key.removeprefix(prefix): value
                for key, value in self._values.items()
                if key.startswith(prefix)
            }

    def delete(self, key: str) -> None:
        with self._changed:
            doomed = [name for name in self._values if name == key or name.startswith(f"{key}/")]
            for name in doomed:
                del self._values[name]


@functools.cache
def _local_store() -> MemoryStore:
    return MemoryStore()
