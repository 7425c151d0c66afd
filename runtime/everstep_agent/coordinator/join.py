"""Newcomers join a running epoch: its members hold from a boundary on, the newcomers take their state, the
next epoch is claimed with them. If one is lost meanwhile, the members go on without it.
"""

import asyncio
import secrets
from collections.abc import Sequence

from everstep_agent.coordinator import join_rules, regroup
from everstep_agent.coordinator.breaks import find_break
from everstep_agent.coordinator.term import Term
from everstep_agent.peers.messages import EpochMember
from everstep_agent.peers.places import with_newcomers

JOIN_SECONDS = 30.0
"""Limit for handing the state over; then the members go on without the newcomers."""


async def admit(term: Term) -> None:
    """All members hold at the boundary. Returns when the next epoch is published, or when a member
    is lost (the caller finds the break).
    """
    epoch = term.running
    term.mark("boundary")
    transfers = join_rules.plan_transfers(epoch, secrets.token_hex(4))
    number = regroup.choose_successor(term)
    term.change(term.state.begin_transfers(transfers, number, secrets.token_hex(16)))
    joining, why = epoch.joining, ""
    try:
        async with asyncio.timeout(JOIN_SECONDS):
            why = await _wait_taken(term)
            await _wait_joined(term)
    except TimeoutError:
        why = why or f"the state was not handed over within {JOIN_SECONDS:g} s"
    if _is_broken(term):
        return
    if why:
        term.line.say("not_joined", reason=why)
        joining = ()
    await _go_on(term, joining)


async def _wait_taken(term: Term) -> str:
    """Why the newcomers cannot join; empty if they hold the state."""
    epoch = term.running
    assert epoch.boundary is not None
    while not join_rules.have_taken(epoch.joining, term.recent(), epoch.boundary.step):
        if why := join_rules.find_lost(epoch.joining, term.recent()):
            return why
        if _is_broken(term):
            return "a member was lost"
        await term.tick()
    return ""


async def _wait_joined(term: Term) -> None:
    """Until all members are promised to the next epoch, whoever else is in it."""
    while not (join_rules.have_joined(term.running, term.recent()) or _is_broken(term)):
        await term.tick()


def _is_broken(term: Term) -> bool:
    found = find_break(
        term.running,
        term.reports.aged(term.now()),
        term.wanted,
        idle=0.0,
        hang=term.settings.hang_seconds,
    )
    return found is not None


async def _go_on(term: Term, joining: Sequence[EpochMember]) -> None:
    epoch = term.running
    if not join_rules.have_joined(epoch, term.recent()):
        return  # the members still hold: `admit` is called again
    standings = join_rules.list_standings(epoch, term.reports.all())
    assert epoch.boundary is not None
    step = epoch.boundary.step
    claim = await regroup.claim(
        term,
        with_newcomers(epoch.members, joining),
        step,
        "Grow" if joining else "GrowFailed",
    )
    if not isinstance(claim, str):
        following = join_rules.continue_epoch(
            epoch, joining, standings, number=claim.epoch, token=claim.token
        )
        regroup.begin(term, following, claim.cause)
