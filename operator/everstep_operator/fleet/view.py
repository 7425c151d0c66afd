"""What a fleet pass decides from, and what follows from it at a glance."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from everstep_operator.evidence import Finding
from everstep_operator.fleet.release import Losses
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import Quarantine, binds


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many GPU nodes may be quarantined at once: a share of them or a number, at least 1."""

    share: float | None = None
    number: int = 1

    def limit(self, gpu_nodes: int) -> int:
        wanted = self.number if self.share is None else math.floor(self.share * gpu_nodes)
        return max(1, wanted)


def parse_budget(text: str) -> Budget:
    """ "10%" or "3"."""
    if text.endswith("%"):
        return Budget(share=int(text[:-1]) / 100)
    return Budget(number=int(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    budget: Budget = Budget(share=0.1)
    many_lost: int = 3
    """More objects than this missing at once are a loss, not releases."""
    settle_seconds: float = 1.0
    repair_seconds: float = 30.0
    """Least time between two repairs of a node's mark: no shouting match with another
    controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    nodes: Mapping[str, NodeFacts]
    quarantines: tuple[Quarantine, ...] | None
    """None: they could not be listed, `unreadable` says why."""
    unreadable: str = ""
    creatable: bool = True
    """A NodeQuarantine could be created now (asked only when one is absent)."""
    findings: Mapping[str, Finding] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    observed: Observed
    policy: Policy
    losses: Losses
    now: float

    @property
    def standing(self) -> dict[str, Quarantine]:
        """By node: the quarantine that binds it, the one that its mark names or the oldest."""
        best: dict[str, Quarantine] = {}
        for q in sorted(self.observed.quarantines or (), key=lambda q: (q.decided_at, q.name)):
            node = self.observed.nodes.get(q.node)
            if node is None or q.deleting or not binds(q, node):
                continue
            if q.node not in best or (node.mark is not None and node.mark.quarantine == q.name):
                best[q.node] = q
        return best

    def finding(self, node: str) -> Finding:
        return self.observed.findings.get(node) or Finding(node=node)

    @property
    def room(self) -> int:
        """How many more nodes may be quarantined."""
        gpu_nodes = sum(node.has_gpus for node in self.observed.nodes.values())
        held = sum(q.cordon for q in self.standing.values())
        held += sum(node.mark is not None for node in self._orphans())
        return self.policy.budget.limit(gpu_nodes) - held

    def _orphans(self) -> Iterator[NodeFacts]:
        standing = self.standing
        return (node for node in self.observed.nodes.values() if node.name not in standing)

    def is_waiting(self, node: NodeFacts) -> bool:
        """A quarantine of this node is absent and its fate open."""
        absent = self.losses.waiting
        if node.mark is not None and node.mark.quarantine in absent:
            return True
        return any(
            q.node == node.name for name, q in self.losses.memory.alive.items() if name in absent
        )
