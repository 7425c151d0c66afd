import asyncio

import pytest

from agent.a_run import claim, commit
from agent.unreliable import UnreliableStore
from everstep_agent.runlog.run_log import Appended, LogDamaged, Lost, RunLog
from everstep_agent.storage import ObjectStore, open_store
from everstep_agent.storage.errors import Conflict, NotFound, Unreachable
from everstep_agent.storage.retrying import Patience, Retrying
from everstep_contract import log
from everstep_contract.log import Done


@pytest.fixture
def memory() -> ObjectStore:
    return open_store("memory://", "", {})


async def test_entries_are_read_back_in_the_order_of_their_places(store: ObjectStore) -> None:
    writer, reader = RunLog(store), RunLog(store)
    first = claim(1)
    written = [
        first,
        *(commit(1, step) for step in range(1, 80)),
        Done(epoch=1, token=first.token, step=79),
    ]
    for place, one in enumerate(written):
        assert await writer.append(one) == Appended(place=place)
    assert list(await reader.refresh()) == written
    assert await reader.refresh() == ()
    assert reader.newest_claim == first
    assert [c.step for c in reader.commits] == list(range(1, 80))
    assert reader.done == written[-1]


async def test_a_run_that_goes_on_after_its_end_is_not_done(store: ObjectStore) -> None:
    run_log, first = RunLog(store), claim(1)
    for one in (first, commit(1, 3), Done(epoch=1, token=first.token, step=3)):
        await run_log.append(one)
    await run_log.append(claim(2))
    assert run_log.done is None


async def test_who_loses_a_place_reads_the_rivals_entry_and_decides_anew(
    store: ObjectStore,
) -> None:
    mine, rival = RunLog(store), RunLog(store)
    await mine.append(claim(1))
    await rival.refresh()
    theirs = claim(2, token="rival")
    await rival.append(theirs)
    outcome = await mine.append(commit(1, 10))
    assert outcome == Lost(
        entries=(theirs,),
        reason="PlaceTaken",
        message="place 1 of the log was taken by another writer",
    )
    again = await mine.append(commit(1, 10))
    assert isinstance(again, Lost)
    assert again.reason == "NewerClaim"
    assert len(mine.entries) == 2


async def test_of_eight_rival_claims_each_gets_its_own_place(store: ObjectStore) -> None:
    async def insist(writer: int) -> None:
        run_log = RunLog(store)
        outcome: Appended | Lost | None = None
        while not isinstance(outcome, Appended):
            epoch = run_log.index.next_epoch
            outcome = await run_log.append(claim(epoch, token=f"w{writer}"))

    await asyncio.gather(*(insist(w) for w in range(8)))
    everything = RunLog(store)
    await everything.refresh()
    assert [c.epoch for c in everything.claims] == list(range(1, 9))
    assert {c.token for c in everything.claims} == {f"w{w}" for w in range(8)}


async def test_a_lost_answer_is_recognised_as_our_own_entry(memory: ObjectStore) -> None:
    bad_day = UnreliableStore(memory)
    run_log = RunLog(Retrying(bad_day, Patience(first_s=0.001)))
    bad_day.lost_answers = 1
    assert await run_log.append(claim(1)) == Appended(place=0, answer_lost=True)
    assert list(run_log.entries) == [claim(1)]


async def test_after_an_error_the_same_entry_may_be_appended_again(memory: ObjectStore) -> None:
    bad_day = UnreliableStore(memory)
    run_log = RunLog(bad_day)
    bad_day.lost_answers = 1
    with pytest.raises(Unreachable):
        await run_log.append(claim(1))
    assert not run_log.entries
    assert await run_log.append(claim(1)) == Appended(place=0, answer_lost=True)
    bad_day.lost_requests = 1
    with pytest.raises(Unreachable):
        await run_log.append(commit(1, 1))
    assert await run_log.append(commit(1, 1)) == Appended(place=1)


async def test_an_entry_that_refresh_finds_is_not_written_twice(memory: ObjectStore) -> None:
    bad_day = UnreliableStore(memory)
    run_log = RunLog(bad_day)
    bad_day.lost_answers = 1
    with pytest.raises(Unreachable):
        await run_log.append(claim(1))
    await run_log.refresh()
    assert await run_log.append(claim(1)) == Appended(place=0, answer_lost=True)
    assert await memory.list("log") == [log.key(0)]


