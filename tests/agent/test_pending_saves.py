"""Saves that wait for their parts, and the save for which the whole job waits."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest

from agent.a_term import a_term
from agent.given import a_member, a_report, a_worker, an_epoch, stepping, wanting
from everstep_agent import logline
from everstep_agent.checkpoint.commit import Committer
from everstep_agent.checkpoint.parts import Part
from everstep_agent.coordinator import last_save, members, recover
from everstep_agent.coordinator.background import Background
from everstep_agent.coordinator.pending_saves import FAILED, PendingSaves
from everstep_agent.coordinator.saves import Saves
from everstep_agent.peers.agent_report import State
from everstep_agent.peers.epoch_level import Boundary
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import open_store
from everstep_contract.units import Mesh


def part(step: int, rank: int = 0, **changes: object) -> Part:
    return Part(epoch=1, step=step, rank=rank, **changes)  # type: ignore[arg-type]


def test_what_is_given_up_is_remembered_until_it_is_saved_anew() -> None:
    saves = PendingSaves()
    saves.add(part(10))
    assert saves.why_given_up(1, 10) == ""
    saves.give_up((1, 10), "retired meanwhile")
    assert saves.why_given_up(1, 10) == "retired meanwhile"
    saves.add(part(10, rank=1, whole=True))
    assert saves.why_given_up(1, 10) == ""
    saves.give_up((1, 10), "retired again")
    assert saves.unsaved(1) == {1}


def test_a_part_that_is_sent_again_after_its_save_was_given_up_begins_no_save() -> None:
    """Its agent did not get the answer. Else the coordinator would make no further save by the clock."""
    saves = PendingSaves()
    for rank in (0, 1):
        saves.add(part(10, rank=rank))
    saves.give_up((1, 10), "NaN or infinite values in model/0.weight")
    saves.add(part(10, rank=1))
    assert saves.pending(1) == []
    assert saves.why_given_up(1, 10) == "NaN or infinite values in model/0.weight"


def test_a_failed_share_is_no_news_once_a_unit_saves_the_full_state() -> None:
    saves, mesh = PendingSaves(), Mesh(shard=2)
    saves.add(part(10, rank=2, whole=True, lead=True))
    assert saves.add(part(10, rank=2, problem="no room")) == ""
    assert saves.pending(1) == [10]
    assert not saves.has_whole(1, 10, mesh)
    saves.add(part(10, rank=3, whole=True))
    assert saves.has_whole(1, 10, mesh)
    saves.give_up((1, 10), "retired meanwhile")
    assert saves.unsaved(1) == {2, 3}


def test_a_part_that_will_not_come_gives_the_save_up_and_is_said_once() -> None:
    saves = PendingSaves()
    assert saves.add(part(10)) == ""
    said = saves.add(part(10, rank=1, problem="no room"))
    assert said == "no checkpoint of step 10: rank 1: no room"
    assert saves.add(part(10, rank=1, problem="no room")) == ""
    assert saves.pending(1) == []
    assert saves.why_given_up(1, 10) == "rank 1: no room"


def test_a_part_that_comes_after_many_failed_saves_begins_no_save() -> None:
    """Else the coordinator would wait for the rest of it, and make no further save by the clock."""
    saves = PendingSaves()
    for step in range(10, 70, 10):
        saves.add(part(step, problem="no room"))
    assert saves.add(part(10, rank=1)) == ""
    assert saves.pending(1) == []
    assert saves.parts(1, 10) == []  # it takes no memory
    assert saves.why_given_up(1, 10) == "rank 0: no room"
    for step in range(70, 10 * FAILED + 70, 10):
        saves.add(part(step, problem="no room"))
    assert saves.why_given_up(1, 10) == ""  # forgotten in the end


def test_a_part_that_is_here_is_not_lost_because_another_pod_cannot_upload_its_copy() -> None:
    """Several pods may upload one part of an unfinished save: its own, and those that hold copies."""
    problem = part(10, rank=1, problem="no space left")
    for order in ((part(10, rank=1), problem), (problem, part(10, rank=1))):
        saves = PendingSaves()
        for each in order:
            saves.add(each)
        assert saves.why_given_up(1, 10) == ""
        assert saves.parts(1, 10) == [part(10, rank=1)]


def test_a_save_that_a_newer_one_overtakes_is_said() -> None:
    saves = PendingSaves()
    for known in (part(5), part(5, rank=2), part(10), part(15)):
        saves.add(known)
    (said,) = saves.settle((1, 10))
    assert said.startswith("no checkpoint of step 5: step 10 was complete sooner")
    assert "ranks 0, 2" in said
    assert saves.pending(1) == [15]


# --- the save for which the whole job waits


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    store = open_store("memory://", "", {})
    line = logline.Log(io.StringIO())
    return Saves(
        Committer(store, RunLog(store), "r"),
        on_commit=lambda _: None, background=Background(line), line=line,
    )  # fmt: skip


FINISHED = [a_worker(state=State.FINISHED, applied=20)] * 2
PARKED = [a_worker(state=State.PARKED, applied=8)] * 2
STAY = an_epoch(boundary=Boundary(step=8, stay=True, confirmed=True))


def test_it_is_the_last_one_or_one_at_a_boundary_where_all_stay() -> None:
    assert last_save.find_awaited(an_epoch(), FINISHED) == 20
    assert last_save.find_awaited(an_epoch(committed=20), FINISHED) == 0
    assert last_save.find_awaited(STAY, PARKED) == 8
    assert last_save.find_awaited(an_epoch(), PARKED) == 0
    assert last_save.find_awaited(STAY, [PARKED[0], a_worker(applied=8)]) == 0
    assert last_save.find_awaited(STAY, PARKED[:1]) == 0


def find(
    saves: Saves,
    wait: last_save.Wait,
    now: float,
    *,
    trouble: bool = False,
    uploading: bool = False,
):
    return last_save.find_lost(
        an_epoch(), FINISHED, saves, wait, now=now, trouble=trouble, uploading=uploading
    )


def test_one_that_lacks_a_part_is_lost_at_once(saves: Saves) -> None:
    saves.add(part(20, rank=1, problem="the file is too short"))
    found = find(saves, last_save.Wait(), 0.0)
    assert found is not None
    assert found.cause == "SaveLost"
    assert "the file is too short" in found.message


def test_one_that_does_not_come_is_lost_after_a_while_in_which_nothing_came(saves: Saves) -> None:
    wait, limit = last_save.Wait(), last_save.LAST_SAVE_SECONDS
    assert find(saves, wait, 0.0) is None
    assert find(saves, wait, limit - 1, trouble=True) is None, "no limit while the store is away"
    assert find(saves, wait, 2 * limit - 2, uploading=True) is None, "no limit for an upload"
    saves.add(part(20))
    assert find(saves, wait, limit + 5) is None, "the new part starts the limit again"
    assert find(saves, wait, 2 * limit) is None
    found = find(saves, wait, 2 * limit + 10)
    assert found is not None
    assert "1 of 2 parts arrived, and none in the last 900 s" in found.message


def test_a_state_is_complete_with_every_part_or_with_one_full_state() -> None:
    epoch = an_epoch(2)
    parts = [a_report(0, epoch=1, staged=12), a_report(1, epoch=1, staged=10)]
    assert members.find_complete(epoch, parts) == 10
    assert members.find_complete(epoch, parts[:1]) == 0, "the other part is unknown"
    full = [stepping(0, whole=12), a_report(1, epoch=1, staged=10)]
    assert members.find_complete(epoch, full) == 12
    assert members.find_complete(epoch, full[:1]) == 12
    assert members.find_complete(epoch, []) == 0


def test_the_full_state_of_a_unit_is_complete_with_what_each_of_its_ranks_holds() -> None:
    epoch = an_epoch(4, mesh=Mesh(shard=2))

    def complete(*whole: int) -> int:
        return members.find_complete(epoch, [stepping(s, whole=n) for s, n in enumerate(whole)])

    assert complete(12, 0, 0, 12) == 0, "the two ranks with a full state are of different units"
    assert complete(0, 0, 12, 12) == 12
    assert complete(12, 0, 12, 14) == 12
    assert members.find_complete(epoch, [stepping(2, whole=12)]) == 0
    in_two_pods = [a_member(slot, lives=(1, 1)) for slot in (0, 1)]
    epoch = an_epoch(members=tuple(in_two_pods), mesh=Mesh(shard=2))
    both = tuple(a_worker(local=local, whole=7) for local in (0, 1))
    assert members.find_complete(epoch, [a_report(1, epoch=1, workers=both)]) == 7
    assert members.find_complete(epoch, [a_report(1, epoch=1, workers=both[:1])]) == 0


async def test_a_save_that_one_rank_had_no_room_for_is_not_awaited_once_all_ranks_are_dead() -> (
    None
):
    """Both ranks have staged a later step than the newest commit, but not the same one."""
    term = a_term(wanting(2))
    term.change(term.state.begin_epoch(an_epoch(committed=6)))
    for slot, staged in ((0, 9), (1, 8)):
        dead = stepping(slot, state=State.DEAD)
        term.take(replace(dead, staged=staged, unsent_of=1))
    for arrived in (part(8, problem="no room"), part(8, rank=1), part(9)):
        assert term.add_part(arrived)
    async with asyncio.timeout(recover.DRAIN_SECONDS / 2):
        await recover._drain(term)


async def test_an_older_save_that_may_still_be_complete_is_awaited_instead() -> None:
    term = a_term(wanting(2))
    term.change(term.state.begin_epoch(an_epoch(committed=6)))
    for slot in (0, 1):
        term.take(replace(stepping(slot, state=State.DEAD), staged=8))
    for arrived in (part(8, problem="no room"), part(7)):
        assert term.add_part(arrived)
    assert recover._find_awaited(term) == 7
