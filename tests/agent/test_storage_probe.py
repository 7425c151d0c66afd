import asyncio

import pytest

from agent.unreliable import UnreliableStore
from everstep_agent.storage import ObjectStore, open_store, probe
from everstep_agent.storage.errors import AlreadyExists, Denied, NoAtomicCreate, Unsupported
from everstep_agent.storage.probe import check_writable, judge_race
from everstep_agent.storage.retrying import Patience, Retrying


class CheckThenPut(UnreliableStore):
    """A server whose create is not atomic: it checks the key, receives the body, then writes."""

    async def create(self, key: str, body: bytes | memoryview) -> None:
        if key in await self.inner.list():
            raise AlreadyExists(key)
        await asyncio.sleep(len(body) * 20e-9)  # a megabyte in 20 ms
        await self.inner.put(key, body)


class WithoutConditions(UnreliableStore):
    """A store that does not know If-None-Match, and says so."""

    async def create(self, key: str, body: bytes | memoryview) -> None:
        raise Unsupported(f"cannot write {key}: 501 NotImplemented; this store does not offer it")


class RefusesSmall(UnreliableStore):
    """Refuses the small body of a race at once, while the large one is still being written."""

    async def create(self, key: str, body: bytes | memoryview) -> None:
        if len(body) < 1024:
            raise Unsupported(f"cannot write {key}: 501 NotImplemented")
        await asyncio.sleep(0.05)
        await super().create(key, body)


class TidiedOnce(UnreliableStore):
    """Another job's coordinator deletes everything under probe/ between two writes of one race."""

    tidies = 0

    async def create(self, key: str, body: bytes | memoryview) -> None:
        if not self.tidies and key in await self.inner.list():
            self.tidies += 1
            await self.inner.delete(key)
        await super().create(key, body)


class KeepsEverything(UnreliableStore):
    async def delete(self, key: str) -> None:
        raise Denied(f"cannot delete {key}")


async def test_every_store_that_we_support_passes_and_is_left_clean(store: ObjectStore) -> None:
    assert await probe(store) == []
    assert await store.list() == []


async def test_a_store_whose_create_is_not_atomic_is_refused() -> None:
    with pytest.raises(NoAtomicCreate, match="racing writers all created the same object"):
        await probe(CheckThenPut(open_store("memory://", "", {})))


async def test_a_store_without_create_only_put_is_refused_instead_of_waited_for() -> None:
    with pytest.raises(
        NoAtomicCreate, match=r"501 NotImplemented.*needs a store whose create-only"
    ):
        await probe(Retrying(WithoutConditions(open_store("memory://", "", {}))))


async def test_no_write_of_a_refused_probe_goes_on_after_it() -> None:
    store = RefusesSmall(open_store("memory://", "", {}))
    with pytest.raises(NoAtomicCreate):
        await probe(store)
    written = await store.inner.list()
    assert len(written) == 1
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others


async def test_a_race_that_another_job_disturbs_is_no_proof_against_a_store() -> None:
    store = TidiedOnce(open_store("memory://", "", {}))
    assert await probe(store) == []
    assert store.tidies == 1


async def test_rights_that_lack_delete_are_a_note() -> None:
    notes = await probe(KeepsEverything(open_store("memory://", "", {})))
    assert notes
    assert "cannot delete" in notes[0]


async def test_lost_answers_are_no_proof_against_a_store() -> None:
    inner = UnreliableStore(open_store("memory://", "", {}))
    inner.lost_answers = 3
    assert await probe(Retrying(inner, Patience(first_s=0.001))) == []


async def test_a_store_whose_answer_was_lost_takes_writes() -> None:
    inner = UnreliableStore(open_store("memory://", "", {}))
    inner.lost_answers = 1
    key = await check_writable(Retrying(inner, Patience(first_s=0.001)))
    assert await inner.list() == [key]


def test_races_are_judged_by_who_was_told_and_what_stands() -> None:
    a, b = b"a", b"b"
    assert judge_race([a, b], [True, False], a) == ""
    assert judge_race([a, b], [False, False], b) == ""
    assert "2 of 2" in judge_race([a, b], [True, True], b)
    assert "replaced" in judge_race([a, b], [True, False], b)
