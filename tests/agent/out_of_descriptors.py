"""An agent's server in its own process, without a free file descriptor until stdin gets a line.

Prints its address, then each message of the server on a line of its own.
"""

import asyncio
import os
import resource
import sys

from everstep_agent.peers import http
from everstep_agent.peers.messages import Accepted
from everstep_contract import codec

LIMIT = 64


async def main() -> None:
    async def accept(body: bytes) -> bytes:
        return codec.dumps(Accepted(acting=True))

    def say(message: str) -> None:
        print(message, flush=True)

    server = http.Server("token", {"/v1/report": accept}, say)
    await server.open("127.0.0.1", 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        say(server.address)
    room = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, room.set)
    await room.wait()
    asyncio.get_running_loop().remove_reader(sys.stdin)
    for descriptor in held:
        os.close(descriptor)
    await asyncio.Event().wait()


asyncio.run(main())
