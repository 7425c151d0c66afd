import asyncio

from everstep_agent.peers.group_store import GroupStore
from everstep_contract import wire


def text(value: bytes) -> str:
    return wire.to_text(value)


async def opened() -> GroupStore:
    group = GroupStore()
    group.open_epoch(3)
    return group


async def test_a_get_is_held_until_the_key_is_set():
    group = await opened()
    get = asyncio.create_task(group.answer(wire.StoreGet(epoch=3, key="k", timeout_ms=5000), 3))
    await asyncio.sleep(0)
    await group.answer(wire.StoreSet(epoch=3, key="k", value=text(b"v")), 3)
    assert (await get).value == text(b"v")


async def test_a_get_without_the_key_ends_with_its_time_limit():
    group = await opened()
    reply = await group.answer(wire.StoreGet(epoch=3, key="k", timeout_ms=10), 3)
    assert (reply.value, reply.error) == (None, "")


async def test_who_waits_for_a_key_of_an_epoch_that_ends_is_told():
    group = await opened()
    get = asyncio.create_task(group.answer(wire.StoreGet(epoch=3, key="k", timeout_ms=5000), 3))
    await asyncio.sleep(0)
    group.open_epoch(4)
    assert (await get).error


async def test_keys_of_another_epoch_are_refused():
    group = await opened()
    assert (await group.answer(wire.StoreSet(epoch=2, key="k", value=""), 2)).error


async def test_add_counts_and_its_key_reads_as_a_decimal_number():
    group = await opened()
    assert (await group.answer(wire.StoreAdd(epoch=3, key="n", amount=2), 3)).number == 2
    assert (await group.answer(wire.StoreAdd(epoch=3, key="n", amount=3), 3)).number == 5
    reply = await group.answer(wire.StoreGet(epoch=3, key="n", timeout_ms=10), 3)
    assert wire.from_text(reply.value) == b"5"


async def test_compare_set_writes_only_over_what_it_expects():
    group = await opened()

    async def compare(expected: bytes, desired: bytes) -> bytes:
        frame = wire.StoreCompareSet(
            epoch=3, key="k", expected=text(expected), desired=text(desired)
        )
        return wire.from_text((await group.answer(frame, 3)).value)

    assert await compare(b"", b"a") == b"a"
    assert await compare(b"x", b"b") == b"a"
    assert await compare(b"a", b"b") == b"b"


async def test_check_and_delete():
    group = await opened()
    await group.answer(wire.StoreSet(epoch=3, key="k", value=text(b"v")), 3)
    assert (await group.answer(wire.StoreCheck(epoch=3, keys=("k",)), 3)).number == 1
    assert (await group.answer(wire.StoreCheck(epoch=3, keys=("k", "l")), 3)).number == 0
    assert (await group.answer(wire.StoreDelete(epoch=3, key="k"), 3)).number == 1
    assert (await group.answer(wire.StoreDelete(epoch=3, key="k"), 3)).number == 0


def all_gather(rank: int, value: bytes, timeout_ms: int = 5000) -> wire.StoreAllGather:
    return wire.StoreAllGather(
        epoch=3, key="k", rank=rank, world=2, value=text(value), timeout_ms=timeout_ms
    )


async def test_an_all_gather_is_held_until_all_ranks_have_sent_theirs():
    group = await opened()
    first = asyncio.create_task(group.answer(all_gather(1, b"one"), 3))
    await asyncio.sleep(0)
    assert not first.done()
    second = await group.answer(all_gather(0, b"zero"), 3)
    assert second.values == (text(b"zero"), text(b"one"))
    assert (await first) == second


async def test_an_all_gather_without_a_rank_ends_with_its_time_limit_or_its_epoch():
    group = await opened()
    reply = await group.answer(all_gather(1, b"one", timeout_ms=10), 3)
    assert (reply.values, reply.error) == ((), "")
    waits = asyncio.create_task(group.answer(all_gather(1, b"one"), 3))
    await asyncio.sleep(0)
    group.open_epoch(4)
    assert (await waits).error
