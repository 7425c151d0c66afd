"""Newcomers join a running epoch: its members hold at a boundary, the newcomers copy their state,
and the next epoch is claimed with the newcomers that hold it. The members continue without a
newcomer that is lost or whose transfer makes no progress; it is invited again after a pause
(`stalled_joins.py`). They continue without all newcomers if the store does not answer or takes no
writes, because then these cannot be claimed. Members that are asked to leave end at the same
boundary.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from everstep_agent.coordinator import (
    join_rules,
    leave_in_place,
    members,
    regroup,
    stalled_joins,
    transfer_rules,
)
from everstep_agent.coordinator.breaks import list_breaks
from everstep_agent.coordinator.term import Term
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Id
from everstep_agent.peers.places import with_newcomers
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.probe import check_writable
from everstep_contract import levels, log

JOIN_SECONDS = 10.0
"""Limit for the members to join the next epoch; then the boundary is tried again."""
ANSWER_SECONDS = 2.0
"""How long the members hold for a read and a write of the store, before they continue without
newcomers.
"""


async def admit(term: Term, leaving: tuple[Id, ...] = ()) -> None:
    """Let newcomers join while all members hold at the boundary. Returns when the next epoch is
    published, or when a member is lost (the caller finds the break).

    Args:
        leaving: members that leave at this boundary; their state is committed, or others hold it,
            too.
    """
    epoch = term.running
    term.mark("boundary")
    failed = stalled_joins.count_most(term.state.failed_joins, epoch.joining)
    transfers = transfer_rules.plan_transfers(epoch, secrets.token_hex(4), leaving, failed=failed)
    number = regroup.choose_successor(term)
    # Members that have joined this number know it by its token.
    token = epoch.successor_token if number == epoch.successor else secrets.token_hex(16)
    term.change(term.state.begin_transfers(transfers, number, token))
    taken = await _wait_taken(term, leaving)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(JOIN_SECONDS):
            await _let_leave(term, leaving)
            await _wait_joined(term)
    if not _is_broken(term):
        await _go_on(term, taken)


async def _let_leave(term: Term, leaving: tuple[Id, ...]) -> None:
    """Wait until the leaving members' workers have ended: only then may a claim leave them out."""
    if not leaving or _is_broken(term):
        return
    term.line.say("members_leave", slots=",".join(str(slot) for slot, _, _ in leaving))
    term.mark("drain")
    term.change(term.state.let_leave(leaving))
    while not (_have_left(term) or _is_broken(term)):
        await _wait_a_moment(term)


def _have_left(term: Term) -> bool:
    epoch, reports = term.running, term.reports.all()
    lost = members.list_lost(epoch, reports, term.state.gone)
    return join_rules.have_left(epoch, reports, lost)


async def _wait_taken(term: Term, leaving: Collection[Id]) -> tuple[EpochMember, ...]:
    """Wait for the transfers. Returns the newcomers that hold the state once no more are expected."""
    joining, boundary = term.running.joining, term.running.boundary
    assert boundary is not None
    progress: dict[Id, transfer_rules.Progress] = {}
    while True:
        now, reports = term.now(), term.recent()
        taken = transfer_rules.list_taken(joining, reports, boundary.step)
        rest = [m for m in joining if m not in taken]
        progress = transfer_rules.note_progress(progress, rest, reports, now)
        own = transfer_rules.find_still(rest, reports, progress, now)
        own |= transfer_rules.find_lost(rest, reports)
        failed = own | _list_failing_mates(term.running, rest, own)
        broken = _is_broken(term)
        if all(m.id in failed for m in rest) or broken or _is_called_away(term, leaving):
            _say_not_joined(term, rest, failed)
            if not broken:  # otherwise the lost member may be the reason
                _note_failed(term, own)
            return taken
        term.pump(term.applied())
        await _wait_a_moment(term)


def _list_failing_mates(
    epoch: EpochLevel, rest: Sequence[EpochMember], failed: Mapping[Id, str]
) -> dict[Id, str]:
    """The newcomers whose unit has a pod that cannot join: a unit joins whole or not at all."""
    mates = join_rules.list_mates(epoch, failed)
    return {m.id: "another pod of its unit cannot join" for m in rest if m.id in mates - {*failed}}


def _is_called_away(term: Term, leaving: Collection[Id]) -> bool:
    """Whether to stop waiting for newcomers: the job is to stop, another member has to leave, or the notice of
    a leaving one is over.
    """
    asked = {*leave_in_place.list_leaving(term)} - {*leaving}
    late = leave_in_place.is_notice_over(term, leaving)
    return bool(asked) or late or term.wanted.stop is not levels.Stop.NONE


