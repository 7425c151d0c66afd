"""Bodies that are sent in several parts."""

import asyncio
import contextlib
import random
import socket

from everstep_contract import auth
from everstep_contract.http.channel import Channel

LARGE = random.Random(0).randbytes(8 * 2**20)
"""More than a socket's buffers take at once."""


async def test_a_body_of_several_parts_arrives_as_one() -> None:
    parts = (b"document\n", memoryview(LARGE), b"", b"end")
    ours, theirs = map(Channel, socket.socketpair())
    with contextlib.closing(ours), contextlib.closing(theirs):
        sending = asyncio.create_task(ours.send("POST / HTTP/1.1", {"name": "value"}, parts))
        head = await theirs.read_head()
        assert head is not None
        assert await theirs.read_body(head.length) == b"".join(parts)
        await sending


def test_its_digest_is_that_of_the_whole() -> None:
    assert auth.digest_of((b"document\n", memoryview(LARGE))) == auth.digest_of(
        b"document\n" + LARGE
    )