async def test_a_lost_answer_with_a_rival_behind_it_keeps_both(memory: ObjectStore) -> None:
    bad_day = UnreliableStore(memory)
    mine, rival = RunLog(bad_day), RunLog(memory)
    await mine.append(claim(1))
    bad_day.lost_answers = 1
    with pytest.raises(Unreachable):
        await mine.append(commit(1, 5))
    await rival.refresh()
    await rival.append(claim(2, token="rival"))
    assert await mine.append(commit(1, 5)) == Appended(place=1, answer_lost=True)
    assert mine.newest_claim == claim(2, token="rival")
    assert isinstance(await mine.append(commit(1, 6)), Lost)


async def test_a_place_that_is_taken_and_cannot_be_read_is_waited_for(memory: ObjectStore) -> None:
    """Whoever appends would otherwise try again at once, without end and without a word."""

    class Hiding(UnreliableStore):
        async def get(self, key: str) -> bytes:
            if key == log.key(1):
                raise NotFound(f"{key}: there is no such object")
            return await super().get(key)

    run_log = RunLog(Hiding(memory))
    await run_log.append(claim(1))
    await memory.put(log.key(1), log.encode(commit(1, 4)))
    with pytest.raises(Conflict, match=r"log/000000000001.json: the store says that it exists"):
        await run_log.append(commit(1, 5))


async def test_a_stale_list_does_no_harm(memory: ObjectStore) -> None:
    stale = UnreliableStore(memory)
    stale.stale = []
    writer = RunLog(memory)
    await writer.append(claim(1))
    await writer.append(commit(1, 5))
    reader = RunLog(stale)
    await reader.refresh()
    assert len(reader.entries) == 2
    assert isinstance(await reader.append(claim(2)), Appended)


async def test_a_copy_of_entries_beside_the_log_is_no_place_of_it(memory: ObjectStore) -> None:
    run_log = RunLog(memory)
    await run_log.append(claim(1))
    for key in ("log/old/000000000007.json", "log/7.json", "log/000000000007.json.bak"):
        await memory.put(key, b"copied before a repair")
    await run_log.check_whole()
    await memory.put(log.key(7), b"beyond the end")
    with pytest.raises(LogDamaged, match=r"log/000000000001.json is gone, though place 7 stands"):
        await run_log.check_whole()


async def test_nothing_but_a_claim_opens_a_log(memory: ObjectStore) -> None:
    outcome = await RunLog(memory).append(commit(1, 1))
    assert isinstance(outcome, Lost)
    assert outcome.reason == "NoClaim"
    assert await memory.list() == []


async def test_a_damaged_place_stops_the_reader_and_is_named(memory: ObjectStore) -> None:
    await memory.put(log.key(0), b'{"kind":"gossip"}')
    with pytest.raises(LogDamaged, match=r"log/000000000000.json.*gossip"):
        await RunLog(memory).refresh()


async def test_appends_of_one_process_do_not_race_each_other(memory: ObjectStore) -> None:
    run_log = RunLog(memory)
    await run_log.append(claim(1))
    outcomes = await asyncio.gather(*(run_log.append(commit(1, s)) for s in range(1, 9)))
    assert sorted(o.place for o in outcomes if isinstance(o, Appended)) == list(range(1, 9))


async def test_a_claim_decided_on_before_another_task_read_more_is_not_written(
    memory: ObjectStore,
) -> None:
    run_log = RunLog(memory)
    await run_log.append(claim(1))
    decided_on = len(run_log.entries)
    await run_log.append(commit(1, 5))
    outcome = await run_log.append(claim(2), after=decided_on)
    assert isinstance(outcome, Lost)
    assert (outcome.reason, outcome.entries) == ("ReadMore", (commit(1, 5),))
    assert isinstance(await run_log.append(claim(2), after=2), Appended)


async def test_an_epochs_number_is_claimed_once(memory: ObjectStore) -> None:
    run_log = RunLog(memory)
    await run_log.append(claim(3))
    outcome = await run_log.append(claim(3, token="another"))
    assert isinstance(outcome, Lost)
    assert outcome.reason == "EpochUsed"
