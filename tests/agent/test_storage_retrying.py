import asyncio
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.given import a_claim
from agent.unreliable import UnreliableStore
from everstep_agent.runlog.run_log import READ_AHEAD, RunLog
from everstep_agent.storage import open_store
from everstep_agent.storage.errors import (
    AlreadyExists,
    Denied,
    NoIdentity,
    NotFound,
    Unreachable,
)
from everstep_agent.storage.retrying import Patience, Retrying, choose_delay
from everstep_agent.storage.store import SLOWEST
from everstep_contract import log


def retrying(inner: UnreliableStore, deadline_s: float = 5.0) -> tuple[Retrying, list[float]]:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    patience = Patience(deadline_s=deadline_s)
    return Retrying(inner, patience, sleep=sleep, chance=lambda: 1.0), waits


@pytest.fixture
def bad_day() -> UnreliableStore:
    return UnreliableStore(open_store("memory://", "", {}))


async def test_a_request_that_was_lost_is_sent_again(bad_day: UnreliableStore) -> None:
    store, waits = retrying(bad_day)
    bad_day.lost_requests = 3
    await store.put("a", b"x")
    assert waits == [0.1, 0.2, 0.4]
    assert await bad_day.inner.get("a") == b"x"


async def test_a_create_whose_answer_was_lost_meets_itself(bad_day: UnreliableStore) -> None:
    store, _ = retrying(bad_day)
    bad_day.lost_answers = 1
    with pytest.raises(AlreadyExists):
        await store.create("a", b"x")


async def test_the_deadline_ends_it_and_the_trouble_is_shown(bad_day: UnreliableStore) -> None:
    store, waits = retrying(bad_day, deadline_s=0.25)
    bad_day.away = True
    with pytest.raises(Unreachable):
        await store.get("a")
    assert store.trouble is not None
    assert len(waits) <= 3


async def test_a_read_that_is_answered_does_not_end_the_trouble_of_a_write(
    bad_day: UnreliableStore,
) -> None:
    """A store that is full takes reads: it is not back, and the status must not change with each read."""
    shown: list[object] = []

    async def sleep(_: float) -> None:
        with pytest.raises(NotFound):
            await store.get("nothing")
        await store.list()
        shown.append(store.trouble)

    store = Retrying(bad_day, Patience(), sleep=sleep)
    bad_day.lost_requests = 2
    await store.put("a", b"x")
    assert [str(error) for error in shown] == ["a: the request was lost"] * 2
    assert store.trouble is None


async def test_an_answer_that_will_not_change_is_not_asked_for_again(
    bad_day: UnreliableStore,
) -> None:
    store, waits = retrying(bad_day)
    with pytest.raises(NotFound):
        await store.get("nothing")
    assert waits == []
    assert store.trouble is None


async def test_a_refusal_is_believed_when_it_stays(bad_day: UnreliableStore) -> None:
    store, waits = retrying(bad_day)
    bad_day.refusals = 2
    await store.put("a", b"x")
    bad_day.refusals = 100
    with pytest.raises(Denied):
        await store.put("a", b"y")
    assert len(waits) == 2 + 3
    assert await bad_day.inner.get("a") == b"x"


async def test_a_cloud_identity_that_is_not_ready_yet_is_waited_for(
    bad_day: UnreliableStore,
) -> None:
    """On a new node, that of the pod may answer some seconds after the pod has started."""
    store, waits = retrying(bad_day)
    bad_day.refusal = NoIdentity
    bad_day.refusals = 9
    await store.put("a", b"x")
    assert 10 < sum(waits) < 30
    bad_day.refusals = 100
    with pytest.raises(NoIdentity):
        await store.put("a", b"y")


@given(st.integers(min_value=1, max_value=10_000), st.floats(min_value=0, max_value=0.999))
def test_delays_grow_to_a_ceiling_and_never_vanish(tries: int, chance: float) -> None:
    patience = Patience()
    delay = choose_delay(tries, patience, chance)
    assert patience.first_s / 2 <= delay <= patience.longest_s


class SlowStore(UnreliableStore):
    """Its connection moves data for longer than the deadline."""

    async def _write(self, verb: str, key: str, body: bytes | memoryview) -> None:
        await asyncio.sleep(1.2)
        await super()._write(verb, key, body)

    async def get(self, key: str) -> bytes:
        await asyncio.sleep(1.2)
        return await super().get(key)

    async def list(self, prefix: str = "", *, after: str = "") -> list[str]:
        await asyncio.sleep(1.2)
        return await super().list(prefix, after=after)


async def test_a_try_that_moves_a_chunk_or_lists_many_keys_may_last_longer_than_the_deadline() -> (
    None
):
    """Otherwise each try would be cut and begun again, and no chunk or list would ever arrive."""
    slow = SlowStore(open_store("memory://", "", {}))
    store, waits = retrying(slow, deadline_s=1.0)
    await slow.inner.put("a", b"x" * 100)
    small = asyncio.ensure_future(store.put("c", b"x"))
    _, _, (size, _), keys = await asyncio.gather(
        store.put("b", bytes(2 * SLOWEST)),
        store.create("manifest", bytes(2 * SLOWEST)),
        store.stream("a", hashlib.sha256),
        store.list(),
    )
    assert (size, waits) == (100, [])
    assert "a" in keys
    with pytest.raises(Unreachable, match="did not complete a request within 1 s"):
        await small


class FarStore(UnreliableStore):
    """Counts the reads that are under way at the same time."""

    under_way = most = 0

    async def get(self, key: str) -> bytes:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.001)
        self.under_way -= 1
        return await super().get(key)


async def test_a_long_log_is_read_with_as_many_requests_at_once_as_its_reader_makes() -> None:
    """Every start, and every change of the coordinator, waits for it."""
    far = FarStore(open_store("memory://", "", {}))
    for place in range(4 * READ_AHEAD):
        await far.inner.create(log.key(place), log.encode(a_claim(place + 1)))
    run_log = RunLog(Retrying(far))
    assert len(await run_log.refresh()) == 4 * READ_AHEAD
    assert far.most == READ_AHEAD
