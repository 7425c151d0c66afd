"""The operator's server as a script, in a process without a free file descriptor until a line
arrives on stdin.

It prints the server's port, then each log message on a line of its own.
"""

import asyncio
import logging
import os
import resource
import sys

from everstep_operator import server
from everstep_operator.world import World

LIMIT = 64


async def main() -> None:
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
    app = server.build_app(World(), lambda: "", lambda: b"")
    serving = await server.start_server(app, "127.0.0.1", 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        print(serving.address[1], flush=True)
    room = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, room.set)
    await room.wait()
    asyncio.get_running_loop().remove_reader(sys.stdin)
    for descriptor in held:
        os.close(descriptor)
    await asyncio.Event().wait()


asyncio.run(main())
