"""An exception in coordinator code: the agent gives up the role, and no pod ends."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.a_term import a_term
from agent.gang import Gang, assert_exact
from agent.given import an_epoch, wanting
from everstep_agent.agent_state import AgentState
from everstep_agent.coordinator import boundary_turn, faults, gather, post_commit
from everstep_agent.identity import Identity
from everstep_agent.peers.epoch_level import Boundary, Stage
from everstep_agent.peers.messages import CoordinatorFault, Levels
from everstep_contract import levels, report

UNTIL = 20


class Faulty:
    """Replaces a function of the coordinator. The first `times` calls raise, later ones do not."""

    def __init__(self, call: Callable[..., Any], times: int) -> None:
        self.call, self.times, self.raised = call, times, 0

    def __call__(self, *given: Any, **more: Any) -> Any:
        if self.raised < self.times:
            self.raised += 1
            raise KeyError("as told")
        return self.call(*given, **more)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep_agent.coordinator.faults.REST_SECONDS", (0.1, 0.2, 0.3))


async def test_one_fault_costs_neither_pod_nor_step_nor_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    gang = Gang(tmp_path, 2, save_every_steps=5)
    gang.stub["STUB_STEP_MS"] = "100"
    async with gang:
        await gang.until(lambda s: s.step >= 2)
        settle = Faulty(boundary_turn.settle, 1)
        monkeypatch.setattr(boundary_turn, "settle", settle)
        seen = await gang.until(lambda s: any("KeyError" in n for n in s.notes))
        assert seen.failure is None
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        assert settle.raised == 1
        assert [c.epoch for c in (await gang.run_log()).claims] == [1], (
            "the steps must continue without a new epoch"
        )
        await assert_exact(gang, UNTIL)
        assert "event=coordinator_failed" in gang.shown()
        assert "Traceback" in gang.shown()


async def test_a_fault_in_work_beside_the_training_is_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    look_after = Faulty(post_commit.PostCommit.look_after, 1)
    monkeypatch.setattr(post_commit.PostCommit, "look_after", lambda *given: look_after(*given))
    gang = Gang(tmp_path, 2, save_every_steps=5)
    gang.stub["STUB_STEP_MS"] = "50"
    async with gang:
        await gang.until(lambda s: any("KeyError" in n for n in s.notes))
        await gang.reports()
        await assert_exact(gang, UNTIL)


async def test_a_fault_before_the_first_epoch_is_outlived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(gather, "_try_to_claim", Faulty(gather._try_to_claim, 2))
    async with Gang(tmp_path, 2) as gang:
        await gang.reports()
        await assert_exact(gang, UNTIL)


async def test_faults_again_and_again_end_the_job_as_ours_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub.update(STUB_STEP_MS="100", STUB_UNTIL="100000")
    async with gang:
        await gang.until(lambda s: s.step >= 3)
        monkeypatch.setattr(boundary_turn, "settle", Faulty(boundary_turn.settle, 100))
        ends = await gang.reports(60)
        assert {r.cause for r in ends.values()} == {report.Cause.COORDINATOR}
        (message,) = {r.message for r in ends.values()}
        assert "a bug in Everstep" in message
        assert "KeyError: 'as told'" in message
        assert "settle" in ends[0].traceback
        assert gang.seen.failure is not None
        newest = (await gang.run_log()).commits[-1]
        assert newest.step >= max(m.step for m in gang.seen.members or [newest]) >= 3
        assert [c.epoch for c in (await gang.run_log()).claims] == [1]


async def test_where_even_the_last_try_fails_the_job_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub.update(STUB_STEP_MS="100", STUB_UNTIL="100000")
    async with gang:
        await gang.until(lambda s: s.step >= 3)
        monkeypatch.setattr(boundary_turn, "settle", Faulty(boundary_turn.settle, 100))
        monkeypatch.setattr(
            "everstep_agent.coordinator.recover._post_mortem", Faulty(asyncio.sleep, 100)
        )
        ends = await gang.reports(60)
        assert {r.cause for r in ends.values()} == {report.Cause.COORDINATOR}


# --- what follows from a fault: unit tests


def a_fault(n: int = 1) -> CoordinatorFault:
    return CoordinatorFault(slot=0, attempt=0, message=f"KeyError: {n} (train.py:5)")


async def test_who_takes_the_role_does_not_inherit_faults_that_no_longer_count() -> None:
    """Nothing else need be published between the end of their time and the loss of the coordinator."""
    term = a_term(wanting(2))
    term.change(replace(term.state, epoch=an_epoch(), faults=(a_fault(1), a_fault(2), a_fault(3))))
    assert len(term.board.levels.faults) == 3
    term.change(term.state.forget_faults())
    assert term.board.levels.faults == ()
    term.lay_down(KeyError("one more"))
    assert (len(term.board.levels.faults), term.board.levels.end) == (1, None)
    await term.close()


def test_each_rest_is_longer_and_after_the_last_comes_the_last_try() -> None:
    rests = [faults.choose_rest([a_fault()] * n) for n in range(6)]
    assert rests == [0.0, 2.0, 8.0, 30.0, 30.0, 30.0]
    assert [faults.is_last_try([a_fault()] * n) for n in range(5)] == [False] * 3 + [True] * 2


def test_only_a_running_epoch_in_which_nobody_may_be_parked_goes_on() -> None:
    told = Levels(
        coordinator=levels.SlotAttempt(slot=0, attempt=0), address="h:1", epoch=an_epoch(),
        laid_down=True,
    )  # fmt: skip
    assert faults.may_go_on(told)
    assert not faults.may_go_on(replace(told, laid_down=False)), "it may have died with its rank"
    assert not faults.may_go_on(replace(told, epoch=None))
    assert not faults.may_go_on(replace(told, epoch=an_epoch(stage=Stage.STARTING)))
    assert faults.may_go_on(replace(told, epoch=an_epoch(boundary=Boundary(step=7))))
    stays = an_epoch(boundary=Boundary(step=7, stay=True))
    assert not faults.may_go_on(replace(told, epoch=stays))


def test_a_fault_names_its_place() -> None:
    try:
        raise ValueError("what")
    except ValueError as error:
        found = faults.build_fault(Identity(slot=3, attempt=1, incarnation=1, address="h:1"), error)
    assert found.message.startswith("ValueError: what (test_coordinator_faults.py:")
    assert "Traceback" in found.traceback
    assert (found.slot, found.attempt) == (3, 1)


async def test_an_agent_rests_when_it_hears_of_a_fault_and_only_then() -> None:
    state, me = AgentState(), Identity(slot=0, attempt=0, incarnation=1, address="h:1")
    told = Levels(coordinator=levels.SlotAttempt(slot=0, attempt=0), address="h:1")
    state.take_published(told)
    assert state.may_coordinate(me)
    state.take_published(replace(told, faults=(a_fault(),), laid_down=True))
    assert not state.may_coordinate(me)
    until = state.rest_until
    state.take_published(replace(told, faults=(a_fault(),), laid_down=True))
    assert state.rest_until == until, "the same fault must not start a second rest"
