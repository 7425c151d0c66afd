"""Whether the survivors of a loss may step before their claim is in the log (rule 3). Pure.

They may if nobody else can have claimed the run, or committed a further step, without this
coordinator's knowledge. Such a claim needs one of the survivors, and they have all joined this
coordinator's epoch. Such a commit needs a rank that saved after a cut, and its agent reports the
cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep_agent.coordinator import rounds
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Id
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.log_index import LogIndex
from everstep_contract.log import Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink:
    """A loss whose survivors have reported their standing."""

    epoch: EpochLevel
    """The epoch that they leave."""
    survivors: Sequence[EpochMember]
    reports: Sequence[AgentReport]
    """The newest of each agent that is not silent."""
    lost: frozenset[Id]
    """Members whose whole pods are lost."""


def why_claim_first(shrink: Shrink, log: LogIndex, *, job_uid: str) -> str:
    """Why the survivors' epoch must be claimed before its first step; empty if it may step first.

    Args:
        log: the log as read, which may be out of date.
    """
    return why_not_proven(shrink, log, job_uid) or why_not_promised(shrink) or why_not_uncut(shrink)


def list_pending(epoch: EpochLevel, log: LogIndex) -> tuple[Claim, ...]:
    """The claims of this epoch, and of those that it continues, that are not in the log as far as
    it was read; oldest first.
    """
    return tuple(c for c in epoch.unclaimed if log.place_of(c) is None)


def why_not_proven(shrink: Shrink, log: LogIndex, job_uid: str) -> str:
    """Why this is more than a shrink, or leaves out a member whose own agent reported no end."""
    if whole := sorted(slot for slot, _, _ in shrink.lost):
        return f"the pod of slot {whole[0]} is lost"
    epoch, pending = shrink.epoch, list_pending(shrink.epoch, log)
    if pending and (why := runlog_rules.why_not_behind(pending[0], log.newest_claim)):
        return why
    named = [i for m in epoch.members for i in m.ids()]
    verdict = runlog_rules.may_step_first(
        [*log.claims, *pending],
        epoch.number,
        [i for m in shrink.survivors for i in m.ids()],
        rounds.list_ended(named, shrink.reports),
        job_uid=job_uid,
    )
    return "" if verdict.ok else verdict.message


def why_not_promised(shrink: Shrink) -> str:
    """Why another coordinator may have claimed a survivor: it has joined another epoch since."""
    epoch = shrink.epoch
    if epoch.successor != epoch.number + 1:
        return f"a member has joined another epoch after {epoch.number}"
    promised = {r.id for r in shrink.reports if _is_promised(epoch, r)}
    others = [m.slot for m in epoch.members if m.id not in promised]
    return f"slot {others[0]} has not joined it by its token" if others else ""


def _is_promised(epoch: EpochLevel, report: AgentReport) -> bool:
    ours = bool(report.joined_token) and report.joined_token == epoch.successor_token
    return ours and report.joined == epoch.successor


def why_not_uncut(shrink: Shrink) -> str:
    """Why another coordinator may have committed more than the survivors hold: it has cut the
    epoch, and a rank that has died since may have saved its state for that coordinator.
    """
    epoch = shrink.epoch
    cut = [r.slot for r in shrink.reports if epoch.member(*r.id) and r.cut >= epoch.number]
    return f"another coordinator has cut the epoch in slot {cut[0]}" if cut else ""
