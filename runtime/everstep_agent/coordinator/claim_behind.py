"""Appends the claims of an epoch that stepped first (rule 3), in the background. A successor of the
coordinator appends the very same entries: they are part of the epoch's level.
"""

import asyncio
from functools import partial

from everstep_agent.coordinator import fence
from everstep_agent.coordinator.term import Term
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.run_log import Lost
from everstep_contract.log import Claim


def start(term: Term) -> None:
    """Claims what the running epoch has not claimed yet, unless that is under way."""
    if _find_oldest(term) is not None and (term.claiming is None or term.claiming.done()):
        term.claiming = term.background.start(_claim_all(term))


async def settle(term: Term) -> None:
    """Returns when nothing is left to claim: any other claim comes after these."""
    while _find_oldest(term) is not None:
        start(term)
        assert term.claiming is not None
        await asyncio.shield(term.claiming)


def _find_oldest(term: Term) -> Claim | None:
    unclaimed = term.epoch.unclaimed if term.epoch is not None and not term.ended else ()
    return next(iter(unclaimed), None)


async def _claim_all(term: Term) -> None:
    while (claim := _find_oldest(term)) is not None:
        await term.persist(term.run_log.refresh)
        index = term.run_log.index
        if index.place_of(claim) is None:
            if why := _why_refused(term, claim):
                await _refuse(term, claim, why)
                return
            append = partial(term.run_log.append, claim, after=len(index))
            outcome = await term.persist(append)
            if isinstance(outcome, Lost):
                continue  # it has read what was written meanwhile, and decides anew
        _note(term, claim)


def _why_refused(term: Term, claim: Claim) -> str:
    return runlog_rules.why_not_behind(claim, term.run_log.newest_claim) or runlog_rules.why_behind(
        term.newest_commit(), claim.chain
    )


def _note(term: Term, claim: Claim) -> None:
    term.line.say("epoch_claimed", epoch=claim.epoch, incident=claim.incident, cause=claim.cause)
    state = term.state.note_claimed(claim)
    newest = term.newest_commit()
    term.change(state.commit(newest) if newest is not None else state)
    term.reports.changed.set()


async def _refuse(term: Term, claim: Claim, why: str) -> None:
    """Another claim stands, so nothing of this epoch can be committed: it is over."""
    term.line.say("claim_refused", epoch=claim.epoch, message=why)
    await fence.check_fence(term)
    if not term.ended:
        term.change(term.state.refuse_claim(f"epoch {claim.epoch} cannot be claimed: {why}"))
        term.reports.changed.set()
