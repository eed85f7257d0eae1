"""Starts the processes of a group: as new interpreters, or forked off one that is warm."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from mtcheckpoint.testing._reports import PLACE_VARIABLE

__all__ = ["Running", "child_environment", "preload", "start"]

_PACKAGE_ROOT = Path(__file__).parents[2]
_CHILD = Path(__file__).with_name("_child.py")
_ZYGOTE = Path(__file__).with_name("_zygote.py")

_SECONDS_TO_IMPORT = 120.0
_SECONDS_TO_FORK = 30.0

# A zygote has its seed of hashes, and so the order of sets, from its start. What must not depend on
# that shall not get it right by being alike everywhere: neighbours come from different ones.
_ZYGOTES = 2


class Running(Protocol):
    """What `Process` needs of a process; ``subprocess.Popen`` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; ``subprocess.TimeoutExpired`` after `timeout` seconds."""


def preload(*modules: str) -> None:
    """From now on the processes of a group are forked off one that has imported these modules.

    Saves the second that importing JAX and Orbax takes, for each process. Call it once, before the
    first group, for instance in ``conftest.py``. What the modules read from the environment when
    they are imported is as it is at this moment: a group whose environment differs in more than
    ``XLA_FLAGS`` and pytest's own variables, or that wants another interpreter, gets new
    interpreters as without this call.

    Args:
        modules: may start no thread and no JAX backend when they are imported; the first group
            raises RuntimeError otherwise. None: back to new interpreters.

    Example:
        >>> preload("jax", "mtcheckpoint")
        >>> preload()
    """
    global _pool
    if _pool is not None:
        _pool.close()
    _pool = Pool(modules) if modules else None


def start(
    rank: int, orders: Path, output: IO[bytes], environment: Mapping[str, str], python: str
) -> Running:
    """Starts ``_child.py`` with these orders, in a session of its own."""
    pool = _pool
    if pool is not None and pool.suits(environment, python):
        return pool.fork(rank, orders, output, environment)
    return subprocess.Popen(
        [python, "-P", str(_CHILD), str(orders), str(os.getpid()), str(_PACKAGE_ROOT)],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        # Its own process group, so that a signal reaches its children too.
        start_new_session=True,
    )


def child_environment(devices: int, extra: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        # Threads of the small arrays of tests only get into each other's way.
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **extra,
    }


class Pool:
    """The zygotes of one `preload`, each started when it is first needed."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._environment = child_environment(1, {})
        self._zygotes: dict[int, _Zygote] = {}
        self._lock = threading.Lock()

    def suits(self, environment: Mapping[str, str], python: str) -> bool:
        return python == sys.executable and _fixed(environment) == _fixed(self._environment)

    def fork(
        self, rank: int, orders: Path, output: IO[bytes], environment: Mapping[str, str]
    ) -> Running:
        with self._lock:
            number = rank % _ZYGOTES
            zygote = self._zygotes.pop(number, None)
            if zygote is not None and not zygote.is_alive():
                zygote.close()
                zygote = None
            zygote = zygote or _Zygote(self._modules, self._environment)
            self._zygotes[number] = zygote
        return zygote.fork(orders, output, environment)

    def close(self) -> None:
        """Ends the zygotes, and what they have forked."""
        while self._zygotes:
            _, zygote = self._zygotes.popitem()
            zygote.close()


class _Zygote:
    """The process that ``_zygote.py`` describes, as its owner sees it."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        # Packets: a request is one, whichever threads send at the same time.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(theirs.fileno()), str(_PACKAGE_ROOT), *modules]
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", str(_ZYGOTE), *arguments],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket.settimeout(_SECONDS_TO_IMPORT)
        problem = self._socket.recv(1 << 16).decode()
        if problem != "ready":
            self.close()
            raise RuntimeError(f"preloading {list(modules)}: {problem or 'the process ended'}")

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def close(self) -> None:
        self._socket.close()
        self._popen.kill()
        self._popen.wait(_SECONDS_TO_FORK)

    def fork(self, orders: Path, output: IO[bytes], environment: Mapping[str, str]) -> Running:
        request = {
            "orders": str(orders),
            "folder": os.getcwd(),
            "environment": dict(environment),
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = os.pipe()
        try:
            fds = [reading, output.fileno(), theirs.fileno()]
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        finally:
            os.close(reading)
            theirs.close()
        return _Forked(ours, os.fdopen(writing, "wb"))


class _Forked:
    """A process that a zygote has forked. Its number is its own until the exit code was read."""

    def __init__(self, status: socket.socket, stdin: IO[bytes]) -> None:
        self.stdin = stdin
        self._status = status
        self._code: int | None = None
        status.settimeout(_SECONDS_TO_FORK)
        told = status.recv(100).decode()
        if not told.startswith("pid "):
            status.close()
            stdin.close()
            raise ChildProcessError(f"no process was forked: {told or 'the zygote could not'}")
        self.pid = int(told.removeprefix("pid "))

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._status.settimeout(timeout)
            try:
                told = self._status.recv(100).decode()
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            # Without a word: the zygote was killed, which kills what it has forked.
            self._code = int(told.removeprefix("code ")) if told else -signal.SIGKILL
            self._status.close()
        return self._code


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be read when a module is imported."""
    return {
        name: value
        for name, value in environment.items()
        if name not in (PLACE_VARIABLE, "XLA_FLAGS") and not name.startswith("PYTEST_")
    }


_pool: Pool | None = None
atexit.register(preload)
