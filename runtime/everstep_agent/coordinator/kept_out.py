"""Workers that a claim names but that are not in its epoch: they are still in the epoch that it
continues. Pure.

An agent that has joined a later epoch of another coordinator cannot enter the claimed epoch. It
keeps its workers, whose state may be the only copy, and reports the epoch that they are in. No
member steps without the others, so the claimed epoch has not begun, and the workers' epoch can be
recovered under its claim.
"""

from collections.abc import Iterable

from everstep_agent.peers.agent_report import AgentReport, State
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.runlog.rules import former_of
from everstep_contract.log import Claim, MemberId


def list_kept_out(reports: Iterable[AgentReport], claim: Claim) -> list[AgentReport]:
    """The reports of agents that have such workers."""
    former = former_of(claim)
    inside = [r for r in reports if r.epoch == former > 0]
    named = frozenset(claim.members if inside else ())
    return [r for r in inside if _list_living(r) & named]


def find_kept_out(
    reports: Iterable[AgentReport], known: EpochLevel | None, claim: Claim
) -> EpochLevel | None:
    """The epoch that such workers are in. None if the coordinator knows it already, or if workers
    of the claimed epoch are alive: these hold as much state.
    """
    told = list(reports)
    if any(r.epoch == claim.epoch and _list_living(r) for r in told):
        return None
    for held in (r.held for r in list_kept_out(told, claim)):
        if held is not None and (known is None or known.number != held.number):
            return held
    return None


def may_enter(reports: Iterable[AgentReport], claim: Claim) -> bool:
    """Whether such workers may still enter the claimed epoch, which is published: their agent has
    joined no later epoch, and nobody has cut them. It may have entered already, and its report is
    on the way.
    """
    return any(
        r.joined <= claim.epoch and all(w.state is not State.PARKED for w in r.workers)
        for r in list_kept_out(reports, claim)
    )


def is_left_empty(report: AgentReport, known: EpochLevel | None, claim: Claim | None) -> bool:
    """Whether the agent was in the claimed epoch (which continues the known one) and holds no
    further state than that from which the epoch continues: it may have staged that.
    """
    if known is None or claim is None or former_of(claim) != known.number:
        return False
    staged = max(report.staged, *(w.whole for w in report.workers), 0)
    further = staged > claim.chain[-1].last_step
    return report.epoch == claim.epoch and not further and not _list_living(report)


def _list_living(report: AgentReport) -> set[MemberId]:
    return {
        MemberId(
            slot=report.slot,
            attempt=report.attempt,
            incarnation=report.incarnation,
            rank=worker.local,
            life=worker.life,
        )
        for worker in report.workers
        if worker.state is not State.DEAD
    }
