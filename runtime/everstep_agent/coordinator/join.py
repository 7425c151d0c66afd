"""Newcomers join a running epoch: its members hold from a boundary on, the newcomers take their state, the
next epoch is claimed with those that hold it. The members go on without one that is lost, or whose
transfer stands still.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence

from everstep_agent.coordinator import boundaries, join_rules, regroup, transfer_rules
from everstep_agent.coordinator.breaks import find_break
from everstep_agent.coordinator.term import Term
from everstep_agent.peers.messages import EpochMember, Id
from everstep_agent.peers.places import with_newcomers
from everstep_contract import levels

JOIN_SECONDS = 10.0
"""Limit for the members to be promised to the next epoch; then the boundary is tried again."""


async def admit(term: Term) -> None:
    """All members hold at the boundary. Returns when the next epoch is published, or when a member
    is lost (the caller finds the break).
    """
    epoch = term.running
    term.mark("boundary")
    transfers = transfer_rules.plan_transfers(epoch, secrets.token_hex(4))
    number = regroup.choose_successor(term)
    term.change(term.state.begin_transfers(transfers, number, secrets.token_hex(16)))
    joining = await _wait_taken(term)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(JOIN_SECONDS):
            await _wait_joined(term)
    if not _is_broken(term):
        await _go_on(term, joining)


async def _wait_taken(term: Term) -> tuple[EpochMember, ...]:
    """The newcomers that hold the state, once nobody else is about to."""
    joining, boundary = term.running.joining, term.running.boundary
    assert boundary is not None
    progress: dict[Id, transfer_rules.Progress] = {}
    while True:
        now, reports = term.now(), term.recent()
        taken = transfer_rules.list_taken(joining, reports, boundary.step)
        rest = [m for m in joining if m not in taken]
        progress = transfer_rules.note_progress(progress, rest, reports, now)
        failed = transfer_rules.find_still(rest, reports, progress, now)
        failed |= transfer_rules.find_lost(rest, reports)
        if all(m.id in failed for m in rest) or _is_broken(term) or _is_called_away(term):
            _say_not_joined(term, rest, failed)
            return taken
        term.saves.pump(term.running, term.applied(), term.spent())
        await term.tick()


def _is_called_away(term: Term) -> bool:
    """The job is to stop, or a member has to leave: nobody waits for newcomers any longer."""
    epoch = term.running
    told = boundaries.list_terminating(epoch.members, term.recent(), coordinator=term.me.id)
    leaves = any(m.slot in {*told, *term.wanted.leave} for m in epoch.members)
    return leaves or term.wanted.stop is not levels.Stop.NONE


def _say_not_joined(term: Term, rest: Sequence[EpochMember], failed: Mapping[Id, str]) -> None:
    for m in rest:
        why = failed.get(m.id, "the members could not wait for it any longer")
        term.line.say("not_joined", slot=m.slot, reason=why)


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
