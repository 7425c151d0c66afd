"""A save that every rank of the last epoch had staged when no whole copy of the model was left. The
agents upload what they hold of it, their own parts or copies of others', and it is committed before
the next epoch is claimed. The same holds for the full state that a whole unit had staged. Even
agents that were killed find the save when they come back.

It is committed under the claim of its own epoch, as that epoch's coordinator would have done. That
claim is still the newest, and whoever has staged a step has applied it, so the log's rules hold
unchanged. A save of which a part is missing is dropped.
"""

from collections.abc import Iterable

from everstep_agent.coordinator.term import Term
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.peers.places import place_in_order
from everstep_contract import log
from everstep_contract.units import ONE_RANK, Mesh


def decide_unfinished(
    claim: log.Claim, committed: int, reports: Iterable[AgentReport], mesh: Mesh = ONE_RANK
) -> tuple[EpochLevel, int] | None:
    """The epoch of the newest claim, and the newest step beyond `committed` of which all parts are
    still there; None: there is no such save.
    """
    ranks: dict[tuple[int, bool], set[int]] = {}
    for unsent in (u for r in reports for u in r.unsent):
        if unsent.epoch == claim.epoch and unsent.step > committed:
            ranks.setdefault((unsent.step, unsent.whole), set()).add(unsent.rank)
    complete = [
        step
        for (step, whole), held in ranks.items()
        if (_has_unit(held, mesh) if whole else len(held) == len(claim.members))
    ]
    if not complete:
        return None
    level = EpochLevel(
        number=claim.epoch,
        token=claim.token,
        stage=Stage.OVER,
        members=list_members(claim),
        mesh=mesh,
        committed=committed,
        kept=max(complete),
    )
    return level, max(complete)


def _has_unit(ranks: set[int], mesh: Mesh) -> bool:
    return any(ranks.issuperset(mesh.list_unit_of(rank)) for rank in ranks)


def list_members(claim: log.Claim) -> tuple[EpochMember, ...]:
    """The pods of a claim, which names them in the order of their ranks; without their addresses."""
    lives: dict[tuple[int, int, int], dict[int, int]] = {}
    for member in claim.members:
        pod = member.slot, member.attempt, member.incarnation
        lives.setdefault(pod, {})[member.rank] = member.life
    return place_in_order(
        EpochMember(
            slot=slot,
            attempt=attempt,
            incarnation=incarnation,
            node_rank=0,
            first=0,
            lives=tuple(found.get(local, 0) for local in range(max(found) + 1)),
            address="",
        )
        for (slot, attempt, incarnation), found in lives.items()
    )


async def finish_save(term: Term) -> None:
    """Have such a save uploaded and commit it, within `drain_seconds`."""
    found = find_save(term)
    if found is None:
        return
    level, step = found
    term.line.say("save_unfinished", epoch=level.number, step=step)
    term.change(term.state.finish_save(level))
    limit = term.now() + term.settings.drain_seconds
    try:
        while _is_open(term, step) and not term.ended and term.now() < limit:
            if term.saves.why_given_up(level.number, step):
                return
            term.saves.pump(level, {}, term.spent())
            await term.tick()
    finally:
        term.change(term.state.finish_save(None))
    commit = term.newest_commit()
    if commit is not None and commit.step >= step:
        incidents = term.state.incidents.finds(commit.step)
        note = f"the save of step {commit.step} was found in the pods' memory: all go on from it"
        term.change(term.state.with_incidents(incidents).note(note))


def _is_open(term: Term, step: int) -> bool:
    """Whether this step's save is still the newest to finish. An older one may be committed first."""
    found = find_save(term)
    return found is not None and found[1] == step


def find_save(term: Term) -> tuple[EpochLevel, int] | None:
    """The epoch of such a save, and its step; None: there is no such save."""
    if term.saves.disagreement is not None:  # nothing of that epoch may be saved
        return None
    claim, commit = term.run_log.newest_claim, term.newest_commit()
    if claim is None or claim.job_uid != term.settings.job_uid:
        return None
    committed = commit.step if commit else 0
    return decide_unfinished(claim, committed, term.recent(), term.settings.mesh)
