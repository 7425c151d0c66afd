"""One HTTP server on many loopback addresses; each address stands for a pod."""

import socket
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def listen(answer: Answer, addresses: Iterable[str], port: int) -> web.ServerRunner:
    """Serve `answer` on all addresses.

    `answer` uses `address_of` to find the requested pod. The caller cleans up the runner.
    """
    runner = web.ServerRunner(web.Server(answer, access_log=None))
    await runner.setup()
    for address in addresses:
        listener = socket.create_server((address, port), backlog=16)
        await web.SockSite(runner, listener).start()
    return runner


def address_of(request: web.BaseRequest) -> str:
    assert request.transport is not None
    address: str = request.transport.get_extra_info("sockname")[0]
    return address
