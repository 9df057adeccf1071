"""A proxy before an object store's server that makes the faults of a bad network and a bad day of the server.

    with FaultProxy(endpoint, seed=1) as proxy:
        proxy.rates = {"unavailable": 0.2, "flipped": 0.05}      each request draws, with the seed
        proxy.next("lost", method="PUT", path=".metadata")       this one certainly
        ... use proxy.url as endpoint_url ...
        assert proxy.counts["lost"] == 1

It runs in a thread of its own. Faults of the way there: `unavailable` (503), `busy` (429), `broken` (500), `gone`
(404), `reset`, `silent` (never answered), `late` (answered to nobody, done later). Faults of the way back: `lost`
(done, but the connection is cut instead of a reply), `truncated`, `shortened` (cut, with a head that fits), `flipped`
(one bit).
"""

from __future__ import annotations

import asyncio
import collections
import io
import random
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

REFUSALS = {
    "unavailable": (503, "SlowDown"),
    "busy": (429, "TooManyRequests"),
    "broken": (500, "InternalError"),
    "gone": (404, "NoSuchUpload"),
}
BEFORE = (*REFUSALS, "reset", "silent", "late")
AFTER = ("lost", "truncated", "shortened", "flipped")
ONLY_GET = ("truncated", "shortened", "flipped")
HOP_BY_HOP = ("connection", "content-length", "expect", "transfer-encoding")


@dataclass
class Target:
    """Requests that certainly meet a fault."""

    fault: str
    method: str
    path: str
    left: int
    skip: int

    def takes(self, method: str, path: str) -> bool:
        """Whether this request does; then there is one less to come."""
        fits = self.left > 0 and method == self.method and self.path in path
        hit = fits and self.skip == 0
        self.left -= hit
        self.skip -= fits and not hit
        return hit

    def end(self) -> None:
        """Let all further requests pass."""
        self.left = 0


class FaultProxy:
    """See the module."""

    def __init__(self, upstream: str, *, seed: int = 0) -> None:
        self.upstream = upstream.rstrip("/")
        self.rates: dict[str, float] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.late_seconds: float | None = 1.0
        self.refuses_conditions = False
        self.swallowed: tuple[str, ...] = ()
        self.url, self.port = "", 0
        self._targets: list[Target] = []
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def next(self, fault: str, *, method: str, path: str = "", times: int = 1, skip: int = 0) -> Target:
        """Make a fault of the next requests whose path and query contain `path`, after the first `skip` of them."""
        assert fault in BEFORE + AFTER
        target = Target(fault, method, path, times, skip)
        self._targets.append(target)
        return target

    def land(self) -> None:
        """Do what was `late`, and return when it is done; `late_seconds` must have been None before it came."""
        asyncio.run_coroutine_threadsafe(self._land(), self._loop).result(120)

    async def _land(self) -> None:
        self._landing.set()
        while self.counts["landed"] < self.counts["late"]:
            await asyncio.sleep(0.001)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _start(self) -> str:
        self._ended = asyncio.Event()
        self._landing = asyncio.Event()
        limits = aiohttp.ClientTimeout(total=60)
        connector = aiohttp.TCPConnector(limit=64, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, timeout=limits)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{self.port}"

    async def _stop(self) -> None:
        self._ended.set()
        await self._runner.cleanup()
        await self._session.close()

    def _fault_of(self, request: web.Request, kinds: tuple[str, ...]) -> str | None:
        possible = [kind for kind in kinds if kind not in ONLY_GET or request.method == "GET"]
        certain = next(
            (t for t in self._targets if t.fault in possible and t.takes(request.method, request.raw_path)), None
        )
        drawn = [kind for kind in possible if self._random.random() < self.rates.get(kind, 0)]
        kind = certain.fault if certain else drawn[0] if drawn else None
        if kind is not None:
            self.counts[kind] += 1
        return kind

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.counts["requests"] += 1
        body = await request.read()
        if self.refuses_conditions and not {"If-Match", "If-None-Match"}.isdisjoint(request.headers):
            return _refusal(501, "NotImplemented")
        fault = self._fault_of(request, BEFORE)
        if fault in REFUSALS:
            return _refusal(*REFUSALS[fault])
        if fault == "silent":
            await self._ended.wait()
        if fault == "late":
            _cut(request)
            await (asyncio.sleep(self.late_seconds) if self.late_seconds is not None else self._landing.wait())
        if fault in ("reset", "silent"):
            _cut(request)
            return web.Response()
        try:
            status, headers, data = await self._forward(request, body)
            self.counts["landed"] += fault == "late"
        except aiohttp.ClientError:  # the server is down: so is what the client sees
            self.counts["down"] += 1
            _cut(request)
            return web.Response()
        if self._fault_of(request, ("lost",)):
            _cut(request)
            return web.Response()
        return await self._reply(request, status, headers, data)

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP + self.swallowed
        }
        data: Any = io.BytesIO(body) if body or request.method in ("PUT", "POST") else None
        url = URL(self.upstream + request.raw_path, encoded=True)
        async with self._session.request(
            request.method, url, headers=headers, data=data, allow_redirects=False, skip_auto_headers=("Content-Type",)
        ) as reply:
            kept = {
                name: value
                for name, value in reply.headers.items()
                if name.lower() not in HOP_BY_HOP or (request.method == "HEAD" and name.lower() == "content-length")
            }
            return reply.status, kept, await reply.read()

    async def _reply(
        self, request: web.Request, status: int, headers: dict[str, str], data: bytes
    ) -> web.StreamResponse:
        if request.method == "HEAD":
            response = web.StreamResponse(status=status, headers=headers)
            await response.prepare(request)
            await response.write_eof()
            return response
        fault = self._fault_of(request, ("truncated", "shortened", "flipped")) if data and status < 300 else None
        if fault == "flipped":
            flipped = bytearray(data)
            flipped[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            data = bytes(flipped)
        if fault == "shortened":
            data = data[: len(data) // 2]
        if fault == "truncated":
            response = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(len(data))})
            await response.prepare(request)
            await response.write(data[: len(data) // 2])
            _cut(request)
            return response
        return web.Response(status=status, headers=headers, body=data)


def _refusal(status: int, code: str) -> web.Response:
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>made by the fault proxy</Message></Error>'
    return web.Response(status=status, content_type="application/xml", text=text)


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
