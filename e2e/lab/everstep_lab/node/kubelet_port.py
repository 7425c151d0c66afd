"""The kubelet's port. It serves logs over TLS and refuses other requests as not simulated."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from aiohttp import web

from everstep_lab.node.clock import parse_stamp, utc_now
from everstep_lab.node.objects import KUBELET_PORT

_POLL = 0.1


class Logged(Protocol):
    def log_file(self, container: str, *, previous: bool = False) -> Path | None: ...
    def is_running(self, container: str) -> bool: ...


Find = Callable[[str, str], Logged | None]
"""Finds a pod by namespace and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    tail: int | None = None
    since: datetime | None = None
    limit: int | None = None


def parse_wanted(query: Mapping[str, str], now: datetime) -> Wanted:
    """Parse the query of a log request. Raises `ValueError` for an invalid number or time."""
    since = None
    if "sinceSeconds" in query:
        since = now - timedelta(seconds=int(query["sinceSeconds"]))
    elif "sinceTime" in query:
        since = parse_stamp(query["sinceTime"])
    return Wanted(
        follow=query.get("follow") in ("true", "1"),
        previous=query.get("previous") in ("true", "1"),
        timestamps=query.get("timestamps") in ("true", "1"),
        tail=int(query["tailLines"]) if "tailLines" in query else None,
        since=since,
        limit=int(query["limitBytes"]) if "limitBytes" in query else None,
    )


def read_lines(raw: bytes, wanted: Wanted) -> list[bytes]:
    """The lines of a CRI log (`time stream tag text`), as `kubectl logs` shows them."""
    lines = [
        text for line in raw.split(b"\n") if line and (text := _line(line, wanted)) is not None
    ]
    return lines if wanted.tail is None else lines[max(0, len(lines) - wanted.tail) :]


def _line(line: bytes, wanted: Wanted) -> bytes | None:
    time, _, rest = line.partition(b" ")
    _stream, _, rest = rest.partition(b" ")
    tag, _, text = rest.partition(b" ")
    if wanted.since is not None and parse_stamp(time.decode()[:26] + "+00:00") < wanted.since:
        return None
    end = b"" if tag == b"P" else b"\n"
    return (time + b" " if wanted.timestamps else b"") + text + end


class KubeletPort:
    def __init__(self, find: Find, certificate: Path, key: Path) -> None:
        self._find = find
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate, key)
        self._runner: web.AppRunner | None = None

    async def open(self, host: str) -> None:
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_route("*", "/{rest:.*}", self._not_simulated)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(
            runner, host, KUBELET_PORT, ssl_context=self._context, reuse_address=True
        )
        await site.start()
        self._runner = runner

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _not_simulated(self, request: web.Request) -> web.Response:
        verb = request.path.strip("/").partition("/")[0] or "this"
        return web.Response(status=501, text=f"{verb} is not simulated in the lab\n")

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        match = request.match_info
        pod = self._find(match["namespace"], match["pod"])
        try:
            wanted = parse_wanted(request.query, utc_now())
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        path = pod.log_file(match["container"], previous=wanted.previous) if pod else None
        if pod is None or path is None:
            what = "previous terminated container" if wanted.previous else "container"
            text = f'{what} "{match["container"]}" in pod "{match["pod"]}" not found\n'
            return web.Response(status=404, text=text)
        answer = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await answer.prepare(request)
        left = wanted.limit
        async for chunk in follow(path, wanted, lambda: pod.is_running(match["container"])):
            chunk = chunk if left is None else chunk[:left]
            await answer.write(chunk)
            left = None if left is None else left - len(chunk)
            if left == 0:
                break
        await answer.write_eof()
        return answer


async def follow(path: Path, wanted: Wanted, running: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield the log so far. Then, if requested, yield new lines until the container ends."""
    with open(path, "rb") as file:  # noqa: ASYNC230 (a small file on a local disk)
        first = _whole_lines(file.read())
        file.seek(len(first))
        yield b"".join(read_lines(first, wanted))
        rest = Wanted(timestamps=wanted.timestamps)
        while wanted.follow:
            alive = running()
            at = file.tell()
            fresh = _whole_lines(file.read())
            file.seek(at + len(fresh))
            if fresh:
                yield b"".join(read_lines(fresh, rest))
            elif not alive:
                return
            await asyncio.sleep(_POLL)


def _whole_lines(raw: bytes) -> bytes:
    return raw[: raw.rfind(b"\n") + 1]
