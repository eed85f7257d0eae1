"""Serves this node's shares to the other processes of the job while they restore.

Read-only, with byte ranges, to holders of a token that was made for this restore. Only regular
files inside the shares given are served, and no link is followed out of them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from aiohttp import web

from mtcheckpoint.errors import WaitTimeoutError

__all__ = ["ShareServer", "address_towards"]

_LOG = logging.getLogger("mtcheckpoint.peers")
_START_SECONDS = 30.0
_MOST_CONNECTIONS = 8192


class ShareServer:
    """An HTTP server in a thread of its own; a context manager.

    ``GET <url>/<share>/<file>`` with ``Authorization: Bearer <token>``.
    """

    def __init__(self, shares: Mapping[str, Path], *, token: str, host: str) -> None:
        """
        Args:
            shares: directory of each share by the name it is served under.
            token: what a reader must hold.
            host: the address to listen on: the one that the other hosts reach this one by.
        """
        self._shares = {name: path.resolve() for name, path in shares.items()}
        self._expected = f"Bearer {token}"
        self._host = host
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mtcheckpoint-peers", daemon=True)
        self.url = ""

    def __enter__(self) -> ShareServer:
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise WaitTimeoutError(f"the share server on {self._host}", seconds=_START_SECONDS)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # handed to the thread that waits in __enter__
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/{share}/{file:.+}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        listening: asyncio.Server | None = None
        try:
            listener = socket.create_server((self._host, 0), backlog=1024)
            listening = await self._loop.create_server(_bounded(runner), sock=listener)
            self.url = "http://{}:{}".format(*listener.getsockname()[:2])
            self._ready.set()
            await self._stop.wait()
        finally:
            if listening is not None:
                listening.close()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "")
        # What is not UTF-8 comes as surrogates.
        held = given.encode(errors="surrogateescape")
        if not hmac.compare_digest(held, self._expected.encode()):
            raise web.HTTPUnauthorized
        file = self._file(request.match_info["share"], request.match_info["file"])
        if file is None:
            raise web.HTTPNotFound
        return web.FileResponse(file, chunk_size=1 << 20)

    def _file(self, share: str, name: str) -> Path | None:
        root = self._shares.get(share)
        if root is None or "\0" in name:
            return None
        try:
            file = (root / name).resolve()
            served = file.is_relative_to(root) and file.is_file()
        except (OSError, RuntimeError):  # a loop of links, a name that is too long
            return None
        return file if served else None


def _bounded(runner: web.AppRunner) -> Callable[[], asyncio.Protocol]:
    """Makes connections as long as there are not too many: this process needs files of its own."""
    files_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(min(_MOST_CONNECTIONS, files_limit // 4), 16)
    server = runner.server
    assert server is not None

    def connection() -> asyncio.Protocol:
        return server() if len(server.connections) < most else _Refused()

    return connection


class _Refused(asyncio.Protocol):
    """One connection too many; whoever made it tries again later."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def address_towards(target: str) -> str:
    """This host's address on the way to `target` (``host:port``); loopback when there is none."""
    host, _, port = target.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]") or "127.0.0.1", int(port or 1), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only picks the route
            return str(probe.getsockname()[0])
    except OSError as error:
        _LOG.warning("no route to the coordinator %s (%s): serving on loopback", target, error)
        return "127.0.0.1"
