"""Variants of the rules for a step before its claim (`step_first_rules.py`), each without one of
them.
"""

from dataclasses import replace

from everstep_agent.coordinator import step_first_rules
from everstep_agent.coordinator.step_first_rules import Shrink
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.runlog.log_index import LogIndex
from simulation.protocol.rules import JOB


def without_proof(shrink: Shrink, log: LogIndex) -> str:
    """Every member that is out of reach or gone counts as dead."""
    return step_first_rules.why_not_promised(
        replace(shrink, reports=_with_lost(shrink))
    ) or step_first_rules.why_not_uncut(shrink)


def unpromised(shrink: Shrink, log: LogIndex) -> str:
    """Survivors step first even if a member has joined another epoch since."""
    return step_first_rules.why_not_proven(shrink, log, JOB) or step_first_rules.why_not_uncut(
        shrink
    )


def after_a_cut(shrink: Shrink, log: LogIndex) -> str:
    """Survivors step first even if another coordinator has cut the epoch."""
    return step_first_rules.why_not_proven(shrink, log, JOB) or step_first_rules.why_not_promised(
        shrink
    )


def _with_lost(shrink: Shrink) -> list[AgentReport]:
    """The reports, changed as if the lost members had joined, too."""
    epoch = shrink.epoch
    there = {r.id: r for r in shrink.reports}
    for lost in shrink.lost & there.keys():
        there[lost] = replace(
            there[lost], joined=epoch.successor, joined_token=epoch.successor_token
        )
    return list(there.values())
