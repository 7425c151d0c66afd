import asyncio

import pytest

from everstep_agent.storage.errors import Busy, Unreachable
from everstep_agent.storage.window import Window


class Server:
    """Serves up to `room` requests at a time and refuses the others; counts both."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.under_way = self.served = self.refused = 0

    async def serve(self) -> None:
        if self.under_way >= self.room:
            self.refused += 1
            raise Busy("slow down")
        self.under_way += 1
        await asyncio.sleep(0.001)
        self.under_way -= 1
        self.served += 1


async def send(server: Server, count: int, window: Window | None) -> None:
    """Send `count` requests; retry each until the server accepts it."""

    async def one() -> None:
        while True:
            try:
                await (window.run(server.serve) if window else server.serve())
            except Busy:
                await asyncio.sleep(0.001)
            else:
                return

    await asyncio.gather(*(one() for _ in range(count)))


async def refuse() -> None:
    await asyncio.sleep(0)
    raise Busy("slow down")


async def succeed() -> None:
    pass


async def test_a_busy_store_is_asked_for_less_and_everything_is_sent() -> None:
    narrow, bare = Server(2), Server(2)
    await send(narrow, 200, Window(8))
    await send(bare, 200, None)
    assert narrow.served == bare.served == 200
    assert narrow.refused < bare.refused / 10


async def test_it_halves_once_for_all_that_were_refused_together_and_grows_by_one_a_round() -> None:
    window = Window(8)
    await asyncio.gather(*(window.run(refuse) for _ in range(8)), return_exceptions=True)
    assert window.limit == 4
    for _ in range(5):
        await window.run(succeed)
    assert window.limit == 5
    for _ in range(100):
        await window.run(succeed)
    assert window.limit == 8


async def test_one_request_is_always_allowed_and_other_troubles_change_nothing() -> None:
    window = Window(8)
    for _ in range(20):
        with pytest.raises(Busy):
            await window.run(refuse)
    assert window.limit == 1

    async def lose() -> None:
        raise Unreachable("no answer")

    await window.run(succeed)
    assert window.limit == 2
    with pytest.raises(Unreachable):
        await window.run(lose)
    assert window.limit == 2


async def test_who_gives_up_waiting_leaves_no_gap() -> None:
    window, go = Window(1), asyncio.Event()

    async def hold() -> None:
        await go.wait()

    first = asyncio.create_task(window.run(hold))
    others = [asyncio.create_task(window.run(succeed)) for _ in range(5)]
    await asyncio.sleep(0)
    for task in others[:3]:
        task.cancel()
    go.set()
    await asyncio.gather(first, *others[3:])
