"""The claims of an epoch that stepped first, appended to a real log by a coordinator's term."""

import asyncio
from dataclasses import replace

import pytest

from agent.a_term import a_term
from agent.given import a_claim, an_epoch, wanting
from everstep_agent.coordinator import claim_behind
from everstep_agent.coordinator.breaks import find_refusal
from everstep_agent.coordinator.term import Term
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_contract import log

IDS = tuple(i for m in an_epoch(3).members for i in m.ids())
FIRST = a_claim(1, members=IDS)
SECOND = a_claim(2, members=IDS[:2], chain=(log.ChainLink(epoch=1, last_step=5),))
THIRD = a_claim(3, members=IDS[:1], chain=(*SECOND.chain, log.ChainLink(epoch=2, last_step=9)))
LEVEL = an_epoch(1, number=3, token=THIRD.token, unclaimed=(SECOND, THIRD))


async def a_term_that_steps_first(*entries: log.Entry, level: EpochLevel = LEVEL) -> Term:
    term = a_term(wanting(3))
    for place, entry in enumerate(entries):
        await term.context.store.create(log.key(place), log.encode(entry))
    term.change(term.state.begin_epoch(level))
    return term


@pytest.mark.parametrize("appended", [(), (SECOND,), (SECOND, THIRD)], ids=["none", "one", "both"])
async def test_they_are_appended_in_order_whatever_a_former_coordinator_had_appended(
    appended: tuple[log.Claim, ...],
) -> None:
    term = await a_term_that_steps_first(FIRST, *appended)
    claim_behind.start(term)
    await claim_behind.settle(term)
    assert list(term.run_log.claims) == [FIRST, SECOND, THIRD]
    assert term.running.unclaimed == ()
    assert find_refusal(term.state.refused) is None
    await term.close()


async def test_two_coordinators_append_them_once() -> None:
    one = await a_term_that_steps_first(FIRST)
    other = a_term(wanting(3))
    other.run_log._store = one.context.store
    other.change(other.state.begin_epoch(LEVEL))
    await asyncio.gather(claim_behind.settle(one), claim_behind.settle(other))
    await one.run_log.refresh()
    assert list(one.run_log.claims) == [FIRST, SECOND, THIRD]
    await one.close()
    await other.close()


async def test_another_claim_ends_the_epoch_and_nothing_is_appended() -> None:
    rival = replace(SECOND, token="rival")
    term = await a_term_that_steps_first(FIRST, rival)
    await claim_behind.settle(term)
    assert list(term.run_log.claims) == [FIRST, rival]
    found = find_refusal(term.state.refused)
    assert found is not None
    assert "epoch 2 cannot be claimed" in found.message
    assert term.running.unclaimed == ()
    await term.close()


async def test_a_claim_that_names_no_member_fences_the_job() -> None:
    rival = a_claim(2, members=tuple(replace(i, attempt=1) for i in IDS))
    term = await a_term_that_steps_first(FIRST, rival)
    await claim_behind.settle(term)
    assert term.ended
    assert "without any pod" in term.state.fenced
    await term.close()


async def test_a_commit_that_the_survivors_do_not_extend_ends_the_epoch() -> None:
    ahead = log.Commit(epoch=1, token=FIRST.token, step=6, manifest="m", digest="d")
    term = await a_term_that_steps_first(FIRST, ahead)
    await claim_behind.settle(term)
    assert "step 6 (epoch 1) is ahead" in term.state.refused
    await term.close()
