"""A reverse proxy before a Cloud Storage server that makes its answers fail as the service's do."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
from types import TracebackType

import aiohttp
import yarl
from aiohttp import web

_START_SECONDS = 10.0
# Meant for one connection only, or made anew by us.
_NOT_PASSED_ON = {"connection", "content-encoding", "content-length", "host", "transfer-encoding"}

LIST = r"/o\?"  # of a bucket's objects
READ = r"alt=media|/download/|/o/[^?]"


@dataclasses.dataclass(kw_only=True)
class Fault:
    """What happens to requests whose path matches.

    Attributes:
        path: a regular expression to find in path and query.
        status: the answer; None: that of the server.
        times: how often; None: always.
        delay_secs: before the answer.
        method: only requests of this method; None: of any.
        body: only requests with these bytes in the body.
        least_bytes: only requests for a range of at least so many bytes; 0: of any.
        harm: ``"reset"``: no answer, and the server hears nothing; ``"lose"``: no answer, though
            the server has done it; ``"cut"``: half an answer; ``"short"``: half of one that
            says it is all; ``"corrupt"``: one byte is another
            in what is sent (POST) or answered (GET).
    """

    path: str
    status: int | None = None
    times: int | None = None
    delay_secs: float = 0.0
    method: str | None = None
    body: bytes = b""
    least_bytes: int = 0
    harm: str | None = None
    hits: int = 0

    def applies(
        self, path: str, method: str = "GET", body: bytes = b"", range_bytes: int = 0
    ) -> bool:
        if not re.search(self.path, path) or self.times == self.hits:
            return False
        if range_bytes < self.least_bytes:
            return False
        if self.method not in (None, method) or self.body not in body:
            return False
        self.hits += 1
        return True


class FaultyProxy:
    """The server at `upstream`, with faults; a context manager."""

    def __init__(self, upstream: str, *faults: Fault) -> None:
        self._upstream = upstream
        self.faults = faults
        self.methods: set[str] = set()
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        assert self._ready.wait(_START_SECONDS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_START_SECONDS)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path_qs
        self.methods.add(request.method)
        body = await request.read()
        for fault in self.faults:
            if fault.applies(path, request.method, body, _range_bytes(request)):
                await asyncio.sleep(fault.delay_secs)
                if fault.status is not None:
                    error = {"error": {"code": fault.status, "message": "made by the proxy"}}
                    return web.json_response(error, status=fault.status)
                if fault.harm is not None:
                    return await self._harm(request, path, body, fault.harm)
        return await self._pass_on(request, path, body)

    async def _harm(
        self, request: web.Request, path: str, body: bytes, harm: str
    ) -> web.StreamResponse:
        if harm == "corrupt" and request.method != "GET":
            return await self._pass_on(request, path, _other_byte(body))
        answer = None if harm == "reset" else await self._pass_on(request, path, body)
        if harm == "corrupt" and answer is not None:
            answer.body = _other_byte(answer.body)
            return answer
        if harm == "short" and answer is not None:
            answer.body = answer.body[: len(answer.body) // 2]
            return answer
        if harm == "cut" and answer is not None:
            headers = {**answer.headers, "Content-Length": str(len(answer.body))}
            half = web.StreamResponse(status=answer.status, headers=headers)
            await half.prepare(request)
            await half.write(answer.body[: len(answer.body) // 2])
        assert request.transport is not None
        request.transport.abort()
        return web.Response(status=500)

    async def _pass_on(self, request: web.Request, path: str, body: bytes) -> web.Response:
        url = yarl.URL(self._upstream + path, encoded=True)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_PASSED_ON}
        async with self._session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _NOT_PASSED_ON}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())


def _range_bytes(request: web.Request) -> int:
    """Bytes that are asked for by a range with both ends; 0 otherwise."""
    first, _, last = request.headers.get("Range", "").removeprefix("bytes=").partition("-")
    return int(last) - int(first) + 1 if first and last else 0


def _other_byte(body: bytes) -> bytes:
    middle = len(body) * 2 // 3
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
