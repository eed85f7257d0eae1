"""A process that has imported what tests need, and forks one that has it too for each request.

Started by path, as ``_child.py`` is, with one end of a socket: the other end is `_starting`'s.
It has one thread and no JAX backend, or forking would not be safe. When the socket ends, because
its owner did, it ends too, and with it whatever it has forked.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import selectors
import socket
import sys
import traceback
from typing import Any

_LONGEST_REQUEST_BYTES = 1 << 17


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Forked:
    """A process that was forked; not reaped, so that its number is its own, until its owner knows.

    Attributes:
        pid: its number.
        pidfd: readable when it has ended.
        status: where its owner is told of the end; the owner closes the other end then.
    """

    pid: int
    pidfd: int
    status: socket.socket


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    sys.path.append(sys.argv[2])
    requests.send(_problem(sys.argv[3:]).encode())
    # What is there now is never freed: no collection shall touch, and so copy, its pages.
    gc.freeze()
    zygote_pid = os.getpid()
    request = _serve(requests)
    if request is not None:
        _become(request)
        from mtcheckpoint.testing import _child

        sys.argv[:] = [_child.__file__, request["orders"], str(zygote_pid), sys.argv[2]]
        _child.main()


def _problem(modules: list[str]) -> str:
    """Imports the modules; why nothing can be forked after that, or "ready"."""
    try:
        for module in modules:
            importlib.import_module(module)
    except BaseException:
        return traceback.format_exc()
    threads = os.listdir("/proc/self/task")
    return "ready" if len(threads) == 1 else f"{modules} have started {len(threads) - 1} threads"


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Forks as requested; returns the request in each forked process, None at the end in this."""
    ready = selectors.PollSelector()
    ready.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            forked: _Forked | None = key.data
            if forked is not None and key.fileobj == forked.pidfd:
                _tell_the_end(forked, ready)
            elif forked is not None:
                _reap(forked, ready)
            else:
                text, fds, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST_BYTES, 3)
                if not text:
                    return None
                if _fork(fds, ready):
                    request: dict[str, Any] = json.loads(text)
                    return {**request, "fds": fds}


def _fork(fds: list[int], ready: selectors.BaseSelector) -> bool:
    """True in the new process, in which nothing of the others is open any more."""
    try:
        pid = os.fork()
    except OSError:
        pid = -1  # Its owner sees that the socket ends without a number.
    if pid == 0:
        for key in list(ready.get_map().values()):
            ready.unregister(key.fileobj)
            _close(key)
        return True
    *files, status = fds
    for fd in files:
        os.close(fd)
    if pid < 0:
        os.close(status)
        return False
    forked = _Forked(pid=pid, pidfd=os.pidfd_open(pid), status=socket.socket(fileno=status))
    ready.register(forked.pidfd, selectors.EVENT_READ, forked)
    return False


def _close(key: selectors.SelectorKey) -> None:
    """Closes what a forked process inherits of what its siblings and the zygote are watched by."""
    forked: _Forked | None = key.data
    if forked is None:
        assert isinstance(key.fileobj, socket.socket)
        key.fileobj.close()
        return
    forked.status.close()
    if key.fileobj == forked.pidfd:
        os.close(forked.pidfd)


def _tell_the_end(forked: _Forked, ready: selectors.BaseSelector) -> None:
    end = os.waitid(os.P_PID, forked.pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    ready.unregister(forked.pidfd)
    os.close(forked.pidfd)
    ready.register(forked.status, selectors.EVENT_READ, forked)
    try:
        forked.status.send(f"code {code}".encode())
    except BrokenPipeError:
        pass  # Nobody wants to know; it is reaped next.


def _reap(forked: _Forked, ready: selectors.BaseSelector) -> None:
    ready.unregister(forked.status)
    forked.status.close()
    os.waitpid(forked.pid, 0)


def _become(request: dict[str, Any]) -> None:
    """Makes this process what a new interpreter would have been."""
    os.setsid()
    stdin, output, status_fd = request["fds"]
    for source, target in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(stdin)
    os.close(output)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # Python's own generator is seeded anew in a forked process by itself.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    with socket.socket(fileno=status_fd) as status:
        status.send(f"pid {os.getpid()}".encode())


if __name__ == "__main__":
    main()
