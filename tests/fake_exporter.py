"""An exporter on loopback that answers with a page or fails in a chosen way, and the exporter's pod."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


class FakeExporter:
    """`mode` is page, hang, http500, empty, garbage, huge, redirect or broken."""

    def __init__(self, page: str = "") -> None:
        self.page, self.mode = page, "page"
        self.url, self.port = "", 0
        self.asked = 0
        self._release = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        match self.mode:
            case "hang":
                await self._release.wait()
            case "http500":
                return web.Response(status=500, text="collector failed")
            case "empty":
                return web.Response(text="")
            case "garbage":
                return web.Response(body=b"\xff\xfe<html>")
            case "huge":
                return web.Response(body=b"#" * 200_000)
            case "redirect":
                raise web.HTTPFound("http://127.0.0.1:1/")
            case "broken":
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(b"DCGM_")
                assert request.transport is not None
                request.transport.close()
                return response
        return web.Response(text=self.page)

    def release(self) -> None:
        self._release.set()


@asynccontextmanager
async def running_exporter(page: str = "") -> AsyncIterator[FakeExporter]:
    exporter = FakeExporter(page)
    app = web.Application()
    app.router.add_get("/metrics", exporter.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    exporter.port = runner.addresses[0][1]
    exporter.url = f"http://127.0.0.1:{exporter.port}/metrics"
    try:
        yield exporter
    finally:
        exporter.release()
        await runner.cleanup()


def an_exporter(name: str = "exporter", *, node: str = "node-1", **changes: Any) -> dict[str, Any]:
    """`changes` may have namespace, owner, address, ports, phase, ready and deleting."""
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "controller": True, "uid": "ds"}
    ports = changes.get("ports", [{"name": "metrics", "containerPort": 9400}])
    ready = "True" if changes.get("ready", True) else "False"
    return {
        "metadata": {
            "name": name,
            "namespace": changes.get("namespace", "gpu-operator"),
            "ownerReferences": [{**owner, **changes.get("owner", {})}],
            **({"deletionTimestamp": "2026-11-21T10:00:00Z"} if changes.get("deleting") else {}),
        },
        "spec": {"nodeName": node, "containers": [{"ports": ports}]},
        "status": {
            "phase": changes.get("phase", "Running"),
            "podIP": changes.get("address", "10.0.0.7"),
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }
