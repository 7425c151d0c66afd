"""A coordinator that knows less than its agents or the run log: the job still keeps all state that
a surviving rank holds.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agent.gang import Gang, assert_exact
from everstep_agent.peers import follower
from everstep_agent.peers.following import HEIRS
from everstep_agent.runlog.run_log import RunLog
from everstep_contract import levels


def read_pages(tmp_path: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in tmp_path.glob("m-*/position-*")}


async def test_a_newcomer_saves_what_the_only_survivor_holds_though_that_one_must_leave(
    tmp_path: Path,
) -> None:
    """Two slots share a bad node: one has lost its GPU, and the other is asked to leave."""
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 5)
        assert gang.seen.coordinator is not None
        lost = gang.seen.coordinator.slot
        living = 1 - lost
        gang.want(
            leave=(living,), gone=(levels.SlotAttempt(slot=lost, attempt=0),), incident="inc-3"
        )
        await gang.kill(lost, say=False)
        await gang.start(lost, 1)
        seen = await gang.until(lambda s: s.left)
        assert (seen.left[0].slot, seen.left[0].attempt) == (living, 0)
        assert seen.left[0].step >= 5
        assert seen.epoch == 1, "the operator ignores reports of an older epoch"
        await gang.kill(living, say=False)
        gang.want(leave=(), gone=(*gang.wanted.gone, levels.SlotAttempt(slot=living, attempt=0)))
        await gang.start(living, 1)
        await gang.reports()
        assert sum(i.steps_lost for i in gang.seen.incidents) == 0
        await assert_exact(gang, 20)


async def test_a_coordinator_that_could_hear_of_no_epoch_adopts_the_one_that_still_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survivor seems too busy to answer when the newcomer asks for a running epoch."""
    monkeypatch.setattr(follower, "choose_witness", lambda answers, known: None)
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 5)
        assert gang.seen.coordinator is not None
        lost = gang.seen.coordinator.slot
        gang.want(leave=(1 - lost,), gone=(levels.SlotAttempt(slot=lost, attempt=0),))
        await gang.kill(lost, say=False)
        await gang.start(lost, 1)
        await gang.until(lambda s: s.left)
        gang.want(leave=())
        await gang.kill(1 - lost)
        await gang.start(1 - lost, 1)
        await gang.reports()
        assert "event=epoch_adopted" in gang.shown()
        assert sum(i.steps_lost for i in gang.seen.incidents) == 0
        assert (await gang.run_log()).claims[1].chain[-1].last_step >= 5
        await assert_exact(gang, 20)


async def test_the_coordinator_is_lost_and_all_others_are_told_to_leave(tmp_path: Path) -> None:
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 5)
        assert gang.seen.coordinator is not None
        lost = gang.seen.coordinator.slot
        others = tuple(s for s in range(3) if s != lost)
        gone = levels.SlotAttempt(slot=lost, attempt=0)
        gang.want(leave=others, gone=(gone,), incident="inc-4")
        await gang.kill(lost, say=False)
        await gang.start(lost, 1)
        seen = await gang.until(lambda s: {x.slot for x in s.left} == set(others))
        assert min(x.step for x in seen.left) >= 5
        for slot in others:
            await gang.kill(slot, say=False)
        gang.want(
            leave=(),
            gone=(gone, *(levels.SlotAttempt(slot=s, attempt=0) for s in others)),
        )
        for slot in others:
            await gang.start(slot, 1)
        await gang.reports()
        assert {i.id for i in gang.seen.incidents} == {"inc-4"}
        assert sum(i.steps_lost for i in gang.seen.incidents) == 0
        await assert_exact(gang, 20)


