"""Values derived from the input of a fleet pass."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from everstep_operator.evidence import Finding, still_applies
from everstep_operator.fleet.budget import by_urgency, choose_admitted, count_room
from everstep_operator.fleet.memory import FleetMemory
from everstep_operator.fleet.observed import Observed, Policy
from everstep_operator.fleet.release import Losses, decide_losses
from everstep_operator.nodes import NodeFacts, choose_expected
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


def admit_unlisted(observed: Observed, memory: FleetMemory, policy: Policy) -> FleetMemory:
    """The memory after a pass without a list of quarantines: the last known ones and the marks on the
    nodes count against the budget.
    """
    standing = choose_standing(observed.nodes, memory.alive.values())
    weighed = frozenset(finding.node for finding in _list_convicted(observed))
    admitted = _admit(observed, policy, standing, memory, None)
    return replace(memory, admitted=admitted, weighed=weighed)


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
            candidates.append(node.name)
    candidates += _list_forgotten(observed, standing, memory)
    room = count_room(observed.roster, standing, policy.budget)
    return choose_admitted(candidates, room, memory.admitted)


def _list_forgotten(
    observed: Observed, standing: Mapping[str, Quarantine], memory: FleetMemory
) -> list[str]:
    """Nodes with a quarantine beyond the budget that this process has never found at fault itself:
    a former one did, and the exporter has not been read yet, or may show another fault by now. A
    node whose exporter shows that all faults are over is not listed. Oldest first.
    """
    known = {finding.node for finding in _list_convicted(observed)} | memory.convicted
    found = [
        held
        for name, held in standing.items()
        if not held.cordon
        and name not in known
        and _may_stand(held, observed.nodes[name], observed.findings.of(name))
    ]
    return [held.node for held in sorted(found, key=lambda q: (q.decided_at, q.name))]


def _may_stand(held: Quarantine, node: NodeFacts, finding: Finding) -> bool:
    """Whether evidence of the quarantine may still hold: that of a GPU which was swapped does not."""
    expected = choose_expected(node.expected, finding.present)
    return any(
        still_applies(one, machine=node.machine, boot=node.boot)
        and (one.gpu, one.kind) not in finding.clear
        and (one.gpu in expected or not node.expected)
        for one in held.evidence
    )


def note_convicted(memory: FleetMemory, view: View) -> FleetMemory:
    """The memory after a pass with this view."""
    weighed = frozenset(finding.node for finding in view.convicted)
    return replace(
        memory, admitted=view.admitted, weighed=weighed, convicted=memory.convicted | weighed
    )


def _list_convicted(observed: Observed) -> tuple[Finding, ...]:
    found = (observed.findings.of(name) for name in observed.findings.telling)
    return by_urgency(found, observed.nodes)
