"""Answers the lab's requests to a node: HTTP on a unix socket of the node.

Only users who may run a command in the node's container (`docker exec`) can reach the socket. It
therefore needs no password and no port.
"""

import contextlib
import json
import os
from collections.abc import Awaitable
from pathlib import Path

from aiohttp import web

from everstep_lab.kind.labnode.node import LabNode
from everstep_lab.seam import BadRequestError, FaultRequest


async def serve(node: LabNode, socket: Path) -> web.AppRunner:
    """Serve until the runner is cleaned up. Answers are `{"ok": …}` or `{"error": sentence}`."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(socket)
    runner = web.AppRunner(build_app(node), access_log=None)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    os.chmod(socket, 0o600)
    return runner


def build_app(node: LabNode) -> web.Application:
    async def fault(request: web.Request) -> web.Response:
        return await _answer(node.fault(FaultRequest(**json.loads(await request.text()))))

    async def heal(request: web.Request) -> web.Response:
        return await _answer(node.heal())

    async def status(request: web.Request) -> web.Response:
        return web.json_response({"ok": node.describe()})

    app = web.Application()
    app.router.add_post("/fault", fault)
    app.router.add_post("/heal", heal)
    app.router.add_get("/status", status)
    return app


async def _answer(work: Awaitable[str]) -> web.Response:
    try:
        return web.json_response({"ok": await work})
    except BadRequestError as error:
        return web.json_response({"error": str(error)})
