"""Appends the claims of an epoch that stepped first (rule 3), in the background. A successor of the
coordinator appends the same entries, because they are part of the epoch's level.
"""

import asyncio
from functools import partial

from everstep_agent.coordinator import fence
from everstep_agent.coordinator.term import Term
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.run_log import Lost
from everstep_contract.log import Claim


def start(term: Term) -> None:
    """Start appending the claims that the running epoch still lacks, unless this is under way."""
    if _find_oldest(term) is not None and (term.claiming is None or term.claiming.done()):
        term.claiming = term.background.start(_claim_all(term))


async def settle(term: Term) -> None:
    """Wait until no claim is missing: any other claim must come after these."""
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
                continue  # `append` has read what was written meanwhile: decide again
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
    """Another claim is in the log, so nothing of this epoch can be committed: the epoch is over."""
    term.line.say("claim_refused", epoch=claim.epoch, message=why)
    await fence.check_fence(term)
    if not term.ended:
        term.change(term.state.refuse_claim(f"epoch {claim.epoch} cannot be claimed: {why}"))
        term.reports.changed.set()
