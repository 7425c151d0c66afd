"""The cordon budget: how many nodes Everstep may cordon at once, and which of the faulty ones.

It also limits what jobs do: for them a verdict beyond the budget is only a suspicion. A bad driver
or a bad DCGM roll-out convicts every node; without this rule every job would leave every node.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everstep_operator.evidence import Finding, choose_state
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import Quarantine
from everstep_operator.roster import Roster
from everstep_operator.values import NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many GPU nodes may be quarantined at once: a share of them or a number, at least 1."""

    percent: int | None = None
    number: int = 1

    def limit(self, gpu_nodes: int) -> int:
        wanted = self.number if self.percent is None else self.percent * gpu_nodes // 100
        return max(1, wanted)


TENTH = Budget(percent=10)


def parse_budget(text: str) -> Budget:
    """Parse "10%" or "3"."""
    if text.endswith("%"):
        return Budget(percent=int(text[:-1]))
    return Budget(number=int(text))


def count_room(roster: Roster, standing: Mapping[str, Quarantine], budget: Budget) -> int:
    """How many more nodes may be quarantined; negative if too many are. A mark counts whether or
    not its object exists.
    """
    held = sum(quarantine.cordon for quarantine in standing.values())
    held += sum(name not in standing for name in roster.marked)
    return budget.limit(roster.gpu_nodes) - held


def choose_admitted(candidates: Iterable[str], room: int, before: frozenset[str]) -> frozenset[str]:
    """Choose the nodes that the budget admits; `candidates` are in order of urgency.

    A node that was admitted before stays admitted: a job that has started to leave it must not be
    called back because another node is worse.
    """
    ordered = sorted(candidates, key=lambda node: node not in before)
    return frozenset(ordered[: max(0, room)])


def by_urgency(findings: Iterable[Finding], nodes: Mapping[str, NodeFacts]) -> tuple[Finding, ...]:
    """The findings that convict a node: GONE before LEAVING, then the oldest first."""
    convicted = [f for f in findings if f.convicting and f.node in nodes]
    return tuple(sorted(convicted, key=_urgency))


def _urgency(finding: Finding) -> tuple[bool, float, str]:
    claims = finding.convicting
    return (
        choose_state(claims) is not NodeState.GONE,
        claims[0].evidence.first_seen,
        finding.node,
    )