async def test_who_would_coordinate_next_has_read_the_log_before_the_coordinator_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of weeks takes the store many seconds, in which no loss could be handled."""
    monkeypatch.setattr("everstep_agent.role.HEIR_SECONDS", 0.05)
    async with Gang(tmp_path, 4, save_every_steps=2) as gang:
        await gang.until(lambda s: s.committed is not None and s.committed.step >= 4)
        assert gang.seen.coordinator is not None
        lost = gang.seen.coordinator.slot
        logs = {s: a._role._context.run_log for s, a in gang.agents.items() if s != lost}
        await gang.until(lambda s: sum(len(log.entries) > 2 for log in logs.values()) == HEIRS)
        heirs = {s for s, log in logs.items() if log.entries}
        assert heirs == set(sorted(logs)[:HEIRS])
        known = {id(logs[s]): len(logs[s].entries) for s in heirs}
        again, on = list[int](), list[int]()
        get = RunLog._get

        async def note(log: RunLog, place: int) -> Any:
            if id(log) in known:  # else of a newcomer, or of an agent that has become an heir
                (on if place >= known[id(log)] - 1 else again).append(place)
            return await get(log, place)

        monkeypatch.setattr(RunLog, "_get", note)
        await gang.kill(lost)
        await gang.start(lost, 1)
        await gang.reports()
        assert again == [], "the successor has read the whole log again"
        assert on != []
        await assert_exact(gang, 20)


async def test_who_hears_that_its_coordinator_was_lost_expects_the_answers_sooner(
    tmp_path: Path,
) -> None:
    """Else a rank that waits for one of its own unit, which looks like computing, holds the successor up."""
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3)
        assert gang.seen.coordinator is not None
        lead = gang.seen.coordinator.slot
        own = gang.agents[1 - lead]._api._own
        own.note_lost(["192.0.2.1:7070"])
        assert not own.waits_long
        own.note_lost([gang.agents[lead].me.address])
        assert own.waits_long


async def test_when_every_pod_was_replaced_the_operators_incident_goes_on(tmp_path: Path) -> None:
    async with Gang(tmp_path, 2) as gang:
        await gang.until(lambda s: s.step >= 3)
        gang.want(leave=(0, 1), incident="inc-5")
        await gang.until(lambda s: {x.slot for x in s.left} == {0, 1})
        for slot in (0, 1):
            await gang.kill(slot, say=False)
        gang.want(leave=(), gone=tuple(levels.SlotAttempt(slot=s, attempt=0) for s in (0, 1)))
        for slot in (0, 1):
            await gang.start(slot, 1)
        await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        (incident,) = gang.seen.incidents
        assert (incident.id, incident.cause, incident.steps_lost) == ("inc-5", "Replaced", 0)
        assert [p.name for p in incident.phases] == ["regroup", "restart", "first_step"]
        await gang.reports()
        claims = (await gang.run_log()).claims
        assert [(c.cause, c.incident) for c in claims] == [("Start", ""), ("Replaced", "inc-5")]
        await assert_exact(gang, 20)


async def test_when_every_container_was_restarted_the_steps_lost_are_said(tmp_path: Path) -> None:
    gang = Gang(tmp_path, 2, save_every_steps=8)
    gang.stub["STUB_STEP_MS"] = "60"  # killed before the next save, which a restart would commit
    async with gang:
        await gang.until(lambda s: s.committed and s.committed.step == 8 and s.step >= 10)
        pages = read_pages(tmp_path)
        for slot in (0, 1):
            await gang.kill(slot)
        for path, page in pages.items():  # as they are after SIGKILL of the whole container
            path.write_bytes(page)
        committed = (await gang.run_log()).commits[-1].step
        for slot in (0, 1):
            await gang.start(slot, 0)
        await gang.until(lambda s: s.incidents and not s.incidents[-1].open)
        (incident,) = gang.seen.incidents
        assert incident.cause == "AgentLost"
        assert incident.step == committed
        assert 0 < incident.steps_lost < 20
        await gang.reports()
        await assert_exact(gang, 20)


async def test_the_coordinator_is_lost_while_a_boundary_is_armed(tmp_path: Path) -> None:
    async with Gang(tmp_path, 3) as gang:
        await gang.until(lambda s: s.step >= 3)
        assert gang.seen.coordinator is not None
        lost = gang.seen.coordinator.slot
        told = asyncio.Event()
        board = gang.agents[lost]._state.coordinator.term.board
        publish = board.publish

        def watched(document: Any) -> bool:
            news = publish(document)
            if board.levels.epoch and board.levels.epoch.boundary:
                told.set()
            return news

        board.publish = watched
        gang.want(leave=((lost + 1) % 3,), incident="inc-6")
        await asyncio.wait_for(told.wait(), 20)
        await gang.kill(lost)
        await gang.start(lost, 1)
        await gang.until(lambda s: s.left)
        leaver = gang.seen.left[0].slot
        await gang.kill(leaver, say=False)
        gang.want(leave=(), gone=(levels.SlotAttempt(slot=leaver, attempt=0),))
        await gang.start(leaver, 1)
        await gang.reports()
        assert sum(i.steps_lost for i in gang.seen.incidents) == 0
        await assert_exact(gang, 20)


async def test_a_coordinator_that_only_coordinates_leaves_at_a_boundary(tmp_path: Path) -> None:
    """Its node is suspect, so it is in no epoch; the others have started one without it."""
    gang = Gang(tmp_path, 3, gang_seconds=0.5)
    gang.stub["STUB_UNTIL"] = "40"
    gang.want(min_workers=2)
    async with gang:
        await gang.until(lambda s: s.step >= 3)
        assert gang.seen.coordinator is not None
        held = gang.seen.coordinator.slot
        gang.want(hold=(held,))
        os.kill(gang.worker(held), signal.SIGKILL)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert held not in {m.slot for m in gang.seen.members}
        assert gang.seen.coordinator.slot == held
        gang.want(leave=(held,), hold=(), incident="inc-7")
        await gang.until(lambda s: s.left)
        await gang.kill(held, say=False)
        seen = await gang.until(lambda s: s.incidents[1:] and not s.incidents[-1].open)
        assert [(i.id, i.cause, i.steps_lost) for i in seen.incidents[1:]] == [
            ("inc-7", "Leave", 0)
        ]
        assert seen.restarts == {"WorkerDied": 1, "Leave": 1}
        gang.want(leave=(), gone=(levels.SlotAttempt(slot=held, attempt=0),))
        await gang.start(held, 1)
        await gang.reports()
        await assert_exact(gang, 40)
