"""Accepts connections from a listening socket, even while the process is out of file descriptors.

In that case asyncio's own servers log a traceback for each place of their backlog, and each of
these errors starts another retry: 55,000 lines in 7 s (seen with Python 3.11).
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import NoReturn

PAUSE_SECONDS = 0.5
"""Pause before the next try when out of descriptors or memory; clients wait in the backlog."""
BACKLOG = 1024
"""Connections that wait to be accepted; the kernel may take fewer."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


async def accept_connections(
    listener: socket.socket,
    take: Callable[[socket.socket], object],
    say: Callable[[str], object],
) -> NoReturn:
    """Accept connections without end. `take` receives each connection and must not block. `say`
    receives a message when accepting stops, and one when it resumes.
    """
    loop = asyncio.get_running_loop()
    exhausted = False
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                await asyncio.sleep(0)  # the peer was gone before it was accepted
                continue
            if not exhausted:
                say(
                    f"cannot accept connections: {error.strerror}. Open connections continue, "
                    "new ones wait until descriptors are free. Raise the limit of open files "
                    "(ulimit -n) if this recurs."
                )
            exhausted = True
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        if exhausted:
            say("accepting connections again")
        exhausted = False
        take(connection)
        await asyncio.sleep(0)  # lets the accepted connections run before the next one
