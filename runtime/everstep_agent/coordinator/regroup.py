"""After a loss: the survivors keep their step and continue it in the next epoch. If they cannot, or
not soon enough, all ranks restart (`recover.py`). Silence is no loss: the survivors keep their step
until the silent member answers, is given up, or is outvoted (`silence_rules.py`). If ranks form
units, the rest of a lost rank's unit is ended first (`unit_losses.py`).

If the loss is proven (`step_first_rules.py`), nothing waits for the store: the claim is appended
while the survivors step (`claim_behind.py`). Otherwise it is appended before they form their group,
while they finish the micro-batches that they have begun. An append has no time limit: once the
claim is in the log, the former epoch can commit nothing more, so its survivors must continue in the
new one.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from everstep_agent.coordinator import (
    boundaries,
    claim_behind,
    members,
    regroup_rules,
    rounds,
    silence_rules,
    step_first_rules,
    unit_losses,
)
from everstep_agent.coordinator.breaks import BELOW_MINIMUM, REPLICAS_DIFFER, Break
from everstep_agent.coordinator.gather import adopt, judge_claim, log_epoch
from everstep_agent.coordinator.kept_out import find_kept_out, may_enter
from everstep_agent.coordinator.recover import (
    CAUSE_SECONDS,
    cause_of,
    count_repeats,
    is_last_try,
    refine,
)
from everstep_agent.coordinator.term import Term
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Id
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog import run_log
from everstep_contract import levels, log
from everstep_contract.layout import name_ranks

HOLD_SECONDS = 5.0
"""Limit for the survivors to report their standing, from the loss on, or since a silent member has
answered again; then all restart.
"""
WORD_SECONDS = 90.0
"""The same if only silent members are missing: the survivors keep their step until these answer, or
until the operator gives them up, which takes at most `recovery.nodeLostSeconds` (60 by default).
"""
FORM_SECONDS = 10.0
"""Limit for the survivors to form their group; then all restart."""


def why_not(term: Term, found: Break) -> str:
    """Why all ranks must restart after this loss; empty if the survivors may continue in place."""
    if found.cause == BELOW_MINIMUM:
        return "the job waits for more pods"
    if term.state.refused:
        return "its claim was refused"
    if found.cause == REPLICAS_DIFFER:
        return "the survivors' states differ"
    return why_not_wanted(term) or regroup_rules.why_not_in_place(
        term.running,
        term.reports.all(),
        found.cause,
        failure=found.failure is not None,
        lost=_list_lost(term),
    )


def why_not_taken_up(term: Term) -> str:
    """The same for an epoch whose coordinator is lost and whose members have not reported yet."""
    return why_not_wanted(term) or regroup_rules.why_not_now(term.running)


def why_not_wanted(term: Term) -> str:
    """Why continuing in place with fewer members is not wanted: the job's settings or its script rule
    it out, or the job is to stop. Empty if it is wanted.
    """
    if term.wanted.stop is not levels.Stop.NONE:
        return "the job is to stop"
    if not term.settings.in_place:
        return "recovery.inPlace is false"
    if fixed := regroup_rules.why_fixed(term.running, term.reports.all()):
        return fixed
    if term.settings.on_loss != levels.OnLoss.WAIT.value:
        return ""
    if boundaries.is_resize(term.wanted, term.running, term.recent(), _list_lost(term)):
        return ""
    return "recovery.onLoss is Wait: all wait for what was lost"


def _list_lost(term: Term) -> frozenset[Id]:
    """Members that need not answer: proven dead, given up by the operator, left out by a yield, or
    silent and outvoted.
    """
    return _list_proven(term) | _list_given_up(term)


def _list_given_up(term: Term) -> frozenset[Id]:
    """Silent members without which the others may continue: left out by a yield, or outvoted."""
    yielded = silence_rules.list_yielded(term.running, term.list_yields(), _newest_claim(term))
    return yielded | list_outvoted(term)


def _list_proven(term: Term) -> frozenset[Id]:
    epoch, reports = term.running, term.reports.all()
    lost = members.list_lost(epoch, reports, term.state.gone)
    return lost | members.list_never_entered(epoch, reports)


def list_outvoted(term: Term) -> frozenset[Id]:
    """Silent members without which the others may claim the next epoch."""
    silent, newest, reports = term.silence.unanswered, _newest_claim(term), term.reports.all()
    if not silent or newest is None:
        return frozenset()
    proven = runlog_rules.list_dead(newest, rounds.build_proof(newest, reports, term.wanted))
    return silence_rules.list_outvoted(
        term.running, newest, silent, _list_proven(term), reports, proven
    )


def _newest_claim(term: Term) -> log.Claim | None:
    """The newest claim that is in the log, or that is about to be appended."""
    pending = step_first_rules.list_pending(term.running, term.run_log.index)
    return pending[-1] if pending else term.run_log.newest_claim


def look_for_silence(term: Term) -> None:
    """Have members that have fallen silent asked whether they are alive."""
    now = term.now()
    doubted = silence_rules.list_doubted(term.running, term.reports.aged(now))
    term.silence.doubt(doubted, now)


async def regroup(term: Term, found: Break) -> Break | None:
    """Continue in place after a loss. Returns None if the survivors' epoch is published or the job
    has ended; otherwise the loss, as known by now, after which all ranks have to restart.
    """
    began = term.now()
    term.open_incident(cause_of(found))
    died, incidents = began - found.dead_ms / 1000, term.state.incidents
    if term.running.leaving:  # until they died, the leaving workers took the rest of their step
        incidents = incidents.mark("boundary", died)
    incidents = incidents.detect(died, began)
    term.line.say("epoch_holds", cause=found.cause, message=found.text, incident=incidents.id)
    term.group.open_epoch(0)
    term.change(term.state.with_incidents(incidents).hold_epoch(found.cause))
    found, planned = await _plan(term, found, began)
    why = planned if isinstance(planned, str) else await _go_on(term, found, *planned)
    if not why or term.ended:
        return None
    term.change(term.state.burn_round(term.running.successor))
    term.line.say("not_in_place", reason=why, incident=term.state.incidents.id)
    return found


@dataclass(slots=True, kw_only=True)
class _Hold:
    """How long the survivors have held their step."""

    began: float
    heard_at: float
    """When a silent member last answered again; from then on it has its time, too."""
    silent: frozenset[Id] = frozenset()

    def are_late(self, silent: frozenset[Id], now: float) -> bool:
        """Whether all members but the silent ones have had the time to report their standing."""
        if self.silent - silent and now - self.began < WORD_SECONDS:
            self.heard_at = now
        self.silent = silent
        return now - self.heard_at >= HOLD_SECONDS


Planned = tuple[Sequence[EpochMember], regroup_rules.Plan]


async def _plan(term: Term, found: Break, began: float) -> tuple[Break, Planned | str]:
    """The loss, and how its survivors continue, or why they cannot."""
    hold = _Hold(began=began, heard_at=began)
    while True:
        if _take_back(term):
            term.change(term.state.hold_epoch(found.cause))
            hold = _Hold(began=term.now(), heard_at=term.now())
        _propose(term)
        look_for_silence(term)
        waited = term.now() - began
        late = hold.are_late(_list_silent(term), term.now())
        given_up = _list_given_up(term)
        found = refine(term, found, term.now(), waited, given_up)
        if found.failure is not None:
            return found, f"{found.cause}: the script failed"
        if why := _why_not_wait(term, waited) if late else "":
            return found, why
        if late:  # only silent members are missing
            _have_kept(term)
        lost = _list_proven(term) | given_up
        _end_lost_units(term, lost, waited)
        survivors, decision = regroup_rules.decide_regroup(term.running, term.recent(), lost)
        match decision:
            case regroup_rules.Impossible():
                return found, decision.reason
            case regroup_rules.AskVector() if term.running.asked != decision.rank:
                term.change(term.state.ask_vector(decision.rank))
            case regroup_rules.Plan():
                return found, (survivors, decision)
        await term.tick()


def _take_back(term: Term) -> bool:
    """Return to the epoch that the running one continues, if its workers are still in it. Their
    agents have joined a later epoch of another coordinator meanwhile, and will not start the running
    one, which has not begun.
    """
    claim = term.run_log.newest_claim
    if claim is None or claim.epoch != term.running.number or term.running.in_place is None:
        return False
    held = find_kept_out(term.recent(), term.running, claim)
    if held is None or may_enter(term.recent(), claim):
        return False
    adopt(term, held)
    return True


def _end_lost_units(term: Term, lost: frozenset[Id], waited: float) -> None:
    """Have the agents end the living ranks of lost units. A death that broke a unit is first given
    the time to be reported.
    """
    epoch = term.running
    ended = unit_losses.list_to_end(epoch, term.recent(), lost, by_word=waited >= CAUSE_SECONDS)
    if ended == epoch.ended:
        return
    ranks = sorted({*ended} - {*epoch.ended})
    term.line.say(
        "unit_ends",
        rank=",".join(map(str, ranks)),
        incident=term.state.incidents.id,
        message=f"a unit goes on whole or not at all: the agents end {name_ranks(ranks)} of a lost one",
    )
    term.change(term.state.end_ranks(ended))


def _have_kept(term: Term) -> None:
    """Have one unit save the state that the survivors hold, to be committed only if all restart."""
    epoch = term.running
    failed = members.list_unsaved(epoch, term.reports.all()) | term.saves.unsaved(epoch.number)
    keeper = regroup_rules.choose_keeper(epoch, term.recent(), failed)
    if keeper is None or term.saves.has_whole(epoch, keeper.step):
        return
    if keeper != epoch.saver:
        term.line.say("held_save", rank=keeper.rank, step=keeper.step)
        term.change(term.state.choose_saver(keeper))


def _why_not_wait(term: Term, waited: float) -> str:
    """Why not to wait for the survivors any longer, who have had their time; empty: wait."""
    missing = _describe_missing(term)
    if not missing:
        return f"the survivors did not answer within {HOLD_SECONDS:g} s"
    if waited > WORD_SECONDS:
        return f"{missing} did not answer within {WORD_SECONDS:g} s, and was not declared gone"
    if why := why_not_wanted(term):
        return why
    leaving = {r.slot for r in term.recent() if r.leaving} | {*term.wanted.leave}
    silent = _list_silent(term)
    if any(m.slot in leaving for m in term.running.members if m.id not in silent):
        return "a member has to leave before the silent ones are given up"
    return ""


def _describe_missing(term: Term) -> str:
    """The silent members, if all others have reported their standing; otherwise empty."""
    epoch, silent = term.running, _list_silent(term)
    lost = _list_lost(term) | silent
    _, decision = regroup_rules.decide_regroup(epoch, term.recent(), lost)
    if isinstance(decision, regroup_rules.Wait):
        return ""
    slots = sorted(slot for slot, _, _ in silent)
    return "slot " + ", ".join(map(str, slots)) if slots else ""


def _list_silent(term: Term) -> frozenset[Id]:
    return silence_rules.list_silent(term.running, term.reports.aged(term.now()))


async def _go_on(
    term: Term, found: Break, survivors: Sequence[EpochMember], plan: regroup_rules.Plan
) -> str:
    former = term.running
    if why := regroup_rules.why_not_again(former, survivors, plan, certain=found.certain):
        return why
    if is_last_try(term, found, plan.applied + 1):
        return "the same fault ends the job now, so its state is saved first"
    count_repeats(term, found, plan.applied + 1)
    ahead = judge_ahead(term, survivors, plan.applied, found.cause)
    if isinstance(ahead, str):
        term.line.say("claims_first", reason=ahead, incident=term.state.incidents.id)
        claimed = await claim(term, survivors, plan.applied, found.cause)
        unclaimed: tuple[log.Claim, ...] = ()
    else:
        claimed, unclaimed = ahead[-1], ahead
    if isinstance(claimed, str):
        return claimed
    epoch = regroup_rules.continue_epoch(
        former, survivors, plan, number=claimed.epoch, token=claimed.token
    )
    term.silence.leave_out(m.id for m in former.members if epoch.member(*m.id) is None)
    term.change(term.state.with_incidents(term.state.incidents.take_rung("regroup")))
    begin(term, replace(epoch, unclaimed=unclaimed), found.cause)
    return ""


def _propose(term: Term) -> None:
    """Propose the next epoch, again whenever its number is used up: another coordinator may claim,
    or have members join a later epoch, at any time.
    """
    number = choose_successor(term)
    if number != term.running.successor:
        term.change(term.state.propose(number, secrets.token_hex(16)))


def choose_successor(term: Term) -> int:
    return regroup_rules.choose_successor(
        term.running, log_epoch(term), term.reports.all(), term.state.burnt
    )


def judge_ahead(
    term: Term, survivors: Sequence[EpochMember], step: int, cause: str
) -> tuple[log.Claim, ...] | str:
    """The claims that are still to be appended if the survivors may continue after `step` before
    their claim, which is the last of these; or why it must come first.
    """
    pending = step_first_rules.list_pending(term.running, term.run_log.index)
    shrink = step_first_rules.Shrink(
        epoch=term.running,
        survivors=survivors,
        reports=term.recent(),
        lost=_list_lost(term),
    )
    if why := step_first_rules.why_claim_first(
        shrink, term.run_log.index, job_uid=term.settings.job_uid
    ):
        return why
    claims = [*term.run_log.claims, *pending]
    found = _judge(term, claims, survivors, step, cause)
    return found.message if isinstance(found, rounds.Wait) else (*pending, found)


def _judge(
    term: Term, claims: Sequence[log.Claim], following: Sequence[EpochMember], step: int, cause: str
) -> log.Claim | rounds.Wait:
    """The claim of an epoch that continues the running one after `step`."""
    chain = runlog_rules.continued_chain(claims, term.running.number, step)
    if behind := runlog_rules.why_behind(term.newest_commit(), chain):
        return rounds.Wait(reason="Behind", message=behind)
    number, token = term.running.successor, term.running.successor_token
    return judge_claim(term, claims, number, following, chain, cause, token=token)


async def claim(
    term: Term, following: Sequence[EpochMember], step: int, cause: str
) -> log.Claim | str:
    """Append the claim of an epoch that continues the running one after `step`. Returns the claim,
    or why there is none. Another entry, such as a commit of this epoch that was under way, only
    means that the claim is judged again.
    """
    await claim_behind.settle(term)
    while True:
        await term.persist(term.run_log.refresh)
        known, newest = len(term.run_log.index), term.run_log.newest_claim
        if term.state.refused:
            return term.state.refused
        found = _judge(term, term.run_log.claims, following, step, cause)
        if isinstance(found, rounds.Wait):
            return found.message
        outcome = await term.persist(partial(term.run_log.append, found, after=known))
        if not isinstance(outcome, run_log.Lost):
            return runlog_rules.why_overtaken(found, term.run_log.newest_claim) or found
        if term.run_log.newest_claim != newest:
            term.change(term.state.burn_round(found.epoch))
            return outcome.message


def begin(term: Term, epoch: EpochLevel, cause: str) -> None:
    """Publish the epoch, and claim it if it is not claimed yet. This agent keeps its keys,
    whichever agent kept those of the former epoch.
    """
    epoch = regroup_rules.note_commit(epoch, term.newest_commit())
    epoch = replace(epoch, store=term.me.address)
    term.group.open_epoch(epoch.number)
    term.saves.drop_older(epoch.number, epoch.committed)
    incidents = term.state.incidents.mark("regroup", term.now()).resumes(epoch.resume, 0)
    term.line.say(
        "epoch_steps_first" if epoch.unclaimed else "epoch_claimed",
        epoch=epoch.number,
        slots=",".join(str(m.slot) for m in epoch.members),
        world=epoch.world,
        resume=epoch.resume,
        cause=cause,
        incident=incidents.id,
        message="its members go on in place",
    )
    term.change(term.state.with_incidents(incidents).begin_epoch(epoch))
    claim_behind.start(term)
