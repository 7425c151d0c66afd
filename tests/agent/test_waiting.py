"""Unit tests of waiting with a limit."""

import asyncio

import pytest

from everstep_agent.waiting import happens


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_is_not_lost_when_the_event_comes_just_then(turns: int):
    event = asyncio.Event()
    waiting = asyncio.create_task(happens(event, 30))
    await asyncio.sleep(0)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        assert waiting.result()


async def test_whether_it_happened_is_told():
    event = asyncio.Event()
    assert not await happens(event, 0.01)
    event.set()
    assert await happens(event, 0.01)
