"""A coordinator's term while members are silent, with reports that the test makes up."""

import asyncio
from dataclasses import replace

import pytest

from agent.a_term import a_term
from agent.given import a_claim, a_member, a_report, an_epoch, ended, stepping, wanting
from agent.test_regroup_rules import dead, held
from everstep_agent.coordinator import join, regroup, silence, silence_rules
from everstep_agent.coordinator.breaks import Break
from everstep_agent.coordinator.term import Term
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import Boundary

EPOCH = an_epoch(2)
CLAIM = a_claim(1, token=EPOCH.token, members=tuple(i for m in EPOCH.members for i in m.ids()))
LOSS = Break(cause="AgentLost", message="slot 0 is silent", slot=0, certain=False)
HOLD, QUIET = 1.0, 0.4


@pytest.fixture
async def term(monkeypatch: pytest.MonkeyPatch) -> Term:
    """Of a job whose slot 0 can be outvoted by nobody: it is half of the members, and the lowest."""
    monkeypatch.setattr(regroup, "HOLD_SECONDS", HOLD)
    monkeypatch.setattr(silence_rules, "SILENT_SECONDS", QUIET)
    made = a_term(wanting(2), in_place=1)
    assert await made.run_log.append(CLAIM)
    made.change(made.state.begin_epoch(EPOCH))
    made.take(replace(stepping(0, waiting=True), in_place=True))
    return made


def joined(term: Term, report: AgentReport) -> AgentReport:
    epoch = term.running
    return replace(report, joined=epoch.successor, joined_token=epoch.successor_token)


async def hold(term: Term, seconds: float, *slots: int) -> None:
    """Only these members report, and they hold their step."""
    until = term.now() + seconds
    while term.now() < until:
        for slot in slots:
            term.take(joined(term, held(slot)))
        await asyncio.sleep(0.05)


async def test_a_member_that_answers_again_has_time_to_tell_how_far_it_is(term: Term) -> None:
    going = asyncio.create_task(regroup.regroup(term, LOSS))
    await hold(term, 2 * HOLD, 1)
    assert not going.done(), "the survivor keeps its step"
    term.take(replace(stepping(0, waiting=True), in_place=True))  # it does not know of the loss yet
    await hold(term, HOLD / 2, 1)
    assert not going.done(), "all restart although the member lives"
    await hold(term, HOLD / 2, 0, 1)
    assert await asyncio.wait_for(going, 10) is None, "all restart"
    assert (term.running.number, term.running.world) == (2, 2)
    await term.close()


@pytest.mark.parametrize("leaves", [0, 1])
async def test_a_silent_member_that_was_asked_to_leave_is_waited_for_like_any_other(
    term: Term, leaves: int
) -> None:
    """The survivor keeps its step, unless it has to leave itself."""
    term.want(wanting(2, leave=(leaves,)))
    going = asyncio.create_task(regroup.regroup(term, LOSS))
    await hold(term, 3 * HOLD, 1)
    if leaves == 0:
        assert not going.done()
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
    else:
        assert await asyncio.wait_for(going, 10) is not None, "all restart"
    await term.close()


async def test_it_has_no_more_time_than_the_others(term: Term) -> None:
    going = asyncio.create_task(regroup.regroup(term, LOSS))
    await hold(term, 2 * HOLD, 1)
    until = term.now() + 2 * HOLD
    while not going.done() and term.now() < until:
        term.take(replace(stepping(0, waiting=True), in_place=True))
        await hold(term, 0.05, 1)
    assert going.done()
    assert await going is not None, "all restart"
    await term.close()


async def test_newcomers_do_not_delay_the_recovery_from_a_silent_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While they copy the state, all members hold their step. Three members of one job, one of them silent."""
    monkeypatch.setattr(silence_rules, "SILENT_SECONDS", QUIET)
    monkeypatch.setattr(silence, "ASK_SECONDS", 0.1)
    epoch = replace(an_epoch(3), boundary=Boundary(step=5, hold=True, confirmed=True))
    members = tuple(i for m in epoch.members for i in m.ids())
    term = a_term(wanting(4), in_place=1)
    assert await term.run_log.append(a_claim(1, token=epoch.token, members=members))
    joining = (a_member(3),)
    term.change(term.state.begin_epoch(replace(epoch, joining=joining)))
    term.take(held(2))
    term.take(a_report(3, in_place=True))
    admitting = asyncio.create_task(join.admit(term))
    async with asyncio.timeout(10):
        while not admitting.done():
            term.take(a_report(3, in_place=True))  # it receives nothing
            await hold(term, 0.05, 0, 1)
    assert regroup.list_outvoted(term) == {(2, 0, 1)}
    assert term.running.number == 1, "the members go on as after any loss"
    await term.close()


async def test_members_that_wait_for_one_that_leaves_late_join_the_same_epoch_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its worker takes longer to end than members may take to join. The newcomer takes its place all the same."""
    monkeypatch.setattr(join, "JOIN_SECONDS", 0.3)
    epoch = replace(an_epoch(2), boundary=Boundary(step=5, hold=True, confirmed=True))
    members = tuple(i for m in epoch.members for i in m.ids())
    term = a_term(wanting(2, leave=(1,)), in_place=1)
    assert await term.run_log.append(a_claim(1, token=epoch.token, members=members))
    term.change(term.state.begin_epoch(replace(epoch, joining=(a_member(2),))))
    newcomer = a_report(2, in_place=True, fresh=(), prepared=(1,), taken=5)
    proposed = []
    for late in (True, False):
        admitting = asyncio.create_task(join.admit(term, ((1, 0, 1),)))
        async with asyncio.timeout(10):
            while not admitting.done():
                term.take(newcomer)
                await hold(term, 0.05, 0, *([1] if late else []))
                if not late:
                    term.take(joined(term, replace(dead(1), ended=ended(1))))
        await admitting
        if late:
            proposed.append((term.running.successor, term.running.successor_token))
    assert (term.running.number, term.running.token) == proposed[0]
    assert [m.slot for m in term.running.members] == [0, 2]
    await term.close()
