"""Values derived from the input of a fleet pass."""

from collections.abc import Mapping
from dataclasses import dataclass

from everstep_operator.evidence import Finding
from everstep_operator.fleet.budget import by_urgency, choose_admitted, count_room
from everstep_operator.fleet.memory import FleetMemory
from everstep_operator.fleet.observed import Observed, Policy
from everstep_operator.fleet.release import Losses, decide_losses
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import Quarantine, choose_standing


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    observed: Observed
    policy: Policy
    losses: Losses
    now: float
    standing: Mapping[str, Quarantine]
    """By node."""
    convicted: tuple[Finding, ...]
    """Most urgent first."""
    admitted: frozenset[str]
    """Convicted nodes without a quarantine with `cordon` yet, for which the budget has room."""

    def is_waiting(self, node: NodeFacts) -> bool:
        """Whether a quarantine of this node is absent and has not been decided on yet."""
        return node.name in self.losses.waiting_nodes


def build_view(observed: Observed, memory: FleetMemory, policy: Policy, now: float) -> View:
    losses = decide_losses(observed, memory, policy, now)
    standing = choose_standing(observed.nodes, observed.quarantines or ())
    convicted = _list_convicted(observed)
    return View(
        observed=observed,
        policy=policy,
        losses=losses,
        now=now,
        standing=standing,
        convicted=convicted,
        admitted=_admit(observed, policy, standing, memory, losses),
    )


def admit_unlisted(observed: Observed, memory: FleetMemory, policy: Policy) -> frozenset[str]:
    """Without a list of quarantines, the last known ones and the marks on the nodes count against
    the budget.
    """
    standing = choose_standing(observed.nodes, memory.alive.values())
    return _admit(observed, policy, standing, memory, None)


def _admit(
    observed: Observed,
    policy: Policy,
    standing: Mapping[str, Quarantine],
    memory: FleetMemory,
    losses: Losses | None,
) -> frozenset[str]:
    waiting = losses.waiting_nodes if losses is not None else frozenset()
    candidates = []
    for finding in _list_convicted(observed):
        node, held = observed.nodes[finding.node], standing.get(finding.node)
        decided = held.cordon if held is not None else node.mark is not None
        if not decided and node.name not in waiting:
            candidates.append(finding)
    room = count_room(observed.roster, standing, policy.budget)
    return choose_admitted(candidates, room, memory.admitted)


def _list_convicted(observed: Observed) -> tuple[Finding, ...]:
    found = (observed.findings.of(name) for name in observed.findings.telling)
    return by_urgency(found, observed.nodes)