def _say_not_joined(term: Term, rest: Sequence[EpochMember], failed: Mapping[Id, str]) -> None:
    for m in rest:
        why = failed.get(m.id, "the members could not wait for it any longer")
        term.line.say("not_joined", slot=m.slot, reason=why)


def _note_failed(term: Term, failed: Mapping[Id, str]) -> None:
    """Count these failed joins: each pod is invited again after a pause (`stalled_joins.py`)."""
    if not failed:
        return
    term.change(term.state.note_failed_joins(failed, term.now()))
    for slot, attempt, _ in failed:
        if pause := term.state.failed_joins[slot, attempt].pause:
            term.line.say("join_waits", slot=slot, seconds=pause)


async def _wait_joined(term: Term) -> None:
    """Wait until all members that stay have joined the next epoch, whoever else is in it."""
    while not (join_rules.have_joined(term.running, term.recent()) or _is_broken(term)):
        await _wait_a_moment(term)


async def _wait_a_moment(term: Term) -> None:
    regroup.look_for_silence(term)
    await term.tick()


def _is_broken(term: Term) -> bool:
    """Whether a member is lost that was not asked to leave, or is silent and outvoted."""
    epoch = term.running
    found = list_breaks(
        epoch,
        term.reports.aged(term.now()),
        term.wanted,
        idle=0.0,
        hang=term.settings.hang_seconds,
        outvoted=() if regroup.why_not_wanted(term) else regroup.list_outvoted(term),
    )
    leaving = {slot for slot, _, _ in epoch.leaving}
    return any(b.slot not in leaving for b in found)


async def _go_on(term: Term, taken: Sequence[EpochMember]) -> None:
    epoch = term.running
    if not (join_rules.have_joined(epoch, term.recent()) and _have_left(term)):
        return  # the members still hold: `admit` is called again
    standings = join_rules.list_standings(epoch, term.reports.all())
    assert epoch.boundary is not None
    step = epoch.boundary.step
    alive = transfer_rules.list_taken(taken, term.recent(), step)
    gone = [m for m in taken if m not in alive]
    lost = {m.id: f"slot {m.slot} was lost" for m in gone}
    _note_failed(term, lost | transfer_rules.find_lost(gone, term.recent()))
    joining = join_rules.choose_joining(epoch, alive, term.wanted.want_workers)
    staying = join_rules.list_staying(epoch)
    trouble = await _find_store_trouble(term)
    ahead = _plan_without(term, staying, step, trouble) if trouble else ""
    if isinstance(ahead, str):
        following = with_newcomers(staying, joining, epoch.slots_together)
        claim = await regroup.claim(term, following, step, _choose_cause(epoch, joining))
        unclaimed: tuple[log.Claim, ...] = ()
    else:
        claim, unclaimed, joining = ahead[-1], ahead, ()
    if not isinstance(claim, str):
        continued = join_rules.continue_epoch(
            epoch, joining, standings, number=claim.epoch, token=claim.token
        )
        regroup.begin(term, replace(continued, unclaimed=unclaimed), claim.cause)


async def _find_store_trouble(term: Term) -> str:
    """Why the store cannot take a claim now; empty: it does. Asked before the claim with newcomers is
    appended: after that, the claim may be in the log, and only its answer is missing.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await term.persist(term.run_log.refresh)
            probed = await check_writable(term.context.store)
    except TimeoutError:
        return f"the store has not answered within {ANSWER_SECONDS:g} s"
    except StoreError as error:
        return str(error)
    term.background.start(term.context.store.delete(probed))
    return ""


def _plan_without(
    term: Term, staying: Sequence[EpochMember], step: int, trouble: str
) -> tuple[log.Claim, ...] | str:
    """As `regroup.judge_ahead`, for the members that stay, without newcomers."""
    ahead = regroup.judge_ahead(term, staying, step, _choose_cause(term.running, ()))
    if isinstance(ahead, str):
        then = f"All hold until the store takes writes again, because {ahead}"
    else:
        then = "The members go on without them; they join when the store takes writes again"
    term.line.say("newcomers_wait", message=f"newcomers cannot be claimed: {trouble}. {then}")
    return ahead


def _choose_cause(epoch: EpochLevel, joining: Sequence[EpochMember]) -> str:
    if epoch.leaving:
        return "Leave"
    return "Grow" if joining else "GrowFailed"
